"""Copies one part of a chunk from staging memory into pages, as its notification describes it."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.errors import MessageError
from kvferry.plan.packing import aligned
from kvferry.plan.requests.moved_blocks import UnitPlaces
from kvferry.protocol.wire.messages import StagedArrived
from kvferry.staging.digests import verify_segment
from kvferry.staging.kernels import Kernels, PackedBlocks
from kvferry.staging.receiving import WriterRing
from kvferry.staging.resolving import Blocks, resolved
from kvferry.staging.rings import Span


def scatter_part(
    message: StagedArrived,
    ring: WriterRing,
    span: Span,
    places: UnitPlaces,
    kernels: Kernels,
    *,
    is_verified: bool = False,
) -> None:
    """Scatters a part of a chunk into its pages. Nothing is copied if any of it is invalid.

    Args:
        message: describes the part.
        ring: the ring that it is in.
        span: where in the ring.
        places: the places of its room's units.
        is_verified: whether to compare digests afterwards. The pages are gathered into the span again, which is no
            longer needed.

    Raises:
        MessageError: if it is not what the writer may send, or not what the room requested.
        RegistrationError: if a page lies outside the pool.
        ChecksumError: if a digest differs.
    """
    parts = [resolved(segment, message.unit, ring.plan, places) for segment in message.segments]
    ends = 0
    for blocks in parts:
        ends = aligned(ends) + blocks.num_bytes
    if ends != span.num_bytes:
        raise MessageError(f"{span.num_bytes} bytes of staging memory for segments of {ends}")
    address, packed = ring.address(span), _packed(parts)
    kernels.scatter_all(address, packed)
    if not is_verified:
        return
    for segment, blocks, placed in zip(message.segments, parts, packed, strict=True):
        where = address + placed.offset
        verify_segment(segment, blocks, ring.plan, places, kernels, where, unit=message.unit, writer=message.writer)


def _packed(parts: Sequence[Blocks]) -> list[PackedBlocks]:
    """Returns every segment's blocks, and where they are packed."""
    found: list[PackedBlocks] = []
    for blocks in parts:
        offset = aligned(found[-1].stop) if found else 0
        found.append(PackedBlocks(blocks.starts, blocks.piece.destination.shape, offset))
    return found
