"""DeepSeek V4's caches, byte for byte between pools of SGLang's own: in pages, and in rings of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.arg_groups import deepseek_v4_hook
from sglang.srt.disaggregation.base.conn import StateType
from sglang.srt.layers.attention.dsv4 import unified_kv_gate
from sglang.srt.mem_cache import deepseek_v4_memory_pool as compressed
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.deepseek_v4_compress_state import c4_state_transfer_indices
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
from tests.real_engines.sglang.ranks import DECODE, PREFILL, Model
from tests.real_engines.sglang.test_ranks import Pair, pair

from kvferry.engines.sglang.compressed import Rings, compressed_caches, rings_of
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
    layers = range(given.get("start_layer", 0), given.get("end_layer", len(ratios)))
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
        layer_num=len(layers),
        device="cpu",
        enable_memory_saver=False,
        compression_ratios=ratios,
        sliding_window=WINDOW,
        num_req_slots=SLOTS,
        **given,
    )


def parts_of(pool: DeepSeekV4TokenToKVPool) -> list[Part]:
    """All that a pool keeps of a request, as its kernels address it, labelled by kind and layer."""
    parts = []
    unified, layers = pool.unified_kv_pool, range(pool._stage_start, pool._stage_end)
    for ratio, latents in pool.kv_pools.items():
        owners = pool.sources_by_ratio.get(ratio, [])
        if unified is None:
            parts += labelled(100 + ratio, owners, [part(each) for each in latents.kv_buffer])
        else:
            for kind, rows in enumerate(unified_rows(pool)):
                mine = [items(rows[layer - layers.start][unified.swa_pages :], PAGE // ratio) for layer in owners]
                parts += labelled(100 + 200 * kind + ratio, owners, mine)
        if ratio in pool.index_pools:
            of_page = PAGE // ratio // pool.index_pools[ratio].page_size
            parts += labelled(500 + ratio, owners, [items(each, of_page) for each in index_of(pool, ratio)])
    if unified is None:
        parts += labelled(700, layers, [part(each, of="window") for each in pool.swa_kv_pool.kv_buffer])
    else:
        for kind, rows in enumerate(unified_rows(pool)):
            parts += labelled(700 + kind, layers, [items(each[: unified.swa_pages], 1, of="ring") for each in rows])
    for kind, states in ((800, pool.compress_state_pools), (801, pool.indexer_compress_state_pools)):
        for layer, state in enumerate(states):
            if state is None:
                continue
            rows = state.kv_score_buffer.kv_score
            size, of = {128: (128, "pending"), 4: (1, "overlap"), 2: (1, "pair")}[state.ratio]
            parts += labelled(kind, [layer], [items(rows, size, of=of)])
    return parts


def labelled(kind: int, layers: Sequence[int], parts: Sequence[Part]) -> list[Part]:
    return [replace(each, label=1000 * kind + layer) for layer, each in zip(layers, parts, strict=True)]


def unified_rows(pool: DeepSeekV4TokenToKVPool) -> list[list[torch.Tensor]]:
    """Rows of windows and latents by layer, and, of 8 bits, of what keeps its 16."""
    unified = pool.unified_kv_pool
    return [unified.kv_buffer, *([unified.kv_buffer_rope] if unified.fp8 else [])]


def index_of(pool: DeepSeekV4TokenToKVPool, ratio: int) -> list[torch.Tensor]:
    return list(pool.index_pools[ratio].index_k_with_scale_buffer)


def rank_of(*, tp: int, tp_rank: int, ratios: list[int] = RATIOS, draft: bool = False, **more: Any) -> PoolRank:
    pool = pool_of(ratios, **more)
    drafts = pool_of([0], is_draft_worker=True, **more) if draft else None
    parts = [*parts_of(pool), *(labelled_anew(parts_of(drafts)) if drafts is not None else ())]
    if drafts is not None and drafts.swa_valid_from is not None:
        parts.append(items(drafts.swa_valid_from[:, None], 1, of="slots"))
    model = Model(heads=None, page_tokens=PAGE, window_tokens=WINDOW, layers=len(ratios))
    return PoolRank(model, pool, parts, tp=tp, tp_rank=tp_rank, draft=drafts)


def labelled_anew(parts: Sequence[Part]) -> list[Part]:
    """A draft model's, whose layers have the model's numbers and other content."""
    return [replace(each, label=10**6 + (each.label or 0)) for each in parts]


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
def in_pages() -> Any:
    """Pools with windows in pages."""
    return rank_of


@pytest.fixture
def of_2() -> Any:
    """Pools with layers that are compressed by 2, as of DeepSeek V4.1: layers 2 and 4 compress, others read theirs."""
    return partial(rank_of, ratios=[0, 1, 1, 2, 2], kv_source_layers=(1, 3))


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


STAGED = [4, 128, 0, 4, 128, 4, 128, 4]
"""Compressions of a model in stages; a stage need not have a layer without any, as the first of three has none."""


def begin_in_stages(pair: Pair, make: Any, prefill: int, decode: int, *, ratios: list[int] = STAGED) -> None:
    for mode, stages in ((PREFILL, prefill), (DECODE, decode)):
        for stage in range(stages):
            start, stop = (number * len(ratios) // stages for number in (stage, stage + 1))
            rank = make(tp=1, tp_rank=0, ratios=ratios, start_layer=start, end_layer=stop)
            pair.model = rank.model
            pair.start(mode, rank, pp=stages, stage=stage)


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("made", ["in_pages", "in_rings"])
def test_stages_have_their_own_compressions(
    pair: Pair, request: pytest.FixtureRequest, made: str, prefill: int, decode: int
):
    begin_in_stages(pair, request.getfixturevalue(made), prefill, decode)
    Crossing(pair, 1, 5, tokens=4 * PAGE + 70).run()
    Crossing(pair, 2, 7, held=3).run()


@pytest.mark.parametrize(
    ("ratios", "words"),
    [
        ([0, 4, 4, 128], "no layer of this pipeline stage is compressed by 128"),
        ([128, 128, 4, 4], "no layer of this pipeline stage is compressed by 4,"),
        ([128, 4, 1, 2], "SGLang does not serve DeepSeek V4.1 so. Leave --pp-size away"),
    ],
)
def test_stages_that_cannot_be_described_are_refused(pair: Pair, ratios: list[int], words: str):
    with pytest.raises(LayoutError, match=words):
        begin_in_stages(pair, partial(rank_of, kv_source_layers=(2, 3)), 2, 1, ratios=ratios)


def test_stages_of_deepseek_v41_are_refused_by_sglang(monkeypatch: pytest.MonkeyPatch):
    cfg = SimpleNamespace(
        dsv4_attn_backend="auto",
        enable_encoder_swa_bounded_replay=False,
        enable_hisparse=False,
        enable_two_batch_overlap=False,
        speculative_algorithm=None,
        pp_size=2,
    )
    model = SimpleNamespace(hf_config=SimpleNamespace(model_type="deepseek_v41"))
    monkeypatch.setattr(deepseek_v4_hook, "resolving_view", lambda _: cfg)
    monkeypatch.setattr(deepseek_v4_hook, "model_config_of", lambda _: model)
    with pytest.raises(ValueError, match=r"DeepSeek-V4\.1 does not support pipeline parallelism yet"):
        deepseek_v4_hook.validate_deepseek_v41_features(None)


def test_layers_that_are_numbered_by_compression_leave_with_their_step(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    """The second stage has as many numbers as layers, in another order than the model computes them."""
    overlap = SimpleNamespace(enable_two_batch_overlap=False)
    monkeypatch.setattr(runtime_context, "get_exec", lambda: SimpleNamespace(overlap=overlap))
    monkeypatch.setenv("KVFERRY_LAYER_RANGES", "4")
    begin_in_stages(pair, rank_of, 2, 1, ratios=[128, 128, 4, 4, 128, 128])
    assert [each.layer_steps for each in pair.prefill.managers] == [None, None]
    Crossing(pair, 1, 5, tokens=4 * PAGE + 70).run()


@pytest.mark.parametrize("layout", ["v4", "v41"])
def test_latents_that_layers_share_arrive(pair: Pair, of_2: Any, layout: str):
    begin(pair, partial(of_2, kv_layout=layout), 2, 1)
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


@pytest.mark.parametrize("drafts_on", ["prefill", "decode"])
@pytest.mark.parametrize("made", ["in_pages", "in_rings", "of_2"])
def test_rings_may_differ_in_length(
    pair: Pair, request: pytest.FixtureRequest, spec: SimpleNamespace, made: str, drafts_on: str
):
    """With speculative decoding on one side alone: of 131 and 128 tokens, 16 and 8, or 8 and 2."""
    make_rank = request.getfixturevalue(made)
    pools: list[DeepSeekV4TokenToKVPool] = []

    def make(*, drafts: bool = drafts_on == "prefill", **given: Any) -> PoolRank:
        spec.speculative_algorithm, spec.speculative_num_draft_tokens = ("EAGLE", 4) if drafts else (None, None)
        rank: PoolRank = make_rank(**given)
        pools.append(rank.pool)
        return rank

    begin(pair, make, 1, 2, drafts=drafts_on == "decode")
    assert len({rings_of(pool) for pool in pools}) == 2
    for room, tokens in enumerate((4 * PAGE + 70, 4 * PAGE + 3, 4 * PAGE + 1, 5 * PAGE, 101, 5), 1):
        Crossing(pair, room, -(-tokens // PAGE), tokens=tokens).run()
    Crossing(pair, 7, 7, held=3, tokens=6 * PAGE + 131).run()
    Crossing(pair, 8, 7, held=6, tokens=6 * PAGE + 3).run()  # the decode side has most of the window in its pages


@pytest.mark.parametrize("ring", [8, 16])
def test_what_is_sent_of_a_ring_is_all_that_the_next_tokens_need(ring: int):
    """SGLang says for its backend of NPUs which places of a ring are alive; elsewhere it sends all."""
    rings = Rings(PAGE, window=WINDOW, overlap=ring)
    for tokens in range(1, 40):
        window = 3 * WINDOW + np.arange(tokens)
        alive = c4_state_transfer_indices(3, tokens, ring_size=ring)
        assert {*alive.tolist()} <= {*np.asarray(rings.overlap_places(window, tokens).pages).tolist()}


def test_latents_in_another_order_are_refused(pair: Pair):
    begin(pair, partial(rank_of, kv_layout="v4"), 1, 1, kv_layout="v41")
    assert_request_fails(pair, "KV layout is v4,.* there and v41,.* here")


def test_places_of_several_rings_are_refused(pair: Pair, in_rings: Any, monkeypatch: pytest.MonkeyPatch):
    begin(pair, in_rings, 1, 1)
    crossing = Crossing(pair, 1, 5, tokens=4 * PAGE + 70)
    states = crossing.states

    def in_the_next_ring(manager: Any, side: int) -> list[Any]:
        kinds = zip(manager.state_types, states(manager, side), strict=True)
        return [given + 1 if kind is StateType.SWA_RING else given for kind, given in kinds]

    monkeypatch.setattr(crossing, "states", in_the_next_ring)
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
