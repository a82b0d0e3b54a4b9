"""Measured costs: what they are made of, on a transport whose speed is known."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from kvferry import RankLayout, attention_components, shard_from_tensors
from kvferry.endpoint.runtime.calibration import Calibration, WireKey, spread_rows
from kvferry.errors import TransportError
from kvferry.layout import Device, MemoryKind, Region
from kvferry.plan.lowering import PageSteps
from kvferry.plan.packing import BlockShape, PackedPiece, PackedSide
from kvferry.staging import Kernels, StagingMemory
from kvferry.staging.resources import sample_starts
from kvferry.transport import PreparedList, TransferHandle, TransferReport

WRITE_S, DESCRIPTOR_S, LARGE_BYTES_PER_S, BULK_BYTES_PER_S, GATHER_BYTES_PER_S = 30e-6, 2e-6, 8e9, 20e9, 5e9
HOST = Device()
KEY = WireKey("here", "clockwork", HOST, HOST)
COMPONENT, _ = attention_components(num_layers=2, num_kv_heads=1, head_dim=128, dtype="uint8")


class Clock:
    """Time that passes only when something is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "thread_time", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self.spend)

    def spend(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Clockwork:
    """A transport that takes as long as it says, at once or later. Only what calibrations use."""

    clock: Clock
    is_synchronous: bool = True
    first_s: float = 0.0  # the first of all writes takes so much longer
    disturbed_s: float = 0.0  # of four writes in a row three take so much longer
    written = 0
    largest = 0

    def prepare(self, rows: Any, peer: str | None) -> PreparedList:
        return PreparedList(peer, rows, len(rows), int(rows[:, 4].sum()))

    def release_list(self, prepared: PreparedList) -> None:
        pass

    def write(self, source: Region, peer: str, address: int, notification: bytes) -> TransferHandle:
        self.largest = max(self.largest, source.length)
        return self._flight(WRITE_S + source.length / BULK_BYTES_PER_S)

    def post(self, local: Any, here: Any, remote: Any, there: Any, notification: bytes) -> TransferHandle:
        assert len(here) == len(there)
        assert int(here.max()) < local.count
        assert int(there.max()) < remote.count
        length = int(local.handle[0, 1])
        return self._flight(WRITE_S + len(here) * (DESCRIPTOR_S + length / LARGE_BYTES_PER_S))

    def _flight(self, seconds: float) -> TransferHandle:
        self.written += 1
        seconds += self.first_s if self.written == 1 else 0
        seconds += self.disturbed_s * (self.written % 4)
        transfer = _Flying(0.0)
        if self.is_synchronous:
            self.clock.spend(seconds)
        else:
            transfer.until = self.clock.now + seconds
        return transfer

    def poll(self, transfer: Any) -> TransferReport | None:
        return TransferReport(0, 0, 0.0, 0.0) if self.clock.now >= transfer.until else None

    def release(self, transfer: TransferHandle) -> None:
        pass


@dataclass
class _Flying(TransferHandle):
    until: float


@dataclass
class Gathering(Kernels):
    """Gathers at a known speed."""

    clock: Clock
    largest = 0

    def gather(self, starts: Any, shape: BlockShape, address: int) -> None:
        self.largest = max(self.largest, len(starts) * shape.num_bytes)
        self.clock.spend(len(starts) * shape.num_bytes / GATHER_BYTES_PER_S)

    def scatter(self, address: int, starts: Any, shape: BlockShape) -> None:
        raise AssertionError("calibrating must not write into a pool")


def calibration(
    clock: Clock, transport: Any, pages: int = 4096, device: Device = HOST
) -> tuple[Calibration, list[PackedPiece], list[Any]]:
    tensors = [np.zeros((pages, 16, 1, 128), np.uint8) for _ in range(2)]
    shard = shard_from_tensors(COMPONENT, tensors, dims=("page", "token", "head", "dim"))
    layout = RankLayout(shards=(replace(shard, device=device),))
    side = PackedSide(
        np.array([each.ctypes.data for each in tensors]), BlockShape((), 2048), PageSteps(1, 2048, 2048), pages
    )
    piece = PackedPiece("kv", 0, side, side, 2, 2048, 1)
    memory = StagingMemory(Region(1 << 21, (2 if device is HOST else 64) << 20), device, owner=tensors)
    return Calibration(transport, Gathering(clock), layout, memory), [piece], tensors


RING = Region(1 << 30, 32 << 20)
GPU = Device(MemoryKind.VRAM, 0)


@pytest.mark.parametrize("is_synchronous", [True, False])
def test_the_costs_are_those_of_the_transport(monkeypatch: pytest.MonkeyPatch, is_synchronous: bool):
    clock = Clock(monkeypatch)
    made, pieces, kept = calibration(clock, Clockwork(clock, is_synchronous, first_s=0.05))
    costs = made.costs(KEY, "peer", RING, pieces, scatter_bytes_per_s=7e9)
    # Polled every 20 us where it takes time: a write of 30 us is seen after 40, and so on.
    off = 0.001 if is_synchronous else 0.2
    assert costs.seconds_per_write == pytest.approx(WRITE_S if is_synchronous else 40e-6, rel=0.001)
    assert costs.seconds_per_descriptor == pytest.approx(DESCRIPTOR_S, rel=off)
    assert costs.wire_bytes_per_s == pytest.approx(LARGE_BYTES_PER_S, rel=off)
    assert costs.bulk_bytes_per_s == pytest.approx(BULK_BYTES_PER_S, rel=off)
    assert costs.gather_bytes_per_s == pytest.approx(GATHER_BYTES_PER_S, rel=0.01)
    assert costs.scatter_bytes_per_s == 7e9
    assert costs.is_one_memory is is_synchronous
    del kept


def test_a_busy_machine_costs_what_a_quiet_one_does(monkeypatch: pytest.MonkeyPatch):
    """One noisy measurement would decide the path of every write, for good."""
    clock = Clock(monkeypatch)
    made, pieces, kept = calibration(clock, Clockwork(clock, disturbed_s=3e-3))
    costs = made.costs(KEY, "peer", RING, pieces, scatter_bytes_per_s=7e9)
    assert costs.seconds_per_write == pytest.approx(WRITE_S, rel=0.001)
    assert costs.seconds_per_descriptor == pytest.approx(DESCRIPTOR_S, rel=0.001)
    assert costs.wire_bytes_per_s == pytest.approx(LARGE_BYTES_PER_S, rel=0.001)
    assert costs.bulk_bytes_per_s == pytest.approx(BULK_BYTES_PER_S, rel=0.001)
    del kept


def test_a_write_that_fails_while_it_measures_is_released(monkeypatch: pytest.MonkeyPatch):
    clock = Clock(monkeypatch)
    transport, released = Clockwork(clock), list[Any]()
    made, pieces, kept = calibration(clock, transport)

    def breaks(transfer: Any) -> TransferReport | None:
        raise TransportError("the connection broke")

    monkeypatch.setattr(transport, "poll", breaks)
    monkeypatch.setattr(transport, "release", released.append)
    with pytest.raises(TransportError, match="the connection broke"):
        made.costs(KEY, "peer", RING, pieces, scatter_bytes_per_s=7e9)
    assert len(released) == transport.written > 0
    del kept


def test_what_takes_long_is_not_repeated_more_often_than_needed(monkeypatch: pytest.MonkeyPatch):
    clock = Clock(monkeypatch)
    transport = Clockwork(clock, disturbed_s=0.2)
    made, pieces, kept = calibration(clock, transport)
    made.costs(KEY, "peer", RING, pieces, scatter_bytes_per_s=7e9)
    assert transport.written == 4 * 3
    del kept


@pytest.mark.parametrize("is_synchronous", [True, False])
def test_on_a_gpu_nothing_sleeps_and_what_is_measured_is_no_launch(
    monkeypatch: pytest.MonkeyPatch, is_synchronous: bool
):
    clock = Clock(monkeypatch)
    transport = Clockwork(clock, is_synchronous)
    poll = transport.poll
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("a sleep is longer than what is measured"))

    def slow_poll(transfer: Any) -> TransferReport | None:
        clock.spend(1e-6)
        return poll(transfer)

    monkeypatch.setattr(transport, "poll", slow_poll)
    made, pieces, kept = calibration(clock, transport, pages=1 << 16, device=GPU)
    ring = Region(1 << 30, 256 << 20)
    costs = made.costs(WireKey("here", "clockwork", GPU, GPU), "peer", ring, pieces, scatter_bytes_per_s=7e9)
    assert transport.largest == 64 << 20
    assert costs.bulk_bytes_per_s == pytest.approx(BULK_BYTES_PER_S, rel=0.001)
    assert costs.wire_bytes_per_s == pytest.approx(LARGE_BYTES_PER_S, rel=0.01)
    assert costs.seconds_per_descriptor == pytest.approx(DESCRIPTOR_S, rel=0.05)
    assert not costs.is_one_memory
    assert made.kernels.largest == 64 << 20  # type: ignore[attr-defined]
    del kept


def test_the_wire_is_measured_once_for_each_pair_of_machines(monkeypatch: pytest.MonkeyPatch):
    clock = Clock(monkeypatch)
    transport = Clockwork(clock)
    made, pieces, kept = calibration(clock, transport)
    costs = made.costs(KEY, "one", RING, pieces, scatter_bytes_per_s=7e9)
    written, now = transport.written, clock.now
    again = made.costs(KEY, "another", RING, pieces, scatter_bytes_per_s=6e9)
    assert transport.written == written
    assert clock.now - now < 2e-3
    assert (again.wire_bytes_per_s, again.scatter_bytes_per_s) == (costs.wire_bytes_per_s, 6e9)
    made.costs(WireKey("elsewhere", "clockwork", HOST, HOST), "third", RING, pieces, scatter_bytes_per_s=7e9)
    assert transport.written == 2 * written
    del kept


def test_it_takes_a_few_milliseconds(monkeypatch: pytest.MonkeyPatch):
    clock = Clock(monkeypatch)
    made, pieces, kept = calibration(clock, Clockwork(clock))
    made.costs(KEY, "peer", RING, pieces, scatter_bytes_per_s=7e9)
    assert clock.now < 8e-3
    del kept


def test_a_pool_that_is_too_small_to_tell_has_the_bulk_writes_speed(monkeypatch: pytest.MonkeyPatch):
    clock = Clock(monkeypatch)
    made, pieces, kept = calibration(clock, Clockwork(clock), pages=4)
    costs = made.costs(KEY, "peer", RING, pieces, scatter_bytes_per_s=0)
    assert costs.wire_bytes_per_s == costs.bulk_bytes_per_s
    assert costs.scatter_bytes_per_s == costs.gather_bytes_per_s
    del kept


@pytest.mark.parametrize("regions", [1, 3, 128, 5000])
@pytest.mark.parametrize("count", [1, 96, 1536])
def test_sampled_descriptors_lie_apart_inside_the_pool(regions: int, count: int):
    pool = [Region(1 << 20 | number << 40, 3_000_000 + 7 * number) for number in range(regions)]
    rows = spread_rows(pool, HOST, 256, count)
    assert rows is not None
    bounds = {region.address: region.stop for region in pool}
    for address, length, _, stride, steps in rows.tolist():
        assert stride > length
        assert address + stride * (steps - 1) + length <= bounds[address]
    assert count <= int(rows[:, 4].sum()) <= 4 * count + len(rows)


def test_without_room_there_is_no_sample():
    assert spread_rows([Region(4096, 255)], HOST, 256, 8) is None


def test_samples_of_pages_do_not_meet():
    side = PackedSide(np.array([0]), BlockShape((), 64), PageSteps(1, 64, 64), 1000)
    samples = [set(sample_starts(side, 100, number).tolist()) for number in range(3)]
    assert [len(sample) for sample in samples] == [100, 100, 100]
    assert not samples[0] & samples[1]
    assert not samples[1] & samples[2]
