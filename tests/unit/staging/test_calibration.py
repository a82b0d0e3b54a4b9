"""How long gathering takes, measured on kernels whose speed is known."""

from __future__ import annotations

import time

import numpy as np
import pytest

from kvferry.errors import SettingsError
from kvferry.layout import Device, MemoryKind, Region
from kvferry.plan.packing import BlockShape
from kvferry.staging import Kernels, StagingMemory, allocate, gather_speed, kernels_for

BLOCK = BlockShape((), 1024)
SAMPLES = [np.arange(4, dtype=np.int64) * 1024 + first for first in (4096, 8192, 12288)]


class Clockwork(Kernels):
    """Takes the next of some times for every call, on a clock of its own."""

    def __init__(self, *seconds: float) -> None:
        self.now = 0.0
        self.calls: list[tuple[int, BlockShape, int]] = []  # first start, shape, address
        self._seconds = iter(seconds)

    def gather(self, starts: np.ndarray, shape: BlockShape, address: int) -> None:
        self.calls.append((int(starts[0]), shape, address))
        self.now += next(self._seconds)

    def scatter(self, address: int, starts: np.ndarray, shape: BlockShape) -> None:
        raise AssertionError("calibrating must not write into a pool")


def measured(kernels: Clockwork, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(time, "thread_time", lambda: kernels.now)
    monkeypatch.setattr(time, "perf_counter", lambda: pytest.fail("others may have had the processor meanwhile"))
    with allocate(4096, Device()) as memory:
        speed = gather_speed(kernels, SAMPLES, BLOCK, memory)
        assert {call[1:] for call in kernels.calls} == {(BLOCK, memory.address)}
    return 4 * BLOCK.num_bytes / speed


def test_it_is_the_best_of_a_few_and_the_first_does_not_count(monkeypatch: pytest.MonkeyPatch):
    kernels = Clockwork(1e-6, 9e-5, 7e-5, 6e-5, 8e-5, 9e-5)
    assert measured(kernels, monkeypatch) == pytest.approx(6e-5)
    assert len(kernels.calls) == 6


def test_no_sample_follows_itself_since_caches_would_hold_it(monkeypatch: pytest.MonkeyPatch):
    kernels = Clockwork(*[1e-5] * 6)
    measured(kernels, monkeypatch)
    assert [first for first, *_ in kernels.calls] == [4096, 8192, 12288, 4096, 8192, 12288]


def test_it_ends_after_a_millisecond(monkeypatch: pytest.MonkeyPatch):
    kernels = Clockwork(9e-3, 3e-4, 3e-4, 3e-4, 3e-4, 3e-4)
    assert measured(kernels, monkeypatch) == pytest.approx(3e-4)
    assert kernels.now < 9e-3 + 1e-3


def test_blocks_that_take_longer_are_gathered_twice(monkeypatch: pytest.MonkeyPatch):
    kernels = Clockwork(1.0, 0.5)
    assert measured(kernels, monkeypatch) == pytest.approx(0.5)


def test_on_a_gpu_it_counts_what_passes_while_the_thread_waits(monkeypatch: pytest.MonkeyPatch):
    kernels = Clockwork(*[1e-4] * 6)
    monkeypatch.setattr(time, "perf_counter", lambda: kernels.now)
    monkeypatch.setattr(time, "thread_time", lambda: pytest.fail("a thread that waits for a device does nothing"))
    memory = StagingMemory(Region(4096, 4096), Device(MemoryKind.VRAM, 0), owner=None)
    assert gather_speed(kernels, SAMPLES, BLOCK, memory) == pytest.approx(4 * BLOCK.num_bytes / 1e-4)


def test_a_clock_that_stands_still_is_no_error(monkeypatch: pytest.MonkeyPatch):
    assert measured(Clockwork(*[0.0] * 6), monkeypatch) > 0


def test_blocks_that_do_not_fit_are_refused():
    memory = StagingMemory(Region(4096, 4095), Device(), owner=None)
    with pytest.raises(SettingsError, match="4096 bytes to gather do not fit into 4095"):
        gather_speed(Clockwork(), SAMPLES, BLOCK, memory)


def test_it_measures_the_real_kernels():
    tensor = np.ones(1 << 20, np.uint8)
    kernels = kernels_for([Region(tensor.ctypes.data, tensor.size)], Device())
    starts = np.arange(64, dtype=np.int64) * 16384 + tensor.ctypes.data
    with allocate(1 << 20, Device()) as memory:
        assert 1e7 < gather_speed(kernels, [starts], BlockShape((), 16384), memory) < 1e12
