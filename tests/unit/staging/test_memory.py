"""Staging memory: where it is, how much there is, and what is said if there is not enough."""

from __future__ import annotations

import numpy as np
import psutil
import pytest
from tests.unit.staging.test_host_kernels import over

from kvferry.errors import SettingsError, TransportUnavailableError
from kvferry.layout import Device, MemoryKind, Region
from kvferry.staging import allocate

MIB = 1 << 20


@pytest.mark.parametrize("num_bytes", [1, 4095, 4096, 3 * MIB + 1])
def test_cpu_memory_starts_at_a_page_and_is_as_large_as_asked(num_bytes: int):
    with allocate(num_bytes, Device()) as memory:
        assert memory.address % 4096 == 0
        assert memory.num_bytes == num_bytes
        assert memory.region == Region(memory.address, num_bytes)
        assert memory.device == Device()
        there = over(memory.address, num_bytes)
        there[:] = 5
        assert int(there.sum()) == 5 * num_bytes


def test_all_of_it_is_there_at_once_and_gone_when_it_is_closed():
    process = psutil.Process()
    before = process.memory_info().rss
    with allocate(512 * MIB, Device()):
        assert process.memory_info().rss - before > 500 * MIB
    assert process.memory_info().rss - before < 64 * MIB, "closing did not give it back"


def test_large_memory_begins_where_a_huge_page_does():
    with allocate(3 * MIB, Device()) as memory:
        assert memory.address % (2 * MIB) == 0


def test_closing_again_does_nothing():
    memory = allocate(4096, Device())
    shown = [repr(memory)]
    for _ in range(2):
        memory.close()
        shown.append(repr(memory))
    assert "4096 bytes at 0x" in shown[0]
    assert ["closed" in text for text in shown] == [False, True, True]


@pytest.mark.parametrize("num_bytes", [1 << 50, 1 << 62, 1 << 70])
def test_what_does_not_fit_is_refused_with_its_size_and_what_to_do(num_bytes: int):
    with pytest.raises(SettingsError, match=rf"{num_bytes} bytes \(.*GiB\).*KVFERRY_STAGING_RING_MIB") as caught:
        allocate(num_bytes, Device())
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_no_memory_is_no_staging_memory(num_bytes: int):
    with pytest.raises(SettingsError, match=f"{num_bytes} bytes of staging memory"):
        allocate(num_bytes, Device())


def test_gpu_memory_needs_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(TransportUnavailableError, match="VRAM:0: a GPU asked for where there is none"):
        allocate(4096, Device(MemoryKind.VRAM))


def test_several_pieces_do_not_overlap():
    pieces = [allocate(MIB, Device()) for _ in range(8)]
    for number, piece in enumerate(pieces):
        over(piece.address, MIB)[:] = number
    assert [int(np.unique(over(piece.address, MIB)).item()) for piece in pieces] == list(range(8))
    for piece in pieces:
        piece.close()
