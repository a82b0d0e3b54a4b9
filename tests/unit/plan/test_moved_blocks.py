"""What a write moves: as blocks, as a load that has a price, and as units that a peer can name."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.shards import byte_shard

from kvferry.errors import MessageError
from kvferry.layout import (
    Axis,
    Component,
    Entry,
    Interval,
    Paging,
    RankLayout,
    Shard,
    TokenShare,
    contiguous,
    interleaved,
    zigzag,
)
from kvferry.plan import (
    ElectedRoute,
    PairPlan,
    Piece,
    Route,
    Unit,
    route_between,
)
from kvferry.plan.descriptors import DescriptorIndices, RowArray
from kvferry.plan.packing import MovedBlocks
from kvferry.plan.requests.chunks import Chunk, ChunkPart
from kvferry.plan.requests.demands import MAX_POSITION, GroupRequest, demands_of
from kvferry.plan.requests.moved_blocks import (
    moved_blocks,
    pack_units,
    places_of_units,
    unpack_units,
    write_size_of,
)
from kvferry.plan.requests.moves import Move, ReceiverRequest, moves_of
from kvferry.plan.requests.page_numbers import GroupPages, PageNumbers

WHOLE = TokenShare()

# ---- units as they travel -------------------------------------------------------------------------------------------


def packed(*ranges: tuple[int, int]) -> bytes:
    return b"".join(struct.pack("<qq", *each) for each in ranges)


@pytest.mark.parametrize(
    ("numbers", "ranges"),
    [
        ([5], [(5, 1)]),
        ([0, 1, 2, 3], [(0, 4)]),
        ([7, 8, 12, 13, 14, 20], [(7, 2), (12, 3), (20, 1)]),
        ([3, 2, 1], [(3, 1), (2, 1), (1, 1)]),
        ([4, 4], [(4, 1), (4, 1)]),
    ],
)
def test_units_travel_as_ranges(numbers: list[int], ranges: list[tuple[int, int]]):
    data = pack_units(np.array(numbers))
    assert data == packed(*ranges)
    assert unpack_units(data, most=len(numbers)).tolist() == numbers


@given(st.lists(st.integers(0, 40) | st.integers(0, MAX_POSITION), min_size=1, max_size=30))
def test_units_come_back_as_they_were_packed(numbers: list[int]):
    back = unpack_units(pack_units(np.array(numbers, np.int64)), most=len(numbers))
    assert back.tolist() == numbers
    assert back.dtype == np.int64


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "0 bytes"),
        (packed((0, 1))[:-1], "15 bytes"),
        (packed((0, 1)) + b"\0" * 8, "24 bytes"),
        (packed((-1, 2)), "begin with -1 to -1"),
        (packed((0, 1), (-(2**63), 1)), "begin with -9223372036854775808 to 0"),
        (packed((0, 0)), "ranges of 0 to 0 units"),
        (packed((0, 1), (4, -3)), "ranges of -3 to 1 units"),
        (packed((0, 11)), "ranges of 11 to 11 units"),
        (packed((0, 2**63 - 1)), "ranges of 9223372036854775807 to"),
        (packed((2**63 - 1, 2)), "begin with 9223372036854775807 to"),
        (packed((MAX_POSITION + 1, 1)), f"begin with {MAX_POSITION + 1}"),
        (packed((0, 6), (10, 5)), "11 units in 2 ranges"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_units_that_make_no_sense_are_refused_by_name(data: bytes, named: str):
    with pytest.raises(MessageError, match=named):
        unpack_units(data, most=10)


def test_as_many_units_as_there_can_be_are_not_too_many():
    assert unpack_units(packed((0, 6), (10, 4)), most=10).tolist() == [0, 1, 2, 3, 4, 5, 10, 11, 12, 13]


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1)), min_size=1, max_size=4))
def test_whatever_comes_is_units_or_refused(ranges: list[tuple[int, int]]):
    try:
        units = unpack_units(packed(*ranges), most=50)
    except MessageError:
        return
    assert 1 <= len(units) <= 50
    assert units.min() >= 0


# ---- where the receiver has them ------------------------------------------------------------------------------------


def layout(page_tokens: int, share: TokenShare = WHOLE, *, window_tokens: int | None = None) -> RankLayout:
    shard = byte_shard(page_tokens=page_tokens, num_pages=1000, window_tokens=window_tokens)
    return RankLayout(shards=(shard,), tokens=share)


def kv(page_tokens: int, unit_tokens: int, *, there: int | None = None) -> Route:
    return Route(
        source_group="kv",
        destination_group="kv",
        source_page_tokens=there or page_tokens,
        destination_page_tokens=page_tokens,
        source_share=WHOLE,
        destination_share=WHOLE,
        unit_tokens=unit_tokens,
        has_slots=False,
    )


def wanted(held: int, start: int, stop: int, *pages: int, first_page: int) -> GroupRequest:
    return GroupRequest("kv", held, start, stop, first_page, PageNumbers.of(np.array(pages, np.int64)))


def found(
    numbers: Sequence[int],
    route: Route,
    group: GroupRequest,
    unit: Unit = Unit.WHOLE,
    share: TokenShare = WHOLE,
    tokens: int | None = None,
) -> list[tuple[int, int]]:
    """(page, unit of the page) of every unit."""
    units, pages = places_of_units(np.array(numbers), route, group, share, unit=unit, tokens=tokens)
    return list(zip(pages.tolist(), units.tolist(), strict=True))


def test_units_lie_where_the_receivers_pages_say():
    group = wanted(40, 40, 70, 9, 4, 6, first_page=2)
    assert found([3, 4], kv(16, 16), group) == [(4, 0), (6, 0)]
    assert found([10, 11, 12, 17], kv(16, 4), group) == [(9, 2), (9, 3), (4, 0), (6, 1)]
    assert found([40, 47, 48, 79], kv(16, 4), group, Unit.TOKEN) == [(9, 8), (9, 15), (4, 0), (6, 15)]


@pytest.mark.parametrize(
    ("numbers", "unit", "named"),
    [
        ([39], Unit.TOKEN, "units 39 to 39 of 1 tokens in group 'kv' .* positions 40 to 80"),
        ([0], Unit.TOKEN, "positions 40 to 80"),
        ([40, 39, 41], Unit.TOKEN, "units 39 to 41"),
        ([80], Unit.TOKEN, "units 80 to 80"),
        ([79, 80], Unit.TOKEN, "units 79 to 80"),
        ([9], Unit.WHOLE, "units 9 to 9 of 4 tokens"),
        ([20], Unit.WHOLE, "units 20 to 20 of 4 tokens"),
        ([MAX_POSITION], Unit.WHOLE, f"units {MAX_POSITION} to {MAX_POSITION}"),
    ],
)
def test_units_that_were_not_group_for_are_refused_by_name(numbers: list[int], unit: Unit, named: str):
    """Not behind the pages that were given, and not in the prefix, though it ends in one of them."""
    with pytest.raises(MessageError, match=named):
        found(numbers, kv(16, 4), wanted(40, 40, 70, 9, 4, 6, first_page=2), unit)


def test_a_unit_that_begins_in_the_prefix_is_refused():
    group = wanted(38, 38, 70, 9, 4, 6, first_page=2)
    assert found([10], kv(16, 4), group) == [(9, 2)]
    with pytest.raises(MessageError, match="units 9 to 9"):
        found([9], kv(16, 4), group)
    assert found([38], kv(16, 4), group, Unit.TOKEN) == [(9, 6)]


def test_what_lies_before_a_window_in_its_page_may_come_along_but_no_page_before():
    """The receiver gave its pages from the request's first on, and needs tokens 38 to 70 of them."""
    group = wanted(3, 38, 70, 1, 2, 9, 4, 6, first_page=0)
    assert found([8], kv(16, 4), group) == [(9, 0)]
    with pytest.raises(MessageError, match="positions 32 to 80"):
        found([7], kv(16, 4), group)


def test_a_rank_of_context_parallelism_counts_its_own_tokens():
    share = TokenShare(interleaved(2, 8), 1)
    group = wanted(20, 20, 64, 5, 6, 7, first_page=0)
    # It has 8 to 16, 24 to 32, ...: of the 20 tokens of the prefix eight, which are its local positions 0 to 8.
    assert found([8, 31], kv(16, 8), group, Unit.TOKEN, share, 64) == [(5, 8), (6, 15)]
    with pytest.raises(MessageError, match="positions 8 to 48"):
        found([7], kv(16, 8), group, Unit.TOKEN, share, 64)


def test_a_slot_is_its_only_unit():
    route = Route(
        source_group="state",
        destination_group="state",
        source_page_tokens=1,
        destination_page_tokens=1,
        source_share=WHOLE,
        destination_share=WHOLE,
        unit_tokens=1,
        has_slots=True,
    )
    share = TokenShare(contiguous(2), 1)
    assert found([0], route, wanted(0, 0, 1, 7, first_page=0), share=share) == [(7, 0)]
    with pytest.raises(MessageError, match="group 'state'"):
        found([1], route, wanted(0, 0, 1, 7, first_page=0), share=share)
    with pytest.raises(MessageError, match="positions 0 to 0"):
        found([0], route, wanted(0, 0, 0, first_page=0), share=share)


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[Route, GroupRequest, TokenShare, int | None, dict[Unit, tuple[Move, ...]]]:
    """A route, what a receiver wants, and everything that the sender would write."""
    sizes = draw(st.tuples(st.integers(1, 8), st.integers(1, 8)))
    partitions = [st.just((WHOLE, WHOLE))]
    kinds = [interleaved(2, 3), interleaved(3, 2), contiguous(2), contiguous(3, 4), zigzag(2)]
    partitions += [st.just((TokenShare(kind, part), TokenShare(kind, part))) for kind in kinds for part in (0, 1)]
    partitions += [st.just((TokenShare(one, 0), TokenShare(other, 1))) for one, other in product(kinds, kinds)]
    shares = draw(st.one_of(partitions))
    tokens = draw(st.integers(1, 40))
    prefix = draw(st.integers(0, tokens))
    window = draw(st.none() | st.integers(1, 12))
    source, destination = (layout(size, share, window_tokens=window) for size, share in zip(sizes, shares, strict=True))
    share, page_tokens = destination.tokens, sizes[1]
    block = share.partition.block(tokens)
    start = max(prefix, tokens - (window or tokens))
    low, high = share.held_before(start, block=block), share.held_before(tokens, block=block)
    first_page = 0 if draw(st.booleans()) else low // page_tokens
    count = max(0, -(-high // page_tokens) - first_page) if low < high else 0
    pages = draw(st.permutations(range(100, 100 + count)))
    (group,) = demands_of(
        destination, {"kv": GroupPages(pages, first_page)}, prefix_tokens=prefix, tokens=tokens, where="here"
    )
    route = route_between(source, "kv", destination, "kv")
    mine = source.tokens.held_before(tokens, block=source.tokens.partition.block(tokens))
    handed = np.arange(-(-mine // sizes[0]), dtype=np.int64)
    chunk = Chunk(number=0, parts=(ChunkPart("kv", 0, handed),), is_last=True)
    moves = moves_of(chunk, ReceiverRequest(tokens, {"kv": group}, (route,)))
    return route, group, share, tokens, moves


@given(exchanges())
def test_whatever_a_sender_writes_lies_where_it_would_have_written_it(exchange: Any):
    route, group, share, tokens, moves = exchange
    for unit, of_unit in moves.items():
        for move in of_unit:
            numbers = unpack_units(pack_units(move.destination_numbers), most=len(move.destination_numbers))
            units, pages = places_of_units(numbers, route, group, share, unit=unit, tokens=tokens)
            assert units.tolist() == move.destination_units.tolist()
            assert pages.tolist() == move.destination_pages.tolist()


@given(exchanges(), st.sampled_from(Unit), st.integers(0, 60))
def test_no_token_outside_of_the_pages_that_were_group_for_is_touched(exchange: Any, unit: Unit, number: int):
    """A unit is refused, unless all of it lies in the pages of what is needed, and none in the prefix."""
    route, group, share, tokens, _ = exchange
    size, page_tokens = route.unit_tokens if unit is Unit.WHOLE else 1, route.destination_page_tokens
    block = share.partition.block(tokens)
    held, low, high = (
        share.held_before(each, block=block) for each in (group.demand.held, group.demand.start, group.demand.stop)
    )
    positions = range(number * size, (number + 1) * size)
    is_group_for = low < high and all(
        held <= position and low // page_tokens <= position // page_tokens <= (high - 1) // page_tokens
        for position in positions
    )
    try:
        units, pages = places_of_units(np.array([number]), route, group, share, unit=unit, tokens=tokens)
    except MessageError:
        assert not is_group_for
        return
    assert is_group_for
    assert pages.tolist() == group.pages[np.array([positions.start // page_tokens - group.first_page])].tolist()
    assert units.tolist() == [positions.start % page_tokens // size]


# ---- loads ----------------------------------------------------------------------------------------------------------

HEADS, BYTES_PER_HEAD = 4, 4


def attention(order: str, heads: Interval, page_tokens: int, *, base: int, padding: int = 0) -> RankLayout:
    """Two layers of some heads, of keys and values, as NHD or HND, with bytes between pages that are nobody's."""
    shards = []
    for number, name in enumerate("kv"):
        component = Component(
            name=name, axes=(Axis("layer", 2), Axis("head", HEADS), Axis("dim", BYTES_PER_HEAD)), dtype="uint8"
        )
        head = BYTES_PER_HEAD if order == "NHD" else BYTES_PER_HEAD * page_tokens
        token = BYTES_PER_HEAD * len(heads) if order == "NHD" else BYTES_PER_HEAD
        page = BYTES_PER_HEAD * len(heads) * page_tokens + padding
        shards.append(
            Shard(
                component=component,
                box=(Interval(0, 2), heads, Interval(0, BYTES_PER_HEAD)),
                addresses=tuple(base + (2 * number + layer << 16) for layer in range(2)),
                strides=(head, 1),
                paging=Paging(page_tokens, 50, page, token),
            )
        )
    return RankLayout(shards=tuple(shards))


def starts_in(rows: RowArray, numbers: DescriptorIndices) -> list[int]:
    """Where descriptors of a list of rows begin."""
    all_starts = np.concatenate([row[0] + row[3] * np.arange(row[4], dtype=np.uint64) for row in rows])
    return [int(start) for start in all_starts[numbers]]


@dataclass(frozen=True)
class Written:
    """A write between two such ranks."""

    plan: PairPlan
    elected: tuple[ElectedRoute, ...]
    unit: Unit
    moves: tuple[Move, ...]

    @property
    def loads(self) -> tuple[MovedBlocks, ...]:
        return moved_blocks(self.elected, self.moves, self.plan.packed_pieces(self.unit))

    def load(self, chunk_bytes: int = 1 << 20) -> Any:
        return write_size_of(self.loads, self.moves, self.plan.packed_pieces(self.unit), chunk_bytes=chunk_bytes)

    def descriptors(self) -> list[tuple[int, int, int]]:
        """(source, destination, length) of every descriptor of the direct write, in its order."""
        rows = self.plan.descriptor_rows(self.unit)
        chosen = []
        for move in self.moves:
            for piece in self.elected[move.route].pieces:
                numbers = rows.pieces[piece]
                source = numbers.source.indices(move.source_units, move.source_pages)
                destination = numbers.destination.indices(move.destination_units, move.destination_pages)
                sides = starts_in(rows.source, source), starts_in(rows.destination, destination)
                chosen += [(here, there, numbers.length) for here, there in zip(*sides, strict=True)]
        return chosen

    def merged(self) -> int:
        """How many descriptors are left once neighbours on both sides are one."""
        count, stops = 0, (-1, -1)
        for source, destination, length in self.descriptors():
            count += stops != (source, destination)
            stops = source + length, destination + length
        return count


ALL = Interval(0, HEADS)
HALF = Interval(1, 3)


def write(
    here: tuple[str, Interval, int],
    there: tuple[str, Interval, int],
    source_pages: Sequence[int],
    destination_pages: Sequence[int],
    *,
    numbers: Sequence[int] | None = None,
    unit: Unit = Unit.WHOLE,
    padding: int = 0,
) -> Written:
    """All tokens of the pages, or the units of the given numbers."""
    source = attention(*here, base=1 << 24, padding=padding)
    destination = attention(*there, base=1 << 26)
    common = here[1].overlap(there[1])
    assert common is not None
    box = (Interval(0, 2), common, Interval(0, BYTES_PER_HEAD))
    plan = PairPlan(source, destination, [Piece(name, box, 0, (0,)) for name in "kv"])
    elected = plan.elected(0, writer=0, receiver=0)
    size = elected[0].route.unit_tokens if unit is Unit.WHOLE else 1
    if numbers is None:
        numbers = range(min(len(source_pages) * here[2], len(destination_pages) * there[2]) // size)
    order = [np.divmod(np.array(numbers, np.int64), page_tokens // size) for _, _, page_tokens in (here, there)]
    move = Move(
        route=0,
        source_pages=np.array(source_pages, np.int64)[order[0][0]],
        source_units=order[0][1],
        destination_pages=np.array(destination_pages, np.int64)[order[1][0]],
        destination_units=order[1][1],
        destination_numbers=np.array(numbers, np.int64),
    )
    return Written(plan, elected, unit, (move,))


IN_ORDER, SCATTERED = range(3, 9), (3, 9, 4, 12, 6, 20)

EXAMPLES = {
    "pages in order, dense on both sides": (write(("NHD", ALL, 4), ("NHD", ALL, 4), IN_ORDER, IN_ORDER), 4),
    "pages in order, and others in order": (write(("HND", ALL, 4), ("HND", ALL, 4), IN_ORDER, range(20, 26)), 4),
    "scattered pages": (write(("NHD", ALL, 4), ("NHD", ALL, 4), IN_ORDER, SCATTERED), 4 * 6),
    "some pages in order on both sides": (
        write(("NHD", ALL, 4), ("NHD", ALL, 4), (1, 2, 3, 7, 8, 9), (4, 5, 8, 9, 10, 12)),
        4 * 4,
    ),
    "padded pages": (write(("NHD", ALL, 4), ("NHD", ALL, 4), IN_ORDER, IN_ORDER, padding=8), 4 * 6),
    "a slice of the heads": (write(("NHD", ALL, 4), ("NHD", HALF, 4), IN_ORDER, IN_ORDER), 4 * 6 * 4),
    "a slice of the heads, outside of tokens": (
        write(("HND", ALL, 4), ("HND", HALF, 4), IN_ORDER, IN_ORDER),
        4 * 6,
    ),
    "another order": (write(("NHD", ALL, 4), ("HND", ALL, 4), IN_ORDER, IN_ORDER), 4 * 6 * 16),
    "pages of other sizes": (write(("NHD", ALL, 4), ("NHD", ALL, 6), (5, 6, 7), (9, 10)), 4),
    "pages of other sizes, scattered": (write(("NHD", ALL, 4), ("NHD", ALL, 6), (5, 9, 7), (9, 10)), 4 * 3),
    "heads outside of tokens, and several units in a page": (
        write(("HND", ALL, 4), ("HND", ALL, 6), (5, 6, 7), (9, 10)),
        4 * HEADS * 4,
    ),
    "pages in order of which the end of one is left out": (
        write(("NHD", ALL, 4), ("NHD", ALL, 6), (5, 6, 7), (9, 10), numbers=(0, 2, 3)),
        4 * 2,
    ),
    "single tokens": (
        write(("NHD", ALL, 4), ("NHD", ALL, 4), (5, 6), (9, 10), numbers=(2, 3, 4, 6), unit=Unit.TOKEN),
        4 * 2,
    ),
    "single tokens of which the end of a page is left out": (
        write(("NHD", ALL, 4), ("NHD", ALL, 4), (5, 6), (9, 10), numbers=(0, 1, 4, 5), unit=Unit.TOKEN),
        4 * 2,
    ),
    "single tokens inside of heads": (
        write(("HND", ALL, 4), ("HND", ALL, 4), (5, 6), (9, 10), numbers=(2, 3, 4, 5), unit=Unit.TOKEN),
        4 * HEADS * 2,
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_load_has_the_descriptors_that_merging_neighbours_leaves(name: str):
    written, expected = EXAMPLES[name]
    load = written.load()
    every = written.descriptors()
    assert written.merged() == expected
    assert load.descriptors == expected
    assert load.runs == len(every)
    assert load.num_bytes == sum(length for _, _, length in every)


sides = st.tuples(st.sampled_from(["NHD", "HND"]), st.sampled_from([ALL, HALF]), st.integers(1, 6))


@given(sides, sides, st.data())
def test_no_load_has_fewer_descriptors_than_merging_leaves(here: Any, there: Any, data: st.DataObject):
    """It may have more: of unlike layers or heads too, the last may end where the next begins."""
    pages = [data.draw(st.permutations(range(8)) | st.just(range(8))) for _ in range(2)]
    whole = write(here, there, *pages)
    count = len(whole.moves[0].source_pages)
    numbers = data.draw(st.sets(st.integers(0, count - 1), min_size=1).map(sorted))
    written = write(here, there, *pages, numbers=numbers)
    load, every = written.load(), written.descriptors()
    assert written.merged() <= load.descriptors <= load.runs == len(every)
    assert load.num_bytes == sum(length for _, _, length in every)


def test_blocks_are_counted_move_by_move_and_piece_by_piece():
    written = write(("NHD", ALL, 4), ("NHD", HALF, 2), (1, 2), (3, 4, 5, 6))
    assert written.loads == (MovedBlocks(0, 0, 2, 4, 16), MovedBlocks(0, 1, 2, 4, 16))


def test_only_elected_pieces_are_loaded():
    written = write(("NHD", ALL, 4), ("NHD", ALL, 4), (1,), (3,))
    only = (ElectedRoute(written.elected[0].route, (1,), written.elected[0].layers),)
    assert moved_blocks(only, written.moves, written.plan.packed_pieces(Unit.WHOLE)) == (MovedBlocks(0, 1, 2, 1, 64),)


def test_a_load_goes_in_as_many_bulk_writes_as_there_are_sub_chunks():
    written = write(("NHD", ALL, 4), ("NHD", ALL, 4), IN_ORDER, IN_ORDER)
    assert written.load().num_bytes == 4 * 6 * 64
    assert written.load(chunk_bytes=4 * 6 * 64).bulk_writes == 1
    assert written.load(chunk_bytes=6 * 64).bulk_writes == 4
    assert written.load(chunk_bytes=3 * 64).bulk_writes == 8


def test_a_packed_page_is_one_run():
    shard = byte_shard(entry=Entry.PAGE)
    here = RankLayout(shards=(shard,))
    plan = PairPlan(here, here, [Piece("k", shard.box, 0, (0,))])
    pages = np.array([4, 5, 9])
    move = Move(0, pages, np.zeros(3, np.int64), pages, np.zeros(3, np.int64), np.arange(3))
    written = Written(plan, plan.elected(0, writer=0, receiver=0), Unit.WHOLE, (move,))
    load = written.load()
    assert (load.runs, load.descriptors, load.num_bytes) == (3, written.merged(), 3)
    assert load.descriptors == 2
