"""Plans a request between two sides that nobody has started, proves the plan, and works out its figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from kvferry.applications.plan.counting import PagePlacement, RoutedPiece, Travelling, total
from kvferry.applications.plan.specification import SideSpecification, parse_side
from kvferry.errors import ConfigurationError, IncompatiblePeerError, LayoutError, ModelError, SettingsError
from kvferry.layout import (
    Entry,
    MemoryKind,
    PageOrder,
    RankCoordinates,
    RankLayout,
    ShardedComponent,
    VirtualPools,
    virtual_layout,
)
from kvferry.layout.interval import volume
from kvferry.models import ModelCache, read_model_cache
from kvferry.plan import Piece, SourceGroup, check_exchangeable, check_token_share, elect_writer, prove_receiver
from kvferry.plan.cost import Choice, PathCosts, TransferPath, WriteSize, choose
from kvferry.plan.proof import ProofError
from kvferry.staging.sizes import DEFAULTS

BULK_WRITE_BYTES = DEFAULTS[MemoryKind.DRAM].chunk_bytes
"""Of a sub-chunk on the staged path between pools in CPU memory, unless it is set otherwise."""

BALANCED_ROOMS = 256
"""Rooms over which the balance of writers is averaged."""


@dataclass(frozen=True, slots=True)
class SideOptions:
    """What the operator said about one side.

    Attributes:
        name: "prefill" or "decode".
        config: where the model's configuration is.
        dtype: of the cache; None as the configuration says.
        specification: how the side is divided, as text.
        page_tokens: tokens in a page.
        order: of the tokens in a page.
    """

    name: str
    config: Path
    dtype: str | None
    specification: str
    page_tokens: int
    order: PageOrder


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Which request is planned.

    Attributes:
        tokens: its length.
        room: its number, on which it depends which of several replicas sends.
        pages: how its pages lie.
    """

    tokens: int
    room: int
    pages: PagePlacement

    def __post_init__(self) -> None:
        if not 1 <= self.tokens <= 1 << 24:
            raise SettingsError(f"--tokens {self.tokens}: a request has 1 to {1 << 24} tokens")
        if not 0 <= self.room < 1 << 64:
            raise SettingsError(f"--room {self.room}: it must lie in [0, 2^64)")


@dataclass(frozen=True, slots=True)
class Side:
    """One side, ready to be planned.

    Attributes:
        options: what the operator said.
        specification: how it is divided.
        cache: of the whole model.
        components: what the side caches, with the draft's if it has them.
        coordinates: of every rank of the first data-parallel group, by group rank.
        layouts: likewise.
        stages: layers of every pipeline stage.
    """

    options: SideOptions
    specification: SideSpecification
    cache: ModelCache
    components: tuple[ShardedComponent, ...]
    coordinates: tuple[RankCoordinates, ...]
    layouts: Mapping[int, RankLayout]
    stages: tuple[int, ...]

    @property
    def name(self) -> str:
        """Prefill or decode."""
        return self.options.name

    def place(self, rank: int) -> str:
        """Where a rank stands, such as "tp 1, pp 0"; empty if it is alone."""
        coordinates = self.coordinates[rank]
        sizes = {"tp": coordinates.tp_size, "cp": coordinates.cp_size, "pp": coordinates.pp_size}
        return ", ".join(f"{axis} {getattr(coordinates, f'{axis}_rank')}" for axis, size in sizes.items() if size > 1)


@dataclass(frozen=True, slots=True)
class Delivery:
    """A piece that one rank sends to another in the room that is planned.

    Attributes:
        source: group rank of the sender.
        receiver: group rank of the receiver.
        piece: what is sent.
        routed: the same, on its way.
        travelling: what the request takes of it.
    """

    source: int
    receiver: int
    piece: Piece
    routed: RoutedPiece
    travelling: Travelling


@dataclass(frozen=True, slots=True)
class Pair:
    """All that one rank sends to another.

    Attributes:
        source: group rank of the sender.
        receiver: group rank of the receiver.
        bytes_per_token: of every token that travels between the two.
        bytes_per_window_token: how many of these travel for the tokens of a window alone.
        bytes_per_request: of slots.
        runs_per_page: of a page of the source, of every component that has pages.
        runs_per_slot: the same of slots.
        travelling: all that the request takes.
        choices: which path is faster, by how pages lie.
    """

    source: int
    receiver: int
    bytes_per_token: int
    bytes_per_window_token: int
    bytes_per_request: int
    runs_per_page: int
    runs_per_slot: int
    travelling: Travelling
    choices: Mapping[PagePlacement, Choice]

    @property
    def bulk_writes(self) -> int:
        """Writes on the staged path."""
        return bulk_writes(self.travelling.num_bytes)


@dataclass(frozen=True, slots=True)
class Balance:
    """How evenly sending is spread over the source ranks.

    Attributes:
        this_room: bytes that each rank sends in the room that is planned.
        mean: averaged over many rooms.
    """

    this_room: tuple[int, ...]
    mean: tuple[float, ...]

    @property
    def shares(self) -> tuple[float, ...]:
        """Each rank's part of all bytes, over many rooms."""
        whole = sum(self.mean)
        return tuple(each / whole if whole else 0.0 for each in self.mean)


@dataclass(frozen=True)
class Study:
    """A plan with its figures.

    Attributes:
        prefill: the side that sends.
        decode: the side that receives.
        request: what was planned.
        deliveries: what is sent by whom to whom.
        absent: components that only one side has, and which: they do not travel.
        refuted: why the plan is wrong; None if it is proved.
        planning_s: how long planning took.
        proof_s: how long the proof took.
        balance: over the source ranks.
    """

    prefill: Side
    decode: Side
    request: RequestOptions
    deliveries: tuple[Delivery, ...]
    absent: Mapping[str, str]
    refuted: str | None
    planning_s: float
    proof_s: float
    balance: Balance

    @property
    def is_proved(self) -> bool:
        """Whether every destination byte is written exactly once."""
        return self.refuted is None

    @cached_property
    def pairs(self) -> tuple[Pair, ...]:
        """Every two ranks of which one sends something to the other, in ascending order."""
        by_ranks: dict[tuple[int, int], list[Delivery]] = {}
        for delivery in self.deliveries:
            if delivery.travelling.num_bytes:
                by_ranks.setdefault((delivery.source, delivery.receiver), []).append(delivery)
        return tuple(_pair(*ranks, deliveries) for ranks, deliveries in sorted(by_ranks.items()))

    @cached_property
    def totals(self) -> Travelling:
        """All that the request takes."""
        return total(pair.travelling for pair in self.pairs)

    def slowest(self, pages: PagePlacement) -> Pair | None:
        """The two ranks that take longest on the path that is chosen for them."""
        return max(
            self.pairs,
            key=lambda pair: min(pair.choices[pages].direct_s, pair.choices[pages].staged_s),
            default=None,
        )

    def seconds(self, path: TransferPath, pages: PagePlacement) -> float:
        """What the request takes on a path, by the rank that sends longest."""
        by_source: dict[int, float] = {}
        for pair in self.pairs:
            choice = pair.choices[pages]
            seconds = choice.direct_s if path is TransferPath.DIRECT else choice.staged_s
            by_source[pair.source] = by_source.get(pair.source, 0.0) + seconds
        return max(by_source.values(), default=0.0)

    @property
    def bulk_writes(self) -> int:
        """All writes on the staged path."""
        return sum(pair.bulk_writes for pair in self.pairs)

    def path(self, pages: PagePlacement) -> str:
        """The path that is chosen: "direct", "staged", or "mixed" if it is not the same for all ranks."""
        paths = {pair.choices[pages].path.value for pair in self.pairs}
        return paths.pop() if len(paths) == 1 else "mixed" if paths else "none"


def study(prefill_options: SideOptions, decode_options: SideOptions, request: RequestOptions) -> Study:
    """Plans and proves a request.

    Raises:
        SettingsError: if an option makes no sense.
        ModelError: if the configuration cannot be read.
        LayoutError: if a side cannot be divided like that.
        IncompatiblePeerError: if the two sides cannot exchange caches; names what differs.
    """
    prefill, decode = _side(prefill_options), _side(decode_options)
    started = time.perf_counter()
    prefill, decode = (_with_layouts(side, request.tokens) for side in (prefill, decode))
    _check(prefill, decode)
    group = SourceGroup(prefill.layouts)
    pieces = {rank: _pieces_for(group, rank, layout) for rank, layout in decode.layouts.items()}
    planned = time.perf_counter()
    refuted = _refuted(prefill, decode, pieces, request.room)
    proved = time.perf_counter()
    travelling = _traveller(request.tokens)
    deliveries = []
    for receiver, theirs in pieces.items():
        for piece in theirs:
            source = elect_writer(piece, room=request.room, receiver=receiver)
            routed = RoutedPiece(piece, prefill.layouts[source], decode.layouts[receiver])
            deliveries.append(Delivery(source, receiver, piece, routed, travelling(routed)))
    return Study(
        prefill=prefill,
        decode=decode,
        request=request,
        deliveries=tuple(deliveries),
        absent=_absent(prefill, decode),
        refuted=refuted,
        planning_s=planned - started,
        proof_s=proved - planned,
        balance=_balance(deliveries, len(prefill.layouts)),
    )


def bulk_writes(num_bytes: int) -> int:
    """Writes on the staged path."""
    return -(-num_bytes // BULK_WRITE_BYTES)


# ---- sides ----------------------------------------------------------------------------------------------------------


def _side(options: SideOptions) -> Side:
    specification = parse_side(options.specification, option=f"--{options.name}")
    if options.page_tokens < 1:
        raise SettingsError(f"--{options.name}-page-size {options.page_tokens}: a page has at least 1 token")
    cache = read_model_cache(options.config, cache_dtype=options.dtype)
    components = cache.components
    if specification.has_draft:
        if not cache.draft:
            raise ModelError(
                f"--{options.name} {options.specification!r} says draft, but {options.config} describes no draft "
                "layers: leave it out, or describe them"
            )
        components = (*components, *cache.draft)
    try:
        stages = cache.layers_per_stage(specification.pp if specification.stages is None else specification.stages)
    except LayoutError as error:
        raise SettingsError(f"--{options.name} {options.specification!r}: {error}") from error
    return Side(
        options=options,
        specification=specification,
        cache=cache,
        components=components,
        coordinates=specification.coordinates,
        layouts={},
        stages=stages,
    )


def _with_layouts(side: Side, request_tokens: int) -> Side:
    pools = VirtualPools(
        page_tokens=side.options.page_tokens,
        # Twice what a request takes, so that its pages can lie apart.
        num_pages=2 * (-(-request_tokens // side.options.page_tokens) + 1),
        order=side.options.order,
        partition=side.specification.partition,
        layers_per_stage=side.stages,
    )
    return replace(side, layouts={rank.group_rank: _layout(side, rank, pools) for rank in side.coordinates})


def _layout(side: Side, rank: RankCoordinates, pools: VirtualPools) -> RankLayout:
    try:
        layout = virtual_layout(side.components, rank, pools)
        check_token_share(layout, rank)
        return layout
    except ConfigurationError as error:
        raise LayoutError(f"{side.name} rank {rank.group_rank}: {error}") from error


def _check(prefill: Side, decode: Side) -> None:
    """Refuses sides that cannot exchange caches.

    Where no page is packed, only what all ranks of a side have in common can differ, and two ranks show it.
    """
    sources, receivers = dict(prefill.layouts), dict(decode.layouts)
    if not any(component.entry is Entry.PAGE for component in (*sources[0].components, *receivers[0].components)):
        sources, receivers = {0: sources[0]}, {0: receivers[0]}
    for source, here in sources.items():
        for receiver, there in receivers.items():
            check_exchangeable(
                here, there, source_name=f"prefill rank {source}", destination_name=f"decode rank {receiver}"
            )


def _pieces_for(group: SourceGroup, rank: int, layout: RankLayout) -> tuple[Piece, ...]:
    try:
        pieces = group.pieces_for(layout)
    except IncompatiblePeerError as error:
        raise IncompatiblePeerError(f"decode rank {rank}: {error}") from error
    return tuple(piece for piece in pieces if volume(piece.box))


def _refuted(prefill: Side, decode: Side, pieces: Mapping[int, tuple[Piece, ...]], room: int) -> str | None:
    try:
        for rank, layout in decode.layouts.items():
            prove_receiver(prefill.layouts, layout, pieces[rank], room=room, receiver=rank)
    except ProofError as error:
        return f"decode rank {rank}: {error}"
    return None


def _absent(prefill: Side, decode: Side) -> dict[str, str]:
    names = {side.name: {sharded.component.name for sharded in side.components} for side in (prefill, decode)}
    only = dict.fromkeys(sorted(names[prefill.name] - names[decode.name]), prefill.name)
    return only | dict.fromkeys(sorted(names[decode.name] - names[prefill.name]), decode.name)


# ---- figures --------------------------------------------------------------------------------------------------------


def _traveller(request_tokens: int) -> Callable[[RoutedPiece], Travelling]:
    """What a request takes of a piece; ranks that are alike but for their numbers are counted once."""
    known: dict[Any, Travelling] = {}

    def travelling(routed: RoutedPiece) -> Travelling:
        runs = routed.runs
        alike = (
            routed.route,
            routed.destination.component,
            len(runs.source_bases),
            runs.loops,
            runs.length,
            runs.source_steps,
            runs.destination_steps,
        )
        if alike not in known:
            known[alike] = routed.travelling(request_tokens)
        return known[alike]

    return travelling


def _pair(source: int, receiver: int, deliveries: Sequence[Delivery]) -> Pair:
    paged = [each for each in deliveries if not each.routed.route.has_slots]
    slots = [each for each in deliveries if each.routed.route.has_slots]
    travelling = total(each.travelling for each in deliveries)
    loads = {
        pages: WriteSize(
            num_bytes=travelling.num_bytes,
            runs=travelling.runs,
            descriptors=travelling.descriptors[pages],
            bulk_writes=bulk_writes(travelling.num_bytes),
        )
        for pages in PagePlacement
    }
    return Pair(
        source=source,
        receiver=receiver,
        bytes_per_token=sum(each.routed.bytes_per_entry for each in paged),
        bytes_per_window_token=sum(each.routed.bytes_per_entry for each in paged if each.routed.is_windowed),
        bytes_per_request=sum(each.routed.bytes_per_entry for each in slots),
        runs_per_page=sum(each.routed.runs_per_page for each in paged),
        runs_per_slot=sum(each.routed.runs_per_page for each in slots),
        travelling=travelling,
        choices={pages: choose(load, PathCosts()) for pages, load in loads.items()},
    )


def _balance(deliveries: Sequence[Delivery], num_sources: int) -> Balance:
    this_room, mean = [0] * num_sources, [0.0] * num_sources
    for delivery in deliveries:
        num_bytes, holders = delivery.travelling.num_bytes, delivery.piece.holders
        this_room[delivery.source] += num_bytes
        for holder, share in zip(holders, _shares(len(holders), delivery.receiver), strict=True):
            mean[holder] += share * num_bytes
    return Balance(tuple(this_room), tuple(mean))


@lru_cache(maxsize=4096)
def _shares(num_holders: int, receiver: int) -> tuple[float, ...]:
    """How often each of several holders is elected."""
    if num_holders == 1:
        return (1.0,)
    piece = Piece("", (), None, tuple(range(num_holders)))
    counts = [0] * num_holders
    for room in range(1, BALANCED_ROOMS + 1):
        counts[elect_writer(piece, room=room, receiver=receiver)] += 1
    return tuple(count / BALANCED_ROOMS for count in counts)
