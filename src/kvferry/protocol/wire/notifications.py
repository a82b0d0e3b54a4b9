"""The notifications that travel with the bytes, over the transport: what has arrived, and how it lies."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from kvferry.plan import Unit
from kvferry.plan.requests.page_numbers import MAX_PAGES
from kvferry.protocol.wire.field_types import MAX_AUX_BYTES, MAX_DIGEST_BYTES, MAX_SEGMENTS, AboutRoom, Count, Random


class Digests(msgspec.Struct, frozen=True, array_like=True):
    """Digests of packed blocks, page by page; see `plan.requests.moved_blocks`.

    Attributes:
        row_bytes: least bytes that a digest covers, where pages are small.
        values: the digests, 8 bytes each, one after the other.
    """

    row_bytes: Count
    values: Annotated[bytes, msgspec.Meta(max_length=MAX_DIGEST_BYTES)]


class StagedSegment(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of one piece, packed one after the other; see `plan.packing`.

    Attributes:
        piece: the piece's number among those of `Attach` that this writer may send.
        first_base: first index of the piece's first axis.
        stop_base: the one after the last.
        units: which units they are on the decode side, as ranges of numbers (local position divided by the unit's
            tokens): first and count of each, int64 little-endian.
        digests: digests of the packed bytes, where the decode rank requested them.
    """

    piece: Count
    first_base: Count
    stop_base: Count
    units: Annotated[bytes, msgspec.Meta(max_length=8 * MAX_PAGES)]
    digests: Digests | None = None


class ChunkArrived(AboutRoom, frozen=True, omit_defaults=True):
    """Notification: all bytes of one chunk from one writer are in place.

    Attributes:
        sequence: counts from 0 per receiver.
        unit: what its digests are counted in.
        segments: what the chunk consists of, with its digests, where the decode rank asked for them.
    """

    writer: Count
    sequence: Count
    unit: Unit = Unit.WHOLE
    segments: Annotated[tuple[StagedSegment, ...], msgspec.Meta(max_length=MAX_SEGMENTS)] = ()


class StagedArrived(AboutRoom, frozen=True):
    """Notification: a part of a chunk from one writer is in staging memory.

    Attributes:
        sequence: the chunk's number, as in `ChunkArrived`.
        part: the part's number in its chunk, from 0.
        is_last: whether it is the last of the chunk.
        epoch: of the ring that it is in.
        start: where its span of the ring starts; see `credits.Span`.
        begin: where its bytes begin.
        stop: where they end.
        unit: what is packed together.
        segments: what the part consists of, in the order in which it is packed.
    """

    writer: Count
    sequence: Count
    part: Count
    is_last: bool
    epoch: Random
    start: Count
    begin: Count
    stop: Count
    unit: Unit
    segments: Annotated[tuple[StagedSegment, ...], msgspec.Meta(max_length=MAX_SEGMENTS)]


class WriterFinished(AboutRoom, frozen=True):
    """Notification: this writer has finished the room.

    Attributes:
        chunks: how many chunks this writer sent to this receiver; they may arrive after this message.
        aux: the request's aux data, from the one rank that sends it; None from all others.
    """

    writer: Count
    chunks: Count
    aux: Annotated[bytes, msgspec.Meta(max_length=MAX_AUX_BYTES)] | None = None


Notification: TypeAlias = ChunkArrived | StagedArrived | WriterFinished
