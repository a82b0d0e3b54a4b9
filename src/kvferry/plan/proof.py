"""A check of the planner by other means: every destination byte is written once, by the right source byte.

Nothing here calls the lowering's arithmetic. Runs are decoded back into logical coordinates by dividing addresses by
strides, once with the source's geometry and once with the receiver's, and the two must name the same elements. Pages
are all alike (one stride further on), so that one page speaks for all. All runs of a piece are equally long, so that
one is looked at element by element and of the others the first and the last element: a run that crosses the end of a
row on one side only is a run whose ends do not match.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import KVFerryError
from kvferry.layout import RankLayout, Shard
from kvferry.layout.interval import covers, overlap, volume
from kvferry.plan.lowering import Runs, lower
from kvferry.plan.pieces import Piece, elect_writer, pieces_for_receiver


class ProofError(KVFerryError):
    """The plan is wrong: a defect of kvferry, not of its user. Please report the message."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What was proved.

    Attributes:
        receivers: ranks whose every byte was shown to be written once.
        pieces: parts that were looked at.
        bytes_per_token: bytes that travel for one token, over all receivers.
    """

    receivers: int
    pieces: int
    bytes_per_token: int


def prove(sources: Mapping[int, RankLayout], receivers: Mapping[int, RankLayout], *, room: int) -> Proof:
    """Proves the plan of one room over all ranks.

    Args:
        sources, receivers: the layouts of both groups, by group rank.

    Raises:
        ProofError: naming the component and the part that is written wrongly.
        IncompatiblePeerError: if the sources do not hold what a receiver needs.
    """
    proofs = [
        prove_receiver(sources, layout, pieces_for_receiver(sources, layout), room=room, receiver=rank)
        for rank, layout in receivers.items()
    ]
    return Proof(
        receivers=len(proofs),
        pieces=sum(proof.pieces for proof in proofs),
        bytes_per_token=sum(proof.bytes_per_token for proof in proofs),
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
    total = 0
    for shard in layout.shards:
        mine = [piece for piece in pieces if piece.component == shard.component.name]
        _prove_tiling(shard, mine)
        for piece in mine:
            writer = elect_writer(piece, room=room, receiver=receiver)
            source = sources[writer].shard(piece.component)
            if not covers(source.box, piece.box):
                raise ProofError(f"rank {writer} was elected to send {_name(shard, piece)} but does not hold it")
            _prove_runs(piece, source, shard, lower(piece.box, source, shard))
            total += volume(piece.box) * shard.component.element_bytes
    return Proof(receivers=1, pieces=len(pieces), bytes_per_token=total)


def _prove_tiling(shard: Shard, pieces: list[Piece]) -> None:
    for piece in pieces:
        if not covers(shard.box, piece.box):
            raise ProofError(f"{_name(shard, piece)} leaves the receiver's part")
    for one, other in combinations(pieces, 2):
        if overlap(one.box, other.box) is not None:
            raise ProofError(f"{_name(shard, one)} and {_name(shard, other)} write the same elements")
    covered, needed = sum(volume(piece.box) for piece in pieces), volume(shard.box)
    if covered != needed:
        raise ProofError(f"{shard.component.name!r}: {needed - covered} of {needed} elements a token are never written")


def _prove_runs(piece: Piece, source: Shard, destination: Shard, runs: Runs) -> None:
    name = _name(destination, piece)
    size = source.component.element_bytes
    expected = volume(piece.box) * destination.paging.page_tokens
    if runs.bytes_per_page != expected * size:
        raise ProofError(f"{name}: {runs.bytes_per_page} bytes a page are sent where {expected * size} are owed")
    strides = (runs.source_page_stride, runs.destination_page_stride)
    if strides != (source.paging.page_stride, destination.paging.page_stride):
        raise ProofError(f"{name}: the runs step {strides} bytes from page to page, the pools do not")
    first_run = np.arange(0, runs.length, size, dtype=np.uint64)
    to_last = np.uint64(runs.length - size)
    for start_source, start_destination in (
        (runs.source, runs.destination),
        (runs.source + to_last, runs.destination + to_last),
        (runs.source[0] + first_run, runs.destination[0] + first_run),
    ):
        here, there = _decode(source, start_source), _decode(destination, start_destination)
        if not np.array_equal(here, there):
            raise ProofError(f"{name}: a run pairs different elements of the two sides")
        for axis, interval in enumerate(piece.box):
            if here[axis].min() < interval.start or here[axis].max() >= interval.stop:
                raise ProofError(f"{name}: a run leaves the part that is owed")
    starts = np.sort(runs.destination)
    if len(starts) > 1 and int(np.diff(starts).min()) < runs.length:
        raise ProofError(f"{name}: two runs write the same bytes")


def _decode(shard: Shard, addresses: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Global coordinates of the elements at some addresses of page 0: shape [axes + 1, addresses], the token last.

    An address belongs to the one base address from which division by the strides, largest first, leaves no rest.
    """
    names = [*(axis.name for axis in shard.component.axes), "token"]
    starts = {axis.name: part.start for axis, part in zip(shard.component.axes, shard.box, strict=True)}
    steps = sorted((step for step in shard.steps() if step.name != "page"), key=lambda step: -step.stride)
    coordinates = np.full((len(names), len(addresses)), -1, np.int64)
    for index, base in enumerate(shard.addresses):
        rest = addresses.astype(np.int64) - base
        decoded = {names[0]: np.full_like(rest, index)}
        for step in steps:
            decoded[step.name] = np.clip(rest // step.stride if step.stride else 0 * rest, 0, step.count - 1)
            rest = rest - decoded[step.name] * step.stride
        found = rest == 0
        for row, name in zip(coordinates, names, strict=True):
            row[found] = decoded[name][found] + starts.get(name, 0)
    if coordinates.min(initial=0) < 0:
        raise ProofError(f"a run of {shard.component.name!r} starts between elements or outside of the pool")
    return coordinates


def _name(shard: Shard, piece: Piece) -> str:
    return f"{piece.component!r} {shard.component.describe(piece.box)}"
