"""Which part of a chunk goes to a receiver, and where; and whether its pages are those that the receiver expects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvferry.errors import LayoutError, PageError, UsageError
from kvferry.layout import Interval, TokenShare
from kvferry.plan import Demand, Route, Unit, Units, needed_locally, places, segments_between, units_of
from kvferry.plan.requests.chunks import Chunk, ChunkPart
from kvferry.plan.requests.demands import GroupRequest
from kvferry.plan.requests.page_numbers import Pages


@dataclass(frozen=True, slots=True, eq=False)
class ReceiverRequest:
    """What a receiver requests from one source rank in a room.

    Attributes:
        tokens: how many tokens the request has; None where the receiver gave no number.
        wanted: what it requests, by those of its groups that the source rank fills.
        routes: the routes along which the source rank was elected to send something.
        depends_on: digests of what the request's cache depends on, by name.
        layers: of each route, the layers that the source rank was elected to send along it, by component.
    """

    tokens: int | None
    wanted: Mapping[str, GroupRequest]
    routes: tuple[Route, ...]
    depends_on: Mapping[str, bytes] = field(default_factory=dict)
    layers: tuple[Mapping[str, tuple[Interval, ...]], ...] = ()

    def has_any(self, route: int, layers: Mapping[str, Interval] | None) -> bool:
        """Returns whether any of some layers is sent along a route; None stands for all."""
        if layers is None:
            return True
        return any(
            part.overlap(layers[name]) is not None
            for name, parts in self.layers[route].items()
            if name in layers
            for part in parts
        )


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """Units of tokens to be written along one route. All arrays have one entry for every unit.

    Attributes:
        route: the number of the route among those of the `ReceiverRequest`.
        source_pages: the page that each unit is in on this rank.
        source_units: which one of the page it is.
        destination_pages: the page that each unit is in on the receiver.
        destination_units: which one of that page it is.
        destination_numbers: the units' numbers on the receiver: local position divided by the unit's tokens.
        layers: the layers of them that are written, by component; None for all.
    """

    route: int
    source_pages: Pages
    source_units: Pages
    destination_pages: Pages
    destination_units: Pages
    destination_numbers: Pages
    layers: Mapping[str, Interval] | None = None


def check_chunk(chunk: Chunk, request: ReceiverRequest, next_pages: Mapping[str, int], *, where: str) -> None:
    """Checks that a chunk continues where a receiver needs it to, and ends where the receiver's pages do.

    The chunks of a group must reach from the first to the last token that the receiver needs without a gap, and must
    not go on after the page of the last one.

    Args:
        next_pages: the page of the request that comes next, for every group of which chunks came before.
        where: begins error messages.

    Raises:
        PageError: if they do not, or name a part of the tokens that the rank cannot have.
    """
    parts = {part.group: part for part in chunk.parts}
    for route in _routes(chunk, request, where):
        name = where if len(request.wanted) == 1 else f"{where}, group {route.source_group!r}"
        demand = request.wanted[route.destination_group].demand
        try:
            low, high = needed_locally(route.source_share, demand, request_tokens=request.tokens)
        except UsageError as error:
            raise PageError(f"{name}: {error}, on the decode side (tokens=...)") from error
        page_tokens, done = route.source_page_tokens, next_pages.get(route.source_group, 0)
        part = parts.get(route.source_group)
        if part is not None:
            missing_from = max(low, done * page_tokens)
            if missing_from < min(high, part.start * page_tokens):
                raise PageError(
                    f"{name}: a chunk starts at page {part.start} of the request, but the receiver needs what comes "
                    f"before, from page {missing_from // page_tokens} on"
                )
            done = part.stop
        expected = -(-high // page_tokens)
        reached = max(low, done * page_tokens)  # what comes before that is not needed
        is_short = chunk.is_last and reached < high and reached < _least(request, route, demand)
        if is_short or (done > expected and not route.has_slots):
            what = "slots" if route.has_slots else f"pages of {page_tokens} tokens"
            raise PageError(
                f"{name}: {done} {what} of the request{'' if chunk.is_last else ' and more to come'} where the "
                f"receiver has room for {expected}, {demand.held} tokens that it holds included: both sides must count "
                "the same tokens"
            )


def _routes(chunk: Chunk, request: ReceiverRequest, where: str) -> tuple[Route, ...]:
    """Returns a receiver's routes, from the part of the request's tokens that a chunk is of.

    Raises:
        PageError: if there is no such part; or if the receiver divides tokens as well, so that it was elected whom it
            gets which part from.
    """
    if chunk.token_part is None:
        return request.routes
    routes = []
    for route in request.routes:
        if route.has_slots:
            routes.append(route)
            continue
        if not route.destination_share.partition.is_whole:
            raise PageError(
                f"{where}: this rank has part {chunk.token_part} of the tokens in this request and another one in "
                f"others, but the receiver has a part alone ({route.destination_share.partition}), and must know the "
                "rank beforehand that has the same tokens"
            )
        try:
            share = TokenShare(route.source_share.partition, chunk.token_part)
        except LayoutError as error:
            raise PageError(f"{where}: {error}") from error
        routes.append(replace(route, source_share=share))
    return tuple(routes)


def _least(request: ReceiverRequest, route: Route, demand: Demand) -> int:
    """Returns the local position up to which a source rank must submit what a receiver needs.

    A receiver that gave no number of tokens counts its last page as full; the page has at least one token.
    """
    stop = demand.stop
    if request.tokens is None:
        stop = max(demand.start, stop - route.destination_page_tokens) + 1
    last = Demand(demand.held, demand.start, stop)
    return needed_locally(route.source_share, last, request_tokens=request.tokens)[1]


def moves_of(chunk: Chunk, request: ReceiverRequest) -> dict[Unit, tuple[Move, ...]]:
    """Returns which part of a chunk goes to a receiver, by the unit in which it is moved."""
    parts = {part.group: part for part in chunk.parts}
    moves: dict[Unit, list[Move]] = {Unit.WHOLE: [], Unit.TOKEN: []}
    for number, route in enumerate(_routes(chunk, request, "")):
        part, wanted = parts.get(route.source_group), request.wanted[route.destination_group]
        if part is None or not request.has_any(number, chunk.layers):
            continue
        segments = segments_between(
            route,
            wanted.demand,
            first=part.start * route.source_page_tokens,
            stop=part.stop * route.source_page_tokens,
            request_tokens=request.tokens,
        )
        units, tokens = units_of(segments, route.unit_tokens)
        if len(units):
            moves[Unit.WHOLE].append(_move(number, route, units, part, wanted, chunk.layers))
        if len(tokens):
            moves[Unit.TOKEN].append(_move(number, route, tokens, part, wanted, chunk.layers))
    return {unit: tuple(of_unit) for unit, of_unit in moves.items()}


def _move(
    number: int,
    route: Route,
    units: Units,
    part: ChunkPart,
    wanted: GroupRequest,
    layers: Mapping[str, Interval] | None,
) -> Move:
    source_units, source_pages = places(
        units.source,
        unit_tokens=units.tokens,
        page_tokens=route.source_page_tokens,
        pages=part.pages,
        first_page=part.start,
    )
    destination_units, destination_pages = places(
        units.destination,
        unit_tokens=units.tokens,
        page_tokens=route.destination_page_tokens,
        pages=wanted.pages,
        first_page=wanted.first_page,
    )
    return Move(number, source_pages, source_units, destination_pages, destination_units, units.destination, layers)
