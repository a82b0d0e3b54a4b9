"""Keys and values with an index that every rank has whole, byte for byte between pools of SGLang's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache import memory_pool, minimax_m3_nvfp4_pool
from sglang.srt.mem_cache.memory_pool import MiniMaxSparseKVPool
from sglang.srt.mem_cache.minimax_m3_nvfp4_pool import MiniMaxM3Nvfp4KVPool
from sglang.srt.mem_cache.qsa_kv_pool import QSATokenToKVPool
from tests.real_engines.sglang.pool_ranks import (
    HEADS,
    PAGES,
    SIZES,
    SLOTS,
    Crossing,
    Part,
    PoolRank,
    assert_request_fails,
    begin,
    by_token,
    items,
    part,
)
from tests.real_engines.sglang.ranks import DECODE, PREFILL, Model, number_of
from tests.real_engines.sglang.test_ranks import Pair, pair

from kvferry.engines.sglang.companions import check_listed
from kvferry.errors import LayoutError

__all__ = ["pair"]  # a fixture

pytestmark = pytest.mark.timeout(60)

HEAD_DIM, INDEX_DIM = 64, 32


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SGLang's pools ask of the rank that they are on."""
    monkeypatch.setattr(memory_pool, "get_parallel", lambda: SimpleNamespace(attn_dcp_size=1))
    monkeypatch.setattr(minimax_m3_nvfp4_pool, "get_platform", lambda: SimpleNamespace(is_sm100=False))


MINIMAX = Model(heads=HEADS, page_tokens=16, layers=6, sparse=(1, 3, 4, 5))
"""The first layer has no sparse attention, and one among the others has none."""


def sparse(*, tp: int, tp_rank: int, page: int = 16, model: Model = MINIMAX, layers: range = range(6)) -> PoolRank:
    """A rank with these layers."""
    pool = MiniMaxSparseKVPool(
        (PAGES - 1) * page,
        page,
        torch.bfloat16,
        max(1, HEADS // tp),
        HEAD_DIM,
        INDEX_DIM,
        [layer for layer in range(model.layers) if layer not in model.sparse],
        [*model.sparse],
        "cpu",
        [*model.sparse],
        start_layer=layers.start,
        end_layer=layers.stop,
    )
    main, of_index = pool.main_pool, [layer for layer in layers if layer in model.sparse]
    index = pool.index_k_pool.k_buffer if of_index else []
    parts = [
        replace(by_token(each, page, heads=heads), label=100 * kind + layer)
        for kind, (buffers, numbers, heads) in enumerate(
            ((main.k_buffer, layers, 1), (main.v_buffer, layers, 1), (index, of_index, None))
        )
        for layer, each in zip(numbers, buffers, strict=True)
    ]
    return PoolRank(replace(model, page_tokens=page), pool, parts, tp=tp, tp_rank=tp_rank)


def of_4_bits(*, tp: int, tp_rank: int, model: Model = MINIMAX, layers: range = range(6)) -> PoolRank:
    page, all_layers = 128, [*range(model.layers)]
    pool = MiniMaxM3Nvfp4KVPool(
        size=(PAGES - 1) * page,
        page_size=page,
        dtype=torch.bfloat16,
        head_num=max(1, HEADS // tp),
        head_dim=128,
        idx_head_dim=128,
        dense_layer_ids=[],
        sparse_layer_ids=all_layers,
        disable_value_sparse_layer_ids=all_layers,
        device="cpu",
        start_layer=layers.start,
        end_layer=layers.stop,
    )
    main = pool.main_pool
    views = (main.k_buffer, main.k_scale_buffer, main.v_buffer, main.v_scale_buffer)
    made = [[Part(each.numpy(), heads=0) for each in of_kind] for of_kind in views]
    made.append([part(each) for each in pool.index_k_pool.rows])
    parts = [
        replace(each, label=100 * kind + layer)
        for kind, of_kind in enumerate(made)
        for layer, each in zip(layers, of_kind, strict=True)
    ]
    of_model = replace(model, page_tokens=page, sparse=tuple(all_layers))
    return PoolRank(of_model, pool, parts, tp=tp, tp_rank=tp_rank)


@pytest.mark.shows("sglang", "MiniMaxSparseKVPool", "StateType.MINIMAX_INDEX_K", "StateType.MINIMAX_DENSE_KV")
@pytest.mark.parametrize("path", ["direct", "staged"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), SIZES)
def test_an_index_of_keys_goes_with_keys_and_values(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, path: str, prefill_tp: int, decode_tp: int
):
    monkeypatch.setenv("KVFERRY_PATH", path)
    begin(pair, sparse, prefill_tp, decode_tp)
    Crossing(pair, 1, 5).run()
    Crossing(pair, 2, 7, held=3).run()


def begin_in_stages(pair: Pair, make: Any, prefill: int, decode: int, *, tp: int = 1) -> None:
    """Starts both sides, in so many stages each, and with more tensor-parallel ranks on the decode side."""
    for mode, stages, ranks in ((PREFILL, prefill, 1), (DECODE, decode, tp)):
        for stage in range(stages):
            layers = range(stage * MINIMAX.layers // stages, (stage + 1) * MINIMAX.layers // stages)
            for tp_rank in range(ranks):
                rank = make(tp=ranks, tp_rank=tp_rank, layers=layers)
                pair.model = rank.model
                pair.start(mode, rank, pp=stages, stage=stage)


@pytest.mark.parametrize(("prefill", "decode", "tp"), [(2, 1, 1), (1, 2, 1), (2, 3, 2), (3, 1, 2)])
@pytest.mark.parametrize("make", [sparse, of_4_bits], ids=["16 bits", "4 bits"])
def test_stages_have_the_index_of_their_layers(pair: Pair, make: Any, prefill: int, decode: int, tp: int):
    """Also a stage in which every layer has sparse attention, while others elsewhere have none."""
    begin_in_stages(pair, make, prefill, decode, tp=tp)
    Crossing(pair, 1, 5).run()
    Crossing(pair, 2, 7, held=3).run()


def test_a_stage_without_sparse_attention_is_refused(pair: Pair):
    """SGLang makes no index there: nothing says how long it is elsewhere."""
    model = replace(MINIMAX, sparse=(3, 4, 5))
    with pytest.raises(LayoutError, match="no layer of this pipeline stage has index of keys"):
        begin_in_stages(pair, lambda **where: sparse(model=model, **where), 2, 1)


class MambaPool:
    """As SGLang's, with layers whose channels are as many as heads."""

    def __init__(self, channels: int, layers: Sequence[int]) -> None:
        shape = len(layers), SLOTS, channels
        conv, temporal = (torch.zeros(*shape, width, dtype=torch.uint8) for width in (3, 6))
        self.mamba_cache = SimpleNamespace(conv=[conv], temporal=temporal)
        self.layers = layers
        self.states = [*conv, *temporal]

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        return (
            [each.data_ptr() for each in self.states],
            [each.nbytes for each in self.states],
            [each[0].nbytes for each in self.states],
        )

    def get_state_dim_per_tensor(self) -> list[int]:
        return [each.shape[1] for each in self.states]

    def get_state_layer_ids(self) -> list[int]:
        return [*self.layers, *self.layers]

    def get_state_slice_outer_counts(self) -> list[int]:
        return [1] * len(self.states)

    def get_state_conv_shard_groups(self) -> list[Any]:
        return [[HEADS]] * len(self.layers) + [None] * len(self.layers)


def pooled_of(
    heads: int, layers: Sequence[int], page: int = 16, ratio: int = 4, states: Sequence[int] = (1,)
) -> QSATokenToKVPool:
    return QSATokenToKVPool(
        size=(PAGES - 1) * page,
        dtype=torch.bfloat16,
        page_size=page,
        head_num=heads,
        head_dim=HEAD_DIM,
        full_attention_layer_ids=[*layers],
        device="cpu",
        mamba_pool=MambaPool(heads, states),
        qsa_index_kv_heads=2,
        qsa_index_head_dim=INDEX_DIM,
        qsa_compress_ratio=ratio,
        qsa_token_topk=8 * ratio,
        num_request_slots=SLOTS,
    )


def pooled(*, tp: int, tp_rank: int, draft: bool = False, page: int = 16, ratio: int = 4) -> PoolRank:
    heads = max(1, HEADS // tp)
    pool = pooled_of(heads, [0, 2], page, ratio)
    drafts = pooled_of(heads, [0], page, ratio) if draft else None
    parts = [Part(each.numpy(), heads=0, of="slots") for each in pool.mamba_pool.states]
    for each, axis in ((pool, 1), (drafts, None)):
        if each is None:
            continue
        full = each.full_kv_pool
        parts += [by_token(kv, page, heads=axis) for kv in (*full.k_buffer, *full.v_buffer)]
        rings = (*each.qsa_key_state_buffer_pool, each.qsa_rope_position_buffer)
        parts += [items(ring, ratio, of="slots") for ring in rings]
        parts += [items(keys, page // ratio) for keys in each.qsa_compressed_k_buffer_pool]
    return PoolRank(Model(heads=HEADS, page_tokens=page), pool, parts, tp=tp, tp_rank=tp_rank, draft=drafts)


@pytest.mark.shows("sglang", "QSATokenToKVPool", "StateType.QSA_PENDING", "StateType.QSA_COMPRESSED")
@pytest.mark.parametrize("path", ["direct", "staged"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), SIZES)
def test_a_pooled_index_goes_with_keys_and_values(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, path: str, prefill_tp: int, decode_tp: int
):
    monkeypatch.setenv("KVFERRY_PATH", path)
    begin(pair, pooled, prefill_tp, decode_tp)
    Crossing(pair, 1, 5).run()
    Crossing(pair, 2, 7, held=3).run()


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2), (2, 4)])
def test_stages_have_the_pooled_index_of_their_layers(pair: Pair, prefill: int, decode: int):
    """Positions of what is pending are the same for all layers, and each stage has them."""
    pair.model = model = Model(heads=HEADS, page_tokens=16, layers=4, state_layers=4)
    for mode, stages in ((PREFILL, prefill), (DECODE, decode)):
        for stage in range(stages):
            layers = range(stage * 4 // stages, (stage + 1) * 4 // stages)
            numbers = [[number_of(kind, layer) for layer in layers] for kind in (0, 2)]
            pool = pooled_of(HEADS, numbers[0], states=numbers[1])
            full, kept = pool.full_kv_pool, pool.mamba_pool.mamba_cache
            parts = [
                (kept.conv[0], lambda each: Part(each.numpy(), heads=0, of="slots")),
                (kept.temporal, lambda each: Part(each.numpy(), heads=0, of="slots")),
                (full.k_buffer, lambda each: by_token(each, 16)),
                (full.v_buffer, lambda each: by_token(each, 16)),
                (pool.qsa_key_state_buffer_pool, lambda each: items(each, 4, of="slots")),
                (pool.qsa_compressed_k_buffer_pool, lambda each: items(each, 4)),
            ]
            labelled = [
                replace(made(each), label=100 * kind + layer)
                for kind, (buffers, made) in enumerate(parts)
                for layer, each in zip(layers, buffers, strict=True)
            ]
            labelled.append(replace(items(pool.qsa_rope_position_buffer, 4, of="slots"), label=900))
            pair.start(mode, PoolRank(model, pool, labelled, tp=1, tp_rank=0), pp=stages, stage=stage)
    Crossing(pair, 1, 5).run()
    Crossing(pair, 2, 7, held=3).run()


@pytest.mark.parametrize("decode", [True, False], ids=["on both sides", "on one side"])
def test_a_drafts_pooled_index_goes_with_the_models(pair: Pair, decode: bool):
    begin(pair, partial(pooled, draft=True), 1, 1, draft=decode)
    Crossing(pair, 1, 5).run()


def test_a_pooled_index_in_pages_of_another_size_is_refused(pair: Pair):
    begin(pair, pooled, 1, 1, page=32)
    assert_request_fails(pair, "--page-size, since pages of index cannot be cut .*, is 16 there and 32 here")


@pytest.mark.shows("sglang", "MiniMaxM3Nvfp4KVPool", "MiniMaxM3Nvfp4MainKVPool")
@pytest.mark.parametrize("path", ["direct", "staged"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), SIZES)
def test_rows_of_4_bits_are_cut_by_heads(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, path: str, prefill_tp: int, decode_tp: int
):
    monkeypatch.setenv("KVFERRY_PATH", path)
    begin(pair, of_4_bits, prefill_tp, decode_tp)
    Crossing(pair, 1, 5).run()
    Crossing(pair, 2, 7, held=3).run()


@pytest.mark.parametrize("kind", ["minimax_index_k", "minimax_dense_kv"])
def test_what_sglang_does_not_list_is_refused(kind: str):
    rank = sparse(tp=1, tp_rank=0)
    states = [each for each in rank.arguments.state_types if each.value != kind]
    with pytest.raises(LayoutError, match=rf"does not list its \['{kind}'\]"):
        check_listed(states, rank.pool, rank.pool.main_pool, None, None)


def test_a_draft_models_index_is_refused():
    rank = sparse(tp=1, tp_rank=0)
    with pytest.raises(LayoutError, match="does not list the index of a draft model in a MiniMaxSparseKVPool"):
        check_listed(rank.arguments.state_types, rank.pool, rank.pool.main_pool, None, rank.pool)
