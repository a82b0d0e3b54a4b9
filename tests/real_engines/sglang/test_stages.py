"""Pipeline stages of models with several kinds of layer, byte for byte between pools of SGLang's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MambaPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from tests.real_engines.sglang.pool_ranks import PAGES, Crossing, Part, PoolRank, part
from tests.real_engines.sglang.ranks import DECODE, PREFILL, Model, number_of
from tests.real_engines.sglang.test_companions import alone
from tests.real_engines.sglang.test_ranks import Pair, pair

__all__ = ["alone", "pair"]  # fixtures

pytestmark = pytest.mark.timeout(60)

PAGE, HEADS, SLOTS = 4, 4, 5
SIZE = (PAGES - 1) * PAGE
COMMON: dict[str, Any] = {"page_size": PAGE, "dtype": torch.float16, "head_dim": 8, "device": "cpu"}
COMMON |= {"enable_memory_saver": False}

FULL, OTHER = 0, 100
VALUES = 50
"""Labels of layers: full attention from 0 on, the other kind from 100 on, and values 50 behind their keys."""


def attention(pool: Any, layers: Sequence[int], first: int, of: str) -> Iterator[Part]:
    """Keys and values of a pool."""
    for kind, buffers in enumerate((pool.k_buffer, pool.v_buffer)):
        for layer, buffer in zip(layers, buffers, strict=True):
            cut = part(buffer, PAGES, PAGE, buffer.shape[1], 16)
            yield Part(cut.bytes, 1, of, HEADS, first + VALUES * kind + layer)


def windowed(model: Model, full: range, windows: range, *, tp: int, tp_rank: int) -> PoolRank:
    """A rank with these layers of each kind."""
    pool = SWAKVPool(
        SIZE,
        SIZE,
        head_num=HEADS // tp,
        swa_attention_layer_ids=[number_of(1, each) for each in windows],
        full_attention_layer_ids=[number_of(0, each) for each in full],
        enable_alt_stream=False,
        **COMMON,
    )
    parts = [
        *attention(pool.full_kv_pool, full, FULL, "pages"),
        *attention(pool.swa_kv_pool, windows, OTHER, "window"),
    ]
    return PoolRank(model, pool, parts, tp=tp, tp_rank=tp_rank)


def recurrent(model: Model, full: range, states: range, *, tp: int, tp_rank: int) -> PoolRank:
    """A rank with these layers of each kind."""
    shape = Mamba2StateShape.create(
        tp_world_size=tp,
        intermediate_size=32,
        n_groups=4,
        num_heads=8,
        head_dim=4,
        state_size=4,
        conv_kernel=4,
        conv_shard_groups=[16, 16, 32],
    )
    ids = [number_of(2, each) for each in states]
    mamba = MambaPool(
        size=SLOTS,
        spec_state_size=0,
        cache_params=Mamba2CacheParams(shape=shape, layers=ids),
        mamba_layer_ids=ids,
        device="cpu",
    )
    pool = HybridLinearKVPool(
        SIZE,
        head_num=HEADS // tp,
        full_attention_layer_ids=[number_of(0, each) for each in full],
        mamba_pool=mamba,
        **COMMON,
    )
    parts = [*attention(pool.full_kv_pool, full, FULL, "pages")]
    for kind, tensor in enumerate((mamba.mamba_cache.conv[0], mamba.mamba_cache.temporal)):
        for layer, each in zip(states, tensor, strict=True):
            given = part(each, of="slots")
            # Heads of the state are its channels; of the convolution, which has blocks, this shows one rank's alone.
            heads = 0 if kind and tp > 1 else None
            parts.append(Part(given.bytes, heads, "slots", 8, OTHER + VALUES * kind + layer))
    return PoolRank(model, pool, parts, tp=tp, tp_rank=tp_rank)


def ranges(count: int, stages: int) -> list[range]:
    return [range(stage * count // stages, (stage + 1) * count // stages) for stage in range(stages)]


def start(pair: Pair, make: Any, model: Model, other: int, prefill: int, decode: int, tp: int = 1) -> None:
    """Starts both sides, with so many stages each, and more tensor-parallel ranks on the decode side."""
    pair.model = model
    for mode, stages, ranks in ((PREFILL, prefill, 1), (DECODE, decode, tp)):
        for stage, layers in enumerate(zip(ranges(model.layers, stages), ranges(other, stages), strict=True)):
            for tp_rank in range(ranks):
                rank = make(model, *layers, tp=ranks, tp_rank=tp_rank)
                pair.start(mode, rank, pp=stages, stage=stage)


@pytest.mark.parametrize(("full", "windows"), [(4, 4), (1, 5), (5, 1)], ids=["all", "full lacks", "windows lack"])
@pytest.mark.parametrize(("prefill", "decode", "tp"), [(2, 1, 1), (1, 2, 2), (2, 3, 1)])
def test_stages_have_their_own_full_attention_and_windows(
    pair: Pair, full: int, windows: int, prefill: int, decode: int, tp: int
):
    model = Model(heads=HEADS, page_tokens=PAGE, layers=full, window_layers=windows, window_tokens=2 * PAGE)
    start(pair, windowed, model, windows, prefill, decode, tp)
    Crossing(pair, 1, 5).run()


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2), (2, 3)])
def test_stages_have_their_own_recurrent_state(pair: Pair, prefill: int, decode: int):
    model = Model(heads=HEADS, page_tokens=PAGE, layers=3, state_layers=6)
    start(pair, recurrent, model, 6, prefill, decode)
    Crossing(pair, 1, 5).run()
