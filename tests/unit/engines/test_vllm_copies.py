"""Blocks that are copied within a worker: of all layers of a group, whatever lies behind their views, and no other."""

from __future__ import annotations

import pytest
import torch

from kvferry import Interval, RankCoordinates
from kvferry.engines.vllm.blocks import copy_blocks
from kvferry.engines.vllm.caches import CacheGroup, HeldPart, ModelShape
from kvferry.engines.vllm.layouts import DescribedCaches, describe
from kvferry.engines.vllm.steps import GroupBlocks

BLOCKS = 6

GROUPS = (CacheGroup("full", ("layers.0", "layers.1"), 4), CacheGroup("window", ("layers.2",), 4, window_tokens=5))


def filled(dtype: torch.dtype, pages: int = BLOCKS) -> torch.Tensor:
    """A cache of random bytes: (page, head, token, content)."""
    size = (pages, 2, 4, 8 * dtype.itemsize)
    return torch.randint(256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(pages)).view(dtype)


def described(caches: dict[str, torch.Tensor], *groups: CacheGroup) -> DescribedCaches:
    heads = dict.fromkeys(caches, HeldPart(2, Interval(0, 2)))
    return describe(caches, groups, ModelShape(3), RankCoordinates(), heads=heads, num_blocks=BLOCKS)


def bytes_of(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(torch.uint8).clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
def test_the_blocks_of_the_group_alone(dtype: torch.dtype):
    caches = {f"layers.{number}": filled(dtype) for number in range(3)}
    before = bytes_of(caches["layers.0"])
    copy_blocks(described(caches, *GROUPS), "full", GroupBlocks(0, (4, 1)), GroupBlocks(0, (0, 5)))
    for name in ("layers.0", "layers.1"):
        assert torch.equal(bytes_of(caches[name]), before[[4, 1, 2, 3, 4, 1]])
    assert torch.equal(bytes_of(caches["layers.2"]), before)


def test_a_block_that_kernels_divide_is_copied_whole():
    cache = filled(torch.float32, pages=2 * BLOCKS)
    before = bytes_of(cache)
    caches = described({"layers.2": cache}, CacheGroup("window", ("layers.2",), 8, window_tokens=5))
    copy_blocks(caches, "window", GroupBlocks(3, (1,)), GroupBlocks(3, (4,)))
    assert torch.equal(bytes_of(cache), before[[0, 1, 2, 3, 4, 5, 6, 7, 2, 3, 10, 11]])


def test_views_of_one_allocation_in_another_order():
    """Blocks that hold both layers, heads before tokens in memory or behind them."""
    memory = torch.arange(BLOCKS * 2 * 4 * 2 * 8, dtype=torch.float32).reshape(BLOCKS, 2, 4, 2, 8)
    caches = {f"layers.{number}": memory[:, number].transpose(1, 2) for number in range(2)}
    before = memory.clone()
    copy_blocks(described(caches, GROUPS[0]), "full", GroupBlocks(0, (0,)), GroupBlocks(0, (3,)))
    assert torch.equal(memory, before[[0, 1, 2, 0, 4, 5]])


def test_nothing_to_copy():
    cache = filled(torch.float32)
    before = bytes_of(cache)
    copy_blocks(described({"layers.2": cache}, GROUPS[1]), "window", GroupBlocks(3, ()), GroupBlocks(3, ()))
    assert torch.equal(bytes_of(cache), before)
