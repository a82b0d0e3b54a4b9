"""What of a chunk goes where: each rule one test, and the law that all chunks together move every token once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests.support.shards import byte_shard
from tests.support.tiers import examples

from kvferry.errors import PageError
from kvferry.layout import Entry, RankLayout, TokenPartition, TokenShare, contiguous, interleaved, zigzag
from kvferry.plan import Unit, route_between
from kvferry.plan.requests.chunks import Chunk, ChunkPart
from kvferry.plan.requests.demands import GroupRequest, demands_of, wanted_groups
from kvferry.plan.requests.moves import Move, ReceiverRequest, check_chunk, moves_of
from kvferry.plan.requests.page_numbers import GroupPages, PageNumbers
from kvferry.pools.places import positions_of

WHOLE = TokenShare()


def layout(page_tokens: int, share: TokenShare = WHOLE, window_tokens: int | None = None) -> RankLayout:
    shard = byte_shard(page_tokens=page_tokens, num_pages=1000, window_tokens=window_tokens)
    return RankLayout(shards=(shard,), tokens=share)


def request_of(
    source: RankLayout,
    destination: RankLayout,
    pages: Any,
    *,
    prefix: int = 0,
    tokens: int | None = None,
) -> ReceiverRequest:
    """What the destination wants of the source, as it arrives there."""
    groups = demands_of(destination, pages, prefix_tokens=prefix, tokens=tokens, where="here")
    names = [group.name for group in source.groups]
    return ReceiverRequest(
        tokens=tokens,
        wanted=wanted_groups(
            groups,
            destination,
            receivers=1,
            tokens=tokens,
            filled={each.name for each in destination.groups},
            where="there",
        ),
        routes=tuple(route_between(source, name, destination, name) for name in names),
    )


def chunk(start: int, *pages: int, is_last: bool = False, group: str = "kv") -> Chunk:
    return Chunk(number=0, parts=(ChunkPart(group, start, np.array(pages, np.int64)),), is_last=is_last)


def places_of(unit: Unit, move: Move, request: ReceiverRequest) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Every token that a move writes: (page, token in page) at the source and at the destination."""
    route = request.routes[move.route]
    size = route.unit_tokens if unit is Unit.WHOLE else 1
    units = zip(
        move.source_pages.tolist(),
        move.source_units.tolist(),
        move.destination_pages.tolist(),
        move.destination_units.tolist(),
        strict=True,
    )
    return [
        ((from_page, from_unit * size + token), (to_page, to_unit * size + token))
        for from_page, from_unit, to_page, to_unit in units
        for token in range(size)
    ]


def written(made: Chunk, request: ReceiverRequest) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    return [
        place
        for unit, moves in moves_of(made, request).items()
        for each in moves
        for place in places_of(unit, each, request)
    ]


def counts(made: Chunk, request: ReceiverRequest) -> dict[Unit, int]:
    return {unit: sum(len(move.source_pages) for move in moves) for unit, moves in moves_of(made, request).items()}


# ---- one chunk ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("here", "there", "pages", "units"),
    [
        (16, 64, [5], 4),
        (64, 16, [5, 6, 7, 8], 4),
        (16, 48, [5, 6], 4),
        (48, 16, [5, 6, 7, 8], 4),
        (16, 16, [5, 6, 7, 8], 4),
    ],
)
def test_pages_of_unlike_sizes_are_moved_in_the_largest_pieces_of_both(
    here: int, there: int, pages: list[int], units: int
):
    request = request_of(layout(here), layout(there), pages, tokens=64)
    made = chunk(0, *range(90, 90 + -(-64 // here)), is_last=True)
    assert counts(made, request) == {Unit.WHOLE: units, Unit.TOKEN: 0}
    assert written(made, request) == [
        ((90 + token // here, token % here), (pages[token // there], token % there)) for token in range(64)
    ]


def test_the_front_of_a_unit_that_the_receiver_holds_is_left_to_single_tokens():
    request = request_of(layout(64), layout(16), [5, 6], prefix=37, tokens=64)
    made = chunk(0, 90, is_last=True)
    assert counts(made, request) == {Unit.WHOLE: 1, Unit.TOKEN: 11}
    assert sorted(written(made, request)) == [
        ((90, token), (5 if token < 48 else 6, token % 16)) for token in range(37, 64)
    ]


def test_a_request_that_ends_inside_a_unit_is_moved_to_the_units_end():
    request = request_of(layout(64), layout(16), [5, 6], tokens=17)
    made = chunk(0, 90, is_last=True)
    assert counts(made, request) == {Unit.WHOLE: 2, Unit.TOKEN: 0}
    assert max(written(made, request)) == ((90, 31), (6, 15))


def test_a_chunk_that_has_nothing_for_a_receiver_moves_nothing():
    request = request_of(layout(16), layout(16), [5], prefix=32, tokens=48)
    assert counts(chunk(0, 90, 91), request) == {Unit.WHOLE: 0, Unit.TOKEN: 0}
    assert moves_of(Chunk(number=0, parts=(), is_last=True), request) == {Unit.WHOLE: (), Unit.TOKEN: ()}
    assert counts(chunk(2, 90), request) == {Unit.WHOLE: 1, Unit.TOKEN: 0}


def test_only_elected_routes_are_moved():
    request = request_of(layout(16), layout(16), [5], tokens=16)
    nothing = ReceiverRequest(tokens=16, wanted=request.wanted, routes=())
    assert moves_of(chunk(0, 90), nothing) == {Unit.WHOLE: (), Unit.TOKEN: ()}
    check_chunk(chunk(0, 90, 91, 92), nothing, {}, where="here")


def test_each_route_takes_the_part_of_its_own_group():
    shards = (byte_shard("a", "one"), byte_shard("b", "two", page_tokens=8), byte_shard("s", "s", entry=Entry.REQUEST))
    both = RankLayout(shards=shards)
    request = request_of(both, both, {"one": [1], "two": [2, 3], "s": [9]}, tokens=12)
    parts = (
        ChunkPart("s", 0, np.array([7])),
        ChunkPart("two", 0, np.array([5, 6])),
        ChunkPart("one", 0, np.array([4])),
    )
    moves = moves_of(Chunk(number=0, parts=parts, is_last=True), request)[Unit.WHOLE]
    assert [(move.route, move.source_pages.tolist(), move.destination_pages.tolist()) for move in moves] == [
        (0, [4], [1]),
        (1, [5, 6], [2, 3]),
        (2, [7], [9]),
    ]


def test_two_groups_of_one_side_may_come_from_one_group_of_the_other():
    one = RankLayout(shards=(byte_shard("a"), byte_shard("b")))
    two = RankLayout(shards=(byte_shard("a", "x"), byte_shard("b", "y")))
    wanted = {
        name: GroupRequest(name, 0, 0, 16, 0, PageNumbers.of(np.array([page]))) for name, page in (("x", 1), ("y", 2))
    }
    routes = tuple(route_between(one, "kv", two, name) for name in ("x", "y"))
    moves = moves_of(chunk(0, 5), ReceiverRequest(tokens=16, wanted=wanted, routes=routes))[Unit.WHOLE]
    assert [(move.route, move.source_pages.tolist(), move.destination_pages.tolist()) for move in moves] == [
        (0, [5], [1]),
        (1, [5], [2]),
    ]


# ---- whether chunks fit --------------------------------------------------------------------------------------------


def refused(made: Chunk, request: ReceiverRequest, done: Mapping[str, int] | None = None) -> str | None:
    """Why a chunk is refused; None if it is not."""
    try:
        check_chunk(made, request, done or {}, where="room 7")
    except PageError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("made", "done", "says"),
    [
        (chunk(0, 1, 2), 0, None),
        (chunk(0, 1, 2, 3, is_last=True), 0, None),
        (chunk(1, 2, 3, is_last=True), 0, None),  # the receiver holds 20 tokens
        (chunk(2, 3, is_last=True), 0, "a chunk starts at page 2 of the request, but .* from page 1 on"),
        (chunk(2, 3, is_last=True), 2, None),
        (chunk(2, is_last=True), 2, "2 pages of 16 tokens of the request where the receiver has room for 3, 20 tokens"),
        (chunk(0, 1, 2, is_last=True), 0, "2 pages of 16 tokens of the request where the receiver has room for 3"),
        (chunk(2, 3, 4), 2, "4 pages of 16 tokens of the request and more to come where the receiver has room for 3"),
        (chunk(2, 3, 4, is_last=True), 2, "4 pages of 16 tokens of the request where the receiver has room for 3"),
        (Chunk(number=0, parts=(), is_last=True), 3, None),
        (Chunk(number=0, parts=(), is_last=True), 2, "2 pages of 16 tokens of the request where the receiver has room"),
        (Chunk(number=0, parts=(), is_last=True), 0, "0 pages of 16 tokens of the request where the receiver has room"),
        (Chunk(number=0, parts=(), is_last=False), 0, None),
    ],
)
def test_chunks_reach_from_the_first_token_that_is_needed_to_the_last(made: Chunk, done: int, says: str | None):
    request = request_of(layout(16), layout(8), [5, 6, 7], prefix=20, tokens=40)
    reason = refused(made, request, {"kv": done} if done else {})
    if says is None:
        assert reason is None
    else:
        assert reason is not None
        assert re.match(f"room 7: {says}", reason)


def test_a_receiver_that_needs_nothing_takes_any_end_but_no_page_too_many():
    request = request_of(layout(16), layout(16), [], prefix=40, tokens=40)
    for stop in range(4):
        assert refused(chunk(0, *range(stop), is_last=True), request) is None
    assert refused(chunk(3, is_last=True), request) is None, "an empty part at the end is no gap"
    assert "4 pages of 16 tokens" in str(refused(chunk(0, 1, 2, 3, 4), request))


@pytest.mark.parametrize(
    ("here", "there", "pages", "prefix", "least", "most"),
    [
        (16, 64, 2, 0, 5, 8),  # 65 to 128 tokens
        (64, 16, 5, 0, 2, 2),  # 65 to 80
        (16, 64, 1, 40, 3, 4),  # 41 to 64
        (16, 64, 1, 63, 4, 4),
        (16, 48, 2, 0, 4, 6),  # 49 to 96
        (48, 16, 3, 0, 1, 1),  # 33 to 48
    ],
)
def test_without_a_length_the_last_page_may_hold_any_number_of_tokens(
    here: int, there: int, pages: int, prefix: int, least: int, most: int
):
    request = request_of(layout(here), layout(there), range(pages), prefix=prefix)
    accepted = [count for count in range(12) if refused(chunk(0, *range(count), is_last=True), request) is None]
    assert accepted == list(range(least, most + 1))


def test_without_a_length_a_share_is_as_long_as_its_part_of_the_last_page_asks():
    """Of 65 to 80 tokens in two parts, partitioned by 8, either part has 33 to 40."""
    for part, least in ((0, 5), (1, 4)):
        source = layout(8, TokenShare(interleaved(2, 8), part))
        request = request_of(source, layout(16), range(5))
        accepted = [count for count in range(12) if refused(chunk(0, *range(count), is_last=True), request) is None]
        assert accepted == list(range(least, 6))


def test_without_a_length_a_rank_may_have_nothing_more_than_the_receiver_holds():
    """Of 17 tokens in three parts the receiver holds 15; of the others the third part may have one, and has none."""
    source = layout(1, TokenShare(interleaved(3, 1), 2))
    request = request_of(source, layout(2), [7, 8], prefix=15)
    assert refused(Chunk(number=0, parts=(), is_last=True), request) is None
    assert refused(chunk(5, 6, is_last=True), request) is None
    assert "7 pages of 1 tokens" in str(refused(chunk(5, 6, 7, is_last=True), request))


def test_a_length_that_is_needed_and_not_said_is_asked_for():
    request = request_of(layout(16, TokenShare(contiguous(2), 0)), layout(16), [1])
    reason = refused(chunk(0, 1), request)
    assert reason is not None
    assert "say how many tokens it has, on the decode side (tokens=...)" in reason


def test_a_group_is_named_where_there_are_several():
    both = RankLayout(shards=(byte_shard(), byte_shard("s", "state", entry=Entry.REQUEST)))
    request = request_of(both, both, {"kv": [1], "state": [2]}, tokens=16)
    assert str(refused(chunk(0, 3, is_last=True), request)).startswith(
        "room 7, group 'state': 0 slots of the request where the receiver has room for 1"
    )
    assert refused(chunk(0, 3, is_last=True), request, {"state": 1}) is None


@pytest.mark.parametrize(
    ("done", "start", "fits"), [(0, 2, True), (0, 3, False), (1, 2, True), (3, 4, False), (4, 4, True)]
)
def test_a_window_may_leave_out_what_is_not_needed(done: int, start: int, fits: bool):
    window = layout(16, window_tokens=30)
    request = request_of(window, window, [5, 6, 7], tokens=70)  # from token 40 on, in page 2
    pages = range(start, 5)
    assert (refused(chunk(start, *pages, is_last=True), request, {"kv": done}) is None) == fits


# ---- the law -------------------------------------------------------------------------------------------------------


SIZES = st.sampled_from([1, 2, 3, 4, 6, 8, 16, 48, 64])
DEALINGS = st.sampled_from(
    [
        TokenPartition(),
        TokenPartition(),
        contiguous(2),
        contiguous(3),
        contiguous(2, 4),
        contiguous(3, 16),
        interleaved(2),
        interleaved(3, 4),
        interleaved(2, 16),
        zigzag(2),
        zigzag(3),
        TokenPartition((0, 1, 1), 2),
        TokenPartition((1, 0, 0), None),
    ]
)


@dataclass(frozen=True, slots=True)
class Case:
    here: int
    there: int
    source: TokenPartition
    share: TokenShare
    window: int | None
    prefix: int
    tokens: int
    is_said: bool


@st.composite
def cases(draw: st.DrawFn) -> Case:
    source = draw(DEALINGS)
    partition = draw(st.one_of(st.just(source), DEALINGS))
    tokens = draw(st.integers(0, 150))
    must_say = source.depends_on_length or not partition.is_whole
    is_said = must_say or draw(st.booleans())
    window = draw(st.none() | st.integers(1, 60)) if is_said else None
    return Case(
        here=draw(SIZES),
        there=draw(SIZES),
        source=source,
        share=TokenShare(partition, draw(st.integers(0, partition.num_parts - 1))),
        window=window,
        prefix=draw(st.just(0) | st.integers(0, tokens)),
        tokens=tokens,
        is_said=is_said,
    )


def source_chunks(data: st.DataObject, first: int, stop: int) -> list[tuple[int, int]]:
    """Ranges of pages that follow each other."""
    cuts = sorted(data.draw(st.lists(st.integers(first, stop), max_size=4)))
    edges = [first, *cuts, stop]
    return list(pairwise(edges))


class Side:
    """One rank's pages of a request, and where its positions lie in them, counted out."""

    def __init__(self, share: TokenShare, size: int, tokens: int, first_needed: int) -> None:
        self.positions = positions_of(share, tokens)
        self.size, self.total = size, -(-len(self.positions) // size)
        needed = [index for index, position in enumerate(self.positions) if position >= first_needed]
        self.first = needed[0] // size if needed else sum(p < first_needed for p in self.positions) // size
        self.count = self.total - self.first if needed else 0
        self.pages = np.random.default_rng(size + tokens).permutation(1000)[: self.total].tolist()

    def place(self, position: int) -> tuple[int, int]:
        order, within = divmod(self.positions.index(position), self.size)
        return int(self.pages[order]), within


@hypothesis_settings(max_examples=examples(400), deadline=None)
@given(cases(), st.data())
def test_all_chunks_of_all_ranks_move_every_token_that_is_needed_once(case: Case, data: st.DataObject):
    start = max(case.prefix, case.tokens - case.window) if case.window is not None else case.prefix
    destination = Side(case.share, case.there, case.tokens, start)
    pages = GroupPages([destination.pages[destination.first + i] for i in range(destination.count)], destination.first)
    there = layout(case.there, case.share, case.window)
    tokens = case.tokens if case.is_said else None
    arrived: dict[tuple[int, int], list[tuple[int, tuple[int, int]]]] = {}
    sources, requests = {}, []
    for part in range(case.source.num_parts):
        share = TokenShare(case.source, part)
        here = layout(case.here, share, case.window)
        request = request_of(here, there, {"kv": pages}, prefix=case.prefix, tokens=tokens)
        requests.append(request)
        own = sources[part] = Side(share, case.here, case.tokens, start)
        first = data.draw(st.integers(0, min(own.first, own.total)))
        done: dict[str, int] = {}
        ranges = source_chunks(data, first, own.total)
        for number, (low, high) in enumerate(ranges):
            made = chunk(low, *own.pages[low:high], is_last=number == len(ranges) - 1)
            check_chunk(made, request, done, where="here")
            done["kv"] = high
            for source, target in written(made, request):
                arrived.setdefault(target, []).append((part, source))
    for target, all_sources in arrived.items():
        assert len(all_sources) == 1, f"{target} is written {len(all_sources)} times"
    beside = set(arrived)
    for index, position in enumerate(destination.positions):
        if position >= start:
            place = destination.place(position)
            (found,) = arrived.get(place, [None])
            owner = next(part for part, side in sources.items() if position in side.positions)
            assert found == (owner, sources[owner].place(position))
            beside.remove(place)
        elif position < case.prefix:
            assert destination.place(position) not in arrived, "the receiver holds it"
        elif index // case.there < destination.first:
            assert destination.place(position) not in arrived, "it lies in a page before the window's"
    local = {destination.pages.index(page) * case.there + within for page, within in beside}
    behind = {index for index in local if index >= len(destination.positions)}
    (unit,) = {each.routes[0].unit_tokens for each in requests}
    is_exact = case.source != case.share.partition and None in (
        case.source.cut_tokens,
        case.share.partition.cut_tokens,
    )
    assert len(local - behind) < (1 if is_exact else unit), "no more than a unit begins before a window"
    assert len(behind) < (case.there if not case.is_said else 1 if is_exact else unit)


@hypothesis_settings(max_examples=examples(200), deadline=None)
@given(cases(), st.data())
def test_a_page_too_few_or_too_many_is_refused(case: Case, data: st.DataObject):
    start = max(case.prefix, case.tokens - case.window) if case.window is not None else case.prefix
    destination = Side(case.share, case.there, case.tokens, start)
    pages = GroupPages(destination.pages[destination.first :][: destination.count], destination.first)
    part = data.draw(st.integers(0, case.source.num_parts - 1))
    here = layout(case.here, TokenShare(case.source, part), case.window)
    there = layout(case.there, case.share, case.window)
    request = request_of(here, there, {"kv": pages}, prefix=case.prefix, tokens=case.tokens)
    own = Side(TokenShare(case.source, part), case.here, case.tokens, start)
    assert refused(chunk(0, *own.pages, is_last=True), request) is None
    many = chunk(0, *own.pages, 1001, is_last=data.draw(st.booleans()))
    assert refused(many, request) is not None
    assume(own.count)
    few = chunk(0, *own.pages[:-1], is_last=True)
    assert refused(few, request) is not None
    gap = chunk(own.first + 1, *own.pages[own.first + 1 :], is_last=True)
    assert refused(gap, request) is not None


def test_no_place_is_counted_twice_by_the_tests_own_arithmetic():
    side = Side(TokenShare(zigzag(2), 1), 3, 20, 7)
    places = Counter(side.place(position) for position in side.positions)
    assert set(places.values()) == {1}


# ---- parts of the tokens that ranks have in one request -------------------------------------------------------------


@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("held", [0, 16, 48])
def test_pages_that_go_round_from_any_rank_all_arrive(first: int, held: int):
    """Three ranks have pages by turns, and which of them has the first page is each request's own affair."""
    page, ranks, pages = 16, 3, 7
    destination = layout(page)
    missing = [*range(100 + held // page, 100 + pages)]
    moved: Counter[int] = Counter()
    for rank in range(ranks):
        source = layout(page, TokenShare(interleaved(ranks, page), rank))
        request = request_of(source, destination, missing, prefix=held)
        part = (rank - first) % ranks
        mine = [each for each in range(held // page, pages) if each % ranks == part]
        start = len([each for each in range(held // page) if each % ranks == part])
        parts = (ChunkPart("kv", start, np.array(mine, np.int64)),)
        made = Chunk(number=0, parts=parts, is_last=True, token_part=part)
        assert refused(made, request) is None
        for move in moves_of(made, request)[Unit.WHOLE]:
            assert (move.source_pages + 100 == move.destination_pages).all()
            moved.update(move.destination_pages.tolist())
    assert moved == Counter(missing)


def test_a_part_that_there_is_not_is_refused():
    request = request_of(layout(16, TokenShare(interleaved(2, 16), 0)), layout(16), [1])
    made = Chunk(number=0, parts=(), is_last=True, token_part=2)
    assert "part 2 does not exist" in str(refused(made, request))


def test_a_receiver_that_divides_tokens_gets_no_part_of_one_request_alone():
    share = TokenShare(interleaved(2, 16), 0)
    request = request_of(layout(16, share), layout(16, share), [1], tokens=32)
    made = Chunk(number=0, parts=(), is_last=True, token_part=1)
    assert "must know the rank beforehand" in str(refused(made, request))
