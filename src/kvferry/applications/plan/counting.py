"""How many bytes, runs and descriptors a request takes between two ranks, counted from the plan itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvferry.layout import Entry, RankLayout, Shard
from kvferry.plan import Demand, Piece, Route, Runs, Units, lower, route_between, segments_between, units_of
from kvferry.plan.lowering import PageSteps

Numbers = NDArray[np.int64]


class PagePlacement(str, Enum):
    """Which pages of a pool a request gets: any, of which no two are neighbours, or one after the other."""

    SCATTERED = "scattered"
    ADJACENT = "adjacent"

    @property
    def step(self) -> int:
        """From one page of a request to the next."""
        return 1 if self is PagePlacement.ADJACENT else 2


@dataclass(frozen=True, slots=True)
class Travelling:
    """What travels of one piece in a request.

    Attributes:
        tokens: how many tokens have an entry that travels; 0 for slots. The last page travels as whole units.
        num_bytes: of all entries.
        runs: contiguous runs, before any are merged.
        descriptors: after merging neighbours, by how the request's pages lie.
    """

    tokens: int
    num_bytes: int
    runs: int
    descriptors: dict[PagePlacement, int]


class RoutedPiece:
    """A piece on its way between two ranks."""

    def __init__(self, piece: Piece, source: RankLayout, destination: RankLayout) -> None:
        here, there = (layout.shard_with(piece.component, piece.box) for layout in (source, destination))
        assert here is not None
        assert there is not None
        self.piece = piece
        self.source: Shard = here
        self.destination: Shard = there
        self.route: Route = route_between(source, here.group, destination, there.group)

    @cached_property
    def runs(self) -> Runs:
        """Its runs in a whole unit."""
        return self._lowered(self.route.unit_tokens)

    def _lowered(self, unit_tokens: int) -> Runs:
        return lower(self.piece.box, self.source, self.destination, unit_tokens=unit_tokens)

    @property
    def is_windowed(self) -> bool:
        """Whether only the tokens of a window travel."""
        return self.destination.component.window_tokens is not None

    @property
    def bytes_per_entry(self) -> int:
        """Bytes of a token, rounded up where pages are packed, or of a slot."""
        units = self.runs.bytes_per_unit
        return units if self.route.has_slots else -(-units // self.route.unit_tokens)

    @property
    def runs_per_page(self) -> int:
        """Runs of a whole page of the source, or of a slot."""
        return self.runs.count * self.runs.source_steps.units

    def travelling(self, request_tokens: int) -> Travelling:
        """What a request of that length takes."""
        units, tokens = units_in_request(self.route, self.destination.component.window_tokens, request_tokens)
        counted = [(units, self.runs)]
        if len(tokens):
            unit = 1 if self.source.component.entry is Entry.TOKEN else self.route.unit_tokens
            counted.append((tokens, self._lowered(unit)))
        counted = [(units, runs) for units, runs in counted if len(units)]
        return Travelling(
            tokens=0 if self.route.has_slots else sum(len(units) * units.tokens for units, _ in counted),
            num_bytes=sum(len(units) * runs.bytes_per_unit for units, runs in counted),
            runs=sum(len(units) * runs.count for units, runs in counted),
            descriptors={
                pages: sum(_merged(self.route, units, runs, pages) for units, runs in counted)
                for pages in PagePlacement
            },
        )


def units_in_request(route: Route, window_tokens: int | None, request_tokens: int) -> tuple[Units, Units]:
    """The units, and the single tokens beside them, that a whole request takes along a route."""
    if route.has_slots:
        start, stop = 0, 1
    else:
        start, stop = 0 if window_tokens is None else max(0, request_tokens - window_tokens), request_tokens
    share, page = route.source_share, route.source_page_tokens
    local = share.held_before(stop, block=share.partition.block(request_tokens))
    segments = segments_between(
        route, Demand(0, start, stop), first=0, stop=-(-local // page) * page, request_tokens=request_tokens
    )
    return units_of(segments, route.unit_tokens)


def _merged(route: Route, units: Units, runs: Runs, pages: PagePlacement) -> int:
    """Descriptors that are left when those that follow each other on both sides become one.

    In the order of `descriptor_indices`. All layers look alike, and lie apart: one is counted.
    """
    sides = (
        (runs.source, runs.source_steps, units.source, route.source_page_tokens),
        (runs.destination, runs.destination_steps, units.destination, route.destination_page_tokens),
    )
    layers = len(runs.source_bases)
    ends = np.ones(runs.count // layers * len(units) - 1, np.bool_)
    for starts, steps, numbers, page_tokens in sides:
        of_layer = starts[: len(starts) // layers].astype(np.int64)
        offsets = _unit_offsets(numbers, steps, page_tokens // units.tokens, pages)
        addresses = np.add.outer(of_layer, offsets).ravel()
        ends &= np.diff(addresses) == runs.length
    return layers * (1 + int(np.count_nonzero(~ends)))


def _unit_offsets(numbers: Numbers, steps: PageSteps, units_per_page: int, pages: PagePlacement) -> Numbers:
    order, within = np.divmod(numbers, units_per_page)
    offsets: Numbers = order * pages.step * steps.page_stride + within * steps.unit_stride
    return offsets


def total(parts: Iterable[Travelling]) -> Travelling:
    """The sum; of the tokens, which parts have in common, the most."""
    parts = list(parts)
    return Travelling(
        tokens=max((part.tokens for part in parts), default=0),
        num_bytes=sum(part.num_bytes for part in parts),
        runs=sum(part.runs for part in parts),
        descriptors={pages: sum(part.descriptors[pages] for part in parts) for pages in PagePlacement},
    )
