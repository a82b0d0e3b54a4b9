"""Where a rank of SGLang's stands: which part of heads, state and tokens it has, and which of a request's pages."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvferry import RankCoordinates, TokenShare, interleaved
from kvferry.engines.sglang.placement import Part, Placement, placed, placement_of
from kvferry.errors import EngineContractError

PAGE = 4


def placement(**given: Any) -> Placement:
    """That of a rank whose manager, and whose parallel settings, say this."""
    manager = {
        "attn_tp_rank": 0,
        "attn_tp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_dp_rank": 0,
        "attn_dp_size": 1,
        "system_dp_rank": 0,
        "system_dp_size": 1,
    }
    parallel = {"attn_dcp_rank": 0, "attn_dcp_size": 1, "enable_cp_tp_group_sharing": False, "tp_rank": 0, "tp_size": 1}
    for name, value in given.items():
        (parallel if name in parallel else manager)[name] = value
    args = SimpleNamespace(page_size=PAGE)
    return placement_of(SimpleNamespace(**manager, kv_args=args), SimpleNamespace(**parallel))


def test_tensor_parallel_ranks_divide_all():
    place = placement(attn_tp_rank=1, attn_tp_size=2, pp_rank=1, pp_size=3)
    assert place.coordinates == RankCoordinates(tp_rank=1, tp_size=2, pp_rank=1, pp_size=3)
    assert place.heads == place.states == place.drafts == Part(1, 2)
    assert place == Placement(place.coordinates, Part(1, 2), Part(1, 2), Part(1, 2), TokenShare(), PAGE)


def test_coordinates_alone_are_those_of_tensor_parallel_ranks():
    where = RankCoordinates(tp_rank=1, tp_size=2)
    assert placed(where) == Placement(where, Part(1, 2), Part(1, 2), Part(1, 2))
    place = placement()
    assert placed(place) is place


@pytest.mark.parametrize("is_system_wide", [False, True])
def test_groups_of_data_parallel_ranks_are_numbered_as_sglang_does(is_system_wide: bool):
    name = "system_dp" if is_system_wide else "attn_dp"
    place = placement(**{f"{name}_rank": 2, f"{name}_size": 4})
    assert (place.coordinates.dp_rank, place.coordinates.dp_size) == (2, 4)


def test_context_parallel_ranks_are_replicas_with_numbers_of_their_own():
    places = [
        placement(attn_tp_rank=tp, attn_tp_size=2, attn_cp_rank=cp, attn_cp_size=3, tp_rank=2 * cp + tp, tp_size=6)
        for cp in range(3)
        for tp in range(2)
    ]
    assert [place.coordinates.tp_rank for place in places] == [*range(6)]
    assert {(place.coordinates.tp_size, place.coordinates.cp_size) for place in places} == {(6, 1)}
    assert [place.heads for place in places] == [Part(0, 2), Part(1, 2)] * 3
    assert [place.states for place in places] == [place.heads for place in places]
    assert [place.drafts for place in places] == [Part(rank, 6) for rank in range(6)]


def test_a_draft_model_of_a_data_parallel_group_stays_within_it():
    assert placement(attn_cp_size=2, attn_cp_rank=1, attn_dp_size=2, tp_size=4, tp_rank=3).drafts == Part(0, 1)


def test_with_a_shared_group_state_is_divided_among_context_parallel_ranks():
    place = placement(attn_cp_rank=1, attn_cp_size=4, enable_cp_tp_group_sharing=True)
    assert (place.heads, place.states, place.coordinates.tp_rank) == (Part(0, 1), Part(1, 4), 1)


def test_sharded_pages_go_round_the_context_parallel_group():
    place = placement(attn_tp_rank=1, attn_tp_size=2, attn_cp_rank=2, attn_cp_size=3, kv_shard_rank=2, kv_shard_size=3)
    assert place.coordinates == RankCoordinates(tp_rank=1, tp_size=2, cp_rank=2, cp_size=3)
    assert (place.heads, place.tokens, place.page_tokens) == (Part(1, 2), TokenShare(interleaved(3, PAGE), 2), PAGE)


def test_sharded_pages_of_latents_go_round_tensor_parallel_ranks():
    place = placement(attn_tp_rank=1, attn_tp_size=2, kv_shard_rank=1, kv_shard_size=2)
    assert place.coordinates == RankCoordinates(cp_rank=1, cp_size=2)
    assert place.heads == Part(0, 1)


def test_with_decode_context_parallelism_neighbours_have_the_same_heads():
    place = placement(attn_tp_rank=6, attn_tp_size=8, attn_dcp_rank=2, attn_dcp_size=4)
    assert place.coordinates == RankCoordinates(tp_rank=1, tp_size=2, cp_rank=2, cp_size=4)
    assert (place.heads, place.states) == (Part(1, 2), Part(6, 8))
    assert (place.tokens, place.page_tokens) == (TokenShare(interleaved(4), 2), 4 * PAGE)


# ---- pages ----------------------------------------------------------------------------------------------------------


def test_a_rank_that_has_all_tokens_keeps_all_pages():
    pages = np.array([5, 3])
    kept = placement().kept(pages, first=7, tokens=35)
    assert kept.pages is pages, "they are copied where they are kept"
    assert (kept.start, kept.token_part) == (7, None)


@pytest.mark.parametrize("first", range(7))
@pytest.mark.parametrize("begin", range(3))
def test_every_page_that_goes_round_is_kept_once(first: int, begin: int):
    """Page p of a request is on rank begin + p, as page number // ranks of its own."""
    count = 8
    numbers = np.array([3 * (10 + page) + (begin + page) % 3 for page in range(count)])
    seen = []
    for rank in range(3):
        place = placement(attn_cp_rank=rank, attn_cp_size=3, kv_shard_rank=rank, kv_shard_size=3)
        kept = place.kept(numbers[first:], first=first, tokens=count * PAGE)
        assert kept.start is not None
        assert kept.token_part == (rank - begin) % 3
        pages = [kept.token_part + 3 * (kept.start + order) for order in range(len(kept.pages))]
        assert [10 + page for page in pages] == kept.pages.tolist()
        seen += pages
    assert sorted(seen) == [*range(first, count)]


def test_no_pages_continue_what_came_before():
    place = placement(attn_cp_size=2, kv_shard_size=2)
    kept = place.kept(np.array([], np.int64), first=3, tokens=12)
    assert (len(kept.pages), kept.start, kept.token_part) == (0, None, None)


def test_pages_that_do_not_go_round_are_refused():
    place = placement(attn_cp_size=2, kv_shard_size=2)
    with pytest.raises(EngineContractError, match=re.escape("pages [4, 6]... do not go round 2 ranks")):
        place.kept(np.array([4, 6]), first=0, tokens=8)


@pytest.mark.parametrize(("tokens", "kept"), [(1, [1, 0, 0]), (3, [1, 1, 1]), (12, [1, 1, 1]), (13, [2, 1, 1])])
def test_of_the_last_page_that_ranks_divide_some_have_nothing(tokens: int, kept: list[int]):
    pages = np.arange(-(-tokens // (3 * PAGE)))
    for rank, count in enumerate(kept):
        place = placement(attn_tp_rank=rank, attn_tp_size=3, attn_dcp_rank=rank, attn_dcp_size=3)
        assert len(place.kept(pages, first=0, tokens=tokens).pages) == count
