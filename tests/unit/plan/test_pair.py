"""Everything that one source rank may send to one receiver."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.shards import byte_shard

from kvferry.errors import IncompatiblePeerError
from kvferry.layout import Entry, Interval, RankLayout, Shard, TokenShare, attention_components, interleaved
from kvferry.layout.shard import Paging
from kvferry.plan import (
    PairPlan,
    Piece,
    Unit,
    elect_writer,
    pieces_for_receiver,
    places,
)

K, V = attention_components(num_layers=2, num_kv_heads=2, head_dim=4, dtype="uint8")
BOTH = Interval(0, 2)


def attention(page_tokens: int, *, base: int = 1 << 20, heads: Interval = BOTH, group: str = "kv") -> RankLayout:
    """Keys and values of two layers, tokens outside of heads."""
    token = len(heads) * 4
    shards = [
        Shard(
            component=component,
            box=(Interval(0, 2), heads, Interval(0, 4)),
            addresses=tuple(base + (2 * number + layer << 16) for layer in range(2)),
            strides=(4, 1),
            paging=Paging(page_tokens, 12, page_tokens * token, token),
            group=group if number else "kv",
        )
        for number, component in enumerate((K, V))
    ]
    return RankLayout(shards=tuple(shards))


def whole(component: Any, holders: tuple[int, ...] = (0,)) -> Piece:
    return Piece(component.name, component.whole, 0, holders)


# ---- elections -----------------------------------------------------------------------------------------------------


def test_pieces_of_one_pair_of_groups_share_a_route():
    plan = PairPlan(attention(4), attention(8), [whole(K), whole(V)])
    (elected,) = plan.elected(7, writer=0, receiver=0)
    assert elected.pieces == (0, 1)
    assert (elected.route.source_page_tokens, elected.route.destination_page_tokens) == (4, 8)
    assert elected.route.unit_tokens == 4


@pytest.mark.parametrize(("here", "there"), [("late", "kv"), ("kv", "late"), ("late", "late")])
def test_pieces_of_other_groups_have_routes_of_their_own(here: str, there: str):
    plan = PairPlan(attention(4, group=here), attention(4, group=there), [whole(K), whole(V)])
    elected = plan.elected(7, writer=0, receiver=0)
    assert [(each.route.source_group, each.route.destination_group) for each in elected] == [
        ("kv", "kv"),
        (here, there),
    ]
    assert [each.pieces for each in elected] == [(0,), (1,)]


def test_a_rank_sends_the_pieces_that_it_is_elected_for():
    pieces = [whole(K, (0, 1)), whole(V, (0, 1, 2)), Piece("k", K.whole, 0, (1,))]
    plan = PairPlan(attention(4), attention(4), pieces)
    for room in range(30):
        for receiver in range(3):
            sent = []
            for writer in range(3):
                numbers = [
                    number for each in plan.elected(room, writer=writer, receiver=receiver) for number in each.pieces
                ]
                expected = [n for n, p in enumerate(pieces) if elect_writer(p, room=room, receiver=receiver) == writer]
                assert numbers == expected
                sent += numbers
            assert sorted(sent) == [0, 1, 2]


def test_an_election_with_the_same_outcome_is_worked_out_once():
    plan = PairPlan(attention(4), attention(4), [whole(K)])
    assert plan.elected(1, writer=0, receiver=0) is plan.elected(2, writer=0, receiver=5)
    assert plan.elected(1, writer=1, receiver=0) == ()


# ---- what is refused -----------------------------------------------------------------------------------------------


def test_a_piece_that_a_side_does_not_hold_is_refused_naming_what_it_holds():
    half = attention(4, heads=Interval(0, 1))
    with pytest.raises(IncompatiblePeerError, match=r"the source rank holds \['layer \[0, 2\) head \[0, 1\)"):
        PairPlan(half, attention(4), [whole(K)])
    with pytest.raises(IncompatiblePeerError, match=r"the receiver rank holds \['layer \[0, 2\) head \[0, 1\)"):
        PairPlan(attention(4), half, [whole(K)])
    with pytest.raises(IncompatiblePeerError, match=r"names 'x' .* but the source rank holds nothing of it"):
        PairPlan(attention(4), half, [Piece("x", (), 0, (0,))])


@pytest.mark.parametrize("part", [1, None])
def test_a_piece_of_tokens_that_the_source_does_not_hold_is_refused(part: int | None):
    piece = Piece("k", K.whole, part, (0,))
    with pytest.raises(IncompatiblePeerError, match=f"asks for part {part} .* of 'k', but .* holds part 0"):
        PairPlan(attention(4), attention(4), [piece])


def test_state_of_a_whole_request_belongs_to_no_part():
    state = byte_shard("s", "state", entry=Entry.REQUEST)
    dealt = RankLayout(shards=(state,), tokens=TokenShare(interleaved(2), 1))
    whole_share = RankLayout(shards=(state,))
    (elected,) = PairPlan(dealt, whole_share, [Piece("s", state.box, None, (1,))]).elected(1, writer=1, receiver=0)
    assert elected.route.has_slots
    assert elected.route.source_share == elected.route.destination_share == TokenShare()
    with pytest.raises(IncompatiblePeerError, match="asks for part 1"):
        PairPlan(dealt, whole_share, [Piece("s", state.box, 1, (1,))])


# ---- rows and indices --------------------------------------------------------------------------------------------


def addresses(rows: Any, indices: Any) -> list[tuple[int, int]]:
    """Where the selected descriptors start and end."""
    starts = np.concatenate([[0], np.cumsum(rows[:, 4])]).astype(np.int64)
    found = []
    for index in indices.tolist():
        row = int(np.searchsorted(starts, index, side="right")) - 1
        address, length, _, stride, count = rows[row].tolist()
        assert index - starts[row] < count
        begin = int(address + (index - starts[row]) * stride)
        found.append((begin, begin + int(length)))
    return found


@pytest.mark.parametrize("unit", list(Unit))
@pytest.mark.parametrize(("here", "there"), [(4, 8), (8, 4), (4, 6), (6, 6), (3, 4)])
def test_the_rows_of_a_unit_name_its_bytes_on_both_sides(unit: Unit, here: int, there: int):
    source, destination = attention(here), attention(there, base=1 << 24)
    plan = PairPlan(source, destination, [whole(K), whole(V)])
    rows, unit_tokens = plan.descriptor_rows(unit), int(np.gcd(here, there)) if unit is Unit.WHOLE else 1
    for side, layout, size in (("source", source, here), ("destination", destination, there)):
        numbers = np.arange(24 // unit_tokens, dtype=np.int64)
        pool_pages = np.array([7, 0, 11, 3, 5, 6, 8, 9], np.int64)
        units, pages = places(numbers, unit_tokens=unit_tokens, page_tokens=size, pages=pool_pages, first_page=0)
        for number, shard in enumerate(layout.shards):
            indices = getattr(rows.pieces[number], side).indices(units, pages)
            found = addresses(getattr(rows, side), indices)
            covered = sorted(byte for begin, stop in found for byte in range(begin, stop))
            expected = sorted(
                address + int(pool_pages[token // size]) * shard.paging.page_stride + token % size * 8 + byte
                for address in shard.addresses
                for token in range(24)
                for byte in range(8)
            )
            assert covered == expected


def test_packed_pages_have_no_single_tokens():
    packed, plain = byte_shard("p", entry=Entry.PAGE), byte_shard("t")
    both = RankLayout(shards=(packed, plain))
    plan = PairPlan(both, both, [Piece("p", packed.box, 0, (0,)), Piece("t", plain.box, 0, (0,))])
    pages = packed.paging.num_pages
    for unit, descriptors in ((Unit.TOKEN, [pages, 16 * pages]), (Unit.WHOLE, [pages, pages])):
        assert plan.descriptor_rows(unit).source[:, 4].tolist() == descriptors


def test_a_plan_made_of_real_pieces_has_a_row_for_each():
    sources = {rank: attention(4, heads=Interval(rank, rank + 1)) for rank in range(2)}
    pieces = pieces_for_receiver(sources, attention(8))
    for rank, layout in sources.items():
        mine = [piece for piece in pieces if rank in piece.holders]
        plan = PairPlan(layout, attention(8), mine)
        assert len(plan.descriptor_rows(Unit.WHOLE).pieces) == len(mine) == 2


# ---- places --------------------------------------------------------------------------------------------------------


def test_a_unit_lies_in_the_page_of_its_first_token():
    within, pages = places(
        np.array([10, 11, 12, 19]), unit_tokens=4, page_tokens=16, pages=np.array([9, 5, 7]), first_page=2
    )
    assert (within.tolist(), pages.tolist()) == ([2, 3, 0, 3], [9, 9, 5, 7])


@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 5), st.lists(st.integers(0, 99), min_size=1, unique=True))
def test_places_are_counted_out(unit: int, per_page: int, first_page: int, numbers: list[int]):
    count = max(numbers) // per_page + 1
    pages = np.random.default_rng(unit).permutation(200)[:count]
    own = np.array(numbers, np.int64) + first_page * per_page
    within, found = places(own, unit_tokens=unit, page_tokens=unit * per_page, pages=pages, first_page=first_page)
    for number, inside, page in zip(numbers, within.tolist(), found.tolist(), strict=True):
        assert (number % per_page, int(pages[number // per_page])) == (inside, page)
