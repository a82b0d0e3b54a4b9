"""The decode side of one transfer, on one rank.

Everything that changes the state of a receiving room lives here; like `sender`, it takes events and returns commands.
Arrivals are counted per writer's engine rank, so their order does not matter and a repeated one changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.errors import (
    ChecksumError,
    KVFerryError,
    TransferAbortedError,
    TransferFailedError,
    TransferTimeoutError,
    caused,
)
from kvferry.protocol.transfer.events import (
    AbortRequested,
    AnswersOverdue,
    AwaitArrival,
    Broke,
    Connected,
    ConnectFailed,
    Drop,
    PartArrived,
    PartPlaced,
    Place,
    ReceiverCommand,
    ReceiverEvent,
    SendAbort,
    SenderDrained,
    SenderSettled,
    SendOpen,
    SendVerified,
    Tick,
)
from kvferry.protocol.transfer.states import (
    RECEIVER_TRANSITIONS,
    Deadlines,
    ReceiverState,
    ReceiverTrigger,
    TransferState,
)
from kvferry.protocol.wire.messages import ChunkArrived, RoomFailed, WriterFinished


@dataclass(slots=True)
class _Parts:
    """What has arrived of a chunk that is put into its pages in parts, or whose digests are compared."""

    count: int | None = None  # known once the last has arrived
    arrived: set[int] = field(default_factory=set)
    placed: int = 0


@dataclass(slots=True)
class _Writer:
    """What has arrived from one rank that is to send something."""

    arrived: set[int] = field(default_factory=set)
    last: int = -1  # the highest number that has arrived
    partial: dict[int, _Parts] = field(default_factory=dict)  # by sequence, until all parts count
    finished_chunks: int | None = None
    is_settling: bool = False  # it writes no more; what it had sent may arrive yet
    is_drained: bool = False

    @property
    def is_complete(self) -> bool:
        return self.finished_chunks is not None and len(self.arrived) == self.finished_chunks

    @property
    def may_write(self) -> bool:
        """Whether anything of it may still land in the pages."""
        return not self.is_drained and self.finished_chunks is None

    @property
    def has_answered(self) -> bool:
        """Whether it has confirmed that it writes no more."""
        return self.is_settling or not self.may_write


class ReceiverMachine:
    """One room on one decode rank.

    Attributes:
        detailed_state: where it stands.
        state: the same, as its caller sees it.
        error: why it failed, once it has.
        aux: the request's aux data, once it has arrived.
        chunks: how many chunks have arrived, over all writers.
    """

    def __init__(self, room: int, *, rank: int, deadlines: Deadlines, now: float) -> None:
        """Takes the arguments of `SenderMachine`; rank is this decode rank's engine rank."""
        self.room = room
        self.detailed_state = ReceiverState.BOOTSTRAPPING
        self.state = self.detailed_state.shown
        self.error: KVFerryError | None = None
        self.aux: bytes | None = None
        self.chunks = 0
        self._rank = rank
        self._deadlines = deadlines
        self._last_progress = now
        self._ranks: frozenset[int] = frozenset()
        self._expected: dict[int, _Writer] = {}
        self._into_pages: frozenset[int] = frozenset()
        # Those of them that had neither answered, nor ended, when they were last looked at: neither is taken back.
        self._not_answered: list[_Writer] = []
        self._not_drained: list[_Writer] = []
        self._unanswered: set[int] = set()  # ranks that were asked to stop, and have not answered
        self._verifies = False
        self._at_pages = 0  # parts that are being put into the pages, or compared there

    @property
    def are_pages_reusable(self) -> bool:
        """Whether no byte of the pages can change any more on behalf of this room."""
        return not self.detailed_state.holds_pages

    @property
    def is_done(self) -> bool:
        """Whether the room can be forgotten, and its number be used again: nothing of it can reach a rank any more."""
        return self.are_pages_reusable and not self._unanswered

    @property
    def undrained(self) -> list[int]:
        """Ranks that may still write to the pages."""
        return [rank for rank in sorted(self._into_pages) if self._expected[rank].may_write]

    @property
    def _silent(self) -> list[int]:
        """Those of them that have not confirmed that they write no more."""
        return [rank for rank in self.undrained if not self._expected[rank].has_answered]

    @property
    def _have_all_answered(self) -> bool:
        """Whether none of them is silent. Who has answered is not looked at again: there may be many ranks."""
        while self._not_answered and self._not_answered[-1].has_answered:
            self._not_answered.pop()
        return not self._not_answered

    @property
    def _are_all_drained(self) -> bool:
        """Whether none of them may write any more, found out likewise."""
        while self._not_drained and not self._not_drained[-1].may_write:
            self._not_drained.pop()
        return not self._not_drained

    @property
    def unanswered(self) -> list[int]:
        """Ranks that were asked to stop and have not answered. They may be asked again."""
        return sorted(self._unanswered)

    @property
    def waits_for(self) -> str:
        """What it waits for, in words. May be read from another thread."""
        if self.state is TransferState.BOOTSTRAPPING:
            return "the prefill engine to be connected"
        if self.detailed_state is ReceiverState.SETTLING:
            return f"what prefill ranks {self.undrained} had sent of writes that failed, in case it arrives"
        if self.detailed_state is ReceiverState.QUARANTINED and self._silent:
            return f"prefill ranks {self._silent} to confirm that they write no more"
        if self.state.is_final:
            return f"prefill ranks {self.unanswered} to confirm its end" if self._unanswered else ""
        incomplete = [rank for rank, writer in list(self._expected.items()) if not writer.is_complete]
        return f"prefill ranks {incomplete}"

    @property
    def deadline(self) -> float | None:
        """When `Tick` is due at the latest; None where nothing is awaited."""
        if self.state.is_final:
            return None
        if self.state is TransferState.BOOTSTRAPPING:
            return self._last_progress + self._deadlines.bootstrap_s
        return self._last_progress + self._deadlines.waiting_s

    def handle(self, event: ReceiverEvent, now: float) -> list[ReceiverCommand]:
        """Handles what happened and returns what to do. Never raises for what a peer did."""
        commands = self._handle(event, now)
        if self.detailed_state is ReceiverState.QUARANTINED and not self._at_pages and self._have_all_answered:
            self._move(ReceiverTrigger.ALL_ANSWERED)
        if self.detailed_state is ReceiverState.SETTLING and self._are_all_drained:
            self._move(ReceiverTrigger.ALL_SETTLED)
        return commands

    def _handle(self, event: ReceiverEvent, now: float) -> list[ReceiverCommand]:
        match event:
            case Connected():
                return self._connected(event, now)
            case ConnectFailed(error):
                self._unanswered &= set(self.undrained)  # the others have detached us, or will not answer
                return self._fail(caused(f"room {self.room}: connecting failed", error))
            case ChunkArrived(writer=rank, sequence=sequence):
                return self._arrived(rank, sequence, now)
            case PartArrived():
                return self._part_arrived(event, now)
            case PartPlaced():
                return self._part_placed(event, now)
            case WriterFinished():
                return self._finished(event, now)
            case RoomFailed(writer=rank, error=error_name, reason=reason):
                return self._fail(self._failed_there(rank, error_name, reason))
            case SenderDrained():
                return self._drained(event)
            case SenderSettled(rank):
                self._expected[rank].is_drained = True
                return []
            case AnswersOverdue():
                self._unanswered &= set(self.undrained)
                return []
            case AbortRequested(reason):
                return self._fail(TransferAbortedError(f"room {self.room} was aborted by the decode side: {reason}"))
            case Broke(error):
                return self._fail(caused(f"room {self.room} met an unexpected error", error))
            case Tick():
                return self._tick(now)

    def _move(self, trigger: ReceiverTrigger) -> None:
        self.detailed_state = RECEIVER_TRANSITIONS[self.detailed_state][trigger]
        self.state = self.detailed_state.shown

    def _connected(self, event: Connected, now: float) -> list[ReceiverCommand]:
        if self.state is not TransferState.BOOTSTRAPPING:
            return []
        self._last_progress = now
        self._ranks = event.ranks
        self._expected = {rank: _Writer() for rank in sorted(event.writers.keys() | {event.aux_writer})}
        self._into_pages = event.into_pages & event.writers.keys()
        self._not_answered = [self._expected[rank] for rank in self._into_pages]
        self._not_drained = list(self._not_answered)
        self._verifies = event.verifies
        self._move(ReceiverTrigger.ALL_SENDERS_ASKED)
        return [SendOpen(rank, event.writers.get(rank, frozenset())) for rank in sorted(event.ranks)]

    def _arrived(self, rank: int, sequence: int, now: float) -> list[ReceiverCommand]:
        writer = self._expected.get(rank)
        if writer is None or self.state.is_final or sequence in writer.arrived:
            return []
        writer.arrived.add(sequence)
        writer.last = max(writer.last, sequence)
        self.chunks += 1
        self._last_progress = now
        self._move(ReceiverTrigger.CHUNK_ARRIVED)
        return self._maybe_succeed(rank, writer)

    def _part_arrived(self, event: PartArrived, now: float) -> list[ReceiverCommand]:
        writer = self._expected.get(event.writer)
        if writer is None or self.state.is_final or event.sequence in writer.arrived:
            return [Drop(event.work)]
        parts = writer.partial.setdefault(event.sequence, _Parts())
        if event.part in parts.arrived:
            return [Drop(event.work)]
        parts.arrived.add(event.part)
        if event.is_last:
            parts.count = event.part + 1
        self._at_pages += 1
        self._last_progress = now
        return [Place(event.work)]

    def _part_placed(self, event: PartPlaced, now: float) -> list[ReceiverCommand]:
        self._at_pages -= 1
        if self.state.is_final:
            return []
        if isinstance(event.error, ChecksumError):
            return self._fail(ChecksumError(f"room {self.room}: {event.error}"))
        if event.error is not None:
            what = f"room {self.room}: what prefill rank {event.writer} sent could not be {event.purpose}"
            return self._fail(caused(what, event.error))
        writer = self._expected[event.writer]
        parts = writer.partial.get(event.sequence)
        if parts is None:  # its writer contradicts itself: the chunk was complete without it
            return []
        parts.placed += 1
        if parts.placed != parts.count:
            return []
        del writer.partial[event.sequence]
        return self._arrived(event.writer, event.sequence, now)

    def _finished(self, event: WriterFinished, now: float) -> list[ReceiverCommand]:
        writer = self._expected.get(event.writer)
        if writer is None or writer.finished_chunks == event.chunks:
            return []
        if writer.finished_chunks is not None:
            return self._fail(
                TransferFailedError(
                    f"room {self.room}: prefill rank {event.writer} said that it sent {writer.finished_chunks} chunks, "
                    f"then {event.chunks}"
                )
            )
        writer.finished_chunks = event.chunks
        if self.state.is_final:
            return []
        self._last_progress = now
        if event.aux is not None:
            self.aux = event.aux
        return self._maybe_succeed(event.writer, writer)

    def _failed_there(self, rank: int, error: str, reason: str) -> TransferFailedError:
        said = f"failed with {error}: {reason}" if error else "stopped without saying why"
        failed = TransferFailedError(f"room {self.room}: prefill rank {rank} {said}")
        failed.there = error
        return failed

    def _drained(self, event: SenderDrained) -> list[ReceiverCommand]:
        rank = event.writer
        self._unanswered.discard(rank)
        writer = self._expected.get(rank)
        if writer is None:
            return []
        commands: list[ReceiverCommand] = []
        if event.after_failure and rank in self._into_pages and not writer.has_answered:
            writer.is_settling = True
            commands.append(AwaitArrival(rank))
        elif not writer.is_settling:  # else the same again, which neither starts that time anew nor ends it
            writer.is_drained = True
        # `RoomFailed` comes first, unless the channel ended before it had left.
        return commands + self._fail(self._failed_there(rank, event.error, event.reason))

    def _maybe_succeed(self, rank: int, writer: _Writer) -> list[ReceiverCommand]:
        if writer.finished_chunks is not None and writer.last >= writer.finished_chunks:
            return self._fail(
                TransferFailedError(
                    f"room {self.room}: prefill rank {rank} said that it sent {writer.finished_chunks} chunks, "
                    f"but number {writer.last} arrived"
                )
            )
        if not writer.is_complete:
            return []
        if all(each.is_complete for each in self._expected.values()):
            self._move(ReceiverTrigger.ALL_ARRIVED)
        # A writer waits for the digests of its own chunks, and not for the others.
        return [SendVerified(rank)] if self._verifies else []

    def _tick(self, now: float) -> list[ReceiverCommand]:
        if self.deadline is None or now < self.deadline:
            return []
        if self.state is TransferState.BOOTSTRAPPING:
            what = (
                f"the prefill engine was not connected within {self._deadlines.bootstrap_s:g} s "
                "(KVFERRY_BOOTSTRAP_TIMEOUT_S); is it running, and registered at the same registry?"
            )
        else:
            waiting = [rank for rank, writer in self._expected.items() if not writer.is_complete]
            what = (
                f"nothing came for {self._deadlines.waiting_s:g} s (KVFERRY_WAITING_TIMEOUT_S) "
                f"and prefill ranks {waiting} have not finished"
            )
        return self._fail(TransferTimeoutError(f"room {self.room} on decode rank {self._rank}: {what}"))

    def _fail(self, error: KVFerryError) -> list[ReceiverCommand]:
        if self.state.is_final:
            return []
        self.error = error
        self._move(ReceiverTrigger.FAILURE)
        self._unanswered = {
            rank for rank in self._ranks if rank not in self._expected or not self._expected[rank].has_answered
        }
        return [self.abort_of(rank) for rank in sorted(self._ranks)]

    def abort_of(self, rank: int) -> SendAbort:
        """Returns the abort to send to a rank once the room has failed, and again if the rank does not answer."""
        is_wrong = isinstance(self.error, ChecksumError)
        return SendAbort(rank, str(self.error), ChecksumError.__name__ if is_wrong else "")
