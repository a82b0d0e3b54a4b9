"""Which tokens travel and where they lie: the laws, against positions partitioned one by one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.tiers import examples

from kvferry.errors import IncompatiblePeerError, UsageError
from kvferry.layout import (
    Axis,
    Paging,
    RankLayout,
    Shard,
    TokenPartition,
    TokenShare,
    attention_components,
    contiguous,
    empty_shard,
    interleaved,
    packed_component,
    state_component,
    zigzag,
)
from kvferry.plan import (
    Demand,
    Route,
    Segments,
    SourceGroup,
    check_exchangeable,
    route_between,
    segments_between,
    units_of,
)
from kvferry.plan.routes import needed_locally
from kvferry.pools.places import positions_of

K, _ = attention_components(num_layers=1, num_kv_heads=1, head_dim=1, dtype="int8")
STATE = state_component("state", num_layers=1, axes=(Axis("head", 1),), dtype="int8")
EVERY_TOKEN = TokenPartition()


def layout(page_tokens: int, partition: TokenPartition = EVERY_TOKEN, part: int = 0) -> RankLayout:
    shards = empty_shard(K, page_tokens=page_tokens, num_pages=3), empty_shard(STATE, page_tokens=1, num_pages=5)
    return RankLayout(shards=shards, tokens=TokenShare(partition, part))


def route(source: RankLayout, destination: RankLayout) -> Route:
    return route_between(source, "kv", destination, "kv")


# --- units


@pytest.mark.parametrize(
    ("source", "destination", "unit"), [(16, 64, 16), (64, 16, 16), (16, 48, 16), (32, 48, 16), (7, 3, 1)]
)
def test_a_unit_divides_both_page_sizes(source: int, destination: int, unit: int):
    found = route(layout(source), layout(destination))
    assert (found.source_page_tokens, found.destination_page_tokens) == (source, destination)
    assert (found.unit_tokens, found.has_slots) == (unit, False)
    assert (found.source_group, found.destination_group) == ("kv", "kv")


@pytest.mark.parametrize(
    ("theirs", "ours", "unit"),
    [
        (interleaved(2), interleaved(2), 16),  # dealt alike: local positions say all
        (zigzag(2), zigzag(2), 16),
        (interleaved(2), EVERY_TOKEN, 1),
        (EVERY_TOKEN, interleaved(2, 4), 4),
        (interleaved(2, 8), interleaved(2, 12), 4),
        (interleaved(2, 64), EVERY_TOKEN, 16),
        (interleaved(2, 24), EVERY_TOKEN, 8),
        (contiguous(2), EVERY_TOKEN, 16),
        (contiguous(2), interleaved(2, 8), 8),
        (contiguous(2, 16), EVERY_TOKEN, 16),
        (contiguous(2, 4), EVERY_TOKEN, 4),
        (contiguous(2, 24), interleaved(2, 16), 8),
        (contiguous(2, 24), contiguous(2, 24), 16),
        (contiguous(1), EVERY_TOKEN, 16),
    ],
)
def test_a_unit_divides_the_blocks_unless_both_sides_partition_alike(
    theirs: TokenPartition, ours: TokenPartition, unit: int
):
    assert route(layout(16, theirs), layout(16, ours)).unit_tokens == unit


def test_slots_have_one_position_that_every_rank_holds():
    found = route_between(layout(16, interleaved(2), 1), "state", layout(16, contiguous(3), 2), "state")
    assert (found.unit_tokens, found.has_slots) == (1, True)
    assert found.source_share == found.destination_share == TokenShare()
    segments = segments_between(found, Demand(0, 0, 1), first=0, stop=1, request_tokens=None)
    assert pairs(segments) == [(0, 0)]


# --- what travels


@dataclass(frozen=True)
class Case:
    """One request between two engines: how each partitions and pages, what is wanted, how the source is chunked."""

    theirs: TokenPartition
    ours: TokenPartition
    part: int
    pages: tuple[int, int]
    tokens: int
    demand: Demand
    cuts: tuple[int, ...] = ()
    """Pages of the source after which a chunk ends."""


@st.composite
def partitions(draw: st.DrawFn) -> TokenPartition:
    size, block = draw(st.integers(1, 4)), draw(BLOCKS)
    kinds = [contiguous(size), contiguous(size, block), zigzag(size), interleaved(size), interleaved(size, block)]
    return draw(st.sampled_from(kinds))


BLOCKS = st.sampled_from([2, 3, 4, 6, 8])
PAGES = st.sampled_from([1, 2, 3, 4, 6, 8, 12])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    theirs = draw(partitions())
    ours = draw(st.one_of(st.just(theirs), partitions()))
    tokens = draw(st.integers(0, 70))
    held, start, stop = sorted(draw(st.tuples(*[st.integers(0, tokens)] * 3)))
    return Case(
        theirs,
        ours,
        part=draw(st.integers(0, ours.num_parts - 1)),
        pages=(draw(PAGES), draw(PAGES)),
        tokens=tokens,
        demand=Demand(held, start, draw(st.sampled_from([stop, tokens]))),
        cuts=tuple(draw(st.lists(st.integers(0, 70), max_size=4))),
    )


def owned(share: TokenShare, tokens: int) -> list[int]:
    """The positions that a share has of a request, counted out one by one."""
    return positions_of(share, tokens)


def pairs(segments: Segments) -> list[tuple[int, int]]:
    """The local positions of every token that travels, on the source and on the receiver."""
    each = zip(segments.source.tolist(), segments.destination.tolist(), segments.lengths.tolist(), strict=True)
    return [(source + token, destination + token) for source, destination, length in each for token in range(length)]


def routes_of(case: Case) -> list[Route]:
    """From every source rank that the plan asks, by part of the tokens."""
    sources = {part: layout(case.pages[0], case.theirs, part) for part in range(case.theirs.num_parts)}
    receiver = layout(case.pages[1], case.ours, case.part)
    parts = SourceGroup(sources).token_parts(K, receiver.tokens)
    return [route(sources[part], receiver) for part in parts if part is not None]


def chunks_of(case: Case, share: TokenShare) -> list[tuple[int, int]]:
    """The source's pages of the request in chunks, as local positions."""
    num_pages = -(-len(owned(share, case.tokens)) // case.pages[0])
    stops = sorted({0, num_pages, *(min(cut, num_pages) for cut in case.cuts)})
    return [(start * case.pages[0], stop * case.pages[0]) for start, stop in pairwise(stops)]


def all_segments(case: Case, route: Route) -> list[Segments]:
    return [
        segments_between(route, case.demand, first=first, stop=stop, request_tokens=case.tokens)
        for first, stop in chunks_of(case, route.source_share)
    ]


@settings(max_examples=examples(500))
@given(cases())
@example(Case(EVERY_TOKEN, EVERY_TOKEN, 0, (4, 12), 21, Demand(5, 5, 21), (1, 2)))
@example(Case(EVERY_TOKEN, EVERY_TOKEN, 0, (12, 4), 21, Demand(0, 9, 21)))
@example(Case(interleaved(2, 4), EVERY_TOKEN, 0, (4, 4), 21, Demand(1, 3, 21), (1,)))
@example(Case(zigzag(2), interleaved(3, 2), 1, (4, 6), 33, Demand(0, 0, 33), (1, 3)))
@example(Case(contiguous(3), contiguous(2), 1, (4, 4), 30, Demand(7, 9, 30)))
@example(Case(contiguous(3, 4), EVERY_TOKEN, 0, (4, 4), 45, Demand(0, 0, 45)))
@example(Case(contiguous(3, 4), EVERY_TOKEN, 0, (4, 8), 38, Demand(0, 0, 38), (2,)))
@example(Case(contiguous(3, 4), contiguous(2, 8), 1, (4, 4), 38, Demand(5, 9, 38), (1, 3)))
@example(Case(contiguous(3, 4), contiguous(3), 1, (4, 4), 45, Demand(0, 0, 45)))
def test_over_all_parts_and_chunks_what_the_receiver_wants_travels_once(case: Case):
    ours = owned(TokenShare(case.ours, case.part), case.tokens)
    wanted = [local for local, position in enumerate(ours) if case.demand.start <= position < case.demand.stop]
    held = sum(position < case.demand.held for position in ours)
    travelled: Counter[int] = Counter()
    for each in routes_of(case):
        theirs = owned(each.source_share, case.tokens)
        units = {local // each.unit_tokens for local in wanted}
        for segments in all_segments(case, each):
            for source, destination in pairs(segments):
                travelled[destination] += 1
                # The same token on both sides; behind the request's end there is none, but its page is.
                assert theirs[source : source + 1] == ours[destination : destination + 1]
                if destination not in wanted:
                    assert destination >= held
                    assert destination // each.unit_tokens in units
    assert set(travelled) >= set(wanted)
    assert set(travelled.values()) <= {1}


@given(cases())
def test_without_widening_exactly_what_is_wanted_travels(case: Case):
    """Units of one token leave nothing to widen."""
    one = Case(case.theirs, case.ours, case.part, (1, 1), case.tokens, case.demand, case.cuts)
    ours = owned(TokenShare(case.ours, case.part), case.tokens)
    wanted = [local for local, position in enumerate(ours) if case.demand.start <= position < case.demand.stop]
    travelled = [pair[1] for each in routes_of(one) for segments in all_segments(one, each) for pair in pairs(segments)]
    assert sorted(travelled) == wanted


@given(cases())
def test_a_segment_stays_in_its_chunk(case: Case):
    for each in routes_of(case):
        for (first, stop), segments in zip(chunks_of(case, each.source_share), all_segments(case, each), strict=True):
            assert all(first <= source < stop for source, _ in pairs(segments))
            assert (segments.lengths > 0).all()


@given(cases())
def test_units_are_the_tokens_of_the_segments_and_none_is_cut_by_a_page(case: Case):
    for each in routes_of(case):
        for segments in all_segments(case, each):
            decoded = []
            for units in units_of(segments, each.unit_tokens):
                assert len(units) == len(units.source) == len(units.destination)
                assert not each.source_page_tokens % units.tokens
                assert not each.destination_page_tokens % units.tokens
                for source, destination in zip(units.source.tolist(), units.destination.tolist(), strict=True):
                    decoded += [
                        (source * units.tokens + token, destination * units.tokens + token)
                        for token in range(units.tokens)
                    ]
            assert sorted(decoded) == sorted(pairs(segments))


@given(cases())
def test_what_a_source_must_have_reaches_from_the_first_to_the_last_wanted_token(case: Case):
    for each in routes_of(case):
        low, high = needed_locally(each.source_share, case.demand, request_tokens=case.tokens)
        theirs = owned(each.source_share, case.tokens)
        wanted = [local for local, at in enumerate(theirs) if case.demand.start <= at < case.demand.stop]
        assert list(range(low, high)) == wanted


# --- examples that a reader can follow


def travelling(
    source: RankLayout, destination: RankLayout, demand: Demand, *, stop: int, tokens: int | None = None
) -> list[tuple[int, int, int]]:
    segments = segments_between(route(source, destination), demand, first=0, stop=stop, request_tokens=tokens)
    each = segments.source.tolist(), segments.destination.tolist(), segments.lengths.tolist()
    return list(zip(*each, strict=True))


def test_a_request_that_ends_inside_a_page_fills_its_last_unit():
    assert travelling(layout(16), layout(16), Demand(0, 0, 37), stop=48) == [(0, 0, 48)]
    assert travelling(layout(16), layout(64), Demand(0, 0, 37), stop=48) == [(0, 0, 48)]
    assert travelling(layout(64), layout(16), Demand(0, 0, 37), stop=64) == [(0, 0, 48)]


def test_a_prefix_inside_a_unit_is_not_touched():
    assert travelling(layout(16), layout(16), Demand(21, 21, 37), stop=48) == [(21, 21, 27)]


def test_a_window_begins_with_the_unit_of_its_first_token():
    assert travelling(layout(16), layout(16), Demand(0, 21, 37), stop=48) == [(16, 16, 32)]
    assert travelling(layout(16), layout(16), Demand(18, 21, 37), stop=48) == [(18, 18, 30)]


def test_nothing_is_wanted_of_an_empty_demand():
    for source in (layout(16), layout(16, interleaved(2))):
        assert travelling(source, layout(16), Demand(5, 37, 37), stop=48) == []


def test_other_parts_of_the_same_dealing_exchange_nothing():
    one, other = layout(16, interleaved(2), 0), layout(16, interleaved(2), 1)
    assert travelling(one, other, Demand(0, 0, 64), stop=32) == []


def test_contiguous_parts_go_to_their_places():
    """12 tokens: the source's part 1 of 3 has 4 to 7, of which the receiver's part 0 of 2 has 4 and 5."""
    source, destination = layout(2, contiguous(3), 1), layout(2, contiguous(2), 0)
    assert travelling(source, destination, Demand(0, 0, 12), stop=4, tokens=12) == [(0, 4, 2)]


def test_contiguous_parts_need_the_length_of_the_request():
    with pytest.raises(UsageError, match="say how many tokens it has"):
        travelling(layout(2, contiguous(2)), layout(2), Demand(0, 0, 12), stop=6)


def test_blocks_of_a_partition_go_one_by_one():
    source = layout(4, interleaved(2, 4), 1)
    assert travelling(source, layout(4), Demand(0, 0, 24), stop=12) == [(0, 4, 4), (4, 12, 4), (8, 20, 4)]


def test_the_last_block_fills_its_unit_also_where_the_other_side_partitions_otherwise():
    """Packed pages of 4 tokens could not be cut at token 22."""
    source = layout(4, interleaved(2, 4), 1)
    assert travelling(source, layout(4), Demand(0, 0, 22), stop=12)[-1] == (8, 20, 4)
    assert travelling(layout(4), source, Demand(0, 6, 22), stop=24)[0] == (4, 0, 4)
    assert travelling(layout(4), source, Demand(6, 6, 22), stop=24)[0] == (6, 2, 2)


def packed(page_tokens: int, share: TokenShare) -> RankLayout:
    """Pages of 12 bytes in one format, whatever number of tokens they are said to hold."""
    component = packed_component("kv", num_layers=1, num_kv_heads=1, packed=12, dtype="int8", packing="x")
    shard = Shard(
        component=component,
        box=component.whole,
        addresses=(0x1000,),
        strides=(12, 1),
        paging=Paging(page_tokens=page_tokens, num_pages=3, page_stride=12, token_stride=0),
    )
    return RankLayout(shards=(shard,), tokens=share)


def may_exchange(source: RankLayout, destination: RankLayout) -> bool:
    try:
        check_exchangeable(source, destination, source_name="prefill", destination_name="decode")
    except IncompatiblePeerError:
        return False
    return True


@given(cases(), st.booleans())
@example(Case(interleaved(2, 4), EVERY_TOKEN, 0, (4, 4), 22, Demand(4, 6, 22)), True)
@example(Case(EVERY_TOKEN, interleaved(3, 4), 2, (4, 4), 22, Demand(0, 0, 22)), True)
def test_pages_that_cannot_be_cut_never_are(case: Case, is_same_page: bool):
    """What may be exchanged in packed pages travels in whole pages, unless a prefix ends inside one."""
    pages = case.pages[0], case.pages[0] if is_same_page else case.pages[1]
    ours = owned(TokenShare(case.ours, case.part), case.tokens)
    held = case.demand.held
    while sum(position < held for position in ours) % pages[1]:
        held -= 1
    whole = replace(case, pages=pages, demand=replace(case.demand, held=held))
    for each in routes_of(whole):
        if may_exchange(packed(pages[0], each.source_share), packed(pages[1], each.destination_share)):
            assert pages == (each.unit_tokens, each.unit_tokens)
            for segments in all_segments(whole, each):
                units, tokens = units_of(segments, each.unit_tokens)
                assert (units.tokens, len(tokens)) == (pages[0], 0)


# --- units


def test_whole_units_and_single_tokens():
    segments = Segments(*(np.array(each, np.int64) for each in ([6, 100, 32], [22, 201, 16], [23, 5, 16])))
    units, tokens = units_of(segments, 8)
    assert units.tokens == 8
    assert list(zip(units.source.tolist(), units.destination.tolist(), strict=True)) == [
        (1, 3),
        (2, 4),
        (4, 2),
        (5, 3),
    ]
    assert tokens.tokens == 1
    alone = list(zip(tokens.source.tolist(), tokens.destination.tolist(), strict=True))
    assert sorted(alone) == sorted(
        [(6, 22), (7, 23), *((24 + token, 40 + token) for token in range(5)), *((100 + t, 201 + t) for t in range(5))]
    )


def test_no_segments_are_no_units():
    none = np.empty(0, np.int64)
    assert [len(units) for units in units_of(Segments(none, none, none), 16)] == [0, 0]
