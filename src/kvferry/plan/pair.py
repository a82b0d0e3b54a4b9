"""Everything that one source rank may send to one receiver, worked out once when they connect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np

from kvferry.errors import IncompatiblePeerError, LayoutError
from kvferry.layout import Entry, Interval, RankLayout, Shard
from kvferry.plan.compatibility import described_alike
from kvferry.plan.descriptors import DescriptorRows, check_descriptors, descriptor_rows
from kvferry.plan.lowering import Runs, lower
from kvferry.plan.packing import PackedPiece, packed_piece
from kvferry.plan.pieces import Piece, elect_writer
from kvferry.plan.routes import Positions, Route, route_between


class PageList(Protocol):
    """Page numbers by their position in a request: an array, or what can be indexed like one."""

    def __getitem__(self, order: Positions, /) -> Positions:
        """Returns the page at each position."""


class Unit(Enum):
    """What a descriptor stands for: a unit, or a single token where a unit is cut."""

    WHOLE = "whole"
    TOKEN = "token"  # noqa: S105 - of text, not of access


@dataclass(frozen=True, slots=True)
class ElectedRoute:
    """A route and the pieces that a rank sends along it in some room.

    Attributes:
        route: the way from pages to pages.
        pieces: the numbers of the pieces in the plan.
        layers: the layers that they have, by component.
    """

    route: Route
    pieces: tuple[int, ...]
    layers: Mapping[str, tuple[Interval, ...]]


class PairPlan:
    """The plan of one source rank for one receiver.

    Attributes:
        pieces: what the rank may send.
    """

    def __init__(self, source: RankLayout, destination: RankLayout, pieces: Sequence[Piece]) -> None:
        """Works out the routes of all pieces.

        Args:
            source: the source rank's layout, as it describes itself.
            destination: the receiver's layout, likewise.
            pieces: those that the source rank is a holder of, of layouts that are described alike.

        Raises:
            IncompatiblePeerError: if one of the sides does not hold a piece.
        """
        held, destination = described_alike({0: source}, destination)
        source = held[0]
        self.pieces = tuple(pieces)
        self._shards: list[tuple[Shard, Shard]] = []
        self._routes: list[Route] = []  # of every piece
        routes: dict[tuple[str, str], Route] = {}
        for piece in self.pieces:
            here, there = _shard(source, piece, "source"), _shard(destination, piece, "receiver")
            if here.component.token_parts and piece.box[-1] != here.component.whole[-1]:
                raise IncompatiblePeerError(
                    f"the plan cuts pages of {piece.component!r} between tokens, which both sides can move whole: "
                    "they do not come to the same plan"
                )
            key = here.group, there.group
            if key not in routes:
                routes[key] = route_between(source, here.group, destination, there.group)
            is_partitioned = here.component.entry is not Entry.REQUEST
            held_part = source.share_of(here).part
            if piece.token_part != (held_part if is_partitioned else None):
                raise IncompatiblePeerError(
                    f"the plan asks for part {piece.token_part} of the tokens of {piece.component!r}, but this source "
                    f"rank holds part {held_part}"
                )
            self._shards.append((here, there))
            self._routes.append(routes[key])
        self._elected: dict[tuple[int, ...], tuple[ElectedRoute, ...]] = {}
        self._packed: dict[Unit, tuple[PackedPiece, ...]] = {}

    def elected(self, room: int, *, writer: int, receiver: int) -> tuple[ElectedRoute, ...]:
        """Returns what the source rank sends in a room.

        Args:
            writer: group rank of the source.
            receiver: group rank of the destination.
        """
        mine = tuple(
            number
            for number, piece in enumerate(self.pieces)
            if elect_writer(piece, room=room, receiver=receiver) == writer
        )
        if mine not in self._elected:
            by_route: dict[tuple[str, str], list[int]] = {}
            for number in mine:
                route = self._routes[number]
                by_route.setdefault((route.source_group, route.destination_group), []).append(number)
            self._elected[mine] = tuple(self._along(tuple(numbers)) for numbers in by_route.values())
        return self._elected[mine]

    def _along(self, numbers: tuple[int, ...]) -> ElectedRoute:
        """Returns what pieces of one route are together."""
        layers: dict[str, tuple[Interval, ...]] = {}
        for piece in (self.pieces[number] for number in numbers):
            layers[piece.component] = (*layers.get(piece.component, ()), piece.box[0])
        return ElectedRoute(self._routes[numbers[0]], numbers, layers)

    def route(self, piece: int) -> Route:
        """Returns the route along which a piece is sent."""
        return self._routes[piece]

    def describe(self, piece: int, first_base: int, stop_base: int) -> str:
        """Describes a piece in words, or only some indices of its first axis."""
        (first, *rest), component = self.pieces[piece].box, self._shards[piece][0].component
        part = Interval(first.start + first_base, first.start + stop_base)
        return f"{component.name!r} {component.describe((part, *rest))}"

    def descriptor_rows(self, unit: Unit) -> DescriptorRows:
        """Makes the rows of all pieces. Pieces that cannot be cut between tokens have rows for whole units either way.

        Raises:
            LayoutError: if there are more descriptors than can be numbered.
        """
        return descriptor_rows([(runs, *shards) for runs, shards in zip(self._runs(unit), self._shards, strict=True)])

    def why_not_direct(self, unit: Unit) -> str:
        """Says why there can be no descriptor rows for all pieces; empty if there can be."""
        try:
            check_descriptors([(runs, *shards) for runs, shards in zip(self._runs(unit), self._shards, strict=True)])
        except LayoutError as error:
            return str(error)
        return ""

    def packed_pieces(self, unit: Unit) -> tuple[PackedPiece, ...]:
        """Returns how every piece is packed into staging memory, unit by unit; worked out at the first call."""
        if unit not in self._packed:  # two threads at a time work out the same
            self._packed[unit] = tuple(
                packed_piece(
                    runs,
                    component=piece.component,
                    first_layer=piece.box[0].start,
                    source_pages=here.paging.num_pages,
                    destination_pages=there.paging.num_pages,
                )
                for piece, runs, (here, there) in zip(self.pieces, self._runs(unit), self._shards, strict=True)
            )
        return self._packed[unit]

    def _runs(self, unit: Unit) -> Iterator[Runs]:
        for piece, (here, there), route in zip(self.pieces, self._shards, self._routes, strict=True):
            tokens = route.unit_tokens if unit is Unit.WHOLE or here.component.entry is not Entry.TOKEN else 1
            yield lower(piece.box, here, there, unit_tokens=tokens)


def _shard(layout: RankLayout, piece: Piece, side: str) -> Shard:
    shard = layout.shard_with(piece.component, piece.box)
    if shard is None:
        held = [shard.component.describe(shard.box) for shard in layout.shards_of(piece.component)]
        raise IncompatiblePeerError(
            f"the plan names {piece.component!r} {list(map(str, piece.box))}, but the {side} rank holds "
            f"{held or 'nothing of it'}"
        )
    return shard


def places(
    numbers: Positions, *, unit_tokens: int, page_tokens: int, pages: PageList, first_page: int
) -> tuple[Positions, Positions]:
    """Finds the pages that units lie in.

    Args:
        numbers: local positions divided by unit_tokens.
        pages: page numbers, of which the first holds the tokens from local position first_page * page_tokens on.

    Returns:
        For every unit which one of its page it is, and the page's number.
    """
    order, within = np.divmod(numbers, page_tokens // unit_tokens)
    return within, pages[order - first_page]
