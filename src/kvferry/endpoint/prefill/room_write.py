"""A write of a room: where it goes, what is through of it, and its end; and those that go directly.

A direct write waits until it is admitted, and is posted into its receiver's pages.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from kvferry.endpoint.prefill.admission import Admitted, due_at
from kvferry.endpoint.prefill.attachment import Attachment
from kvferry.endpoint.prefill.context import PrefillContext
from kvferry.endpoint.prefill.paths import StagedPath
from kvferry.endpoint.runtime.workers import Worker
from kvferry.errors import PeerDisconnectedError
from kvferry.observe.records import PartRecord, WriteRecord
from kvferry.plan import Choice, ElectedRoute, Unit
from kvferry.protocol.transfer.events import (
    Broke,
    SenderEvent,
    Write,
    WriteAdmitted,
    WriteDeferred,
    WriteDone,
    WriteFailed,
)
from kvferry.protocol.wire import messages
from kvferry.transport import TransferHandle, TransferReport


class WritingRoom(Protocol):
    """What a room's writes need of the room."""

    @property
    def room(self) -> int:
        """Its number."""

    def post(self, event: Any) -> None:
        """Queues an event for one of the room's next turns. From any thread."""

    def apply(self, event: SenderEvent, worker: Worker) -> None:
        """Passes an event to the room's machine, in the room's turn."""

    def keep(self, record: WriteRecord) -> None:
        """Takes the record of a write that is through. From the thread that polled it."""


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A receiver of a room.

    Attributes:
        room: the room.
        attachment: the receiver.
        elected: the routes by which this rank sends to it in the room.
        context: what all parts of the rank share.
    """

    room: WritingRoom
    attachment: Attachment
    elected: tuple[ElectedRoute, ...]
    context: PrefillContext

    @property
    def receiver(self) -> str:
        """Its endpoint."""
        return self.attachment.receiver

    @property
    def staged(self) -> StagedPath:
        """What staged writes to it need. Only for these: there may be none."""
        path = self.attachment.paths.staged
        assert path is not None
        return path

    def report_failure(self, error: Exception, *, is_read: bool = False) -> None:
        """Reports, outside of the room, that a write to it failed.

        Where the connection broke, the decode rank is given up: only connecting anew mends it. So it is where our
        memory may be read yet: only then what was posted is cut off.
        """
        self.context.observer.write_failed(self.room.room, self.receiver, error)
        if is_read or isinstance(error, PeerDisconnectedError):
            self.context.write_failed(self.attachment, error)


class RoomWrite:
    """A write of a room to one receiver. It holds the receiver's lists from `Attachment.begin_write` to its end.

    Attributes:
        command: what is to be written.
        receiver: whose memory is written.
        target: the receiver.
        choice: its path, and why.
        submitted_at: when the first of its chunks was handed in, and all receivers had opened the room.
        num_bytes: of the cache that it moves.
        parts: those that are through.
    """

    def __init__(self, command: Write, target: Target, choice: Choice, *, submitted_at: float, begun_at: float) -> None:
        """Begins with nothing posted."""
        self.command = command
        self.receiver = command.receiver
        self.target = target
        self.choice = choice
        self.parts: list[PartRecord] = []
        self.submitted_at = submitted_at
        self.num_bytes = target.attachment.bytes_of(command.unit, target.elected, command.moves)
        self._begun_at = begun_at
        self._descriptors = 0
        self._post_s = self._transfer_s = 0.0
        self._is_reported = False  # that it failed
        self._is_over = False

    def arrived(self, report: TransferReport, part: PartRecord, *, descriptors: int) -> None:
        """Adds a part that is in the receiver's memory."""
        self.target.attachment.moved_at = part.landed_at
        self.parts.append(part)
        self._descriptors += descriptors
        self._post_s += report.post_s
        self._transfer_s += report.transfer_s

    def failure(self, error: Exception, *, may_arrive: bool = False, is_read: bool = False) -> WriteFailed:
        """Reports that it failed, once, and returns the event for the room's machine.

        Args:
            may_arrive: whether what was sent of it may arrive yet.
            is_read: as in `WatchedWrite.failed`.
        """
        if may_arrive:  # before anything is said of the room when it is forgotten
            self.target.context.broken_off.add(self.receiver)
        if not self._is_reported:
            self._is_reported = True
            self.target.report_failure(error, is_read=is_read)
        return WriteFailed(self.receiver, self.command.sequence, error, may_arrive)

    def end(self, error: Exception | None) -> SenderEvent | None:
        """Ends it: nothing of it is on its way. Returns the event for the room's machine; None if it ended before.

        Args:
            error: why it is not complete, if it is not.
        """
        if self._is_over:
            return None
        self.drop()
        if error is not None:
            return self.failure(error)
        self.target.room.keep(self._record())
        return WriteDone(self.receiver, self.command.sequence)

    def drop(self) -> None:
        """Ends it, before it has ended otherwise, where nobody waits for that."""
        self._is_over = True
        self.target.attachment.end_write()

    def _record(self) -> WriteRecord:
        return WriteRecord(
            receiver=self.receiver,
            path=self.choice.path,
            why=self.choice.reason,
            total_bytes=sum(part.num_bytes for part in self.parts),
            descriptors=self._descriptors,
            submitted_at=self.submitted_at,
            posted_at=self._begun_at,
            done_at=self.target.context.now(),
            transport_post_s=self._post_s,
            transport_transfer_s=self._transfer_s,
            parts=tuple(self.parts),
        )


class DirectWrite(RoomWrite):
    """A write into the receiver's pages.

    Attributes:
        transfer: the transport's handle, once it is posted.
    """

    transfer: TransferHandle
    _admitted: Admitted | None
    _part: Callable[..., PartRecord]

    def post(self, admitted: Admitted, worker: Worker) -> None:
        """Posts it, in the room's turn."""
        context, command = self.target.context, self.command
        self._admitted = admitted
        ready_at = context.now()
        try:
            selected = self.target.attachment.select(command.unit, self.target.elected, command.moves)
            notification = context.encoded(self.receiver, self._arrived())
        except Exception as error:  # nothing was posted
            self.settled(error)
            return
        selected_at = context.now()
        try:
            self.transfer = context.transport.post(
                selected.local, selected.local_indices, selected.remote, selected.remote_indices, notification
            )
        except Exception as error:
            worker.post_raised(self, error)
            return
        self._part = partial(
            PartRecord,
            ready_at=ready_at,
            begun_at=ready_at,
            gathered_at=selected_at,
            posted_at=context.now(),
            runs=len(selected.local_indices),
            thread=threading.current_thread().name,
        )
        worker.watch(self)

    def done(self, report: TransferReport) -> None:
        """Takes note that it is complete."""
        part = self._part(landed_at=self.target.context.now(), num_bytes=report.total_bytes)
        self.arrived(report, part, descriptors=report.descriptors)
        self._end(None)

    def failed(self, error: Exception, *, is_read: bool) -> None:
        """Takes note that it has failed, and may arrive yet."""
        if not is_read:
            self._leave_wire()
        self.target.room.post(self.failure(error, may_arrive=True, is_read=is_read))

    def settled(self, error: Exception) -> None:
        """Takes note that nothing of it can arrive any more."""
        self._end(error)

    def broke(self, error: BaseException) -> None:
        """Fails the room: whether the write has ended is not known."""
        self.target.room.post(Broke(error))

    def _leave_wire(self) -> None:
        """Lets others be admitted in its place: nothing more is sent of it."""
        admitted, self._admitted = self._admitted, None
        if admitted is not None:
            self.target.context.admission.give_back(admitted)

    def _end(self, error: Exception | None) -> None:
        self._leave_wire()
        if (event := self.end(error)) is not None:
            self.target.room.post(event)

    def _arrived(self) -> messages.ChunkArrived:
        """Makes the notification that travels behind the bytes."""
        command, attachment = self.command, self.target.attachment
        segments: tuple[messages.StagedSegment, ...] = ()
        if attachment.digests is not None:
            packed = attachment.plan.packed_pieces(command.unit)
            segments = attachment.digests.of_write(self.target.elected, command.moves, packed)
        return messages.ChunkArrived(
            room=self.target.room.room,
            generation=command.generation,
            writer=self.target.context.engine_rank,
            sequence=command.sequence,
            unit=command.unit if segments else Unit.WHOLE,
            segments=segments,
        )


class DirectWrites:
    """Those of a room to one receiver. Only the room's own turns use it, except for `admitted`."""

    def __init__(self, target: Target) -> None:
        """Begins with none."""
        self._target = target
        self._admission = target.context.admission
        self._waiting: deque[DirectWrite] = deque()  # the first has applied to be admitted

    def write(self, write: DirectWrite, worker: Worker) -> None:
        """Posts a write as soon as it is admitted."""
        admitted = self._apply(write) if not self._waiting else None
        if admitted is not None and self._admission.use(admitted):
            write.post(admitted, worker)
            return
        self._waiting.append(write)
        self._target.room.apply(WriteDeferred(write.receiver, write.command.sequence), worker)
        if admitted is not None:  # which has lapsed
            self.admitted(admitted)

    def admitted(self, admitted: Admitted) -> None:
        """Lets the room have a turn to post its first write. From any thread."""
        self._target.room.post(admitted)

    def post_admitted(self, admitted: Admitted, worker: Worker) -> None:
        """Posts the first write that waits, unless its leave has lapsed; who is first then stands in line."""
        if not self._waiting:  # dropped meanwhile
            self._admission.give_back(admitted)
            return
        if self._admission.use(admitted):
            write = self._waiting.popleft()
            self._target.room.apply(WriteAdmitted(write.receiver, write.command.sequence), worker)
            write.post(admitted, worker)
        following = self._apply(self._waiting[0]) if self._waiting else None
        if following is not None:
            self.admitted(following)

    def drop(self) -> None:
        """Drops all that are not posted."""
        self._admission.withdraw(self._target.receiver, self)
        for write in self._waiting:
            write.drop()
        self._waiting.clear()

    @property
    def deferred_chunk(self) -> int | None:
        """The first chunk of which a write waits; None if none does."""
        return self._waiting[0].command.chunk if self._waiting else None

    @property
    def moved_at(self) -> float:
        """When something last got on that the writes wait for."""
        if not self._waiting:
            return self._target.attachment.moved_at
        return self._admission.moved_at(self._target.receiver) or 0.0

    def _apply(self, write: DirectWrite) -> Admitted | None:
        left_bytes = write.num_bytes + sum(each.num_bytes for each in self._waiting if each is not write)
        return self._admission.admit(write.receiver, write.num_bytes, self, due_at(write.submitted_at, left_bytes))
