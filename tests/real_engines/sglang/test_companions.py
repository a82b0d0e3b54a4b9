"""What SGLang keeps beside keys, values and latents, byte for byte between pools of SGLang's own, cut by any rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import FP4MXBlock16KVCacheMethod, NVFP4KVCacheMethod
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    MHATokenToKVPool,
    MHATokenToKVPoolFP4,
    MHATokenToKVPoolMXFP8,
    MLATokenToKVPoolFP4,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from tests.real_engines.sglang.pool_ranks import (
    HEAD_DIM,
    HEADS,
    LAYERS,
    PAGES,
    SIZES,
    Crossing,
    Part,
    PoolRank,
    assert_request_fails,
    begin,
    part,
)
from tests.real_engines.sglang.ranks import DECODE, PREFILL, Model
from tests.real_engines.sglang.test_ranks import Pair, pair

from kvferry.engines.sglang.cache_kinds import check_pool
from kvferry.engines.sglang.companions import check_listed
from kvferry.errors import LayoutError

__all__ = ["pair"]  # a fixture

pytestmark = pytest.mark.timeout(60)


def sparse(
    kpool: int, *, tp: int, tp_rank: int, skipped: bool = False, order: int = 128, layers: range = range(LAYERS)
) -> PoolRank:
    """A rank with some layers of latents, of which the second of the model may have no index."""
    page = 64 * kpool
    skip = [skipped and layer == 1 for layer in layers]
    pool = DSATokenToKVPool(
        (PAGES - 1) * page,
        page,
        kv_lora_rank=32,
        dtype=torch.bfloat16,
        qk_rope_head_dim=16,
        layer_num=len(layers),
        start_layer=layers.start,
        end_layer=layers.stop,
        device="cpu",
        index_head_dim=order,
        enable_memory_saver=False,
        kv_cache_dim=48,
        index_buf_size=(PAGES - 1) * page,
        index_kpool=kpool,
        index_kpool_compress=kpool > 1,
        tail_extra_slots=1,
        max_running_requests=5,
        skip_topk_layers=skip,
    )
    made = [(pool.kv_buffer, (PAGES, page * 96), "pages"), (pool.index_k_with_scale_buffer, (), "pages")]
    if kpool > 1:
        made += [(pool._compress_tail_k, (), "slots"), (pool._compress_tail_score, (), "slots")]
    parts = [
        replace(part(each, *shape, of=of), label=100 * kind + layer)
        for kind, (buffers, shape, of) in enumerate(made)
        for layer, each in zip(layers, buffers, strict=True)
        if len(each)
    ]
    return PoolRank(Model(heads=None, page_tokens=page, layers=LAYERS), pool, parts, tp=tp, tp_rank=tp_rank)


def blocks(pool: Any, page: int, of: str = "pages") -> Iterator[Part]:
    for each in (*pool.k_buffer, *pool.v_buffer):
        yield part(each, len(each) // page, page, *each.shape[1:], heads=1, of=of)
    for each in (*pool.k_scale_buffer, *pool.v_scale_buffer):
        shape = each.shape if pool.mxfp8_sf_interleaved else (len(each) // page, page, *each.shape[1:])
        yield part(each, *shape, heads=0 if pool.mxfp8_sf_interleaved else 1, of=of)


def scaled(page: int, *, tp: int, tp_rank: int, window: bool = False) -> PoolRank:
    common: dict[str, Any] = {
        "page_size": page,
        "dtype": torch.float8_e4m3fn,
        "head_num": max(1, HEADS // tp),
        "head_dim": HEAD_DIM,
        "device": "cpu",
        "enable_memory_saver": False,
        "enable_alt_stream": False,
    }
    size = (PAGES - 1) * page
    if not window:
        pool: Any = MHATokenToKVPoolMXFP8(size, layer_num=LAYERS, **common)
        parts = [*blocks(pool, page)]
    else:
        pool = SWAKVPool(
            size,
            size,
            swa_attention_layer_ids=[0],
            full_attention_layer_ids=[1, 2],
            **common,
            token_to_kv_pool_class=MHATokenToKVPoolMXFP8,
        )
        parts = [*blocks(pool.full_kv_pool, page), *blocks(pool.swa_kv_pool, page, of="window")]
    model = Model(heads=HEADS, page_tokens=page, layers=LAYERS, window_tokens=2 * page if window else 8)
    return PoolRank(model, pool, parts, tp=tp, tp_rank=tp_rank)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SGLang's pools ask of the rank that they are on."""
    monkeypatch.setattr(memory_pool, "get_parallel", lambda: SimpleNamespace(attn_dcp_size=1))


@pytest.mark.shows("sglang", "DSATokenToKVPool", "StateType.DSA", "StateType.DSA_TAIL")
@pytest.mark.parametrize("path", ["direct", "staged"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), SIZES)
@pytest.mark.parametrize(("kpool", "skipped"), [(1, False), (2, True)], ids=["plain", "pooled, a layer without"])
def test_the_index_goes_with_its_latents(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, path: str, prefill_tp: int, decode_tp: int, kpool: int, skipped: bool
):
    monkeypatch.setenv("KVFERRY_PATH", path)
    begin(pair, lambda **where: sparse(kpool, skipped=skipped, **where), prefill_tp, decode_tp)
    Crossing(pair, 1, 5).run()
    Crossing(pair, 2, 7, held=3).run()


@pytest.mark.parametrize(
    ("prefill", "decode", "kpool", "skipped"),
    [(2, 1, 1, False), (1, 2, 1, False), (2, 3, 1, False), (2, 1, 2, True), (1, 2, 2, True)],
)
def test_a_stages_index_goes_with_its_latents(pair: Pair, prefill: int, decode: int, kpool: int, skipped: bool):
    """Also of a stage in which a layer takes what the one before it has chosen."""
    for mode, stages in ((PREFILL, prefill), (DECODE, decode)):
        for stage in range(stages):
            layers = range(stage * LAYERS // stages, (stage + 1) * LAYERS // stages)
            rank = sparse(kpool, tp=1, tp_rank=0, skipped=skipped, layers=layers)
            pair.model = rank.model
            pair.start(mode, rank, pp=stages, stage=stage)
    Crossing(pair, 1, 5).run()
    Crossing(pair, 2, 7, held=3).run()


@pytest.mark.shows("sglang", "MHATokenToKVPoolMXFP8", "StateType.BLOCK_SCALE")
@pytest.mark.parametrize("path", ["direct", "staged"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), SIZES)
@pytest.mark.parametrize("page", [16, 128], ids=["by token", "interleaved"])
def test_scales_go_with_their_heads(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, path: str, prefill_tp: int, decode_tp: int, page: int
):
    monkeypatch.setenv("KVFERRY_PATH", path)
    begin(pair, lambda **where: scaled(page, **where), prefill_tp, decode_tp)
    Crossing(pair, 1, 5).run()
    Crossing(pair, 2, 7, held=3).run()


@pytest.mark.parametrize("side", [0, 1])
def test_an_index_in_other_pages_than_its_latents_is_not_exchanged(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, side: int
):
    begin(pair, lambda **where: sparse(1, **where), 1, 1)
    crossing = Crossing(pair, 1, 5)
    states = crossing.states

    def others(manager: Any, of: int) -> list[Any]:
        return [each[::-1] if of == side else each for each in states(manager, of)]

    monkeypatch.setattr(crossing, "states", others)
    with pytest.raises(AssertionError, match="it failed"):
        crossing.run()


@pytest.mark.parametrize(
    ("make", "there", "words"),
    [
        (lambda **where: sparse(where.pop("kpool", 1), **where), {"kpool": 2}, "--page-size, since pages of index"),
        (
            lambda **where: scaled(where.pop("page", 128), **where),
            {"page": 16},
            "layout of 'scale of k': .* has packed pages .SGLang's MXFP8_INTERLEAVED., .* has entries for every token",
        ),
    ],
)
def test_what_cannot_be_cut_alike_is_refused(pair: Pair, make: Any, there: dict[str, int], words: str):
    begin(pair, make, 1, 1, **there)
    assert_request_fails(pair, words)


@pytest.mark.shows("sglang", "StateType.BLOCK_SCALE_SWA")
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), SIZES)
def test_scales_of_a_window_go_with_it(pair: Pair, prefill_tp: int, decode_tp: int):
    begin(pair, lambda **where: scaled(128, window=True, **where), prefill_tp, decode_tp)
    Crossing(pair, 1, 5).run()


def of_4_bits(page: int, *, tp: int, tp_rank: int, method: Any = FP4MXBlock16KVCacheMethod) -> PoolRank:
    pool = MHATokenToKVPool(
        (PAGES - 1) * page,
        page_size=page,
        dtype=torch.float4_e2m1fn_x2,
        head_num=max(1, HEADS // tp),
        head_dim=HEAD_DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
        enable_alt_stream=False,
        quant_method=method(num_layers=LAYERS, device="cpu", page_size=page),
    )
    kv = (*pool.k_buffer, *pool.v_buffer, *pool.k_scale_buffer, *pool.v_scale_buffer)
    parts = [part(each, PAGES, page, pool.head_num, each[0].nbytes // pool.head_num, heads=1) for each in kv]
    return PoolRank(Model(heads=HEADS, page_tokens=page, layers=LAYERS), pool, parts, tp=tp, tp_rank=tp_rank)


@pytest.mark.shows("sglang", "MHATokenToKVPool with scales")
@pytest.mark.parametrize("path", ["direct", "staged"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), SIZES)
@pytest.mark.parametrize("method", [FP4MXBlock16KVCacheMethod, NVFP4KVCacheMethod])
def test_scales_that_sglang_does_not_list_go_with_their_heads(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, path: str, prefill_tp: int, decode_tp: int, method: Any
):
    monkeypatch.setenv("KVFERRY_PATH", path)
    begin(pair, partial(of_4_bits, 16, method=method), prefill_tp, decode_tp)
    Crossing(pair, 1, 5).run()
    Crossing(pair, 2, 7, held=3).run()


def windows_of_4_bits(page: int, *, tp: int, tp_rank: int) -> PoolRank:
    size = (PAGES - 1) * page
    pool = SWAKVPool(
        size,
        size,
        page_size=page,
        dtype=torch.float4_e2m1fn_x2,
        head_num=max(1, HEADS // tp),
        head_dim=HEAD_DIM,
        device="cpu",
        enable_memory_saver=False,
        enable_alt_stream=False,
        swa_attention_layer_ids=[0],
        full_attention_layer_ids=[1, 2],
        token_to_kv_pool_class=partial(MHATokenToKVPool, quant_method=FP4MXBlock16KVCacheMethod()),
    )
    parts = []
    for each, of in ((pool.full_kv_pool, "pages"), (pool.swa_kv_pool, "window")):
        kv = (*each.k_buffer, *each.v_buffer, *each.k_scale_buffer, *each.v_scale_buffer)
        parts += [part(kind, PAGES, page, each.head_num, -1, heads=1, of=of) for kind in kv]
    model = Model(heads=HEADS, page_tokens=page, layers=LAYERS, window_tokens=2 * page)
    return PoolRank(model, pool, parts, tp=tp, tp_rank=tp_rank)


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), SIZES)
def test_scales_of_a_window_that_sglang_does_not_list_go_with_it(pair: Pair, prefill_tp: int, decode_tp: int):
    begin(pair, partial(windows_of_4_bits, 16), prefill_tp, decode_tp)
    Crossing(pair, 1, 5).run()
    Crossing(pair, 2, 7, held=3).run()


def latents_of_4_bits(page: int, *, tp: int, tp_rank: int) -> PoolRank:
    pool = MLATokenToKVPoolFP4(
        (PAGES - 1) * page,
        page,
        dtype=torch.float4_e2m1fn_x2,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    parts = [part(each, PAGES, page * each[0].nbytes) for each in (*pool.kv_buffer, *pool.kv_scale_buffer)]
    return PoolRank(Model(heads=None, page_tokens=page, layers=LAYERS), pool, parts, tp=tp, tp_rank=tp_rank)


@pytest.mark.shows("sglang", "MLATokenToKVPoolFP4")
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), SIZES)
def test_scales_of_latents_go_with_them(pair: Pair, prefill_tp: int, decode_tp: int):
    begin(pair, partial(latents_of_4_bits, 16), prefill_tp, decode_tp)
    Crossing(pair, 1, 5).run()
    Crossing(pair, 2, 7, held=3).run()


@pytest.mark.shows("sglang", "MHATokenToKVPoolFP4")
def test_a_pool_that_sglang_cannot_list_is_refused():
    pool = MHATokenToKVPoolFP4(
        (PAGES - 1) * 16,
        page_size=16,
        dtype=torch.float4_e2m1fn_x2,
        head_num=HEADS,
        head_dim=HEAD_DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
        enable_alt_stream=False,
    )
    with pytest.raises(AttributeError, match="_kv_buffer_descs"):
        pool.get_contiguous_buf_infos()
    with pytest.raises(LayoutError, match=r"MHATokenToKVPoolFP4.* SGLang can list it for no backend"):
        check_pool(pool, "layers of this model")


@pytest.mark.parametrize("make", [of_4_bits, latents_of_4_bits])
def test_scales_of_a_draft_model_are_refused(make: Any):
    rank = make(16, tp=1, tp_rank=0)
    with pytest.raises(LayoutError, match="does not list the scales of a draft model's blocks"):
        check_listed([], rank.pool, rank.pool, None, rank.pool)
