"""Which part of a receiver's cache comes from which source rank.

What a source rank owes a receiver is the intersection of their boxes. Where several source ranks hold the same part
(grouped-query attention with more ranks than heads, MLA), one of them is elected writer, room by room. Context
parallelism divides a part once more, by token: ranks that hold other tokens of it each have a piece of their own.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.errors import IncompatiblePeerError
from kvferry.layout import Box, Component, Entry, Interval, RankLayout, TokenPartition, TokenShare
from kvferry.layout.component import MOST_AXES, Name
from kvferry.layout.interval import WireIndex, volume
from kvferry.layout.tokens import parts_met

MOST_HOLDERS = 1 << 14
"""Most ranks that share a request, on one side."""


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A part of a receiver's box, and who could send it.

    Attributes:
        component: the component's name.
        box: the part.
        token_part: which part of the source engine's partition of tokens it is; None for state of a whole request.
        holders: group ranks on the source side that hold all of it, in ascending order. One of them sends it.
    """

    component: Name
    box: Annotated[Box, msgspec.Meta(max_length=MOST_AXES)]
    token_part: WireIndex | None
    holders: Annotated[tuple[WireIndex, ...], msgspec.Meta(max_length=MOST_HOLDERS)]


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """What the source ranks hold of one component.

    Attributes:
        bounds: start and stop of every shard's box, shape [shards, axes, 2].
        ranks: the group rank of every shard.
        token_parts: the part of the tokens that every shard has.
        partition: how the ranks partition the tokens of the component.
    """

    component: Component
    bounds: NDArray[np.int64]
    ranks: NDArray[np.int64]
    token_parts: NDArray[np.int64]
    partition: TokenPartition


class SourceGroup:
    """All ranks of the source side that share a request. Works out what a receiver gets from which of them."""

    def __init__(self, layouts: Mapping[int, RankLayout]) -> None:
        """Takes the ranks of one group.

        Args:
            layouts: the ranks' layouts, by group rank.

        Raises:
            IncompatiblePeerError: if there are no ranks, or they disagree on how tokens are partitioned.
        """
        if not layouts:
            raise IncompatiblePeerError("there are no source ranks: nobody holds what this rank needs")
        partitions = {layout.tokens.partition for layout in layouts.values()}
        if len(partitions) != 1:
            raise IncompatiblePeerError(
                f"the source ranks partition tokens differently: {'; '.join(sorted(map(str, partitions)))}"
            )
        self._partition: TokenPartition = partitions.pop()
        self.layouts = dict(sorted(layouts.items()))
        self._held: dict[str, _Held] = {}
        self._cuts: dict[
            tuple[str, Box, tuple[int | None, ...]], list[Piece]
        ] = {}  # many receivers hold the same boxes

    def held(self, component: str) -> _Held | None:
        """Returns what the ranks hold of a component; None if they do not have it at all.

        Raises:
            IncompatiblePeerError: if some ranks hold every token of it, and others a share.
        """
        if component not in self._held:
            shards = [
                (rank, layout.share_of(shard), shard)
                for rank, layout in self.layouts.items()
                for shard in layout.shards_of(component)
            ]
            if not shards:
                return None
            partitions = {share.partition for _, share, shard in shards if volume(shard.box)} or {self._partition}
            if len(partitions) > 1:
                raise IncompatiblePeerError(
                    f"the source ranks partition the tokens of {component!r} differently: "
                    f"{'; '.join(sorted(map(str, partitions)))}"
                )
            self._held[component] = _Held(
                component=shards[0][2].component,
                bounds=np.array([[(part.start, part.stop) for part in shard.box] for _, _, shard in shards]),
                ranks=np.array([rank for rank, _, _ in shards]),
                token_parts=np.array([share.part for _, share, _ in shards]),
                partition=partitions.pop(),
            )
        return self._held[component]

    def token_parts(self, component: Component, share: TokenShare) -> tuple[int | None, ...]:
        """Returns the parts of the tokens from which a receiver with that share needs entries of a component."""
        if component.entry is Entry.REQUEST:
            return (None,)
        held = self.held(component.name)
        return parts_met(self._partition if held is None else held.partition, share)

    def pieces_for(self, receiver: RankLayout) -> tuple[Piece, ...]:
        """Cuts everything that a receiver holds into pieces that have the same holders throughout.

        Returns:
            Pieces that tile the receiver's boxes, once for each part of the tokens that it needs.

        Raises:
            IncompatiblePeerError: if no source rank holds some part, naming it.
        """
        pieces: list[Piece] = []
        for shard in receiver.shards:
            held = self.held(shard.component.name)
            if held is None:
                if not shard.component.is_optional and volume(shard.box):
                    raise IncompatiblePeerError(f"no source rank has component {shard.component.name!r}")
                continue
            parts = self.token_parts(shard.component, receiver.share_of(shard))
            key = shard.component.name, shard.box, parts
            if key not in self._cuts:
                self._cuts[key] = self._cut(held, shard.box, parts)
            pieces += self._cuts[key]
        return tuple(pieces)

    def _cut(self, held: _Held, box: Box, token_parts: tuple[int | None, ...]) -> list[Piece]:
        """Cuts a box at every face of the holders' boxes, so that each piece lies either in or outside of each."""
        slices: list[list[tuple[Interval, NDArray[np.bool_]]]] = []
        for axis, whole in enumerate(box):
            starts, stops = held.bounds[:, axis, 0], held.bounds[:, axis, 1]
            faces = {*starts.tolist(), *stops.tolist()}
            points = sorted({whole.start, whole.stop, *(face for face in faces if whole.start < face < whole.stop)})
            slices.append([(Interval(low, high), (starts <= low) & (stops >= high)) for low, high in pairwise(points)])
        has_part = {part: held.token_parts == part if part is not None else True for part in token_parts}
        pieces = []
        for combination in product(*slices):
            part_of_box = tuple(interval for interval, _ in combination)
            holds = np.logical_and.reduce([holds_slice for _, holds_slice in combination])
            for part in token_parts:
                holders = tuple(sorted(set(held.ranks[holds & has_part[part]].tolist())))
                if not holders:
                    raise IncompatiblePeerError(self._why_nobody_holds(held, part_of_box, part))
                pieces.append(Piece(held.component.name, part_of_box, part, holders))
        return pieces

    def _why_nobody_holds(self, held: _Held, part: Box, token_part: int | None) -> str:
        component = held.component
        tokens = "" if token_part is None or held.partition.is_whole else f" for part {token_part} of the tokens"
        boxes = [tuple(Interval(*map(int, pair)) for pair in bounds) for bounds in held.bounds]
        return (
            f"no source rank holds {component.name!r} {component.describe(part)}{tokens}, which this rank needs; the "
            f"{len(self.layouts)} source ranks hold "
            + "; ".join(f"rank {rank}: {component.describe(box)}" for rank, box in zip(held.ranks, boxes, strict=True))
        )


def pieces_for_receiver(sources: Mapping[int, RankLayout], receiver: RankLayout) -> tuple[Piece, ...]:
    """Works out what a receiver gets from which source rank; see `SourceGroup`.

    Args:
        sources: the layouts of all ranks of the source group, by group rank.
        receiver: the layout of the rank that receives.
    """
    return SourceGroup(sources).pieces_for(receiver)


def elect_writer(piece: Piece, *, room: int, receiver: int) -> int:
    """Elects the group rank that sends a piece in a room.

    Both sides compute it from the same data. Successive receivers take successive holders, and rooms spread over the
    holders whatever pattern their numbers follow.

    Args:
        room: the transfer's number.
        receiver: the receiver's group rank.
    """
    spread = zlib.crc32(room.to_bytes(8, "little"))
    return piece.holders[(spread + receiver) % len(piece.holders)]
