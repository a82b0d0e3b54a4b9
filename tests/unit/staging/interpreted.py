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
from tests.support.staging import ODD_CASES, Arena, Case, cases, check_gather, check_round_trip, check_scatter
from tests.support.tiers import examples

from kvferry.errors import LayoutError, RegistrationError, SettingsError
from kvferry.layout import Region
from kvferry.plan.blocks import BlockShape
from kvferry.staging import triton_kernels
from kvferry.staging.gpu import GpuKernels
from kvferry.staging.host import HostKernels

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


def test_pages_go_straight_into_pages_by_the_kernel_of_the_first_contact():
    import torch
    from benchmarks.gpu_contact.probes.device_kernels import copy_runs

    for run_bytes, count in ((256, 70), (1024, 33), (48, 5)):
        source = torch.randint(0, 256, (100, run_bytes), dtype=torch.uint8)
        target = torch.zeros_like(source)
        order = torch.from_numpy(np.random.default_rng(count).permutation(100)[:count])
        places = torch.arange(count) * run_bytes
        copy_runs(source.data_ptr() + order * run_bytes, target.data_ptr() + places, run_bytes)
        assert torch.equal(target[:count], source[order])
        assert not target[count:].any()


@given(cases())
@settings(max_examples=examples(50))
def test_both_kinds_of_kernels_pack_the_same_bytes(case: Case):
    arenas = [Arena(case, "cpu", 1) for _ in range(2)]
    for arena, make in zip(arenas, (interpreted, HostKernels), strict=True):
        arena.fill(*arena.pool, kind=case.contents, seed=2)
        make(arena.regions).gather(arena.starts, case.shape, arena.address)
    arenas[0].expect(arenas[1].read())
    for arena, make in zip(arenas, (HostKernels, interpreted), strict=True):
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
