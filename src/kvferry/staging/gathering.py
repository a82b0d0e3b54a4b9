"""Gathers what a write moves into staging memory, sub-chunk by sub-chunk, and says what is in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import tee

from kvferry.plan import ElectedRoute
from kvferry.plan.packing import PackedPiece, Segment, SubChunk, aligned, sub_chunks
from kvferry.plan.requests.moved_blocks import moved_blocks, pack_units, row_bytes_of
from kvferry.protocol.transfer.events import Write
from kvferry.protocol.wire import messages
from kvferry.staging.digests import segment_digests
from kvferry.staging.kernels import Kernels, PackedBlocks
from kvferry.staging.rings import Span


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """A sub-chunk in staging memory, or to be gathered there.

    Attributes:
        notification: travels behind it.
        cache_bytes: bytes of the cache that it carries.
        runs: how many blocks they were gathered from.
        blocks: what is still to be gathered; empty if it was.
    """

    notification: messages.StagedArrived
    cache_bytes: int
    runs: int
    blocks: Sequence[PackedBlocks]


class Gathering:
    """Gathers one write of a room, sub-chunk by sub-chunk.

    Attributes:
        command: what is gathered.
        units: as they travel; those of layer after layer are the same.
    """

    def __init__(
        self,
        room: int,
        command: Write,
        elected: Sequence[ElectedRoute],
        packed: Sequence[PackedPiece],
        kernels: Kernels,
        *,
        chunk_bytes: int,
        writer: int,
        is_digested: bool = False,
        is_put_off: bool = False,
    ) -> None:
        """Begins with the first sub-chunk.

        Args:
            room: the room's number.
            command: what is to be written.
            elected: what this rank sends in the room.
            packed: every piece of the pair's plan, in the unit of the command.
            kernels: copy blocks into staging memory.
            chunk_bytes: the size of a sub-chunk.
            writer: this rank's engine rank.
            is_digested: whether the receiver requested digests.
            is_put_off: whether others gather what is not digested.
        """
        self._room = room
        self.command = command
        self._packed = packed
        self._kernels = kernels
        self._writer = writer
        self._rest, ahead = tee(sub_chunks(moved_blocks(elected, command.moves, packed), chunk_bytes))
        self._is_put_off = is_put_off and not is_digested
        # Digests are made segment by segment, and nothing is looked at ahead.
        is_ahead = not (is_digested or is_put_off)
        self._gathers = kernels.gathers(self._placed(chunk) for chunk in ahead) if is_ahead else None
        self._next = next(self._rest, None)
        self._gathered = 0
        self.units: dict[tuple[int, int, int], bytes] = {}  # as they travel: those of layer after layer are the same

    @property
    def next_bytes(self) -> int | None:
        """Bytes of the next sub-chunk; None if all were gathered."""
        return None if self._next is None else self._next.num_bytes

    def gather(self, address: int, span: Span, *, epoch: int) -> Gathered:
        """Gathers the next sub-chunk, or says what is to be gathered.

        Args:
            address: where to, as many bytes as it has.
            span: where it will go in the receiver's ring.
            epoch: the ring's.
        """
        chunk = self._next
        assert chunk is not None
        self._next = next(self._rest, None)
        blocks = self._placed(chunk) if self._is_put_off else ()
        digests = self._pack(chunk, address) if not blocks else [None] * len(chunk.segments)
        segments = tuple(
            messages.StagedSegment(
                segment.piece, segment.first_base, segment.stop_base, self._units_of(segment), digest
            )
            for segment, digest in zip(chunk.segments, digests, strict=True)
        )
        part, self._gathered = self._gathered, self._gathered + 1
        notification = messages.StagedArrived(
            room=self._room,
            generation=self.command.generation,
            writer=self._writer,
            sequence=self.command.sequence,
            part=part,
            is_last=self._next is None,
            epoch=epoch,
            start=span.start,
            begin=span.begin,
            stop=span.stop,
            unit=self.command.unit,
            segments=segments,
        )
        return Gathered(
            notification,
            sum(segment.num_bytes for segment in chunk.segments),
            sum(segment.num_blocks for segment in chunk.segments),
            blocks,
        )

    def _pack(self, chunk: SubChunk, address: int) -> list[messages.Digests | None]:
        """Packs the segments, and returns their digests."""
        if self._gathers is not None:
            self._gathers.gather(address)
            return [None] * len(chunk.segments)
        row_bytes = row_bytes_of(chunk.num_bytes)
        digests: list[messages.Digests | None] = []
        # Segment by segment, while the bytes are in the processor's cache.
        for segment, blocks in zip(chunk.segments, self._placed(chunk), strict=True):
            move, piece, where = self.command.moves[segment.move], self._packed[segment.piece], address + blocks.offset
            self._kernels.gather(blocks.starts, blocks.shape, where)
            digests.append(segment_digests(segment, move, piece, where, row_bytes=row_bytes))
        return digests

    def _placed(self, chunk: SubChunk) -> list[PackedBlocks]:
        """Returns where the blocks of every segment begin, and where they are packed."""
        offset = 0
        found = []
        for segment in chunk.segments:
            move, piece = self.command.moves[segment.move], self._packed[segment.piece]
            which = slice(segment.first_unit, segment.stop_unit)
            starts = piece.source.starts(
                segment.first_base, segment.stop_base, move.source_units[which], move.source_pages[which]
            )
            found.append(PackedBlocks(starts, piece.source.shape, aligned(offset)))
            offset = found[-1].stop
        return found

    def _units_of(self, segment: Segment) -> bytes:
        """Returns the segment's units as they are sent."""
        key = segment.move, segment.first_unit, segment.stop_unit
        if key not in self.units:
            move = self.command.moves[segment.move]
            self.units[key] = pack_units(move.destination_numbers[segment.first_unit : segment.stop_unit])
        return self.units[key]
