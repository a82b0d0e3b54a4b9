"""From staging memory into pages: one part of a chunk, as a notification describes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvferry.errors import MessageError
from kvferry.plan.packing import aligned
from kvferry.protocol.credits import Span
from kvferry.protocol.messages import StagedArrived
from kvferry.protocol.placing import UnitPlaces
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
    """Puts what a part of a chunk consists of into its pages. Nothing is copied if any of it makes no sense.

    Args:
        message: what the part is.
        ring, span: where it is.
        places: of the room that it belongs to.
        is_verified: whether to compare digests of what is in the pages then. It is gathered into the span again, which
            nobody needs any more.

    Raises:
        MessageError: if it is not what the writer may send, or not what the room asked for.
        RegistrationError: if a page lies outside the pool.
        ChecksumError: if a digest differs.
    """
    packed = ring.packed(message.unit)
    parts = [resolved(segment, message.unit, packed, ring.plan, places) for segment in message.segments]
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
    """Every segment's blocks, and where they are packed."""
    offset = 0
    for blocks in parts:
        offset = aligned(offset)
        yield blocks, address + offset
        offset += blocks.num_bytes
