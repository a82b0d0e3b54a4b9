"""How fast this machine and the wire to a peer are: measured when peers connect, in a few milliseconds.

Everything is written between the staging rings of both sides, before anything else uses them. What depends on the
machines and the transport alone is measured once for each pair of machines; how fast caches are gathered depends on
their layout as well.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvferry.endpoint.gathering import PeerMemory
from kvferry.endpoint.slots import SourceMemory
from kvferry.errors import TransportError
from kvferry.layout import Device, Region
from kvferry.plan import PathCosts
from kvferry.plan.packing import PackedPiece, PackedSide, Starts
from kvferry.staging import Kernels, StagingMemory, gather_speed
from kvferry.transport import Flight, Transport

_BULK_BYTES = 1024 * 1024
_SMALL_DESCRIPTORS = 1024
_SMALL_BYTES = 256
_REPETITIONS = 3
_LONGEST_S = 1.0
_SLEEP_S = 20e-6


@dataclass(frozen=True, slots=True)
class WireKey:
    """What a measurement of the wire holds for.

    Attributes:
        host: the peer's machine.
        transport: the transport's name.
        source, destination: the devices of both sides.
    """

    host: str
    transport: str
    source: Device
    destination: Device


class Calibration:
    """Measured costs, kept for as long as the endpoint lives."""

    def __init__(self, transport: Transport, kernels: Kernels) -> None:
        self._transport = transport
        self._kernels = kernels
        # Guards the table, which workers that attach peers at the same time share.
        self._lock = threading.Lock()
        self._wires: dict[WireKey, PathCosts] = {}

    def costs(
        self,
        key: WireKey,
        peer: str,
        memory: SourceMemory,
        peer_memory: PeerMemory,
        pieces: Sequence[PackedPiece],
        *,
        scatter_bytes_per_s: float,
    ) -> PathCosts:
        """The costs for one receiver.

        Args:
            key: what the wire's part is kept under.
            peer: the receiver.
            memory, peer_memory: the staging memory of both sides.
            pieces: what this rank may send.
            scatter_bytes_per_s: as the receiver measured it; 0 if it did not.

        Raises:
            TransportError: if the wire does not work.
        """
        with self._lock:
            wire = self._wires.get(key)
        if wire is None:
            wire = self._measure_wire(key, peer, memory, peer_memory)
            with self._lock:
                self._wires[key] = wire
        gathered = copy_bytes_per_s(self._kernels, [piece.source for piece in pieces], memory.memory)
        # Runs are part of what was measured: it was in the shape of this very plan.
        return replace(
            wire,
            gather_bytes_per_s=gathered,
            scatter_bytes_per_s=scatter_bytes_per_s or gathered,
            seconds_per_run=1e-15,
        )

    def _measure_wire(self, key: WireKey, peer: str, memory: SourceMemory, peer_memory: PeerMemory) -> PathCosts:
        most = min(memory.memory.num_bytes, peer_memory.ring.num_bytes)
        bulk_bytes, few_bytes = min(_BULK_BYTES, most), min(64, most)
        bulk_s = self._bulk_s(peer, memory, peer_memory, bulk_bytes)
        few_s = self._bulk_s(peer, memory, peer_memory, few_bytes)
        wire_bytes_per_s = bulk_bytes / max(bulk_s - few_s, bulk_s / 10)
        count = min(_SMALL_DESCRIPTORS, most // (2 * _SMALL_BYTES))
        costs = PathCosts(wire_bytes_per_s=wire_bytes_per_s, seconds_per_write=few_s)
        if count == 0:
            return costs
        small_s = self._small_s(key, peer, memory, peer_memory, count)
        bytes_s = count * _SMALL_BYTES / wire_bytes_per_s
        return replace(costs, seconds_per_descriptor=max(small_s - few_s - bytes_s, small_s / 10) / count)

    def _bulk_s(self, peer: str, memory: SourceMemory, peer_memory: PeerMemory, num_bytes: int) -> float:
        """Seconds of one write of so many bytes."""
        source = Region(memory.memory.address, num_bytes)
        return min(
            self._timed(lambda: self._transport.write(source, peer, peer_memory.address, b""))
            for _ in range(_REPETITIONS)
        )

    def _small_s(self, key: WireKey, peer: str, memory: SourceMemory, peer_memory: PeerMemory, count: int) -> float:
        """Seconds of one write of so many small descriptors, of which no two are neighbours."""

        def rows(address: int, device: Device) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
            return np.array([[address, _SMALL_BYTES, device.index, 2 * _SMALL_BYTES, count]], np.uint64)

        local = self._transport.prepare(rows(memory.memory.address, key.source), None)
        try:
            remote = self._transport.prepare(rows(peer_memory.address, key.destination), peer)
            try:
                indices = np.arange(count, dtype=np.int32)
                return min(
                    self._timed(lambda: self._transport.post(local, indices, remote, indices, b""))
                    for _ in range(_REPETITIONS)
                )
            finally:
                self._transport.release_list(remote)
        finally:
            self._transport.release_list(local)

    def _timed(self, post: Callable[[], Flight]) -> float:
        started_at = time.perf_counter()
        flight = post()
        while self._transport.poll(flight) is None:
            if time.perf_counter() - started_at > _LONGEST_S:
                # What is on its way stays so, in memory that nothing but measurements has used.
                raise TransportError(f"a write of a few bytes did not end within {_LONGEST_S:g} s")
            time.sleep(_SLEEP_S)
        seconds = time.perf_counter() - started_at
        self._transport.release(flight)
        return seconds


def copy_bytes_per_s(kernels: Kernels, sides: Sequence[PackedSide], memory: StagingMemory) -> float:
    """How fast the largest of several pieces is gathered from its pages.

    The receiver measures the same instead of scattering, which would overwrite what its pages hold: both take about as
    long (6.4 and 7.0 GB/s for slices of 1 KiB of scattered pages, 5.2 and 6.8 for 512 bytes).

    Args:
        sides: where one side has the blocks of every piece.
    """
    side = max(sides, key=lambda each: len(each.bases) * each.shape.num_bytes)
    blocks = min(_BULK_BYTES, memory.num_bytes) // side.shape.num_bytes
    starts = sample_starts(side, max(1, blocks))
    return len(starts) * side.shape.num_bytes / gather_speed(kernels, starts, side.shape, memory)


def sample_starts(side: PackedSide, count: int) -> Starts:
    """Where so many blocks begin, spread over a pool as a request's scattered pages are."""
    step = max(1, side.num_pages // count)
    pages = np.arange(0, side.num_pages, step, dtype=np.int64)[:count]
    bases = max(1, min(len(side.bases), count // len(pages)))
    return side.starts(0, bases, np.zeros_like(pages), pages)
