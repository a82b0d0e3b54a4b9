"""Copies one part of a chunk from staging memory into pages, as its notification describes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvferry.errors import MessageError
from kvferry.plan.packing import aligned
from kvferry.plan.requests.placing import UnitPlaces
from kvferry.protocol.transfer.credits import Span
from kvferry.protocol.wire.notifications import StagedArrived
from kvferry.staging.digests import verify_segment
from kvferry.staging.kernels import Kernels
from kvferry.staging.receiving import WriterRing
from kvferry.staging.resolving import Blocks, resolved


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
    for blocks, address in _placed(parts, ring.address(span)):
        kernels.scatter(address, blocks.starts, blocks.piece.destination.shape)
    if not is_verified:
        return
    for segment, (blocks, address) in zip(message.segments, _placed(parts, ring.address(span)), strict=True):
        verify_segment(segment, blocks, ring.plan, places, kernels, address, unit=message.unit, writer=message.writer)


def _placed(parts: Sequence[Blocks], address: int) -> Iterator[tuple[Blocks, int]]:
    """Yields every segment's blocks, and where they are packed."""
    offset = 0
    for blocks in parts:
        offset = aligned(offset)
        yield blocks, address + offset
        offset += blocks.num_bytes
