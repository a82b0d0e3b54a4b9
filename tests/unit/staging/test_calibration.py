"""How long gathering takes, measured on kernels whose speed is known."""

from __future__ import annotations

import time

import numpy as np
import pytest

from kvferry.errors import SettingsError
from kvferry.layout import Device, Region
from kvferry.plan.blocks import BlockShape
from kvferry.staging import Kernels, StagingMemory, allocate, gather_speed, kernels_for

BLOCK = BlockShape((), 1024)
STARTS = np.arange(4, dtype=np.int64) * 1024 + 4096


class Clockwork(Kernels):
    """Takes the next of some times for every call, on a clock of its own."""

    def __init__(self, *seconds: float) -> None:
        self.now = 0.0
        self.calls: list[tuple[int, BlockShape, int]] = []
        self._seconds = iter(seconds)

    def gather(self, starts: np.ndarray, shape: BlockShape, address: int) -> None:
        self.calls.append((len(starts), shape, address))
        self.now += next(self._seconds)

    def scatter(self, address: int, starts: np.ndarray, shape: BlockShape) -> None:
        raise AssertionError("calibrating must not write into a pool")


def measured(kernels: Clockwork, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(time, "perf_counter", lambda: kernels.now)
    with allocate(4096, Device()) as memory:
        taken = gather_speed(kernels, STARTS, BLOCK, memory)
        assert set(kernels.calls) == {(4, BLOCK, memory.address)}
    return taken


def test_it_is_the_best_of_a_few_and_the_first_does_not_count(monkeypatch: pytest.MonkeyPatch):
    kernels = Clockwork(1e-6, 9e-5, 7e-5, 6e-5, 8e-5, 9e-5)
    assert measured(kernels, monkeypatch) == pytest.approx(6e-5)
    assert len(kernels.calls) == 6


def test_it_ends_before_a_millisecond(monkeypatch: pytest.MonkeyPatch):
    kernels = Clockwork(3e-4, 2e-4, 2e-4, 2e-4, 2e-4, 2e-4)
    assert measured(kernels, monkeypatch) == pytest.approx(2e-4)
    assert kernels.now < 1e-3


def test_blocks_that_take_longer_are_gathered_twice(monkeypatch: pytest.MonkeyPatch):
    kernels = Clockwork(1.0, 0.5)
    assert measured(kernels, monkeypatch) == pytest.approx(0.5)


def test_blocks_that_do_not_fit_are_refused():
    memory = StagingMemory(Region(4096, 4095), Device(), owner=None)
    with pytest.raises(SettingsError, match="4096 bytes to gather do not fit into 4095"):
        gather_speed(Clockwork(), STARTS, BLOCK, memory)


def test_it_measures_the_real_kernels():
    tensor = np.ones(1 << 20, np.uint8)
    kernels = kernels_for([Region(tensor.ctypes.data, tensor.size)], Device())
    starts = np.arange(64, dtype=np.int64) * 16384 + tensor.ctypes.data
    with allocate(1 << 20, Device()) as memory:
        assert 1e-6 < gather_speed(kernels, starts, BlockShape((), 16384), memory) < 0.1
