"""How far a sending room has come with one of its decode ranks: what is on its way to it, and what it was told."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.errors import KVFerryError
from kvferry.plan import Unit
from kvferry.plan.requests.moves import Move
from kvferry.protocol.transfer.events import (
    ReceiverOpened,
    SendDrained,
    SenderCommand,
    SendFailed,
    SendFinish,
    Write,
)


@dataclass(slots=True)
class ReceiverProgress:
    """One decode rank of a room.

    Attributes:
        opened: its open request.
        chunks_sent: how many writes were begun.
        writes_in_flight: their sequences, until they have ended.
        writes_deferred: those of writes that are not in flight, and may never be posted.
        progressed_at: when the first of those in flight was begun, or one of them last progressed or ended.
        finish_requested: whether it is to be notified that all is written; `finish_sent`, whether it was.
        has_verified: whether it has confirmed that all is right.
        has_failed_write: whether a write failed of which something had been sent.
        failure_sent: whether it knows that the room has failed.
        drained_sent: whether it was told that nothing will be written any more.
    """

    opened: ReceiverOpened
    chunks_sent: int = 0
    writes_in_flight: set[int] = field(default_factory=set)
    writes_deferred: set[int] = field(default_factory=set)
    progressed_at: float = 0.0
    finish_requested: bool = False
    finish_sent: bool = False
    has_verified: bool = False
    has_failed_write: bool = False
    failure_sent: bool = False
    drained_sent: bool = False

    @property
    def num_writes(self) -> int:
        """How many writes to it have not ended, or are to be posted."""
        return len(self.writes_in_flight) + len(self.writes_deferred)

    @property
    def is_written_to(self) -> bool:
        """Whether a write to it has not ended, or is to be posted."""
        return self.num_writes > 0

    @property
    def is_owed(self) -> bool:
        """Whether this rank sends it anything."""
        return bool(self.opened.request.routes) or self.opened.sends_aux

    @property
    def is_content(self) -> bool:
        """Whether it needs nothing more of this rank: it was notified of the end, and has verified where it does."""
        return self.finish_sent and (self.has_verified or not self.opened.verifies)

    def write(self, chunk: int, unit: Unit, moves: tuple[Move, ...], now: float) -> Write:
        """Begins the next write to it."""
        write = Write(self.opened.receiver, self.opened.generation, chunk, self.chunks_sent, unit, moves)
        self.begin_write(self.chunks_sent, now)
        self.chunks_sent += 1
        return write

    def begin_write(self, sequence: int, now: float) -> None:
        """Begins a write, perhaps one that was deferred."""
        self.writes_deferred.discard(sequence)
        if not self.writes_in_flight:
            self.progressed(now)
        self.writes_in_flight.add(sequence)

    def defer_write(self, sequence: int) -> None:
        """Takes a write that was begun for one that is not: it must wait."""
        self.writes_in_flight.discard(sequence)
        self.writes_deferred.add(sequence)

    def progressed(self, now: float) -> None:
        """Starts the time of its writes anew."""
        self.progressed_at = max(self.progressed_at, now)

    def finish(self, aux: bytes) -> SendFinish:
        """Notifies it that this rank has finished.

        Args:
            aux: the request's aux data, if this rank sends it that.
        """
        self.finish_requested = True
        opened = self.opened
        return SendFinish(opened.receiver, opened.generation, self.chunks_sent, aux if opened.sends_aux else None)

    def fail(self, error: KVFerryError) -> list[SenderCommand]:
        """Tells it, once, that the room has failed. Whoever has deferred writes to it drops them."""
        self.writes_deferred.clear()
        if self.failure_sent:
            return []
        self.failure_sent = True
        return [SendFailed(self.opened.receiver, self.opened.generation, error)]

    def tell_drained(self, error: KVFerryError | None) -> list[SenderCommand]:
        """Tells it, once no write to it is in flight, that it may reuse its pages."""
        if self.drained_sent or self.writes_in_flight:
            return []
        self.drained_sent = True
        return [SendDrained(self.opened.receiver, self.opened.generation, self.has_failed_write, error)]
