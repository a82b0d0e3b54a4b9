"""The GPU's kernels on a CPU, under Triton's interpreter: the suite that test_triton_interpreted.py runs.

It is no suite of its own, since Triton reads TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from tests.support.interpreted_accelerator import InterpretedAccelerator
from tests.support.sparse import FAR_BLOCKS, check_far_blocks
from tests.support.staging import (
    ODD_CASES,
    Arena,
    Case,
    KernelMaker,
    cases,
    check_gather,
    check_round_trip,
    check_scatter,
)
from tests.support.tiers import examples

from kvferry.errors import LayoutError, RegistrationError, SettingsError
from kvferry.layout import Device, Region
from kvferry.plan.packing import BlockShape
from kvferry.staging import kernels_for, triton_kernels
from kvferry.staging.accelerator import ThreadStreams
from kvferry.staging.gpu import GpuKernels
from kvferry.staging.mapped import MappedTransport
from kvferry.staging.resources import MachineResources
from kvferry.staging.sharing import MappedCopies, SharedAllocation, Sharing
from kvferry.transport import InProcessNetwork, InProcessTransport

assert os.environ.get("TRITON_INTERPRET") == "1", "run tests/unit/staging/test_triton_interpreted.py"


def interpreted(regions: Sequence[Region]) -> GpuKernels:
    return GpuKernels(regions, InterpretedAccelerator())


@pytest.mark.parametrize("case", ODD_CASES.values(), ids=ODD_CASES)
@pytest.mark.parametrize("check", [check_gather, check_scatter, check_round_trip])
def test_odd_shapes(check: Callable[..., None], case: Case):
    check(interpreted, case, "cpu")


@given(cases())
@settings(max_examples=examples(100))
def test_gathering_packs_the_blocks_and_nothing_else(case: Case):
    check_gather(interpreted, case, "cpu")


@given(cases())
@settings(max_examples=examples(100))
def test_scattering_writes_the_blocks_and_nothing_else(case: Case):
    check_scatter(interpreted, case, "cpu")


@pytest.mark.parametrize(("shape", "blocks"), FAR_BLOCKS.values(), ids=FAR_BLOCKS)
def test_offsets_beyond_what_32_bits_count(shape: BlockShape, blocks: tuple[int, ...]):
    check_far_blocks(interpreted, shape, blocks)


class _OneProcess(Sharing):
    """Memory of one process, in which what is mapped is where it always was."""

    host = "here"

    def offer(self, regions: Sequence[Region]) -> tuple[SharedAllocation, ...]:
        return tuple(SharedAllocation(region, b"") for region in regions)

    def map(self, shared: SharedAllocation) -> int:
        return shared.memory.address

    def unmap(self, address: int) -> None:
        pass


class _Resources(MachineResources):
    def mapped_copies(self, device: Device) -> MappedCopies:
        return MappedCopies(ThreadStreams(InterpretedAccelerator()), _OneProcess())


@pytest.mark.parametrize("offset", [0, 8, 3])
def test_pages_go_straight_into_pages(offset: int):
    """Rows of several lengths in one write, at places that are aligned well or not at all."""
    network = InProcessNetwork()
    here, there = (MappedTransport(InProcessTransport(network), _Resources(), offers=True) for _ in range(2))
    rows = ((256, 512, 70), (48, 48, 40), (1024, 1040, 33), (3, 16, 5))  # length, stride, count
    size = sum(stride * count for _, stride, count in rows) + 64
    memory = [np.random.default_rng(seed).integers(0, 256, size, np.uint8) for seed in range(2)]
    lists, peer = [], None
    for transport, its in zip((here, there), memory, strict=True):
        transport.register([Region(its.ctypes.data, size)], Device())
    peer = here.connect(there.metadata())
    for its, of in zip(memory, (None, peer), strict=True):
        at = its.ctypes.data + -its.ctypes.data % 16 + offset
        table = []
        for length, stride, count in rows:
            table.append((at, length, 0, stride, count))
            at += stride * count
        lists.append(here.prepare(np.array(table, np.uint64), of))
    expected = memory[1].copy()
    numbers, base = [], 0
    starts = [-its.ctypes.data % 16 + offset for its in memory]
    for length, stride, count in rows:
        order = np.random.default_rng(count).permutation(count)[: count - 1]
        numbers.append((base + order, base + np.arange(count - 1)))
        for to, from_ in enumerate(order):
            expected[starts[1] + to * stride :][:length] = memory[0][starts[0] + from_ * stride :][:length]
        base, starts = base + count, [start + stride * count for start in starts]
    local, remote = (np.concatenate(each).astype(np.int32) for each in zip(*numbers, strict=True))
    transfer = here.post(lists[0], local, lists[1], remote, b"there")
    report = here.poll(transfer)
    assert report is not None
    assert report.descriptors == len(local)
    np.testing.assert_array_equal(memory[1], expected)
    assert [text for _, text in there.take_notifications()] == [b"there"]


@given(cases())
@settings(max_examples=examples(50))
def test_both_kinds_of_kernels_pack_the_same_bytes(case: Case):
    arenas = [Arena(case, "cpu", 1) for _ in range(2)]
    makers: list[KernelMaker] = [interpreted, lambda regions: kernels_for(regions, Device())]
    for arena, make in zip(arenas, makers, strict=True):
        arena.fill(*arena.pool, kind=case.contents, seed=2)
        make(arena.regions).gather(arena.starts, case.shape, arena.address)
    arenas[0].expect(arenas[1].read())
    for arena, make in zip(arenas, reversed(makers), strict=True):
        arena.fill(*arena.pool, kind="any", seed=3)
        make(arena.regions).scatter(arena.address, arena.starts, case.shape)
    arenas[0].expect(arenas[1].read())


def test_blocks_outside_the_pool_are_refused():
    arena = Arena(Case((4096,), ((0, 0),), BlockShape((), 64)), "cpu", 1)
    kernels = interpreted(arena.regions)
    for outside in (arena.starts - 1, arena.starts + 4096 - 63, arena.starts + (1 << 40)):
        with pytest.raises(RegistrationError, match=f"{int(outside[0]):#x} lies outside the pool"):
            kernels.gather(np.concatenate([arena.starts, outside]), BlockShape((), 64), arena.address)
        with pytest.raises(RegistrationError, match="outside the pool"):
            kernels.scatter(arena.address, np.concatenate([arena.starts, outside]), BlockShape((), 64))
    with pytest.raises(LayoutError, match="is no block"):
        kernels.gather(arena.starts, BlockShape((), 0), arena.address)
    arena.expect(arena.contents)


def test_more_than_one_launch_copies_is_refused_with_the_setting_to_lower():
    # Two billion runs that are the same byte: no memory of that size is needed to name them.
    arena = Arena(Case((4096,), ((0, 0),), BlockShape((), 1)), "cpu", 1)
    shape = BlockShape(((1 << 16, 0), (1 << 15, 0)), 1)
    with pytest.raises(SettingsError, match=r"2147483648 runs of 1 bytes.*KVFERRY_STAGING_CHUNK_MIB"):
        interpreted(arena.regions).gather(arena.starts, shape, arena.address)


def test_layers_far_apart_are_one_launch(monkeypatch: pytest.MonkeyPatch):
    launches = []
    kernel = triton_kernels.copy_runs

    class Counting:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            launches.append(grid)
            launch: Callable[..., None] = kernel[grid]
            return launch

    monkeypatch.setattr("kvferry.staging.cuda.copy_runs", Counting())
    blocks = tuple((layer, page * 1024) for layer in range(12) for page in (3, 0))
    check_round_trip(interpreted, Case((4096,) * 12, blocks, BlockShape(((4, 256),), 128), before=5), "cpu")
    assert len(launches) == 2, "one to gather and one to scatter"
