"""A check of the planner by other means: every destination byte is written once, by the right source byte.

Nothing here calls the planner's arithmetic. What a receiver holds must be tiled by pieces, once for every part of the
tokens that it needs. Of a piece's runs the start and every stride is decoded back into logical coordinates by dividing
by the shard's strides, once with the source's geometry and once with the receiver's: both must name the same element,
and the same step along the same axis. As the map from coordinates to addresses is affine, this holds for every byte of
every layer, token and page without looking at it: the effort grows with pieces and axes alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, lcm, prod
from operator import sub

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.errors import KVFerryError
from kvferry.layout import Component, Entry, RankLayout, Shard, TokenPartition, TokenShare
from kvferry.layout.interval import covers, volume
from kvferry.layout.tokens import BlockLength
from kvferry.plan.compatibility import described_alike
from kvferry.plan.lowering import PageSteps, Runs, lower
from kvferry.plan.pieces import Piece, SourceGroup, elect_writer
from kvferry.plan.routes import Demand, Route, route_between, segments_between, units_of

_MOST_TOKENS_LOOKED_AT = 1 << 16
_MOST_STEPS_LOOKED_AT = 1 << 20
_TOKENS_OF_A_SAMPLE = 1024
_LONGEST_BLOCK_LOOKED_AT = 64
_LONGEST_PAGE_LOOKED_AT = 4


class ProofError(KVFerryError):
    """The plan is wrong: a defect of kvferry, not of its user. Please report the message."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What was proved.

    Attributes:
        receivers: ranks whose every byte was shown to be written once.
        pieces: pieces that were checked.
        absent: components that receivers hold and no source has, which is allowed for those that are optional.
    """

    receivers: int
    pieces: int
    absent: tuple[str, ...] = ()


def prove(sources: Mapping[int, RankLayout], receivers: Mapping[int, RankLayout], *, room: int) -> Proof:
    """Proves the plan of one room over all ranks.

    Args:
        sources: the layouts of the source group, by group rank.
        receivers: the layouts of the receiving group, by group rank.

    Raises:
        ProofError: naming the component and the part that is written wrongly.
        IncompatiblePeerError: if the sources do not hold what a receiver needs.
    """
    group = SourceGroup(sources)
    proofs = []
    for rank, layout in receivers.items():
        held, wanted = described_alike(sources, layout)
        pieces = (group if held is sources else SourceGroup(held)).pieces_for(wanted)
        proofs.append(prove_receiver(held, wanted, pieces, room=room, receiver=rank))
    return Proof(
        receivers=len(proofs),
        pieces=sum(proof.pieces for proof in proofs),
        absent=tuple(sorted({name for proof in proofs for name in proof.absent})),
    )


def prove_receiver(
    sources: Mapping[int, RankLayout],
    layout: RankLayout,
    pieces: tuple[Piece, ...],
    *,
    room: int,
    receiver: int,
) -> Proof:
    """Proves the plan for one receiving rank; arguments and errors as in `prove`."""
    _prove_partition(layout.tokens.partition)
    by_component: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_component.setdefault(piece.component, []).append(piece)
    routes: dict[tuple[int, str, str], Route] = {}
    absent = []
    for shard in layout.shards:
        name = shard.component.name
        if not any(source.shards_of(name) for source in sources.values()):
            if not shard.component.is_optional and volume(shard.box):
                raise ProofError(f"no source has {name!r}, which the receiver cannot do without")
            if name in by_component:
                raise ProofError(f"no source has {name!r}, of which {len(by_component[name])} pieces are planned")
            absent.append(name)
            continue
        mine = [piece for piece in by_component.get(name, []) if covers(shard.box, piece.box)]
        partition = _partition_of(sources, name)
        _prove_partition(partition)
        by_part: dict[int | None, list[Piece]] = {
            part: [] for part in _parts_needed(shard.component, partition, layout.share_of(shard))
        }
        for piece in mine:
            if piece.token_part not in by_part:
                raise ProofError(
                    f"{_name(shard, piece)} travels with part {piece.token_part} of the tokens, where {[*by_part]} are "
                    "needed"
                )
            by_part[piece.token_part].append(piece)
        for tiles in by_part.values():
            _prove_tiling(shard, tiles)
        for piece in mine:
            writer = elect_writer(piece, room=room, receiver=receiver)
            held = _prove_holder(piece, writer, sources.get(writer), shard)
            key = writer, held.group, shard.group
            if key not in routes:
                routes[key] = route_between(sources[writer], held.group, layout, shard.group)
                _prove_route(replace(routes[key], source_group="", destination_group=""))
            unit = routes[key].unit_tokens
            prove_runs(piece, held, shard, lower(piece.box, held, shard, unit_tokens=unit), unit_tokens=unit)
    inside = sum(1 for piece in pieces if layout.shard_with(piece.component, piece.box) is not None)
    if inside != len(pieces):
        raise ProofError(f"{len(pieces) - inside} pieces lie outside of what the receiver holds")
    return Proof(receivers=1, pieces=len(pieces), absent=tuple(absent))


# ---- tokens ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _prove_partition(partition: TokenPartition) -> None:
    """Proves that every position of a cycle has one owner, and that owners number theirs without gaps.

    Two cycles suffice, since each repeats the one before; where a block follows from the request's length, or is very
    long, any block shows the pattern. Whole pages are looked at where some blocks have none, all as many, or some more.
    """
    if partition.page_tokens is None:
        _prove_blocks(partition, BlockLength(min(partition.block_tokens or 3, _LONGEST_BLOCK_LOOKED_AT)))
        return
    page, blocks = min(partition.page_tokens, _LONGEST_PAGE_LOOKED_AT), len(partition.pattern)
    for pages in (blocks // 2, blocks, blocks + 1, 2 * blocks - 1):
        block = msgspec.structs.replace(partition, page_tokens=page).block(pages * page)
        _prove_blocks(partition, block)
        of_blocks = [len(each) for each in np.array_split(np.arange(pages), blocks)]
        right = np.repeat(np.repeat(partition.pattern, of_blocks), page)
        for part in range(partition.num_parts):
            held = TokenShare(partition, part).holds(np.arange(pages * page, dtype=np.int64), block=block)
            if not np.array_equal(held, right == part):
                raise ProofError(f"part {part} of {partition} has other tokens of {pages} pages than its own")


def _prove_blocks(partition: TokenPartition, block: BlockLength) -> None:
    """Proves a partition of requests with blocks of a length."""
    positions = np.arange(2 * block.cycle(len(partition.pattern)), dtype=np.int64)
    owners = np.zeros(len(positions), np.int64)
    for part in range(partition.num_parts):
        share = TokenShare(partition, part)
        held = share.holds(positions, block=block)
        owners += held
        local = share.local(positions, block=block)
        if not np.array_equal(local[held], np.arange(np.count_nonzero(held))):
            raise ProofError(f"part {part} of {partition} numbers its tokens with gaps or twice")
        if not np.array_equal(local, np.cumsum(held) - held):
            raise ProofError(f"part {part} of {partition} counts other tokens than it holds")
    if not np.all(owners == 1):
        raise ProofError(f"{partition}: some token has {owners.min()} owners, some {owners.max()}")


def _partition_of(sources: Mapping[int, RankLayout], component: str) -> TokenPartition:
    """Returns how the ranks that hold anything of a component partition its tokens, which is all of them alike."""
    partitions = {
        source.share_of(shard).partition
        for source in sources.values()
        for shard in source.shards_of(component)
        if volume(shard.box)
    }
    if len(partitions) > 1:
        raise ProofError(f"ranks partition the tokens of {component!r} differently: {'; '.join(map(str, partitions))}")
    return partitions.pop() if partitions else TokenPartition()


def _parts_needed(component: Component, partition: TokenPartition, share: TokenShare) -> tuple[int | None, ...]:
    """Returns the parts of the source's tokens of which a receiver needs any, in some request."""
    return (None,) if component.entry is Entry.REQUEST else _parts_met(partition, share)


@lru_cache(maxsize=4096)
def _parts_met(partition: TokenPartition, share: TokenShare) -> tuple[int, ...]:
    """Returns the parts that have some token of a share; all of them where that depends on the request."""
    if partition == share.partition:
        return (share.part,)
    every = tuple(range(partition.num_parts))
    if partition.depends_on_length or share.partition.depends_on_length:
        return every
    blocks = partition.block(None).tokens, share.partition.block(None).tokens
    step = gcd(*blocks)
    patterns = partition.pattern, share.partition.pattern
    steps = lcm(*(len(pattern) * (block // step) for pattern, block in zip(patterns, blocks, strict=True)))
    if steps > _MOST_STEPS_LOOKED_AT:
        return every
    theirs, ours = (
        np.resize(np.repeat(np.array(pattern), block // step), steps)
        for pattern, block in zip(patterns, blocks, strict=True)
    )
    return tuple(np.unique(theirs[ours == share.part]).tolist())


def _common_cycle(one: TokenPartition, other: TokenPartition) -> int | None:
    """Returns after how many tokens both partitions repeat; None if that depends on the request, or is too many."""
    if one.depends_on_length or other.depends_on_length:
        return None
    cycle = lcm(*(partition.block(None).tokens * len(partition.pattern) for partition in (one, other)))
    return cycle if cycle <= _MOST_TOKENS_LOOKED_AT else None


@lru_cache(maxsize=256)
def _owned(share: TokenShare, tokens: int) -> NDArray[np.int64]:
    """Returns the positions of a request that a share has."""
    positions = np.arange(tokens, dtype=np.int64)
    return positions[share.holds(positions, block=share.partition.block(tokens))]


@lru_cache(maxsize=8192)
def _prove_route(route: Route) -> None:
    """Proves that every token that both ranks of a route hold is sent once, from and to its right place in a page.

    The check goes token by token, on a request long enough to show how cycles and pages of both sides meet.
    """
    source, destination = route.source_share, route.destination_share
    cycle = _common_cycle(source.partition, destination.partition) or _TOKENS_OF_A_SAMPLE
    tokens = min(2 * lcm(cycle, route.source_page_tokens, route.destination_page_tokens), _MOST_TOKENS_LOOKED_AT) + 1
    owned = [_owned(share, tokens) for share in (source, destination)]
    segments = segments_between(route, Demand(0, 0, tokens), first=0, stop=len(owned[0]), request_tokens=tokens)
    sent = [np.empty(0, np.int64)]
    for units in units_of(segments, route.unit_tokens):
        within = np.arange(units.tokens)
        places = [np.add.outer(numbers * units.tokens, within).ravel() for numbers in (units.source, units.destination)]
        if any(
            place.max(initial=-1) >= len(own) for place, own in zip(places, owned, strict=True)
        ) or not np.array_equal(owned[0][places[0]], owned[1][places[1]]):
            raise ProofError(f"tokens of {source} go to other places than {destination} has for them")
        if route.source_page_tokens % units.tokens or route.destination_page_tokens % units.tokens:
            raise ProofError(
                f"{units.tokens} tokens are moved together, but do not always lie in one page of both sides"
            )
        sent.append(owned[0][places[0]])
    shared = owned[0][np.isin(owned[0], owned[1], assume_unique=True)]
    if not np.array_equal(np.sort(np.concatenate(sent)), shared):
        raise ProofError(f"between {source} and {destination} some tokens are never sent, or more than once")


# ---- boxes ----------------------------------------------------------------------------------------------------------


def _prove_tiling(shard: Shard, pieces: Sequence[Piece]) -> None:
    if len(pieces) > 1:
        bounds = np.array([[(part.start, part.stop) for part in piece.box] for piece in pieces])
        starts, stops = bounds[..., 0], bounds[..., 1]
        meets: NDArray[np.bool_] = np.all((starts[:, None] < stops[None]) & (starts[None] < stops[:, None]), axis=2)
        np.fill_diagonal(meets, False)
        if meets.any():
            one, other = np.argwhere(meets)[0]
            raise ProofError(f"{_name(shard, pieces[one])} and {_name(shard, pieces[other])} write the same elements")
    covered, needed = sum(volume(piece.box) for piece in pieces), volume(shard.box)
    if covered != needed:
        raise ProofError(
            f"{shard.component.name!r}: {needed - covered} of {needed} elements of an entry are never written"
        )


# ---- runs -----------------------------------------------------------------------------------------------------------


def _prove_holder(piece: Piece, writer: int, source: RankLayout | None, shard: Shard) -> Shard:
    """Proves that the elected writer holds a piece; returns the shard that has it."""
    held = source.shard_with(piece.component, piece.box) if source is not None else None
    if source is None or held is None or writer not in piece.holders:
        raise ProofError(f"rank {writer} was elected to send {_name(shard, piece)} but does not hold it")
    if piece.token_part is not None and source.share_of(held).part != piece.token_part:
        raise ProofError(f"rank {writer} was elected to send {_name(shard, piece)} but holds other tokens of it")
    return held


class _FlawError(Exception):
    """The runs of a piece are wrong; the caller names the piece."""


def prove_runs(piece: Piece, source: Shard, destination: Shard, runs: Runs, *, unit_tokens: int) -> None:
    """Proves that the runs of a piece move exactly its elements, each to where the receiver keeps it.

    Raises:
        ProofError: if they do not.
    """
    try:
        _check_runs(piece, source, destination, runs, unit_tokens)
    except _FlawError as flaw:
        raise ProofError(f"{_name(destination, piece)}: {flaw}") from None


def _check_runs(piece: Piece, source: Shard, destination: Shard, runs: Runs, unit_tokens: int) -> None:
    extents = [len(part) for part in piece.box[1:]]
    if source.component.entry is Entry.TOKEN:
        extents.append(unit_tokens)
    sides = (
        _Side(source, piece, runs.source_bases.tolist(), runs.source_steps),
        _Side(destination, piece, runs.destination_bases.tolist(), runs.destination_steps),
    )
    for side in sides:
        side.check_starts()
        side.check_page_steps(unit_tokens)
    remaining = dict(enumerate(extents))
    for loop in runs.loops:
        axes = {sides[0].axis_of_step(loop.source_stride), sides[1].axis_of_step(loop.destination_stride)}
        axis = axes.pop()
        if axes or axis is None or remaining.pop(axis, None) != loop.count:
            raise _FlawError("a run pairs different elements of the two sides")
    # What is left must lie densely, in the same order on both sides, and fill the length.
    melted = [axis for axis, extent in remaining.items() if extent > 1]
    length = source.component.element_bytes
    for axis in sorted(melted, key=lambda axis: sides[0].strides[axis]):
        if not sides[0].strides[axis] == sides[1].strides[axis] == length:
            raise _FlawError("a run leaves the part that is owed, or pairs different elements")
        length *= remaining[axis]
    if length != runs.length:
        owed = prod(extents) * source.component.element_bytes * len(piece.box[0])
        raise _FlawError(f"{runs.bytes_per_unit} bytes a unit are sent where {owed} are owed")


class _Side:
    """One side of a piece's runs, decoded by its shard's geometry."""

    def __init__(self, shard: Shard, piece: Piece, bases: list[int], steps: PageSteps) -> None:
        self._shard, self._piece, self._bases, self._steps = shard, piece, bases, steps
        self.strides = [*shard.strides]
        if shard.component.entry is Entry.TOKEN:
            self.strides.append(shard.paging.token_stride)
        extents = [len(part) for part in shard.box[1:]]
        self._extents = [*extents, shard.paging.page_tokens][: len(self.strides)]
        # A stride of an axis with one index is never stepped along and may be anything.
        self._decodable = sorted(
            (axis for axis, extent in enumerate(self._extents) if extent > 1), key=lambda axis: -self.strides[axis]
        )

    def check_starts(self) -> None:
        """Proves that every base is the first element of the piece, in the layer that it stands for."""
        first = self._piece.box[0].start - self._shard.box[0].start
        addresses = self._shard.addresses[first : first + len(self._piece.box[0])]
        if len(addresses) != len(self._bases):
            what = f"{self._shard.component.axes[0].name}s"
            raise _FlawError(f"{len(self._bases)} of {len(addresses)} {what} are sent")
        offsets = set(map(sub, self._bases, addresses))
        wanted = [part.start - held.start for part, held in zip(self._piece.box[1:], self._shard.box[1:], strict=True)]
        wanted += [0] * (len(self.strides) - len(wanted))
        for offset in offsets:
            if self._decode(offset) != wanted:
                raise _FlawError("a run starts at another element than the first that is owed")

    def _decode(self, offset: int) -> list[int] | None:
        """Returns the coordinates in the shard at an offset from a base address; None if no element starts there."""
        coordinates = [0] * len(self.strides)
        rest = offset
        for axis in self._decodable:
            coordinates[axis], rest = divmod(rest, self.strides[axis])
            if not 0 <= coordinates[axis] < self._extents[axis]:
                return None
        return coordinates if rest == 0 else None

    def axis_of_step(self, stride: int) -> int | None:
        """Returns the axis along which a stride goes one step; None if it is no such step."""
        coordinates = self._decode(stride)
        if coordinates is None or sorted(coordinates)[-1:] != [1] or sum(coordinates) != 1:
            return None
        return coordinates.index(1)

    def check_page_steps(self, unit_tokens: int) -> None:
        """Proves that units and pages follow each other as in the pool."""
        paging, steps = self._shard.paging, self._steps
        if steps.units * unit_tokens != paging.page_tokens:
            raise _FlawError(f"{steps.units} units of {unit_tokens} tokens are not a page")
        is_divided = steps.units > 1
        if steps.page_stride != paging.page_stride or (
            is_divided and steps.unit_stride != unit_tokens * paging.token_stride
        ):
            raise _FlawError("the runs step from page to page as the pool does not")
        if is_divided and self._shard.component.entry is not Entry.TOKEN:
            raise _FlawError("pages that cannot be cut between tokens are cut")


def _name(shard: Shard, piece: Piece) -> str:
    return f"{piece.component!r} {shard.component.describe(piece.box)}"
