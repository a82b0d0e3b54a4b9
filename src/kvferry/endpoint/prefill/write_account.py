"""One write of a room: where it goes, and the record of it while it is under way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from kvferry.endpoint.prefill.attachment import Attachment
from kvferry.endpoint.runtime.workers import Worker
from kvferry.observe.records import PartRecord, WriteRecord
from kvferry.plan import Choice, ElectedRoute
from kvferry.protocol.transfer.sender_events import SenderEvent
from kvferry.transport import TransferReport


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A receiver of a room.

    Attributes:
        attachment: the receiver.
        elected: the routes by which this rank sends to it in the room.
    """

    attachment: Attachment
    elected: tuple[ElectedRoute, ...]

    @property
    def receiver(self) -> str:
        """Its endpoint."""
        return self.attachment.receiver


class WritingRoom(Protocol):
    """What a room's writes need of the room."""

    def post(self, event: Any) -> None:
        """Queues an event for one of the room's next turns. From any thread."""

    def apply(self, event: SenderEvent, worker: Worker) -> None:
        """Passes an event to the room's machine, in the room's turn."""

    def keep(self, record: WriteRecord) -> None:
        """Takes the record of a write that is through. From the thread that polled it."""


@dataclass(slots=True, eq=False)
class WriteAccount:
    """The record of a write in flight.

    Attributes:
        choice: its path, and why.
        submitted_at: when its chunk was handed in.
        begun_at: when this was begun.
        descriptors: of the parts that are through.
        post_s: likewise, by the transport's account.
        transfer_s: likewise.
        parts: those that are through.
    """

    choice: Choice
    submitted_at: float
    begun_at: float
    descriptors: int = 0
    post_s: float = 0.0
    transfer_s: float = 0.0
    parts: list[PartRecord] = field(default_factory=list)

    def add(self, report: TransferReport, part: PartRecord, *, descriptors: int) -> None:
        """Adds a part that is complete."""
        self.parts.append(part)
        self.descriptors += descriptors
        self.post_s += report.post_s
        self.transfer_s += report.transfer_s

    def record(self, receiver: str, now: float) -> WriteRecord:
        """Returns the record of the whole write, which completes now."""
        return WriteRecord(
            receiver=receiver,
            path=self.choice.path,
            why=self.choice.reason,
            total_bytes=sum(part.num_bytes for part in self.parts),
            descriptors=self.descriptors,
            submitted_at=self.submitted_at,
            posted_at=self.begun_at,
            done_at=now,
            transport_post_s=self.post_s,
            transport_transfer_s=self.transfer_s,
            parts=tuple(self.parts),
        )
