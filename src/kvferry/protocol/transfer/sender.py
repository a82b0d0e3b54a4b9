"""The prefill side of one transfer, on one rank.

Everything that changes the state of a sending room lives here. This module has neither threads nor transports: it takes
what happened (events) and returns what to do (commands), and both are plain data.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from kvferry.errors import (
    ChecksumError,
    IncompatiblePeerError,
    KVFerryError,
    PageError,
    TransferAbortedError,
    TransferFailedError,
    TransferRefusedError,
    TransferTimeoutError,
    caused,
)
from kvferry.plan.fingerprint import why_different
from kvferry.plan.requests.chunks import Chunk, goes_on, take_together, why_impossible
from kvferry.plan.requests.moves import check_chunk, moves_of
from kvferry.protocol.transfer.events import (
    AbortRequested,
    AwaitTurn,
    Broke,
    ChunkSubmitted,
    FinishSent,
    ReceiverLost,
    ReceiverMessage,
    ReceiverOpened,
    RoomExpected,
    SendDrained,
    SenderCommand,
    SenderEvent,
    SendFailed,
    Tick,
    TurnCame,
    WriteAdmitted,
    WriteDeferred,
    WriteDone,
    WriteFailed,
    WriteProgressed,
)
from kvferry.protocol.transfer.receiver_progress import ReceiverProgress
from kvferry.protocol.transfer.states import SENDER_TRANSITIONS, Deadlines, SenderState, SenderTrigger, TransferState
from kvferry.protocol.wire.field_types import DecodeRank
from kvferry.protocol.wire.messages import AbortRoom, RefuseRoom, RoomVerified


class SenderMachine:
    """One room on one prefill rank.

    Attributes:
        detailed_state: where it stands.
        state: the same, as its caller sees it.
        error: why it failed, once it has.
    """

    def __init__(
        self,
        room: int,
        *,
        rank: int,
        deadlines: Deadlines,
        now: float,
        tokens: int | None = None,
        depends_on: Mapping[str, bytes] | None = None,
        joined_pages: int = 1,
    ) -> None:
        """Opens the room.

        Args:
            room: the transfer's number.
            rank: this rank's engine rank, for messages.
            deadlines: longest waits.
            now: the time, in seconds on any steady clock.
            tokens: how many tokens the request has; None if our caller gave no number.
            depends_on: digests of what the request's cache depends on, by name.
            joined_pages: how many pages chunks that wait may have together, to leave in one write.
        """
        self.room = room
        self.detailed_state = SenderState.BOOTSTRAPPING
        self.state = self.detailed_state.shown
        self.error: KVFerryError | None = None
        self._rank = rank
        self._tokens = tokens
        self._depends_on = depends_on or {}
        self._joined_pages = joined_pages
        self._deadlines = deadlines
        self._awaited_at = now  # when a receiver was last known to be on its way
        self._last_progress = now
        self._receivers: dict[str, ReceiverProgress] = {}
        # Submitted before every receiver had opened the room, right before another, or behind such.
        self._chunks: deque[Chunk] = deque()
        self._waiting_pages = 0
        self._awaits_turn = False
        self._next_pages: dict[str, int] = {}  # by group: the position in the request of the page that comes next
        self._last_chunk: Chunk | None = None

    @property
    def held_tokens(self) -> int:
        """Tokens at the start of the request that every decode rank which has opened the room holds already."""
        return min((receiver.opened.held for receiver in self._receivers.values()), default=0)

    @property
    def waiting_chunks(self) -> int:
        """Chunks that wait until every receiver has opened the room, or for a turn since."""
        return len(self._chunks)

    @property
    def first_waiting(self) -> int | None:
        """The number of the first of them; None if there are none."""
        return self._chunks[0].number if self._chunks else None

    @property
    def is_busy(self) -> bool:
        """Whether a chunk more would change nothing yet: others wait, or one write follows another to a receiver."""
        is_behind = any(receiver.num_writes > 1 for receiver in self._receivers.values())
        return self.state is TransferState.BOOTSTRAPPING or bool(self._chunks) or is_behind

    @property
    def is_drained(self) -> bool:
        """Whether no write is in flight, or will be: nothing reads the source pages on behalf of this room.

        May be read from another thread.
        """
        return not any(receiver.is_written_to for receiver in list(self._receivers.values()))

    @property
    def is_done(self) -> bool:
        """Whether the room can be forgotten."""
        return not self.detailed_state.holds_pages

    @property
    def waits_for(self) -> str:
        """What it waits for, in words. May be read from another thread."""
        if self.state is TransferState.BOOTSTRAPPING:
            expected = self._expected
            return f"{len(expected)} of {expected[0] if expected else 'some'} decode ranks have opened it"
        if writing := self._names_of(lambda receiver: bool(receiver.writes_in_flight)):
            return f"writes to {', '.join(writing)}"
        if deferred := self._names_of(lambda receiver: bool(receiver.writes_deferred)):
            return f"other writes to end before those to {', '.join(deferred)}"
        if self.state.is_final:
            return ""
        if self._last_chunk is None:
            return "the next chunk of the caller"
        return f"{', '.join(self._names_of(lambda receiver: not receiver.is_content))} to verify"

    @property
    def _expected(self) -> list[int]:
        """How many decode ranks will open the room, as each that has opened it says."""
        return [receiver.opened.expected_receivers for receiver in list(self._receivers.values())]

    def _names_of(self, those: Callable[[ReceiverProgress], bool]) -> list[str]:
        return [name for name, receiver in list(self._receivers.items()) if those(receiver)]

    @property
    def deadline(self) -> float | None:
        """When `Tick` is due at the latest; None where nothing is awaited."""
        if self.state.is_final:
            return None
        if self.state is TransferState.BOOTSTRAPPING:
            return self._awaited_at + self._deadlines.bootstrap_s
        # Of a receiver's writes the later wait for the earlier, so that all have progressed when one has.
        waited_for = [receiver.progressed_at for receiver in self._receivers.values() if receiver.writes_in_flight]
        if waited_for:
            return min(waited_for) + self._deadlines.write_s
        deferred = [receiver.progressed_at for receiver in self._receivers.values() if receiver.writes_deferred]
        return max([self._last_progress, *deferred]) + self._deadlines.waiting_s

    def handle(self, event: SenderEvent, now: float) -> list[SenderCommand]:
        """Handles what happened and returns what to do. Never raises for what a peer did."""
        commands: list[SenderCommand] = []
        match event:
            case ReceiverOpened():
                commands = self._receiver_opened(event, now)
            case RoomExpected(said_at):
                self._awaited_at = max(self._awaited_at, said_at)
            case ChunkSubmitted() if self.state.is_final:
                pass  # the caller learns from the state
            # Looked for here, where no scheduler waits for it.
            case ChunkSubmitted(chunk) if (impossible := why_impossible(chunk, where=f"room {self.room}")) is not None:
                commands = self._fail(impossible)
            case ChunkSubmitted(chunk, is_followed):
                commands = self._take_chunk(chunk, now, is_followed=is_followed)
            case TurnCame():
                self._awaits_turn = False
                commands = self._send_next(now)
            case WriteDeferred(name, sequence):
                self._receivers[name].defer_write(sequence)
            case WriteAdmitted(name, sequence):
                self._receivers[name].begin_write(sequence, now)
            case WriteDone(name, sequence):
                self._receivers[name].writes_in_flight.discard(sequence)
                self._receivers[name].progressed(now)
                self._last_progress = now
                commands = self._maybe_finish()
            case WriteProgressed(name):
                self._receivers[name].progressed(now)
            case WriteFailed(name, sequence, error, may_arrive):
                if may_arrive:
                    self._receivers[name].has_failed_write = True
                else:
                    self._receivers[name].writes_in_flight.discard(sequence)
                commands = self._fail(caused(f"writing chunk {sequence} of room {self.room} to {name} failed", error))
            case FinishSent(name, None):
                self._receivers[name].finish_sent = True
                commands = self._maybe_finish()
            case FinishSent(name, Exception() as error):
                commands = self._fail(caused(f"notifying {name} that room {self.room} is complete failed", error))
            case ReceiverMessage(name, AbortRoom() as message):
                commands = self._receiver_aborted(name, message)
            case ReceiverMessage(name, RefuseRoom() as message):
                commands = self._receiver_refused(name, message)
            case ReceiverMessage(name, RoomVerified() as message):
                commands = self._receiver_verified(name, message.generation, now)
            case ReceiverLost(name, error):
                commands = self._receiver_lost(name, error)
            case AbortRequested(reason):
                commands = self._fail(
                    TransferAbortedError(f"room {self.room} was aborted by the prefill side: {reason}")
                )
            case Broke(error):
                commands = self._fail(caused(f"room {self.room} met an unexpected error", error))
            case Tick():
                commands = self._tick(now)
        if self.detailed_state is SenderState.DRAINING and self.is_drained:
            self._move(SenderTrigger.WRITES_ENDED)
        return commands + self._tell_drained()

    def _move(self, trigger: SenderTrigger) -> None:
        self.detailed_state = SENDER_TRANSITIONS[self.detailed_state][trigger]
        self.state = self.detailed_state.shown

    def _receiver_opened(self, event: ReceiverOpened, now: float) -> list[SenderCommand]:
        known = self._receivers.get(event.receiver)
        if known is not None and known.opened.generation == event.generation:
            return []
        error: KVFerryError | None = None
        if self.state.is_final:
            complete = TransferFailedError(f"room {self.room} is already complete on prefill rank {self._rank}")
            error = self.error or complete
        elif known is not None:
            error = TransferFailedError(
                f"room {self.room} is already being sent to {event.receiver}; "
                "wait for it to end before opening it again"
            )
        if error is not None:
            drained = SendDrained(event.receiver, event.generation, error=error)
            return [SendFailed(event.receiver, event.generation, error), drained]
        self._receivers[event.receiver] = ReceiverProgress(event)
        expected = self._expected
        if len(set(expected)) > 1 or len(expected) > event.expected_receivers:
            return self._fail(
                IncompatiblePeerError(
                    f"room {self.room}: {event.receiver} speaks of {event.expected_receivers} receivers, "
                    f"others of {expected}, and {len(expected)} have opened it; "
                    "do two decode engines use the same room number?"
                )
            )
        if (another := self._why_another(event)) is not None:
            return self._fail(another)
        self._last_progress = now
        if len(expected) < event.expected_receivers:
            return []
        self._move(SenderTrigger.ALL_RECEIVERS_OPEN)
        return self._send_next(now)

    def _why_another(self, event: ReceiverOpened) -> KVFerryError | None:
        """Returns the error of a room whose sides mean different requests; None if they mean the same."""
        theirs = event.request
        if difference := why_different(self._depends_on, theirs.depends_on):
            return IncompatiblePeerError(
                f"room {self.room}: {difference} (prefill rank {self._rank}, {event.receiver}): "
                "send both sides the same request"
            )
        if self._tokens is not None and theirs.tokens is not None and self._tokens != theirs.tokens:
            return PageError(
                f"room {self.room}: the request has {self._tokens} tokens on prefill rank {self._rank}, "
                f"{theirs.tokens} on {event.receiver}: both sides must count the same tokens"
            )
        return None

    def _take_chunk(self, chunk: Chunk, now: float, *, is_followed: bool) -> list[SenderCommand]:
        """Sends a chunk, unless it waits: for the receivers, behind others, or for the next ones to leave with it."""
        self._last_progress = now
        is_one_write = not self._chunks or goes_on(chunk, self._chunks[-1])
        self._chunks.append(chunk)
        self._waiting_pages += chunk.num_pages
        if self.state is TransferState.BOOTSTRAPPING:
            return []
        if is_followed and is_one_write and self._waiting_pages < self._joined_pages:
            return self._await_turn()
        return self._send_next(now)

    def _await_turn(self) -> list[SenderCommand]:
        """Asks for a turn if chunks wait, unless one is awaited already."""
        if not self._chunks or self._awaits_turn:
            return []
        self._awaits_turn = True
        return [AwaitTurn()]

    def _send_next(self, now: float) -> list[SenderCommand]:
        """Sends the first of the chunks that wait, and with it those that go on where it ends.

        No more of them in a turn than a write should have: other rooms are not held up by all.
        """
        if not self._chunks:
            return []
        chunk = take_together(self._chunks, self._joined_pages)
        self._waiting_pages -= chunk.num_pages
        commands = self._send_chunk(chunk, now)
        return [*commands, *self._await_turn()]

    def _send_chunk(self, chunk: Chunk, now: float) -> list[SenderCommand]:
        self._last_progress = now
        for name, receiver in self._receivers.items():
            try:
                check_chunk(chunk, receiver.opened.request, self._next_pages, where=f"room {self.room}")
            except PageError as error:
                return self._fail(PageError(f"{error} (prefill rank {self._rank}, receiver {name})"))
        self._next_pages.update({part.group: part.stop for part in chunk.parts})
        # Worked out for all before any write is counted: after an error here no write may be counted but never posted.
        moves = [(receiver, moves_of(chunk, receiver.opened.request)) for receiver in self._receivers.values()]
        commands: list[SenderCommand] = [
            receiver.write(chunk.number, unit, of_unit, now)
            for receiver, by_unit in moves
            for unit, of_unit in by_unit.items()
            if of_unit
        ]
        if commands:
            self._move(SenderTrigger.WRITE_STARTED)
        if chunk.is_last:
            self._last_chunk = chunk
        return commands + self._maybe_finish()

    def _maybe_finish(self) -> list[SenderCommand]:
        """Notifies the receivers once all is written, and ends the room once they need nothing more."""
        if self._last_chunk is None or self.state.is_final or not self.is_drained:
            return []
        owed = [receiver for receiver in self._receivers.values() if receiver.is_owed]
        if all(receiver.is_content for receiver in owed):
            self._move(SenderTrigger.ALL_FINISHED)
        aux = self._last_chunk.aux or b""
        return [receiver.finish(aux) for receiver in owed if not receiver.finish_requested]

    def _receiver_verified(self, name: str, generation: int, now: float) -> list[SenderCommand]:
        receiver = self._receivers.get(name)
        if receiver is None or receiver.opened.generation != generation:
            return []
        receiver.has_verified = True
        self._last_progress = now
        return self._maybe_finish()  # it may have all of its chunks while others have not

    def _receiver_aborted(self, name: str, message: AbortRoom) -> list[SenderCommand]:
        receiver = self._receivers.get(name)
        is_over = self.state is TransferState.SUCCESS
        if receiver is None or receiver.opened.generation != message.generation or is_over:
            return [SendDrained(name, message.generation)]  # nothing of that generation was written, or all of it is
        receiver.failure_sent = True  # it ended the room itself
        receiver.drained_sent = False  # every abort is answered, a repeated one again
        if message.error == ChecksumError.__name__:
            return self._fail(ChecksumError(f"{name} found wrong bytes: {message.reason}"))
        return self._fail(TransferAbortedError(f"room {self.room} was aborted by {name}: {message.reason}"))

    def _receiver_refused(self, name: str, message: RefuseRoom) -> list[SenderCommand]:
        rank = DecodeRank(message.engine, message.coordinates)
        ranks = [receiver.opened.rank for receiver in self._receivers.values()]
        is_awaited = self.state is TransferState.BOOTSTRAPPING and name not in self._receivers
        if not (is_awaited and rank.can_be_beside(ranks)):
            return []
        who = f"decode rank {rank.coordinates.engine_rank} of {rank.engine!r}"
        refused = TransferFailedError(f"room {self.room}: {who} refused it: {message.reason}")
        refused.there = TransferRefusedError.__name__
        return self._fail(refused)

    def _receiver_lost(self, name: str, error: Exception) -> list[SenderCommand]:
        receiver = self._receivers.get(name)
        if receiver is None:
            return []
        receiver.failure_sent = receiver.drained_sent = True  # it cannot be notified
        if receiver.is_content or not receiver.is_owed:
            return []  # it got from this rank all that it was to get; the other receivers go on
        return self._fail(caused(f"room {self.room}: {name} is gone", error))

    def _tick(self, now: float) -> list[SenderCommand]:
        if self.deadline is None or now < self.deadline:
            return []
        if self.state is TransferState.BOOTSTRAPPING:
            expected = self._expected
            what = (
                f"{len(expected)} of {expected[0] if expected else 'an unknown number of'} decode ranks "
                f"opened it within {self._deadlines.bootstrap_s:g} s (KVFERRY_BOOTSTRAP_TIMEOUT_S)"
            )
        elif any(receiver.writes_in_flight for receiver in self._receivers.values()):
            long_ago = now - self._deadlines.write_s
            slow = self._names_of(lambda each: bool(each.writes_in_flight) and each.progressed_at <= long_ago)
            what = f"writes to {slow} did not end within {self._deadlines.write_s:g} s (KVFERRY_WRITE_TIMEOUT_S)"
        elif not self.is_drained:
            behind = self._names_of(lambda receiver: bool(receiver.writes_deferred))
            what = (
                f"what writes to {behind} wait for did not get on for {self._deadlines.waiting_s:g} s "
                "(KVFERRY_WAITING_TIMEOUT_S): so many bytes as may be are on their way already "
                "(KVFERRY_DIRECT_MIB, KVFERRY_DIRECT_RECEIVER_MIB)"
            )
        elif self._last_chunk is None:
            what = (
                f"no chunk was submitted for {self._deadlines.waiting_s:g} s, or the next one was not ready "
                "(KVFERRY_WAITING_TIMEOUT_S)"
            )
        elif all(receiver.finish_sent for receiver in self._receivers.values() if receiver.finish_requested):
            silent = self._names_of(lambda receiver: not receiver.is_content)
            what = (
                f"{silent} did not confirm within {self._deadlines.waiting_s:g} s that the digests are right "
                "(KVFERRY_WAITING_TIMEOUT_S)"
            )
        else:
            untold = self._names_of(lambda receiver: not receiver.finish_sent)
            what = (
                f"{untold} could not be notified within {self._deadlines.waiting_s:g} s that it is complete "
                "(KVFERRY_WAITING_TIMEOUT_S)"
            )
        return self._fail(TransferTimeoutError(f"room {self.room} on prefill rank {self._rank}: {what}"))

    def _fail(self, error: KVFerryError) -> list[SenderCommand]:
        if self.state.is_final:
            return []
        self.error = error
        self._move(SenderTrigger.FAILURE)
        self._chunks.clear()
        return [command for receiver in self._receivers.values() for command in receiver.fail(error)]

    def _tell_drained(self) -> list[SenderCommand]:
        """Sends `Drained` to a failed room's receivers to which no write is in flight: they may reuse their pages."""
        if self.state is not TransferState.FAILED:
            return []
        return [command for receiver in self._receivers.values() for command in receiver.tell_drained(self.error)]
