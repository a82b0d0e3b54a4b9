"""DeepSeek V4's caches, byte for byte between pools of SGLang's own: in pages, and in rings of requests."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.dsv4 import unified_kv_gate
from sglang.srt.mem_cache import deepseek_v4_memory_pool as compressed
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from tests.real_engines.sglang.pool_ranks import (
    PAGES,
    SIZES,
    SLOTS,
    Crossing,
    Part,
    PoolRank,
    assert_request_fails,
    begin,
    items,
    part,
)
from tests.real_engines.sglang.ranks import Model
from tests.real_engines.sglang.test_ranks import Pair, pair

from kvferry.engines.sglang.compressed import compressed_caches
from kvferry.errors import LayoutError

__all__ = ["pair"]  # a fixture

pytestmark = pytest.mark.timeout(60)

PAGE, WINDOW = 256, 128
RATIOS = [0, 4, 128, 4, 128]


@pytest.fixture(autouse=True)
def spec(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What SGLang's pools ask of the rank that they are on; its speculative decoding may be changed."""
    speculative = SimpleNamespace(speculative_algorithm=None, speculative_num_draft_tokens=None)
    kernel = SimpleNamespace(dsv4_attn_backend="auto", enable_deepseek_v4_fp4_indexer=False)
    features = SimpleNamespace(enable_encoder_swa_bounded_replay=False)
    monkeypatch.setattr(memory_pool, "get_parallel", lambda: SimpleNamespace(attn_dcp_size=1))
    monkeypatch.setattr(compressed, "get_exec", lambda: SimpleNamespace(kernel=kernel, features=features))
    monkeypatch.setattr(compressed, "get_spec", lambda: speculative)
    monkeypatch.setattr(compressed, "get_platform", lambda: SimpleNamespace(is_sm120=False))
    return speculative


def pool_of(ratios: list[int], **more: Any) -> DeepSeekV4TokenToKVPool:
    tokens = (PAGES - 1) * PAGE
    given: dict[str, Any] = {"dtype": torch.uint8, "full_size": tokens} | more
    return DeepSeekV4TokenToKVPool(
        max_num_reqs=SLOTS - 1,
        swa_size=tokens,
        c4_size=tokens // 4,
        c128_size=tokens // 128,
        c4_state_pool_size=PAGES * compressed.resolve_compress_state_ring_size(4),
        c128_state_pool_size=SLOTS * 128,
        page_size=PAGE,
        swa_page_size=PAGE,
        c4_state_dtype=torch.float32,
        c128_state_dtype=torch.float32,
        qk_nope_head_dim=448,
        qk_rope_head_dim=64,
        indexer_head_dim=128,
        layer_num=len(ratios),
        device="cpu",
        enable_memory_saver=False,
        compression_ratios=ratios,
        sliding_window=WINDOW,
        num_req_slots=SLOTS,
        **given,
    )


def parts_of(pool: DeepSeekV4TokenToKVPool) -> list[Part]:
    """All that a pool keeps of a request, as its kernels address it."""
    parts = []
    unified = pool.unified_kv_pool
    for ratio, latents in pool.kv_pools.items():
        if unified is None:
            parts += [part(each) for each in latents.kv_buffer]
        else:
            of_ratio = [layer for layer, found in enumerate(RATIOS) if found == ratio]
            rows = [each[layer] for each in unified_rows(pool) for layer in of_ratio]
            parts += [items(each[unified.swa_pages :], PAGE // ratio) for each in rows]
        if ratio in pool.index_pools:
            parts += [items(each, PAGE // ratio // pool.index_pools[ratio].page_size) for each in index_of(pool, ratio)]
    if unified is None:
        parts += [part(each, of="window") for each in pool.swa_kv_pool.kv_buffer]
    else:
        rows = [each for kind in unified_rows(pool) for each in kind]
        parts += [items(each[: unified.swa_pages], unified.swa_ring_size, of="slots") for each in rows]
    for state in (*pool.compress_state_pools, *pool.indexer_compress_state_pools):
        if state is None:
            continue
        rows = state.kv_score_buffer.kv_score
        if state.request_scoped:
            parts.append(items(rows, 128 if state.ratio == 128 else state.ring_size, of="pending"))
        else:
            parts.append(items(rows, state.ring_size, of="window" if unified is None else "slots"))
    return parts


def unified_rows(pool: DeepSeekV4TokenToKVPool) -> list[list[torch.Tensor]]:
    """Rows of windows and latents by layer, and, of 8 bits, of what keeps its 16."""
    unified = pool.unified_kv_pool
    return [unified.kv_buffer, *([unified.kv_buffer_rope] if unified.fp8 else [])]


def index_of(pool: DeepSeekV4TokenToKVPool, ratio: int) -> list[torch.Tensor]:
    return list(pool.index_pools[ratio].index_k_with_scale_buffer)


def rank_of(*, tp: int, tp_rank: int, ratios: list[int] = RATIOS, draft: bool = False, **more: Any) -> PoolRank:
    pool = pool_of(ratios, **more)
    drafts = pool_of([0], is_draft_worker=True, **more) if draft else None
    parts = [*parts_of(pool), *(parts_of(drafts) if drafts is not None else ())]
    if drafts is not None and drafts.swa_valid_from is not None:
        parts.append(items(drafts.swa_valid_from[:, None], 1, of="slots"))
    model = Model(heads=None, page_tokens=PAGE, window_tokens=WINDOW)
    return PoolRank(model, pool, parts, tp=tp, tp_rank=tp_rank, draft=drafts)


@pytest.mark.shows("sglang", "DeepSeekV4TokenToKVPool", "StateType.DSV4_REQUEST_STATE")
@pytest.mark.parametrize("path", ["direct", "staged"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), SIZES)
def test_latents_at_several_compressions_arrive_with_their_windows(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, path: str, prefill_tp: int, decode_tp: int
):
    monkeypatch.setenv("KVFERRY_PATH", path)
    begin(pair, rank_of, prefill_tp, decode_tp)
    Crossing(pair, 1, 5, tokens=4 * PAGE + 70).run()
    Crossing(pair, 2, 7, held=3).run()  # nothing is left to be compressed


@pytest.fixture
def in_rings(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pools as on ROCm, with windows in rings of requests."""
    monkeypatch.setattr(unified_kv_gate, "is_unified_kv_triton", lambda: True)
    return partial(rank_of, dtype=torch.bfloat16)


@pytest.mark.shows("sglang", "StateType.SWA_RING")
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), SIZES)
@pytest.mark.parametrize("bits", [16, 8])
def test_windows_in_rings_arrive_in_the_requests_own(
    pair: Pair, in_rings: Any, prefill_tp: int, decode_tp: int, bits: int
):
    begin(pair, partial(in_rings, unified_fp8=bits == 8), prefill_tp, decode_tp)
    Crossing(pair, 1, 5, tokens=4 * PAGE + 70).run()
    Crossing(pair, 2, 7, held=3).run()


@pytest.mark.parametrize("layout", ["v4", "v41"])
def test_latents_that_layers_share_arrive(pair: Pair, layout: str):
    """As of DeepSeek V4.1: layers 2 and 4 compress, and others read what they have."""
    make = partial(rank_of, ratios=[0, 1, 1, 2, 2], kv_source_layers=(1, 3), kv_layout=layout)
    begin(pair, make, 2, 1)
    Crossing(pair, 1, 5, tokens=4 * PAGE + 71).run()
    Crossing(pair, 2, 7, held=3).run()


@pytest.mark.shows("sglang", "StateType.REQUEST_ROW")
@pytest.mark.parametrize("decode", [True, False], ids=["on both sides", "on one side"])
def test_a_drafts_windows_go_with_the_models(pair: Pair, spec: SimpleNamespace, decode: bool):
    spec.speculative_algorithm, spec.speculative_num_draft_tokens = "DSPARK", 4
    begin(pair, partial(rank_of, draft=True), 1, 2, draft=decode)
    Crossing(pair, 1, 5, tokens=4 * PAGE + 70).run()


def test_a_drafts_windows_go_in_rings_with_the_models(pair: Pair, in_rings: Any):
    begin(pair, partial(in_rings, draft=True), 1, 2)
    Crossing(pair, 1, 5, tokens=4 * PAGE + 70).run()


def test_rings_of_another_length_are_refused(pair: Pair, in_rings: Any, spec: SimpleNamespace):
    def make(*, drafts: bool = False, **where: Any) -> PoolRank:
        spec.speculative_algorithm, spec.speculative_num_draft_tokens = ("EAGLE", 4) if drafts else (None, None)
        rank: PoolRank = in_rings(**where)
        return rank

    begin(pair, make, 1, 1, drafts=True)
    assert_request_fails(pair, "axes of 'window latent': .*place in the ring 128, .*place in the ring 131, ")


def test_latents_in_another_order_are_refused(pair: Pair):
    begin(pair, partial(rank_of, kv_layout="v4"), 1, 1, kv_layout="v41")
    assert_request_fails(pair, "KV layout is v4,.* there and v41,.* here")


def test_places_of_several_rings_are_refused(pair: Pair, in_rings: Any, monkeypatch: pytest.MonkeyPatch):
    begin(pair, in_rings, 1, 1)
    crossing = Crossing(pair, 1, 5, tokens=4 * PAGE + 70)
    places = crossing._places
    monkeypatch.setattr(crossing, "_places", lambda side: places(side) + 1)
    with pytest.raises(AssertionError, match="it failed"):
        crossing.run()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"request_window": object()}, "leave --enable-encoder-swa-bounded-replay away"),
        ({"swa_page_size": 64}, "pages have 256 tokens, and those of windows 64"),
    ],
)
def test_what_kvferry_does_not_do_is_refused(pair: Pair, changed: dict[str, Any], words: str):
    rank = rank_of(tp=1, tp_rank=0)
    args = rank.arguments
    vars(rank.pool).update(changed)
    with pytest.raises(LayoutError, match=words):
        compressed_caches(args, rank.pool, None, WINDOW)


@pytest.mark.parametrize("kind", ["swa", "c128_state"])
def test_what_sglang_does_not_list_is_refused(kind: str):
    rank = rank_of(tp=1, tp_rank=0)
    args = rank.arguments
    del args.state_types[[each.value for each in args.state_types].index(kind)]
    with pytest.raises(LayoutError, match=rf"does not list its \['{kind}'\]"):
        compressed_caches(args, rank.pool, None, WINDOW)


def test_a_draft_that_sglang_lists_nothing_of_is_refused():
    rank = rank_of(tp=1, tp_rank=0)
    with pytest.raises(LayoutError, match="the draft model keeps its cache in a object"):
        compressed_caches(rank.arguments, rank.pool, object(), WINDOW)


@pytest.mark.parametrize("more", [1, -1])
def test_lists_that_are_not_the_pools_are_refused(more: int):
    rank = rank_of(tp=1, tp_rank=0)
    args = rank.arguments
    for name in ("kv_data_ptrs", "kv_data_lens", "kv_item_lens"):
        given = getattr(args, name)
        setattr(args, name, [*given, given[0]] if more > 0 else given[:-1])
    with pytest.raises(LayoutError, match=f"SGLang lists {6 + more} buffers of keys and values"):
        compressed_caches(args, rank.pool, None, WINDOW)
