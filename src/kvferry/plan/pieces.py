"""Which part of a receiver's cache comes from which source rank.

What a source rank owes a receiver is the intersection of their boxes. Where several source ranks hold the same part
(grouped-query attention with more ranks than heads, MLA), one of them is elected writer, room by room.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import msgspec

from kvferry.errors import IncompatiblePeerError
from kvferry.layout import Box, RankLayout
from kvferry.layout.interval import covers, cut, volume


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A part of a receiver's box, and who could send it.

    Attributes:
        component: the component's name.
        box: the part.
        holders: group ranks on the source side that hold all of it, in ascending order. One of them sends it.
    """

    component: str
    box: Box
    holders: tuple[int, ...]


def pieces_for_receiver(sources: Mapping[int, RankLayout], receiver: RankLayout) -> tuple[Piece, ...]:
    """Cuts everything that a receiver holds into pieces that have the same holders throughout.

    Args:
        sources: the layouts of all ranks of the source group, by group rank.
        receiver: the layout of the rank that receives.

    Returns:
        Pieces that tile the receiver's boxes.

    Raises:
        IncompatiblePeerError: if no source rank holds some part, naming it.
    """
    pieces = []
    for shard in receiver.shards:
        component = shard.component
        held = {rank: layout.shard(component.name).box for rank, layout in sources.items()}
        for part in cut(shard.box, held.values()):
            if volume(part) == 0:
                continue
            holders = tuple(sorted(rank for rank, box in held.items() if covers(box, part)))
            if not holders:
                raise IncompatiblePeerError(
                    f"no source rank holds {component.name!r} {component.describe(part)}, which this rank needs; "
                    f"the {len(held)} source ranks hold "
                    + "; ".join(f"rank {rank}: {component.describe(box)}" for rank, box in sorted(held.items()))
                )
            pieces.append(Piece(component.name, part, holders))
    return tuple(pieces)


def elect_writer(piece: Piece, *, room: int, receiver: int) -> int:
    """The group rank that sends a piece in a room.

    Both sides compute it from the same data. Successive receivers take successive holders, and rooms spread over the
    holders whatever pattern their numbers follow.

    Args:
        room: the transfer's number.
        receiver: the receiver's group rank.
    """
    spread = zlib.crc32(room.to_bytes(8, "little"))
    return piece.holders[(spread + receiver) % len(piece.holders)]
