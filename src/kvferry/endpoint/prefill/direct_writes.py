"""The direct writes of a room: each waits until it is admitted, and is posted into the receiver's pages."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvferry.endpoint.prefill.admission import Admission, Admitted
from kvferry.endpoint.prefill.write_account import Target, WriteAccount, WritingRoom
from kvferry.endpoint.runtime.workers import Worker
from kvferry.observe.records import PartRecord
from kvferry.plan import Unit
from kvferry.protocol.transfer.sender_events import (
    SenderBroke,
    Write,
    WriteAdmitted,
    WriteDeferred,
    WriteDone,
    WriteFailed,
)
from kvferry.protocol.wire import codec, notifications
from kvferry.transport import TransferReport, Transport


@dataclass(slots=True, eq=False)
class _Line:
    """Writes to one receiver that are not posted yet: the first has applied to be admitted.

    Attributes:
        admitted: called, on any thread, when it is its turn.
        target: the receiver.
        writes: with the record of each.
    """

    admitted: Callable[[Admitted], None]
    target: Target
    writes: deque[tuple[Write, WriteAccount]] = field(default_factory=deque)


class DirectWrites:
    """The direct writes of one room. Only the room's own turns use it."""

    def __init__(
        self,
        number: int,
        room: WritingRoom,
        *,
        transport: Transport,
        admission: Admission,
        writer: int,
        now: Callable[[], float],
    ) -> None:
        """Begins with none.

        Args:
            number: the room's.
            room: is told what becomes of each write.
            writer: this rank's engine rank.
            now: the time, in seconds of a steady clock.
        """
        self._number = number
        self._room = room
        self._transport = transport
        self._admission = admission
        self._writer = writer
        self._now = now
        self._lines: dict[str, _Line] = {}  # by receiver

    def write(self, command: Write, target: Target, account: WriteAccount, worker: Worker) -> None:
        """Posts a write as soon as it is admitted. It holds the receiver's lists (`Attachment.begin_write`)."""
        line = self._lines.get(target.receiver)
        if line is None:
            line = self._lines[target.receiver] = _Line(self._room.post, target)
        admitted = self._apply(line, command) if not line.writes else None
        if admitted is not None:
            self._post(command, target, account, admitted, worker)
            return
        line.writes.append((command, account))
        self._room.apply(WriteDeferred(target.receiver, command.sequence), worker)

    def admitted(self, admitted: Admitted, worker: Worker) -> None:
        """Posts the first write that waits for a receiver, whose turn it is; the next stands in line behind others."""
        line = self._lines[admitted.receiver]
        if not line.writes:  # dropped meanwhile
            self._admission.give_back(admitted)
            return
        command, account = line.writes.popleft()
        self._room.apply(WriteAdmitted(command.receiver, command.sequence), worker)
        self._post(command, line.target, account, admitted, worker)
        if line.writes:
            following = self._apply(line, line.writes[0][0])
            if following is not None:
                self._room.post(following)

    def drop(self) -> None:
        """Drops all that are not posted."""
        for receiver, line in self._lines.items():
            self._admission.withdraw(receiver, line)
            for _ in line.writes:
                line.target.attachment.end_write()
            line.writes.clear()

    @property
    def deferred_chunks(self) -> Iterator[int]:
        """The first chunk of which a write waits, for every receiver to which one does."""
        return (line.writes[0][0].chunk for line in self._lines.values() if line.writes)

    def moved_at(self, target: Target) -> float:
        """Returns when something last got on that the writes to a receiver wait for."""
        line = self._lines.get(target.receiver)
        if line is None or not line.writes:
            return target.attachment.moved_at
        return self._admission.moved_at(target.receiver) or 0.0

    def _apply(self, line: _Line, command: Write) -> Admitted | None:
        target = line.target
        num_bytes = target.attachment.bytes_of(command.unit, target.elected, command.moves)
        return self._admission.admit(target.receiver, num_bytes, line)

    def _post(self, command: Write, target: Target, account: WriteAccount, admitted: Admitted, worker: Worker) -> None:
        attachment = target.attachment
        begun_at = self._now()

        def ended() -> None:
            self._admission.give_back(admitted)
            attachment.end_write()

        try:
            selected = attachment.select(command.unit, target.elected, command.moves)
            gathered_at = self._now()
            transfer = self._transport.post(
                selected.local,
                selected.local_indices,
                selected.remote,
                selected.remote_indices,
                codec.encode(self._arrived(command, target)),
            )
        except Exception as error:
            ended()
            self._room.post(WriteFailed(command.receiver, command.sequence, error))
            return

        posted_at = self._now()
        thread = threading.current_thread().name

        def done(report: TransferReport) -> None:
            now = self._now()
            part = PartRecord(
                ready_at=begun_at,
                begun_at=begun_at,
                gathered_at=gathered_at,
                posted_at=posted_at,
                landed_at=now,
                num_bytes=report.total_bytes,
                runs=len(selected.local_indices),
                thread=thread,
            )
            attachment.moved_at = now
            account.add(report, part, descriptors=report.descriptors)
            self._room.keep(account.record(command.receiver, now))
            ended()
            self._room.post(WriteDone(command.receiver, command.sequence))

        def failed(error: Exception) -> None:
            self._admission.give_back(admitted)  # nothing more is sent
            if self._transport.may_deliver_late:
                self._room.post(WriteFailed(command.receiver, command.sequence, error, may_arrive=True))

        def settled(error: Exception) -> None:
            attachment.end_write()
            self._room.post(WriteFailed(command.receiver, command.sequence, error))

        def broke(error: Exception) -> None:
            self._room.post(SenderBroke(error))

        worker.watch(transfer, done, failed, broke, settled, peer=command.receiver)

    def _arrived(self, command: Write, target: Target) -> notifications.ChunkArrived:
        """Makes the notification that travels behind the bytes."""
        segments: tuple[notifications.StagedSegment, ...] = ()
        if target.attachment.digests is not None:
            packed = target.attachment.plan.packed_pieces(command.unit)
            segments = target.attachment.digests.of_write(target.elected, command.moves, packed)
        return notifications.ChunkArrived(
            room=self._number,
            generation=command.generation,
            writer=self._writer,
            sequence=command.sequence,
            unit=command.unit if segments else Unit.WHOLE,
            segments=segments,
        )
