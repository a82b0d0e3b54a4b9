"""From staging memory into pages: one part of a chunk, as a notification describes it."""

from __future__ import annotations

from kvferry.errors import MessageError
from kvferry.plan.packing import PackedPiece, Starts, aligned
from kvferry.protocol.credits import Span
from kvferry.protocol.messages import StagedArrived, StagedSegment
from kvferry.protocol.placing import UnitPlaces
from kvferry.staging.kernels import Kernels
from kvferry.staging.receiving import WriterRing


def scatter_part(message: StagedArrived, ring: WriterRing, span: Span, places: UnitPlaces, kernels: Kernels) -> None:
    """Puts what a part of a chunk consists of into its pages. Nothing is copied if any of it makes no sense.

    Args:
        message: what the part is.
        ring, span: where it is.
        places: of the room that it belongs to.

    Raises:
        MessageError: if it is not what the writer may send, or not what the room asked for.
        RegistrationError: if a page lies outside the pool.
    """
    packed = ring.packed(message.unit)
    resolved = [_resolved(message, segment, packed, ring, places) for segment in message.segments]
    ends = 0
    for _, piece, num_blocks in resolved:
        ends = aligned(ends) + num_blocks * piece.block_bytes
    if ends != span.num_bytes:
        raise MessageError(f"{span.num_bytes} bytes of staging memory for segments of {ends}")
    offset = 0
    address = ring.address(span)
    for starts, piece, num_blocks in resolved:
        offset = aligned(offset)
        kernels.scatter(address + offset, starts, piece.destination.shape)
        offset += num_blocks * piece.block_bytes


def _resolved(
    message: StagedArrived,
    segment: StagedSegment,
    packed: tuple[PackedPiece, ...],
    ring: WriterRing,
    places: UnitPlaces,
) -> tuple[Starts, PackedPiece, int]:
    """Where a segment's blocks begin, its piece, and how many they are."""
    if segment.piece >= len(packed):
        raise MessageError(f"piece {segment.piece} of {len(packed)}")
    piece = packed[segment.piece]
    if not segment.first_base < segment.stop_base <= piece.num_bases:
        raise MessageError(f"indices {segment.first_base} to {segment.stop_base} of {piece.num_bases}")
    units, pages = places.find(segment.units, ring.plan.route(segment.piece), unit=message.unit)
    starts = piece.destination.starts(segment.first_base, segment.stop_base, units, pages)
    return starts, piece, len(starts)
