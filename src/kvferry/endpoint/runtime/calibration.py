"""How fast this machine and the wire to a peer are: measured when peers connect, in a few milliseconds.

Everything is written into the peer's staging ring, before anything else uses it: from staging memory kept for this, and
straight from the pool, whose pages no cache holds. What depends on the machines and the transport alone is measured
once for each pair of machines; how fast caches are gathered depends on their layout as well.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from kvferry.errors import TransportError
from kvferry.layout import Device, MemoryKind, RankLayout, Region
from kvferry.plan import PathCosts
from kvferry.plan.descriptors import RowArray
from kvferry.plan.packing import PackedPiece
from kvferry.staging import Kernels, StagingMemory, copy_bytes_per_s
from kvferry.transport import PreparedList, TransferHandle, Transport

_SMALL_BYTES, _SMALL_COUNT = 256, 256
_FEWEST, _MOST = 3, 8
_ALIKE = 1.2
"""How much longer than the best the second best measurement of a write may be for both to be believed."""

_LONG_S = 0.1
"""Measurements that take so long in all are not repeated: what disturbs them takes milliseconds."""


@dataclass(frozen=True, slots=True)
class _Samples:
    """What is written to measure a wire from one kind of memory.

    Attributes:
        bulk_bytes: bytes of a bulk write.
        large_bytes: bytes of a large descriptor.
        large_count: how many of them are written at a time.
        longest_s: how long a write may take. A worker is held by several, and whoever restarts then waits for it.
        sleep_s: between two polls.
    """

    bulk_bytes: int
    large_bytes: int
    large_count: int
    longest_s: float
    sleep_s: float


_SAMPLES: Mapping[MemoryKind, _Samples] = {
    MemoryKind.DRAM: _Samples(2 << 20, 64 << 10, 32, longest_s=1.0, sleep_s=20e-6),
    # Less would measure how long a copy takes to begin, and a sleep is longer than what is measured.
    MemoryKind.VRAM: _Samples(64 << 20, 1 << 20, 64, longest_s=5.0, sleep_s=0.0),
}


@dataclass(frozen=True, slots=True)
class WireKey:
    """What a measurement of the wire holds for.

    Attributes:
        host: the peer's machine.
        transport: the transport's name.
        source: the device of the source side.
        destination: the device of the destination side.
    """

    host: str
    transport: str
    source: Device
    destination: Device

    @property
    def is_in_cpu_memory(self) -> bool:
        """Whether both sides are in CPU memory."""
        return self.source.kind is self.destination.kind is MemoryKind.DRAM


class WriteHangsError(Exception):
    """A write that measures may not have ended. Stays in the endpoint, which reports a TransportError to the peer.

    Attributes:
        transfer: the write; None if its post raised. Until it has ended its receiver must stay connected.
    """

    def __init__(self, transfer: TransferHandle | None, what: str) -> None:
        super().__init__(f"a write of a few bytes {what}")
        self.transfer = transfer


@dataclass(frozen=True, slots=True)
class _Timing:
    """How long a write took, and whether it was over as soon as it was posted."""

    seconds: float
    is_over_at_once: bool


class Calibration:
    """Measures costs, and keeps them for as long as the endpoint lives.

    Attributes:
        kernels: that are measured.
    """

    def __init__(self, transport: Transport, kernels: Kernels, layout: RankLayout, memory: StagingMemory) -> None:
        """Begins with nothing measured.

        Args:
            layout: the pool's.
            memory: registered, for measurements only.
        """
        self._transport = transport
        self.kernels = kernels
        self._layout = layout
        self._memory = memory
        self._samples = _SAMPLES[layout.device.kind]
        # Guards the table and the memory: two ranks that attach at the same time are measured one after the other.
        self._lock = threading.Lock()
        self._wires: dict[WireKey, PathCosts] = {}

    def costs(
        self, key: WireKey, peer: str, ring: Region, pieces: Sequence[PackedPiece], *, scatter_bytes_per_s: float
    ) -> PathCosts:
        """Returns the costs for one receiver, measuring what is not known yet.

        Args:
            key: what the wire's part is kept under.
            peer: the receiver.
            ring: its staging memory.
            pieces: what this rank may send.
            scatter_bytes_per_s: as the receiver measured it; 0 if it did not.

        Raises:
            TransportError: if the wire does not work.
            WriteHangsError: if a write does not end.
        """
        with self._lock:
            if key not in self._wires:
                self._wires[key] = self._measure_wire(key, peer, ring)
            gathered = copy_bytes_per_s(self.kernels, [piece.source for piece in pieces], self._memory)
            # The gathering that was measured had this plan's shape: its speed includes the cost of runs.
            return replace(
                self._wires[key],
                gather_bytes_per_s=gathered,
                scatter_bytes_per_s=scatter_bytes_per_s or gathered,
                seconds_per_run=0.0,
            )

    def _measure_wire(self, key: WireKey, peer: str, ring: Region) -> PathCosts:
        most = min(self._memory.num_bytes, ring.length)
        samples = self._samples
        bulk_bytes = min(samples.bulk_bytes, most)
        few, bulk = self._bulk(peer, ring, min(64, most)), self._bulk(peer, ring, bulk_bytes)
        costs = PathCosts(
            seconds_per_write=few.seconds,
            bulk_bytes_per_s=bulk_bytes / max(bulk.seconds - few.seconds, bulk.seconds / 10),
            # A device copies by itself, whether or not a write happens to be over when it is first looked at.
            is_one_memory=bulk.is_over_at_once and key.is_in_cpu_memory,
        )
        # Small descriptors measure the cost of their number, large ones that of bytes from main memory.
        small = self._direct(key, peer, ring, _SMALL_BYTES, _SMALL_COUNT, is_elsewhere_each_time=False)
        large = self._direct(key, peer, ring, samples.large_bytes, samples.large_count, is_elsewhere_each_time=True)
        if small is None or large is None:  # a pool or a ring so small that neither way takes any time
            return replace(costs, wire_bytes_per_s=costs.bulk_bytes_per_s)
        # Seconds of one descriptor are a part for itself and a part for its bytes: two sizes tell them apart.
        small_s, large_s = (max(each - few.seconds, each / 10) for each in (small[0], large[0]))
        small_s, large_s = small_s / small[1], large_s / large[1]
        per_byte_s = max(large_s - small_s, large_s / 10) / (samples.large_bytes - _SMALL_BYTES)
        return replace(
            costs,
            seconds_per_descriptor=max(small_s - _SMALL_BYTES * per_byte_s, small_s / 10),
            wire_bytes_per_s=1 / per_byte_s,
        )

    def _bulk(self, peer: str, ring: Region, num_bytes: int) -> _Timing:
        """Times a write of so many bytes, the shortest of several."""
        source = Region(self._memory.address, num_bytes)
        # The first write of all makes the connection, and takes long; it is not the shortest.
        return _shortest(lambda _: self._timed(lambda: self._transport.write(source, peer, ring.address, b"")))

    def _direct(
        self, key: WireKey, peer: str, ring: Region, length: int, count: int, *, is_elsewhere_each_time: bool
    ) -> tuple[float, int] | None:
        """Times a write of descriptors of so many bytes from all over the pool; returns seconds and their number.

        Returns None if the pool or the ring has no space for any.

        Args:
            is_elsewhere_each_time: whether no repetition finds in a cache what the two before it left there.
        """
        places = _FEWEST if is_elsewhere_each_time else 1
        here = spread_rows(self._layout.regions(), key.source, length, count * places)
        there = spread_rows([ring], key.destination, length, count)
        if here is None or there is None:
            return None
        with self._prepared(here, None) as local, self._prepared(there, peer) as remote:
            count = min(count, remote.count, -(-local.count // places))
            remote_indices = np.arange(count, dtype=np.int32)

            def measure(repetition: int) -> _Timing:
                indices = (remote_indices * places + repetition % places) % local.count
                return self._timed(lambda: self._transport.post(local, indices, remote, remote_indices, b""))

            return _shortest(measure).seconds, count

    @contextmanager
    def _prepared(self, rows: RowArray, peer: str | None) -> Iterator[PreparedList]:
        """Prepares a list and gives it back at the end, unless a write hangs, which needs it for good."""
        prepared = self._transport.prepare(rows, peer)
        try:
            yield prepared
        except WriteHangsError:
            raise
        except BaseException:
            self._transport.release_list(prepared)
            raise
        self._transport.release_list(prepared)

    def _timed(self, post: Callable[[], TransferHandle]) -> _Timing:
        started_at = time.perf_counter()
        try:
            transfer = post()
        except Exception as error:
            if self._transport.promises.posts_all_or_nothing:
                raise
            raise WriteHangsError(None, f"could not be posted: {error}") from error
        is_over_at_once = True
        try:
            while not self._has_ended(transfer):
                is_over_at_once = False
                if time.perf_counter() - started_at > self._samples.longest_s:
                    raise WriteHangsError(transfer, f"did not end within {self._samples.longest_s:g} s")
                if self._samples.sleep_s:
                    time.sleep(self._samples.sleep_s)
        except TransportError:
            self._transport.release(transfer)  # it has failed, and is over
            raise
        seconds = time.perf_counter() - started_at
        self._transport.release(transfer)
        return _Timing(seconds, is_over_at_once)

    def _has_ended(self, transfer: TransferHandle) -> bool:
        try:
            return self._transport.poll(transfer) is not None
        except TransportError:
            raise
        except Exception as error:  # which no transport should raise: it says nothing of the write
            raise WriteHangsError(transfer, f"could not be polled: {error}") from error


def _shortest(measure: Callable[[int], _Timing]) -> _Timing:
    """Measures until the best two are alike, and returns the best: what disturbs a measurement makes it longer."""
    timings: list[_Timing] = []
    while len(timings) < _MOST:
        timings = sorted([*timings, measure(len(timings))], key=lambda timing: timing.seconds)
        are_alike = len(timings) > 1 and timings[1].seconds <= _ALIKE * timings[0].seconds
        if len(timings) >= _FEWEST and (are_alike or sum(timing.seconds for timing in timings) > _LONG_S):
            break
    return timings[0]


def spread_rows(regions: Sequence[Region], device: Device, length: int, count: int) -> RowArray | None:
    """Spreads about so many descriptors over all regions; returns their rows, or None if there is no space for any.

    Args:
        length: bytes of a descriptor.
    """
    able = [region for region in regions if region.length >= length]
    if not able:
        return None
    each = -(-count // len(able))
    rows = []
    for region in able[:: max(1, len(able) // count)]:
        # Of two neighbours in one page of memory the second would find everything prepared.
        step = max(length + 64, region.length // each)
        rows.append((region.address, length, device.index, step, (region.length - length) // step + 1))
    return np.array(rows, np.uint64)
