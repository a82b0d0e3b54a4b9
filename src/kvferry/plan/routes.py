"""Which token positions travel between two ranks, and where each lies in either one's pages.

Both sides number the positions that they hold from 0. Where both sides partition tokens alike, the same numbers mean
the same tokens; otherwise a segment is a range that lies together on both sides. Segments are moved in units, the most
tokens that lie together in every page of either side, and what is left at their ends token by token.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from kvferry.layout import PageGroup, RankLayout, TokenShare
from kvferry.layout.tokens import Ranges

Positions = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Route:
    """The way from the pages of one group of a source rank to those of one group of a receiver.

    Attributes:
        source_group: the name of the group on the source side.
        destination_group: the name of the group on the destination side.
        source_page_tokens: the page size there, in tokens.
        destination_page_tokens: the page size on the destination side.
        source_share: the positions that the source rank holds.
        destination_share: the positions that the destination rank holds.
        unit_tokens: tokens that are moved together.
        has_slots: whether pages are slots with the one entry of a request.
    """

    source_group: str
    destination_group: str
    source_page_tokens: int
    destination_page_tokens: int
    source_share: TokenShare
    destination_share: TokenShare
    unit_tokens: int
    has_slots: bool


def route_between(source: RankLayout, source_group: str, destination: RankLayout, destination_group: str) -> Route:
    """Makes the route from a group of one rank to a group of another."""
    here, there = source.group(source_group), destination.group(destination_group)
    shares = source.share_of(here), destination.share_of(there)
    return Route(
        source_group=source_group,
        destination_group=destination_group,
        source_page_tokens=here.page_tokens,
        destination_page_tokens=there.page_tokens,
        source_share=shares[0],
        destination_share=shares[1],
        unit_tokens=unit_tokens(here, there, *shares),
        has_slots=here.has_slots,
    )


def unit_tokens(
    source: PageGroup, destination: PageGroup, source_share: TokenShare, destination_share: TokenShare
) -> int:
    """Returns how many tokens always lie together in pages of both sides."""
    unit = gcd(source.page_tokens, destination.page_tokens)
    if source_share.partition == destination_share.partition:
        return unit
    for share in (source_share, destination_share):
        if not share.partition.is_whole and share.partition.cut_tokens is not None:
            unit = gcd(unit, share.partition.cut_tokens)
    return unit


@dataclass(frozen=True, slots=True)
class Demand:
    """What a receiver needs of one group: positions in the request, not local ones.

    Attributes:
        held: the receiver has the positions before this one, which must not be touched.
        start: the first position that it needs.
        stop: the first after those that it needs.
    """

    held: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Ranges of tokens that lie together on both sides, by local positions.

    Attributes:
        source: where each range starts on the source side.
        destination: where each range starts on the destination side.
        lengths: tokens of each.
    """

    source: Positions
    destination: Positions
    lengths: Positions


def needed_locally(share: TokenShare, demand: Demand, *, request_tokens: int | None) -> tuple[int, int]:
    """Returns the local positions, first and stop, of a rank's share of what a receiver needs."""
    block = share.partition.block(request_tokens)
    return share.held_before(demand.start, block=block), share.held_before(demand.stop, block=block)


def segments_between(route: Route, demand: Demand, *, first: int, stop: int, request_tokens: int | None) -> Segments:
    """Returns what is sent of the source's local positions [first, stop).

    Ends are widened to whole units as far as the receiver allows: what lies behind the request's last token in its
    page, or before a window in its page, belongs to the request as well. Only where the sides partition tokens
    differently, and one of them may cut between any two, so that units may lie apart, nothing is widened.
    """
    source, destination = route.source_share, route.destination_share
    if source.partition == destination.partition:
        return _alike(route, demand, first, stop, request_tokens)
    source_block = source.partition.block(request_tokens)
    destination_block = destination.partition.block(request_tokens)
    low, high = demand.start, demand.stop
    if low < high and None not in (source.partition.cut_tokens, destination.partition.cut_tokens):
        low, high = _widened(low, high, demand.held, route.unit_tokens)
    low = max(low, source.position(first, block=source_block))
    high = min(high, source.position(stop - 1, block=source_block) + 1) if stop > first else low
    if low >= high:
        return _segments([], [], [])
    starts, stops = _shared(
        source.ranges(low, high, block=source_block), destination.ranges(low, high, block=destination_block)
    )
    return Segments(
        source=source.local(starts, block=source_block),
        destination=destination.local(starts, block=destination_block),
        lengths=stops - starts,
    )


def _shared(one: Ranges, other: Ranges) -> Ranges:
    """Intersects two ascending lists of ranges. The result is ascending too."""
    (starts, stops), (other_starts, other_stops) = one, other
    first = np.searchsorted(other_stops, starts, side="right")
    counts = np.maximum(np.searchsorted(other_starts, stops, side="left") - first, 0)
    mine, theirs = np.repeat(np.arange(len(starts)), counts), ascending_ranges(first, counts)
    return np.maximum(starts[mine], other_starts[theirs]), np.minimum(stops[mine], other_stops[theirs])


def _alike(route: Route, demand: Demand, first: int, stop: int, request_tokens: int | None) -> Segments:
    share, unit = route.source_share, route.unit_tokens
    if share.part != route.destination_share.part:
        return _segments([], [], [])
    block = share.partition.block(request_tokens)
    held, low, high = (share.held_before(each, block=block) for each in (demand.held, demand.start, demand.stop))
    if low >= high:
        return _segments([], [], [])
    low, high = _widened(low, high, held, unit)
    low, high = max(low, first), min(high, stop)
    return _segments([low], [low], [high - low]) if low < high else _segments([], [], [])


def _widened(low: int, high: int, held: int, unit: int) -> tuple[int, int]:
    """Widens [low, high) to the units that it touches, without what lies before `held`."""
    return max(low // unit * unit, min(held, low)), -(-high // unit) * unit


def _segments(source: list[int], destination: list[int], lengths: list[int]) -> Segments:
    return Segments(*(np.array(each, np.int64) for each in (source, destination, lengths)))


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """Units of equally many tokens, numbered on either side by local position divided by `tokens`.

    Attributes:
        tokens: tokens in a unit.
        source: the units' numbers on the source side, shape [units].
        destination: the same on the destination side.
    """

    tokens: int
    source: Positions
    destination: Positions

    def __len__(self) -> int:
        return len(self.source)


def units_of(segments: Segments, unit_tokens: int) -> tuple[Units, Units]:
    """Divides segments into whole units, and into single tokens what does not fill one."""
    source, destination, lengths = segments.source, segments.destination, segments.lengths
    if unit_tokens == 1:
        return Units(1, ascending_ranges(source, lengths), ascending_ranges(destination, lengths)), Units(
            1, source[:0], source[:0]
        )
    head = np.minimum(-source % unit_tokens, lengths)
    is_aligned = (source - destination) % unit_tokens == 0
    head = np.where(is_aligned, head, lengths)
    whole = (lengths - head) // unit_tokens
    body = head + whole * unit_tokens
    units = Units(
        unit_tokens,
        ascending_ranges((source + head) // unit_tokens, whole),
        ascending_ranges((destination + head) // unit_tokens, whole),
    )
    tail = lengths - body
    tokens = Units(
        1,
        np.concatenate([ascending_ranges(source, head), ascending_ranges(source + body, tail)]),
        np.concatenate([ascending_ranges(destination, head), ascending_ranges(destination + body, tail)]),
    )
    return units, tokens


def ascending_ranges(starts: Positions, counts: Positions) -> Positions:
    """Joins the ranges start, start + 1, ... of as many numbers as counted, for every start."""
    if len(starts) == 1:
        return np.arange(starts[0], starts[0] + counts[0], dtype=np.int64)
    before = np.cumsum(counts) - counts
    ranges: Positions = np.repeat(starts - before, counts) + np.arange(int(counts.sum()), dtype=np.int64)
    return ranges
