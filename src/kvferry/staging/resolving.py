"""Where the blocks of a notification's segments lie on this rank."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.errors import MessageError
from kvferry.plan import PairPlan, Unit
from kvferry.plan.packing import PackedPiece, Starts
from kvferry.plan.requests.moved_blocks import UnitPlaces
from kvferry.plan.requests.page_numbers import Pages
from kvferry.protocol.wire.messages import StagedSegment


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The blocks of a segment in the receiver's pages.

    Attributes:
        starts: where each begins, in the order in which they are packed.
        piece: the piece that they are of.
        pages: the page of every unit; each index of the first axis has as many units.
    """

    starts: Starts
    piece: PackedPiece
    pages: Pages

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return len(self.starts) * self.piece.block_bytes


def resolved(segment: StagedSegment, unit: Unit, plan: PairPlan, places: UnitPlaces) -> Blocks:
    """Finds the blocks of a segment.

    Args:
        plan: what the writer may send.
        places: the places of the room's units.

    Raises:
        MessageError: if it is not what the writer may send, or not what the room requested.
    """
    pieces = plan.packed_pieces(unit)
    if segment.piece >= len(pieces):
        raise MessageError(f"piece {segment.piece} of {len(pieces)}")
    piece = pieces[segment.piece]
    if not segment.first_base < segment.stop_base <= piece.num_bases:
        raise MessageError(f"indices {segment.first_base} to {segment.stop_base} of {piece.num_bases}")
    units, pages = places.find(segment.units, plan.route(segment.piece), unit=unit)
    return Blocks(piece.destination.starts(segment.first_base, segment.stop_base, units, pages), piece, pages)
