"""The direct writes of a room to one receiver: each waits until it is admitted, and is posted into its pages."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from kvferry.endpoint.prefill.admission import Admitted
from kvferry.endpoint.prefill.room_write import RoomWrite, Target
from kvferry.endpoint.runtime.workers import Worker
from kvferry.observe.records import PartRecord
from kvferry.plan import Unit
from kvferry.protocol.transfer.events import Broke, WriteAdmitted, WriteDeferred
from kvferry.protocol.wire import messages
from kvferry.transport import TransferHandle, TransferReport


class DirectWrite(RoomWrite):
    """A write into the receiver's pages.

    Attributes:
        transfer: the transport's handle, once it is posted.
    """

    transfer: TransferHandle
    _admitted: Admitted | None
    _part: Callable[..., PartRecord]

    @property
    def receiver(self) -> str:
        """Whose memory is written."""
        return self.command.receiver

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
        if admitted is not None:
            write.post(admitted, worker)
            return
        self._waiting.append(write)
        self._target.room.apply(WriteDeferred(write.receiver, write.command.sequence), worker)

    def admitted(self, admitted: Admitted) -> None:
        """Lets the room have a turn to post its first write. From any thread."""
        self._target.room.post(admitted)

    def post_admitted(self, admitted: Admitted, worker: Worker) -> None:
        """Posts the first write that waits; the next stands in line behind other rooms'."""
        if not self._waiting:  # dropped meanwhile
            self._admission.give_back(admitted)
            return
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
        command, target = write.command, self._target
        num_bytes = target.attachment.bytes_of(command.unit, target.elected, command.moves)
        return self._admission.admit(target.receiver, num_bytes, self)
