"""Pools of the types that engines use: bytes arrive bit for bit, whatever numbers they are, NaNs among them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvferry.layout import Device, MemoryKind, RankLayout, attention_components, shard_from_tensors
from kvferry.plan.packing import BlockShape
from kvferry.staging import kernels_for

PAGES, TOKENS, HEADS, DIM = 32, 16, 4, 32

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device; the cpu case is the twin"),
        ],
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_half_of_the_heads_travel_bit_for_bit(name: str, device: str):
    dtype: torch.dtype = getattr(torch, name)
    component, _ = attention_components(num_layers=2, num_kv_heads=HEADS, head_dim=DIM, dtype=name)
    generator = torch.Generator().manual_seed(3)
    size = (PAGES, TOKENS, HEADS, DIM * dtype.itemsize)

    def pool(tensors: list[torch.Tensor]) -> RankLayout:
        return RankLayout(shards=(shard_from_tensors(component, tensors, dims=("page", "token", "head", "dim")),))

    contents = [torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).to(device) for _ in range(2)]
    sources = [content.view(dtype) for content in contents]
    targets = [torch.zeros_like(content).view(dtype) for content in contents]
    where = Device(MemoryKind.VRAM, 0) if device == "cuda" else Device()
    assert pool(sources).device == where
    half = HEADS // 2 * DIM * dtype.itemsize
    shape = BlockShape(((TOKENS, 2 * half),), half)
    here, there = (np.random.default_rng(seed).permutation(PAGES)[:20] for seed in (1, 2))
    page_bytes = TOKENS * 2 * half
    staging = torch.zeros(len(sources) * len(here) * shape.num_bytes, dtype=torch.uint8, device=device)
    if device == "cuda":
        torch.cuda.synchronize()

    def starts(tensors: list[torch.Tensor], pages: np.ndarray) -> np.ndarray:
        firsts = np.array([tensor.data_ptr() for tensor in tensors], np.int64)
        return np.add.outer(firsts, pages.astype(np.int64) * page_bytes).ravel()

    kernels_for(pool(sources).regions(), where).gather(starts(sources, here), shape, staging.data_ptr())
    kernels_for(pool(targets).regions(), where).scatter(staging.data_ptr(), starts(targets, there), shape)
    for content, target in zip(contents, targets, strict=True):
        expected = torch.zeros_like(content)
        expected[there, :, : HEADS // 2] = content[here, :, : HEADS // 2]
        assert torch.equal(target.view(torch.uint8).reshape(size), expected)
