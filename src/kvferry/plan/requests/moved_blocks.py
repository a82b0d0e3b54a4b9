"""The blocks of a write: how much they are, where they lie in a receiver's pages, and which of them a digest covers.

A segment's blocks are packed index by index of the first axis, unit by unit, and packed they are the same bytes on both
sides, however either side lays them out. A row is the part of such a segment that goes to one page of the receiver,
index after index. Each row has a digest. Where pages are small, several that follow each other make one row, so that
digests are never much to send.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import MessageError
from kvferry.layout import RankLayout, TokenShare
from kvferry.plan import ElectedRoute, Route, Unit, WriteSize, places
from kvferry.plan.lowering import PageSteps
from kvferry.plan.packing import MovedBlocks, PackedPiece, count_sub_chunks
from kvferry.plan.requests.demands import MAX_POSITION, GroupRequest
from kvferry.plan.requests.moves import Move
from kvferry.plan.requests.page_numbers import Pages
from kvferry.plan.routes import ascending_ranges


def moved_blocks(
    elected: Sequence[ElectedRoute], moves: Sequence[Move], packed: Sequence[PackedPiece]
) -> tuple[MovedBlocks, ...]:
    """Lists the blocks of a write, piece by piece.

    Args:
        elected: what the rank sends in the room; moves refer to it.
        packed: every piece of the pair's plan, in the unit of the moves.
    """
    return tuple(
        MovedBlocks(number, piece, stop - first, len(move.source_pages), packed[piece].block_bytes, first)
        for number, move in enumerate(moves)
        for piece in elected[move.route].pieces
        for first, stop in [packed[piece].bases(move.layers)]
        if packed[piece].block_bytes and stop > first
    )


def bytes_of(loads: Iterable[MovedBlocks]) -> int:
    """Returns how many bytes the blocks of a write have.

    Args:
        loads: as in `moved_blocks`.
    """
    return sum(load.num_bases * load.num_units * load.block_bytes for load in loads)


def write_size_of(
    loads: Iterable[MovedBlocks], moves: Sequence[Move], packed: Sequence[PackedPiece], *, chunk_bytes: int
) -> WriteSize:
    """Works out the size of a write, on which its cost depends.

    Args:
        loads: as in `moved_blocks`.
        moves: as in `moved_blocks`.
        packed: as in `moved_blocks`.
        chunk_bytes: bytes of a sub-chunk.
    """
    loads = tuple(loads)
    num_bytes = runs = descriptors = 0
    parts: dict[tuple[int, PageSteps, PageSteps, int], int] = {}  # the same for pieces that are laid out alike
    for load in loads:
        piece, move = packed[load.piece], moves[load.move]
        blocks = load.num_bases * load.num_units
        num_bytes += blocks * load.block_bytes
        runs += blocks * piece.block_runs
        run_bytes = load.block_bytes // piece.block_runs
        key = load.move, piece.source.steps, piece.destination.steps, run_bytes
        if key not in parts:
            parts[key] = _parts(move, piece, run_bytes)
        descriptors += load.num_bases * piece.block_runs * parts[key]
    return WriteSize(num_bytes, runs, descriptors, count_sub_chunks(loads, chunk_bytes))


def _parts(move: Move, piece: PackedPiece, run_bytes: int) -> int:
    """Returns in how many parts one run of all units lies, once the transport has merged neighbours on both sides."""
    here = _follows(move.source_pages, move.source_units, piece.source.steps, run_bytes)
    there = _follows(move.destination_pages, move.destination_units, piece.destination.steps, run_bytes)
    return 1 + int(np.count_nonzero(~(here & there)))


def _follows(pages: Pages, units: Pages, steps: PageSteps, run_bytes: int) -> NDArray[np.bool_]:
    """Returns for every unit but the first whether its run begins where that of the one before it ends."""
    offsets = pages * steps.page_stride
    if steps.units > 1:
        offsets = offsets + units * steps.unit_stride
    follows: NDArray[np.bool_] = np.diff(offsets) == run_bytes
    return follows


def pack_units(numbers: Pages) -> bytes:
    """Packs units' numbers as they are sent in `StagedSegment`: as ranges, first and count of each."""
    firsts = np.concatenate([[0], np.flatnonzero(np.diff(numbers) != 1) + 1])
    counts = np.diff(firsts, append=len(numbers))
    return np.stack([numbers[firsts], counts], axis=1).astype("<i8").tobytes()


def unpack_units(data: bytes, *, most: int) -> Pages:
    """Unpacks units' numbers, the inverse of `pack_units`.

    Args:
        most: the most units that there can be.

    Raises:
        MessageError: if the bytes are no ranges, or of more units than that.
    """
    if len(data) % 16 or not data:
        raise MessageError(f"{len(data)} bytes of units are not a multiple of 16, or nothing")
    ranges = np.frombuffer(data, "<i8").astype(np.int64, copy=False).reshape(-1, 2)
    firsts, counts = ranges[:, 0], ranges[:, 1]
    if firsts.min() < 0 or firsts.max() > MAX_POSITION or counts.min() < 1 or counts.max() > most:
        raise MessageError(
            f"ranges of {counts.min()} to {counts.max()} units that begin with {firsts.min()} to {firsts.max()} make "
            f"no sense where there are {most} units, from 0 on"
        )
    if (total := int(counts.sum())) > most:
        raise MessageError(f"{total} units in {len(ranges)} ranges are more than the {most} that there can be")
    return ascending_ranges(firsts, counts)


def places_of_units(
    numbers: Pages, route: Route, wanted: GroupRequest, share: TokenShare, *, unit: Unit, tokens: int | None
) -> tuple[Pages, Pages]:
    """Returns where a receiver has units that a writer names: which unit of its page each is, and the page.

    Args:
        numbers: the units' numbers on the receiver.
        route: the route along which they came.
        wanted: what the receiver requested.
        share: the receiver's share of a request's tokens.
        tokens: how many tokens the request has.

    Raises:
        MessageError: if the receiver did not request one of them.
    """
    unit_tokens = route.unit_tokens if unit is Unit.WHOLE else 1
    page_tokens = route.destination_page_tokens
    held = low = 0
    if not route.has_slots:
        block = share.partition.block(tokens)
        held, low = (share.held_before(each, block=block) for each in (wanted.demand.held, wanted.demand.start))
    # What comes before the first token in its page may come along, unless it is held already.
    first = max(wanted.first_page * page_tokens, low // page_tokens * page_tokens, held)
    stop = (wanted.first_page + len(wanted.pages)) * page_tokens
    if int(numbers.min()) * unit_tokens < first or (int(numbers.max()) + 1) * unit_tokens > stop:
        raise MessageError(
            f"units {numbers.min()} to {numbers.max()} of {unit_tokens} tokens in group {route.destination_group!r} "
            f"are not among the positions {first} to {stop} that were asked for"
        )
    return places(
        numbers,
        unit_tokens=unit_tokens,
        page_tokens=page_tokens,
        pages=wanted.pages,
        first_page=wanted.first_page,
    )


_MOST_PLACES = 64


class UnitPlaces:
    """Finds the page of each unit, and which unit of the page it is. For several threads at once."""

    def __init__(self, layout: RankLayout, groups: tuple[GroupRequest, ...], tokens: int | None) -> None:
        """Serves one room.

        Args:
            layout: this rank's layout.
            groups: what the room requested.
            tokens: how many tokens the request has.
        """
        self._layout = layout
        self._groups = groups
        self._tokens = tokens
        # The same units come for layer after layer, and from several writers. Threads that scatter share it: an entry
        # is put there as a whole, and two threads at a time would only work out the same.
        self.found: dict[tuple[str, int, Unit, bytes], tuple[Pages, Pages]] = {}

    def find(self, units: bytes, route: Route, *, unit: Unit) -> tuple[Pages, Pages]:
        """Returns where units that a writer names lie: which of its page each is, and the page.

        Args:
            units: the units as they are sent in `StagedSegment`.
            route: the route along which they came.

        Raises:
            MessageError: if the room did not request them.
        """
        key = route.destination_group, route.unit_tokens, unit, units
        found = self.found.get(key)
        if found is None:
            wanted = self._wanted(route)
            numbers = self._numbers(units, route, unit)
            share = self._share(route)
            found = places_of_units(numbers, route, wanted, share, unit=unit, tokens=self._tokens)
            if len(self.found) >= _MOST_PLACES:
                self.found.clear()
            self.found[key] = found
        return found

    def describe(self, units: bytes, first: int, stop: int, route: Route, *, unit: Unit) -> str:
        """Describes some of the units that a writer names, by pages and tokens. `find` has accepted them before.

        Args:
            first: the first of them, by their order.
            stop: the one after the last.
        """
        _, pages = self.find(units, route, unit=unit)
        used = list(dict.fromkeys(pages[first:stop].tolist()))
        if route.has_slots:
            return f"slot {used[0]}"
        unit_tokens = route.unit_tokens if unit is Unit.WHOLE else 1
        numbers = self._numbers(units, route, unit)[first:stop]
        # Where tokens are partitioned, what a rank holds is no range of the request; the first and the last say enough.
        ends = int(numbers[0]) * unit_tokens, (int(numbers[-1]) + 1) * unit_tokens - 1
        share = self._share(route)
        block = share.partition.block(self._tokens)
        low, high = (share.position(local, block=block) for local in ends)
        orders = [local // route.destination_page_tokens for local in ends]
        which = f"page {used[0]} (page {orders[0]} of the request on this rank"
        if len(used) > 1:
            which = f"pages {used[0]} to {used[-1]} (pages {orders[0]} to {orders[1]} of the request on this rank"
        return f"{which}, group {route.destination_group!r}), tokens {low} to {high}"

    def _share(self, route: Route) -> TokenShare:
        return self._layout.share_of(self._layout.group(route.destination_group))

    def _wanted(self, route: Route) -> GroupRequest:
        return next(group for group in self._groups if group.name == route.destination_group)

    def _numbers(self, units: bytes, route: Route, unit: Unit) -> Pages:
        unit_tokens = route.unit_tokens if unit is Unit.WHOLE else 1
        pages = len(self._wanted(route).pages)
        return unpack_units(units, most=pages * route.destination_page_tokens // unit_tokens)


DIGEST_BYTES = 8
_LEAST_ROW_BYTES = 512
_MOST_ROWS = 1 << 16


def row_bytes_of(num_bytes: int) -> int:
    """Returns the least bytes of a row in a message about `num_bytes`: 65,536 rows take half a mebibyte."""
    return max(_LEAST_ROW_BYTES, -(-num_bytes // _MOST_ROWS))


def row_bounds(pages: Pages, *, unit_bytes: int, row_bytes: int) -> Pages:
    """Returns where rows begin, and where the last one ends, counted in units.

    Args:
        pages: the page of every unit on the receiver.
        unit_bytes: bytes of a unit, of all indices of the first axis.
        row_bytes: bytes that a row has at least on average, unless it is the only one.
    """
    cuts = np.flatnonzero(np.diff(pages)) + 1
    units = -(-row_bytes // unit_bytes)
    if units > 1 and len(cuts):
        _, firsts = np.unique(cuts // units, return_index=True)
        cuts = cuts[firsts]
        cuts = cuts[cuts >= units]
    return np.concatenate([np.zeros(1, np.int64), cuts, np.array([len(pages)], np.int64)])
