"""Context parallelism and sharded pages, byte for byte between pools of SGLang's own.

SGLang computes none of it on a CPU. Its classes of pools, its allocator and its placement of tokens run there.
"""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sglang.srt.arg_groups.model_overrides import deepseek_v2
from sglang.srt.mem_cache import memory_pool, page_interleave_pool
from sglang.srt.mem_cache.memory_pool import (
    MHATokenToKVPool,
    MHATokenToKVPoolFP4,
    MHATokenToKVPoolMXFP8,
    MiniMaxSparseKVPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from tests.real_engines.sglang.crossings import Request
from tests.real_engines.sglang.divided import (
    KEYS,
    LATENTS,
    PAGE,
    Crossing,
    DecodeContextRank,
    ShardedRank,
    WholeRank,
    WithDraft,
    WithIndex,
)
from tests.real_engines.sglang.ranks import DECODE, PREFILL, Model, Rank
from tests.real_engines.sglang.test_ranks import Pair, pair

from kvferry.errors import EngineContractError, UsageError

__all__ = ["pair"]  # a fixture

pytestmark = pytest.mark.timeout(60)

PATHS = pytest.mark.parametrize("path", ["direct", "staged"])


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SGLang's pools ask of the rank that they are on."""
    where = SimpleNamespace(attn_dcp_size=1, attn_dcp_rank=0, dcp_enabled=False)
    monkeypatch.setattr(memory_pool, "get_parallel", lambda: where)
    monkeypatch.setattr(page_interleave_pool, "PyNcclCommunicator", lambda **_: None)


def whole(pair: Pair, mode: Any, model: Model, tp: int) -> None:
    """Starts ranks that keep all tokens."""
    for tp_rank in range(tp):
        pair.start(mode, WholeRank(model, tp=tp, tp_rank=tp_rank))


# ---- attention context parallelism: every rank keeps what all have computed -----------------------------------------


def replicated(pair: Pair, model: Model, *, tp: int, cp: int, **more: Any) -> None:
    """Starts a prefill side whose context-parallel ranks are replicas."""
    pair.model = model
    for cp_rank in range(cp):
        for tp_rank in range(tp):
            where = {"attn_cp_size": cp, "attn_cp_rank": cp_rank, "tp_size": tp * cp, **more}
            pair.start(PREFILL, WholeRank(model, tp=tp, tp_rank=tp_rank, **where))


@PATHS
@pytest.mark.parametrize(("tp", "cp", "decode_tp"), [(1, 2, 1), (2, 2, 1), (1, 3, 2), (2, 2, 4)])
@pytest.mark.parametrize("model", [KEYS, LATENTS], ids=["heads", "latents"])
def test_context_parallel_ranks_are_replicas(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, path: str, model: Model, tp: int, cp: int, decode_tp: int
):
    monkeypatch.setenv("KVFERRY_PATH", path)
    replicated(pair, model, tp=tp, cp=cp)
    whole(pair, DECODE, model, decode_tp)
    Crossing(pair, 1, 27).run()
    Crossing(pair, 2, 30, held=3 * PAGE).run()


def test_replicas_take_turns(pair: Pair):
    """SGLang's own backends have the first rank send, or each a part of every request."""
    replicated(pair, KEYS, tp=1, cp=2)
    whole(pair, DECODE, KEYS, 1)
    assert not any(manager.is_dummy_cp_rank for manager in pair.prefill.managers)
    sent = np.sum([Crossing(pair, room, 20).run() for room in range(1, 9)], axis=0)
    assert (sent > 0).all()


@pytest.mark.parametrize(("prefill_cp", "decode_tp"), [(2, 1), (4, 2), (2, 4)])
def test_state_is_divided_among_context_parallel_ranks_that_share_their_group(
    pair: Pair, prefill_cp: int, decode_tp: int
):
    """CP-TP group sharing: a rank has all KV heads, and the recurrent state that tensor parallelism would give it."""
    pair.model = SHARING
    for cp_rank in range(prefill_cp):
        where = {"attn_cp_size": prefill_cp, "attn_cp_rank": cp_rank, "attn_tp_size": 1, "attn_tp_rank": 0}
        options = {**where, "enable_cp_tp_group_sharing": True}
        pair.start(PREFILL, SharingRank(SHARING, tp=prefill_cp, tp_rank=cp_rank, options=options))
    for tp_rank in range(decode_tp):
        pair.start(DECODE, Rank(SHARING, tp=decode_tp, tp_rank=tp_rank))
    for room in range(1, 4):
        Request(pair, room).run()


SHARING = Model(heads=2, state_layers=2)


class SharingRank(Rank):
    """A rank whose KV heads are all, and whose state is its own."""

    def _heads(self, heads: int) -> range:
        return range(heads) if heads == SHARING.heads else super()._heads(heads)


# ---- sharded pages --------------------------------------------------------------------------------------------------


def sharded(pair: Pair, model: Model, shards: int, tp: int = 1) -> None:
    """Starts a prefill side whose pages go round: context-parallel ranks, or the tensor-parallel ranks of latents."""
    pair.model = model
    for shard in range(shards):
        for tp_rank in range(tp):
            cp = {"attn_cp_size": shards, "attn_cp_rank": shard, "tp_size": shards * tp}
            where = {"tp": tp, "tp_rank": tp_rank, **cp}
            if model.heads is None:
                where = {"tp": 1, "tp_rank": 0, "attn_tp_size": shards, "attn_tp_rank": shard}
            pair.start(PREFILL, ShardedRank(model, shards, shard, **where))


@PATHS
@pytest.mark.shows("sglang", "PageInterleaveMHATokenToKVPool", "PageInterleaveMLATokenToKVPool")
@pytest.mark.parametrize(
    ("model", "shards", "tp", "decode_tp"),
    [(KEYS, 2, 1, 1), (KEYS, 3, 2, 1), (KEYS, 2, 2, 4), (LATENTS, 4, 1, 1), (LATENTS, 3, 1, 2)],
    ids=["2x1 to 1", "3x2 to 1", "2x2 to 4", "4 of latents to 1", "3 of latents to 2"],
)
def test_pages_that_go_round_arrive(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, model: Model, shards: int, tp: int, decode_tp: int, path: str
):
    """Whichever rank has the first page, and also if there are fewer pages than ranks."""
    monkeypatch.setenv("KVFERRY_PATH", path)
    sharded(pair, model, shards, tp)
    whole(pair, DECODE, model, decode_tp)
    rooms = [(27, 0, 0), (30, 3 * PAGE, 1), (5, 0, shards - 1), (3, 0, 1), (24, 5 * PAGE, 0)]
    for room, (tokens, held, first_rank) in enumerate(rooms, 1):
        sent = Crossing(pair, room, tokens, held=held, first_rank=first_rank).run()
        assert len(sent) == shards * tp
    assert np.count_nonzero(sent) == tp, "the last request needs one page"


def test_pages_may_be_divided_otherwise_on_the_other_side(pair: Pair):
    sharded(pair, KEYS, 2)
    pair.start(DECODE, WholeRank(Model(heads=4, page_tokens=2 * PAGE, layers=2), tp=1, tp_rank=0, page=2 * PAGE))
    Crossing(pair, 1, 27).run()


def test_pages_that_do_not_go_round_are_not_exchanged(pair: Pair):
    sharded(pair, KEYS, 2)
    place = pair.prefill.managers[0].place
    with pytest.raises(EngineContractError, match=re.escape("SGLang's pages [4, 6, 7]... do not go round 2 ranks")):
        place.kept(np.array([4, 6, 7]), first=0, tokens=12)


# ---- decode context parallelism -------------------------------------------------------------------------------------


def divided(pair: Pair, mode: Any, model: Model, dcp: int, tp: int = 1) -> None:
    """Starts ranks whose tokens go round: neighbouring tensor-parallel ranks with the same heads."""
    for number in range(tp * dcp):
        where = {"attn_tp_size": tp * dcp, "attn_tp_rank": number, "tp_size": tp * dcp}
        pair.start(mode, DecodeContextRank(model, dcp, number % dcp, tp=tp, tp_rank=number // dcp, **where))


@PATHS
@pytest.mark.parametrize(
    ("model", "prefill_tp", "dcp", "decode_tp"),
    [(LATENTS, 1, 2, 1), (LATENTS, 2, 4, 1), (LATENTS, 4, 2, 2), (KEYS, 2, 2, 2), (KEYS, 1, 3, 1)],
    ids=["1 to 2", "2 to 4", "4 to 2x2", "heads, 2 to 2x2", "heads, 1 to 3"],
)
def test_tokens_may_go_round_on_the_decode_side(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, model: Model, prefill_tp: int, dcp: int, decode_tp: int, path: str
):
    monkeypatch.setenv("KVFERRY_PATH", path)
    pair.model = model
    whole(pair, PREFILL, model, prefill_tp)
    divided(pair, DECODE, model, dcp, decode_tp)
    page = PAGE * dcp
    for room, (tokens, held) in enumerate([(27, 0), (2 * page, page), (2 * page + 1, page), (1, 0), (3, 0)], 1):
        Crossing(pair, room, tokens, held=held).run()


@pytest.mark.parametrize(("prefill", "decode"), [(2, 2), (4, 2), (2, 3), (2, 1)])
def test_tokens_may_go_round_on_both_sides(pair: Pair, prefill: int, decode: int):
    pair.model = LATENTS
    divided(pair, PREFILL, LATENTS, prefill)
    divided(pair, DECODE, LATENTS, decode)
    for room, tokens in enumerate([27, 16, 1, 3], 1):
        Crossing(pair, room, tokens).run()


@PATHS
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 4), (3, 2)])
@pytest.mark.parametrize("kind", [WithDraft, WithIndex])
def test_a_draft_and_an_index_have_every_token_on_ranks_that_divide_them(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, kind: Any, prefill: int, decode: int, path: str
):
    monkeypatch.setenv("KVFERRY_PATH", path)
    pair.model = kind.MODEL
    for mode, dcp in ((PREFILL, prefill), (DECODE, decode)):
        for number in range(dcp):
            where = {"attn_tp_size": dcp, "attn_tp_rank": number, "tp_size": dcp}
            pair.start(mode, kind(dcp, number, **where))
    page = kind.MODEL.page_tokens * decode
    for room, (tokens, held) in enumerate([(6 * page + 3, 0), (2 * page, page), (2 * page + 1, page), (1, 0)], 1):
        Crossing(pair, room, tokens, held=held).run()


def test_sglangs_checksums_are_not_of_what_ranks_that_divide_tokens_have(pair: Pair):
    pair.model = LATENTS
    whole(pair, PREFILL, LATENTS, 2)
    divided(pair, DECODE, LATENTS, 2)
    Crossing(pair, 1, 27).run()
    assert not any(manager.should_verify_kv_checksum(pair.address) for manager in pair.decode.managers)


# ---- data-parallel attention ----------------------------------------------------------------------------------------


@PATHS
@pytest.mark.parametrize("model", [KEYS, LATENTS], ids=["heads", "latents"])
def test_a_group_of_tensor_parallel_ranks_sends_to_each_data_parallel_one(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, model: Model, path: str
):
    """TP 4 to 4 groups of attention data parallelism: experts are divided too there, which divides no cache."""
    monkeypatch.setenv("KVFERRY_PATH", path)
    pair.model = model
    whole(pair, PREFILL, model, 4)
    for dp_rank in range(4):
        where = {"attn_dp_size": 4, "attn_dp_rank": dp_rank, "num_dp_ranks": 4, "tp_size": 4}
        pair.start(DECODE, WholeRank(model, tp=1, tp_rank=0, **where))
    for dp_rank in range(4):
        Crossing(pair, dp_rank + 1, 27, held=dp_rank * PAGE).run(slice(dp_rank, dp_rank + 1))


@pytest.mark.parametrize("tp", [1, 2])
def test_each_data_parallel_group_sends_its_own_requests(pair: Pair, tp: int):
    """Two groups of so many ranks each, to one group of two: those of the other group send nothing."""
    pair.model = KEYS
    for dp_rank in range(2):
        for tp_rank in range(tp):
            where = {"attn_dp_size": 2, "attn_dp_rank": dp_rank, "num_dp_ranks": 2, "tp_size": 2 * tp}
            pair.start(PREFILL, WholeRank(KEYS, tp=tp, tp_rank=tp_rank, **where))
    whole(pair, DECODE, KEYS, 2)
    for dp_rank in (1, 0, 1):
        group = slice(dp_rank * tp, (dp_rank + 1) * tp)
        Crossing(pair, 7, 27, dp_rank=dp_rank).run(senders_of=group)


# ---- what SGLang itself does not do ---------------------------------------------------------------------------------


def test_sglang_cannot_write_windows_where_ranks_divide_tokens():
    """Its attention says which tokens are a rank's own, and its pool of windows does not take that."""
    assert "dcp_kv_mask" in inspect.signature(MHATokenToKVPool.set_kv_buffer).parameters
    with pytest.raises(TypeError, match="unexpected keyword argument 'dcp_kv_mask'"):
        SWAKVPool.set_kv_buffer(None, None, None, None, None, dcp_kv_mask=None)


def test_sglang_cannot_write_scales_of_blocks_or_minimaxs_layers_where_ranks_divide_tokens():
    with pytest.raises(NotImplementedError, match="MXFP8 KV cache does not support DCP KV masks"):
        MHATokenToKVPoolMXFP8.set_kv_buffer(None, None, None, None, None, dcp_kv_mask=object())
    for pool in (MHATokenToKVPoolFP4, MiniMaxSparseKVPool):
        with pytest.raises(TypeError, match="unexpected keyword argument 'dcp_kv_mask'"):
            pool.set_kv_buffer(None, None, None, None, None, dcp_kv_mask=None)


def test_sglang_refuses_a_pooled_index_where_ranks_divide_tokens():
    said = " ".join(re.findall(r'"([^"]*)"', inspect.getsource(deepseek_v2)))
    assert "--dcp-size > 1 is not supported for DSA with " in said
    assert "a pooled index key spans  positions owned by different DCP ranks." in said


@pytest.mark.parametrize(
    ("options", "mode", "words"),
    [
        ({"attn_cp_size": 2}, DECODE, "attention context parallelism on the decode side .*_resolve_rank_mapping"),
        ({"enable_dsa_cache_layer_split": True}, PREFILL, "--enable-dsa-cache-layer-split .SGLang itself allows it"),
    ],
)
def test_what_sglang_does_not_do_is_refused_with_its_reason(pair: Pair, options: dict[str, Any], mode: Any, words: str):
    with pytest.raises(UsageError, match=words):
        pair.start(mode, WholeRank(KEYS, tp=1, tp_rank=0, **options))
