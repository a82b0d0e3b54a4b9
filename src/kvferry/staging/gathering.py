"""The staged path on the prefill side: gather a sub-chunk into staging memory, write it in bulk, and go on.

A room does one sub-chunk in a turn and then queues behind the others, so that a huge request delays a small one by a
sub-chunk at most. Where memory is short, on this side or the receiver's, the room waits for its turn at that ring and
holds up no room that needs another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvferry.layout import Region
from kvferry.plan import ElectedRoute, Unit
from kvferry.plan.packing import PackedPiece, Segment, SubChunk, aligned, sub_chunks
from kvferry.plan.requests.digest_rows import row_bytes_of
from kvferry.plan.requests.moved_blocks import moved_blocks, pack_units
from kvferry.protocol.transfer.credits import Span
from kvferry.protocol.transfer.sender_events import Write
from kvferry.protocol.wire import codec, notifications
from kvferry.staging.digests import segment_digests
from kvferry.staging.kernels import Kernels
from kvferry.staging.rings import SharedRing
from kvferry.staging.slots import Slot, SourceMemory
from kvferry.transport import TransferHandle, Transport


@dataclass(frozen=True, slots=True, eq=False)
class PeerMemory:
    """Staging memory of a receiver that this rank writes to.

    Attributes:
        address: where it is.
        epoch: distinguishes credits for it from those for an earlier one.
        ring: what of it is free.
    """

    address: int
    epoch: int
    ring: SharedRing


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """What a room's staged writes to one receiver have in common.

    Attributes:
        receiver: its endpoint.
        elected: what this rank sends in the room.
        packed: every piece of the pair's plan, by unit.
        kernels: copy blocks into staging memory.
        transport: writes to the receiver.
        peer: the receiver's staging memory.
        chunk_bytes: the size of a sub-chunk.
        writer: this rank's engine rank.
        give_up: gives up a span of the receiver's ring, and notifies the receiver.
        now: returns the time.
        is_digested: whether the receiver requested digests.
    """

    receiver: str
    elected: Sequence[ElectedRoute]
    packed: Callable[[Unit], tuple[PackedPiece, ...]]
    kernels: Kernels
    transport: Transport
    peer: PeerMemory
    chunk_bytes: int
    writer: int
    give_up: Callable[[Span], None]
    now: Callable[[], float]
    is_digested: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Posted:
    """One sub-chunk on its way.

    Attributes:
        transfer: the bulk write's handle.
        slot: what it keeps of this side's staging memory.
        span: what it keeps of the receiver's ring.
        memory: the memory that the slot is of.
        num_bytes: bytes of the cache that it carries.
        runs: how many blocks they were gathered from.
        ready_at: when it could have begun, had there been memory on both sides.
        begun_at: when gathering began.
        gathered_at: when it was gathered.
        posted_at: when it was posted.
    """

    transfer: TransferHandle
    slot: Slot
    span: Span
    memory: SourceMemory
    num_bytes: int
    runs: int
    ready_at: float
    begun_at: float
    gathered_at: float
    posted_at: float


class StagedWrite:
    """One write of a room, sub-chunk by sub-chunk.

    Attributes:
        command: what is to be written.
        in_flight: sub-chunks on their way.
        parts: sub-chunks that were posted.
        error: why it cannot be completed; None if it can.
    """

    def __init__(self, room: int, command: Write, packing: Packing) -> None:
        self.command = command
        self.in_flight = 0
        self.parts = 0
        self.error: Exception | None = None
        self._room = room
        self._packing = packing
        self._packed = packing.packed(command.unit)
        loads = moved_blocks(packing.elected, command.moves, self._packed)
        self._rest = sub_chunks(loads, packing.chunk_bytes)
        self._next = next(self._rest, None)
        self._units: dict[tuple[int, int, int], bytes] = {}  # as they travel: those of layer after layer are the same

    @property
    def next_bytes(self) -> int | None:
        """Bytes of the next sub-chunk; None if all were posted, or no more are to be."""
        return None if self._next is None or self.error is not None else self._next.num_bytes

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it is on its way, and nothing more is to be posted."""
        return self.next_bytes is None and self.in_flight == 0

    def landed(self, error: Exception | None) -> None:
        """Records that a part is no longer on its way, written or failed."""
        self.in_flight -= 1
        self.error = self.error or error

    def post(self, slot: Slot, memory: SourceMemory, span: Span, *, ready_at: float | None = None) -> Posted:
        """Gathers the next sub-chunk and posts it.

        Args:
            slot: where to gather it, one of memory's.
            span: where it goes in the receiver's ring, as many bytes as it has.
            ready_at: since when it has waited for either; None if it has not.

        Raises:
            TransportError: if it cannot be posted; nothing is on its way then.
        """
        chunk = self._next
        assert chunk is not None
        self._next = next(self._rest, None)
        packing = self._packing
        begun_at = packing.now()
        digests, runs = self._gather(chunk, slot.address)
        gathered_at = packing.now()
        transfer = packing.transport.write(
            Region(slot.address, chunk.num_bytes),
            self.command.receiver,
            packing.peer.address + packing.peer.ring.place(span),
            codec.encode(self._arrived(chunk, span, digests)),
        )
        self.parts += 1
        self.in_flight += 1
        return Posted(
            transfer=transfer,
            slot=slot,
            span=span,
            memory=memory,
            num_bytes=sum(segment.num_bytes for segment in chunk.segments),
            runs=runs,
            ready_at=begun_at if ready_at is None else ready_at,
            begun_at=begun_at,
            gathered_at=gathered_at,
            posted_at=packing.now(),
        )

    def _gather(self, chunk: SubChunk, address: int) -> tuple[list[notifications.Digests | None], int]:
        """Packs the segments. Returns their digests and how many blocks they were in.

        Digests are made segment by segment, while the bytes are in the processor's cache.
        """
        offset = runs = 0
        digests: list[notifications.Digests | None] = []
        row_bytes = row_bytes_of(chunk.num_bytes)
        for segment in chunk.segments:
            move, side = self.command.moves[segment.move], self._packed[segment.piece].source
            which = slice(segment.first_unit, segment.stop_unit)
            starts = side.starts(
                segment.first_base, segment.stop_base, move.source_units[which], move.source_pages[which]
            )
            offset = aligned(offset)
            self._packing.kernels.gather(starts, side.shape, address + offset)
            digests.append(
                segment_digests(segment, move, self._packed[segment.piece], address + offset, row_bytes=row_bytes)
                if self._packing.is_digested
                else None
            )
            offset += segment.num_bytes
            runs += len(starts)
        return digests, runs

    def _arrived(
        self, chunk: SubChunk, span: Span, digests: Sequence[notifications.Digests | None]
    ) -> notifications.StagedArrived:
        return notifications.StagedArrived(
            room=self._room,
            generation=self.command.generation,
            writer=self._packing.writer,
            sequence=self.command.sequence,
            part=self.parts,
            is_last=self._next is None,
            epoch=self._packing.peer.epoch,
            start=span.start,
            begin=span.begin,
            stop=span.stop,
            unit=self.command.unit,
            segments=tuple(
                notifications.StagedSegment(
                    segment.piece, segment.first_base, segment.stop_base, self._units_of(segment), digest
                )
                for segment, digest in zip(chunk.segments, digests, strict=True)
            ),
        )

    def _units_of(self, segment: Segment) -> bytes:
        """Returns the segment's units as they are sent."""
        key = segment.move, segment.first_unit, segment.stop_unit
        if key not in self._units:
            move = self.command.moves[segment.move]
            self._units[key] = pack_units(move.destination_numbers[segment.first_unit : segment.stop_unit])
        return self._units[key]


WriteT = TypeVar("WriteT", bound=StagedWrite)


class StagedQueue(Generic[WriteT]):
    """A room's staged writes to one receiver, in order. Only the room's own turns use it, except for `wake`.

    Attributes:
        packing: what they have in common.
    """

    def __init__(self, packing: Packing, wake: Callable[[], None]) -> None:
        """Starts empty.

        Args:
            packing: what all writes have in common.
            wake: schedules a turn of the room.
        """
        self.packing = packing
        self._is_awake = False  # whether a turn of the room is scheduled
        self._wake = wake
        self._writes: deque[WriteT] = deque()  # the first is being posted
        self._unended: dict[int, WriteT] = {}  # the same and those with parts on their way, by sequence
        self._span: Span | None = None  # of the receiver's ring, while a slot is waited for
        self._waits_at: SharedRing | SourceMemory | None = None
        self._waits_since: float | None = None  # since when the next sub-chunk has waited for memory

    def wake(self) -> None:
        """Schedules a turn of the room, unless one is scheduled already. For any thread."""
        if not self._is_awake:  # it turns false before the room looks again, so that nothing is missed
            self._is_awake = True
            self._wake()

    @property
    def writes(self) -> list[WriteT]:
        """Those that have not ended. May be read from any thread."""
        return list(self._unended.values())

    def add(self, write: WriteT) -> None:
        """Queues a write behind the others."""
        self._writes.append(write)
        self._unended[write.command.sequence] = write

    def post_next(self, memory: SourceMemory) -> tuple[WriteT, Posted | None] | None:
        """Posts the next sub-chunk. Returns None if there is none, or if it has to wait for memory.

        Args:
            memory: of the worker that runs the room now.

        Returns:
            The write, and its sub-chunk on its way; None for the sub-chunk if posting failed with the write's error.
        """
        self._is_awake = False
        while self._writes and self._writes[0].next_bytes is None:
            self._writes.popleft()
        if not self._writes:
            self._stop_waiting()  # those queued behind must not wait for this one
            self._waits_since = None
            return None
        write = self._writes[0]
        num_bytes = write.next_bytes
        assert num_bytes is not None
        # The receiver's memory first: while it is held, only writes to this receiver are held up.
        if self._span is None:
            self._span = self._reserve(num_bytes)
        slot = self._take_slot(memory) if self._span is not None else None
        if self._span is None or slot is None:
            self._waits_since = self.packing.now() if self._waits_since is None else self._waits_since
            return None
        span, self._span = self._span, None
        since, self._waits_since = self._waits_since, None
        try:
            return write, write.post(slot, memory, span, ready_at=since)
        except Exception as error:
            memory.give_back(slot)
            self.packing.give_up(span)
            write.error = error
            return write, None

    def _reserve(self, num_bytes: int) -> Span | None:
        ring = self.packing.peer.ring
        span = ring.reserve(num_bytes, self)
        self._waits_at = ring if span is None else None
        return span

    def _take_slot(self, memory: SourceMemory) -> Slot | None:
        if self._waits_at is not memory:
            self._stop_waiting()  # woken on another worker, which has memory of its own
        slot = memory.take(self.packing.receiver, self)
        self._waits_at = memory if slot is None else None
        return slot

    def _stop_waiting(self) -> None:
        if self._waits_at is not None:
            where, self._waits_at = self._waits_at, None
            where.withdraw(self)

    @property
    def waits_since(self) -> float | None:
        """Since when the next sub-chunk has waited for memory, on this side or the receiver's; None if it does not."""
        return self._waits_since

    @property
    def has_more(self) -> bool:
        """Whether there is anything left to post."""
        return any(write.next_bytes is not None for write in self._writes)

    def ended(self, write: WriteT) -> None:
        """Forgets a write that has ended."""
        self._unended.pop(write.command.sequence, None)

    def cancel(self, error: Exception) -> list[WriteT]:
        """Posts no more. Returns the writes of which nothing is on its way; the others end when their parts have."""
        self._stop_waiting()
        self._waits_since = None
        if self._span is not None:
            span, self._span = self._span, None
            self.packing.give_up(span)
        self._writes.clear()
        for write in self._unended.values():
            write.error = write.error or error
        return [write for write in self._unended.values() if write.has_ended]
