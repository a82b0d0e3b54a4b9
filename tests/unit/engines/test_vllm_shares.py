"""Context parallelism of vLLM's: which ranks keep which tokens, and that these arrive wherever the other side has them.

Requests go through the whole plug-in, and which rank has a token is dealt out one by one; in
`tests/real_engines/vllm/test_shares.py` vLLM itself decides it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
from tests.support.vllm_ranks import Deployment, Engine, Kind, plugged_in, transfer

from kvferry import RankCoordinates, TokenShare, interleaved
from kvferry.engines.vllm.caches import CacheGroup
from kvferry.engines.vllm.shares import GroupRank, check_turns, place_of, sharing_ranks, worker_place
from kvferry.errors import LayoutError, SettingsError
from kvferry.testing.network import LocalNetwork

LATENTS = (Kind((0, 1), heads=1),)
TWO_HEADS = (Kind((0, 1), heads=2),)


@pytest.fixture(params=["direct", "staged"])
def network(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[LocalNetwork]:
    with plugged_in(monkeypatch, path=request.param) as found:
        yield found


REQUESTS = [(2, 0), (5, 0), (12, 8), (14, 3), (30, 0), (33, 16), (34, 21), (47, 46), (48, 47), (49, 0)]
"""Tokens, and how many of them the decode side has: whole blocks, some of a rank's turns, and all that are sent."""


def cross(network: LocalNetwork, kinds: tuple[Kind, ...], here: Deployment, there: Deployment) -> None:
    prefill = Engine(network, "prefill", kinds, here, sends=True)
    decode = Engine(network, "decode", kinds, there, sends=False)
    try:
        for tokens, prefix in REQUESTS:
            decode.wipe()
            request = transfer(prefill, decode, tokens, prefix)
            decode.check(request, tokens - 1, prefix)
    finally:
        decode.close()
        prefill.close()


DEPLOYMENTS = [
    (Deployment(tp=4, dcp=2, turn=2), Deployment()),
    (Deployment(tp=2), Deployment(tp=4, dcp=2, turn=4)),
    (Deployment(tp=4, dcp=4, turn=1), Deployment(tp=2, dcp=2, turn=4)),
    (Deployment(tp=4, dcp=2, turn=4), Deployment(tp=4, dcp=2, turn=1)),
    (Deployment(tp=3, dcp=3, turn=4), Deployment(tp=4, dcp=2, turn=8, block_tokens=8)),
    (Deployment(tp=2, dcp=2, turn=8, block_tokens=8, pages_per_block=4), Deployment(tp=4, dcp=4, turn=2)),
    (Deployment(pcp=2), Deployment()),
    (Deployment(), Deployment(pcp=2)),
    (Deployment(pcp=2, dcp=2, turn=4), Deployment(tp=2)),
    (Deployment(tp=2, pcp=2, dcp=4, turn=2), Deployment(tp=2, dcp=2, turn=2)),
    (Deployment(tp=2, pcp=2, dcp=2, turn=1), Deployment(tp=2, pcp=2, dcp=4, turn=4)),
]


@pytest.mark.sampled(one_in=10)
@pytest.mark.parametrize(("here", "there"), DEPLOYMENTS, ids=str)
def test_latents_arrive_whichever_ranks_share_their_tokens(network: LocalNetwork, here: Deployment, there: Deployment):
    cross(network, LATENTS, here, there)


@pytest.mark.sampled(one_in=10)
@pytest.mark.parametrize(
    ("here", "there"),
    [
        (Deployment(tp=4, dcp=2, turn=2), Deployment()),
        (Deployment(tp=2), Deployment(tp=4, dcp=2, turn=4)),
        (Deployment(tp=8, dcp=4, turn=4), Deployment(tp=4, dcp=2, turn=1)),
        # Ranks that share tokens need not have the same heads: 12 ranks have 2 of them, and each 4 share tokens.
        (Deployment(tp=12, dcp=4, turn=2), Deployment(tp=3)),
    ],
    ids=str,
)
def test_heads_that_several_ranks_have_arrive_from_those_with_the_token(
    network: LocalNetwork, here: Deployment, there: Deployment
):
    cross(network, TWO_HEADS, here, there)


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (Deployment(tp=2, dcp=2, turn=4), Deployment()),
        (Deployment(tp=1), Deployment(tp=4, dcp=4, turn=2)),
        (Deployment(tp=4, dcp=2, turn=1), Deployment(tp=2, dcp=2, turn=4)),
    ],
    ids=str,
)
def test_recurrent_state_is_divided_by_tensor_parallelism_alone(
    network: LocalNetwork, here: Deployment, there: Deployment
):
    """As in Kimi Linear: latents of which ranks share the tokens, beside state that none of them shares."""
    kinds = (Kind((1,), heads=1), Kind((0, 2), has_state=True))
    prefill = Engine(network, "prefill", kinds, here, sends=True)
    decode = Engine(network, "decode", kinds, there, sends=False)
    try:
        for tokens in (2, 6, 17, 30):
            decode.wipe()
            decode.check(transfer(prefill, decode, tokens, 0), tokens - 1, 0)
    finally:
        decode.close()
        prefill.close()


@pytest.mark.sampled(one_in=10)
@pytest.mark.parametrize(
    ("here", "there"),
    [
        (Deployment(tp=4, dcp=2, turn=2), Deployment()),
        (Deployment(tp=2), Deployment(tp=4, dcp=4, turn=4)),
        (Deployment(tp=4, dcp=4, turn=1), Deployment(tp=4, dcp=2, turn=4)),
        (Deployment(tp=2, dcp=2, turn=4, stages=(range(1), range(1, 2))), Deployment(pcp=2, dcp=2, turn=2)),
    ],
    ids=str,
)
def test_a_draft_whose_tokens_no_ranks_share_is_whole_on_each(
    network: LocalNetwork, here: Deployment, there: Deployment
):
    """As DFlash drafts beside latents: each rank of decode context parallelism has all of the draft's cache."""
    cross(network, (Kind((0, 1), heads=1), Kind((0,), heads=4, is_draft=True, is_shared=False)), here, there)


# ---- places -----------------------------------------------------------------------------------------------------


def placed(tp: int, pcp: int, dcp: int) -> list[tuple[int, int, int]]:
    """Of every worker, in vLLM's order (PCP outside of TP): its number towards other engines, its share, its heads'."""
    places = [
        place_of(
            GroupRank(rank, tp),
            GroupRank(0, 1),
            GroupRank(prefill, pcp),
            GroupRank((rank * pcp + prefill) % dcp, dcp),
            16,
        )
        for prefill in range(pcp)
        for rank in range(tp)
    ]
    assert sorted(each.in_engine.engine_rank for each in places) == list(range(tp * pcp)), "no two have one number"
    assert {each.in_engine.world_size for each in places} == {tp * pcp}
    return [(each.in_engine.engine_rank, each.tokens.part, each.in_model.tp_rank) for each in places]


def test_ranks_that_share_tokens_are_context_parallel_ones():
    assert placed(4, 1, 1) == [(0, 0, 0), (1, 0, 1), (2, 0, 2), (3, 0, 3)]
    assert placed(4, 1, 2) == [(0, 0, 0), (2, 1, 1), (1, 0, 2), (3, 1, 3)]
    assert placed(1, 2, 1) == [(0, 0, 0), (1, 0, 0)]
    assert placed(2, 2, 2) == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
    assert placed(2, 2, 4) == [(0, 0, 0), (2, 2, 1), (1, 1, 0), (3, 3, 1)]


def test_a_place_is_the_layouts_share():
    place = place_of(GroupRank(3, 4), GroupRank(1, 2), GroupRank(0, 1), GroupRank(1, 2), 16)
    assert place.tokens == TokenShare(interleaved(2, 16), 1)
    assert place.in_model == RankCoordinates(tp_rank=3, tp_size=4, pp_rank=1, pp_size=2)
    assert place.in_engine == RankCoordinates(tp_rank=1, tp_size=2, cp_rank=1, cp_size=2, pp_rank=1, pp_size=2)


def test_another_order_of_ranks_is_refused():
    with pytest.raises(LayoutError, match=r"is rank 0 of 2 under decode context parallelism, where .* it rank 1"):
        place_of(GroupRank(3, 4), GroupRank(0, 1), GroupRank(0, 1), GroupRank(0, 2), 1)


def test_turns_that_do_not_divide_a_block_are_refused(caplog: pytest.LogCaptureFixture):
    """vLLM compares them with the size that is configured alone, and before the deprecated option takes effect."""
    shared, whole = (CacheGroup("group 0", ("model.layers.0.attn",), 24, token_ranks=ranks) for ranks in (2, 1))
    check_turns([shared, whole], TokenShare(interleaved(2, 24)))
    assert not caplog.text
    check_turns([shared, whole], TokenShare(interleaved(2, 8)))
    assert "ranks take 8 tokens in turns" in caplog.text
    assert "--cp-kv-cache-interleave-size 24" in caplog.text
    check_turns([whole], TokenShare(interleaved(2, 16)))
    with pytest.raises(LayoutError, match=r"take 16 tokens in turns .* the blocks of 24 tokens in group 0"):
        check_turns([shared], TokenShare(interleaved(2, 16)))


@pytest.mark.parametrize("shares", [True, False])
def test_a_worker_asks_vllm_where_it_stands(monkeypatch: pytest.MonkeyPatch, shares: bool):
    """Groups of ranks of context parallelism are asked for where there is any: older versions may not have them."""
    state = ModuleType("vllm.distributed.parallel_state")
    groups = {"tp": (3, 4), "pp": (1, 2)} | ({"pcp": (1, 2), "dcp": (3, 4)} if shares else {})
    for name, (rank, size) in groups.items():
        group = SimpleNamespace(rank_in_group=rank, world_size=size)
        vars(state)[f"get_{name}_group"] = lambda group=group: group
    package = ModuleType("vllm.distributed")
    vars(package)["parallel_state"] = state
    for module in (ModuleType("vllm"), package, state):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    sizes = configured(4, 2) if shares else configured(1)
    sizes.cp_kv_cache_interleave_size = 16
    tensor, pipeline = GroupRank(3, 4), GroupRank(1, 2)
    context = (GroupRank(1, 2), GroupRank(3, 4), 16) if shares else (GroupRank(0, 1), GroupRank(0, 1), 1)
    assert worker_place(sizes) == place_of(tensor, pipeline, *context)


def configured(decode: int, prefill: int = 1) -> SimpleNamespace:
    return SimpleNamespace(decode_context_parallel_size=decode, prefill_context_parallel_size=prefill)


def test_vllm_says_of_which_caches_ranks_share_the_tokens():
    shared, kept = SimpleNamespace(dcp_sharded=True), SimpleNamespace(dcp_sharded=False)
    assert [sharing_ranks(spec, configured(4)) for spec in (shared, kept)] == [4, 1]
    assert sharing_ranks(shared, configured(1, prefill=2)) == 1
    assert sharing_ranks(object(), configured(1)) == 1


@pytest.mark.parametrize("sizes", [configured(2), configured(1, prefill=2)], ids=str)
def test_a_vllm_that_does_not_say_it_is_refused(sizes: SimpleNamespace):
    with pytest.raises(SettingsError, match=r"does not say of its caches .object. whether ranks share their tokens"):
        sharing_ranks(object(), sizes)
