"""One write of a room: where it goes, what is through of it, and its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from kvferry.endpoint.prefill.attachment import Attachment
from kvferry.endpoint.prefill.context import PrefillContext
from kvferry.endpoint.prefill.paths import StagedPath
from kvferry.endpoint.runtime.workers import Worker
from kvferry.errors import PeerDisconnectedError
from kvferry.observe.records import PartRecord, WriteRecord
from kvferry.plan import Choice, ElectedRoute
from kvferry.protocol.transfer.events import SenderEvent, Write, WriteDone, WriteFailed
from kvferry.transport import TransferReport


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
        target: the receiver.
        choice: its path, and why.
        parts: those that are through.
    """

    def __init__(self, command: Write, target: Target, choice: Choice, *, submitted_at: float, begun_at: float) -> None:
        """Begins with nothing posted, of a chunk that was handed in at `submitted_at`."""
        self.command = command
        self.target = target
        self.choice = choice
        self.parts: list[PartRecord] = []
        self._submitted_at = submitted_at
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
            self.target.context.broken_off.add(self.target.receiver)
        if not self._is_reported:
            self._is_reported = True
            self.target.report_failure(error, is_read=is_read)
        return WriteFailed(self.command.receiver, self.command.sequence, error, may_arrive)

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
        return WriteDone(self.command.receiver, self.command.sequence)

    def drop(self) -> None:
        """Ends it, before it has ended otherwise, where nobody waits for that."""
        self._is_over = True
        self.target.attachment.end_write()

    def _record(self) -> WriteRecord:
        return WriteRecord(
            receiver=self.command.receiver,
            path=self.choice.path,
            why=self.choice.reason,
            total_bytes=sum(part.num_bytes for part in self.parts),
            descriptors=self._descriptors,
            submitted_at=self._submitted_at,
            posted_at=self._begun_at,
            done_at=self.target.context.now(),
            transport_post_s=self._post_s,
            transport_transfer_s=self._transfer_s,
            parts=tuple(self.parts),
        )
