"""The turns of a room on a prefill rank's workers: chunks come, writes begin and end, and its caller sees it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Protocol, TypeAlias

from kvferry.endpoint.prefill.admission import Admitted
from kvferry.endpoint.prefill.attachment import Attachment
from kvferry.endpoint.prefill.context import PrefillContext
from kvferry.endpoint.prefill.receiver_writes import ReceiverWrites
from kvferry.endpoint.prefill.room import SendingRoom
from kvferry.endpoint.prefill.room_write import Target
from kvferry.endpoint.prefill.staged_writes import PostNextPart, StagedPart
from kvferry.endpoint.runtime.callers_code import SIGNAL, Awaited, CallersCode
from kvferry.endpoint.runtime.run_queue import Actor, Timers
from kvferry.endpoint.runtime.workers import Worker, WorkerPool
from kvferry.endpoint.transfer import RoomReport, Sender
from kvferry.errors import TransferFailedError
from kvferry.layout import Shard
from kvferry.observe.records import WriteRecord
from kvferry.observe.status import RoomStatus
from kvferry.plan.requests.chunks import ChunkSequence, HandedIn, components_by_group, joined
from kvferry.plan.requests.moves import ReceiverRequest
from kvferry.protocol.transfer.events import (
    AbortRequested,
    Broke,
    ChunkSubmitted,
    ReceiverLost,
    ReceiverMessage,
    ReceiverOpened,
    SendDrained,
    SenderEvent,
    SendFailed,
    SendFinish,
    Tick,
    Write,
    WriteDone,
    WriteFailed,
    WriteProgressed,
)
from kvferry.protocol.transfer.room_table import RoomMessage
from kvferry.protocol.transfer.sender import SenderMachine
from kvferry.protocol.transfer.states import SenderState, TransferState
from kvferry.protocol.wire import messages


@dataclass(slots=True)
class ReadyChunk:
    """A chunk of which the pages hold what is to be sent.

    Attributes:
        chunk: the chunk, or several as one.
        ready_at: since when; if it is several, the first of them.
        last_ready_at: since when the last of them is.
        count: how many were handed in for it.
    """

    chunk: HandedIn
    ready_at: float
    last_ready_at: float
    count: int = 1


class UnreadChunks:
    """Those of a room, in the order in which they were handed in. Only the room's own turns use it.

    The first that has a signal waits for it, and the others wait for the first. Ranges of layers of the same pages are
    joined while earlier writes keep the wire busy: a range leaves by itself as soon as the wire has nothing else to do,
    and if layers are computed faster than they are sent, fewer and larger writes take them.
    """

    def __init__(self, room: int, shards: Sequence[Shard], came: Callable[[BaseException | None], None]) -> None:
        """Begins with none.

        Args:
            room: whose they are.
            shards: those of the rank's layout.
            came: called by a worker when the first signal has come, or with what looking at it has raised.
        """
        self._room = room
        self._came = came
        self._awaited: Awaited | None = None  # the signal of the first that is unready
        self._shards = shards
        self._ready: deque[ReadyChunk] = deque()
        self._unready: deque[HandedIn] = deque()

    def __bool__(self) -> bool:
        return bool(self._ready or self._unready)

    @property
    def has_ready(self) -> bool:
        """Whether there is any of which the pages may be read."""
        return bool(self._ready)

    @property
    def unready(self) -> HandedIn | None:
        """The first chunk whose pages are still being written. May be read from any thread."""
        return next(iter(list(self._unready)), None)

    def add(self, chunk: HandedIn) -> None:
        """Adds the next chunk that was handed in."""
        if self._unready or chunk.is_ready is not None:
            self._unready.append(chunk)
        else:
            self._add_ready(chunk, chunk.submitted_at)

    def await_signal(self, worker: Worker) -> None:
        """Has a worker look at the first signal, unless one does."""
        if self._awaited is None and self._unready:
            is_ready = self._unready[0].is_ready
            assert is_ready is not None
            self._awaited = Awaited(is_ready, self._came, self._room)
            worker.signals.add(self._awaited)

    def signalled(self, error: BaseException | None, now: float, code: CallersCode) -> BaseException | None:
        """Takes note that the first signal has come, and looks at those behind it.

        Args:
            error: what looking at it has raised.
            code: runs what looks at signals.

        Returns:
            What looking at any has raised.
        """
        self._awaited = None
        if not self._unready or error is not None:
            return error
        self._add_ready(self._unready.popleft(), now)
        try:
            while self._unready:
                is_ready = self._unready[0].is_ready
                if is_ready is not None and not code.run(SIGNAL, is_ready, self._room):
                    break
                self._add_ready(self._unready.popleft(), now)
        except BaseException as raised:  # the caller's code, or a device that has failed
            return raised
        return None

    def next(self, *, is_wire_busy: bool) -> ReadyChunk | None:
        """Takes out what is to be sent next; None if there is nothing, or more layers are to join what there is."""
        if not self._ready:
            return None
        is_joinable = len(self._ready) == 1 and not self._ready[0].chunk.completes
        return None if is_joinable and is_wire_busy else self._ready.popleft()

    def drop(self) -> int:
        """Drops all, and looks at no signal any more; returns how many were handed in."""
        if self._awaited is not None:
            self._awaited.is_dropped = True
            self._awaited = None
        count = len(self._unready) + sum(each.count for each in self._ready)
        self._unready.clear()
        self._ready.clear()
        return count

    @cached_property
    def _components(self) -> dict[str, frozenset[str]]:
        return components_by_group(self._shards)  # made where layers are handed in alone: few rooms need it

    def _add_ready(self, chunk: HandedIn, now: float) -> None:
        last = self._ready[-1] if self._ready else None
        together = joined(last.chunk, chunk, self._components) if last is not None else None
        if last is None or together is None:
            self._ready.append(ReadyChunk(chunk, now, now))
        else:
            last.chunk, last.last_ready_at = together, now
            last.count += 1


@dataclass(frozen=True, slots=True, eq=False)
class OpenReceived:
    """A decode rank's open request for the room.

    Attributes:
        request: what it asks for, as it was checked when it came; None where it has waited for our caller since.
    """

    attachment: Attachment
    message: messages.OpenRoom
    request: ReceiverRequest | None = None


_AWAITING_CHUNKS = (TransferState.WAITING_FOR_INPUT, TransferState.TRANSFERRING)


@dataclass(frozen=True, slots=True)
class ChunkReady:
    """The pages of the first chunk that waited for that hold what is to be sent; or looking whether they do failed."""

    error: BaseException | None


RoomEvent: TypeAlias = SenderEvent | HandedIn | ChunkReady | OpenReceived | PostNextPart | StagedPart | Admitted


_ENDS = (WriteDone, WriteFailed, StagedPart, ReceiverMessage, ReceiverLost, AbortRequested, Broke)
"""Events that begin nothing. They have their turns first, or all rooms would end when the last one does."""

_BEHIND_ENDS = 1.0
"""When everything else is due, in the order in which it came: an end is due at 0."""


class AllRooms(Protocol):
    """What a room needs of whoever has all of them. May be called from any worker.

    Attributes:
        timers: when each room must be looked at.
    """

    timers: Timers[RoomActor]

    def pass_on(self, receiver: str, message: RoomMessage) -> None:
        """Takes a decode rank's message for whoever has the room now, or will have it."""

    def forget(self, room: RoomActor) -> None:
        """Drops a room, which is done."""


class RoomActor(Actor, SendingRoom[Worker]):
    """A room that runs on whichever worker is free, and does what it wants done outside of itself (`RoomPort`).

    Attributes:
        chunks: how many chunks it has taken.
        is_told_to_look: whether it was told to look at the time, and has not had the turn for it.
    """

    def __init__(
        self,
        machine: SenderMachine,
        workers: WorkerPool,
        context: PrefillContext,
        rooms: AllRooms,
    ) -> None:
        """Begins with no receivers, as one of all rooms."""
        run_queue = workers.queue_of(machine.room.to_bytes(8, "little"))
        Actor.__init__(self, run_queue)
        SendingRoom.__init__(self, machine, self)
        self._gathering = workers.gathering
        self._context = context
        self._rooms = rooms
        self.now = context.now
        self.pass_on = rooms.pass_on
        self._receivers: dict[str, ReceiverWrites] = {}  # those that have opened the room
        self._submitted_at: dict[int, float] = {}
        self._unread = UnreadChunks(
            machine.room,
            context.identity.layout.shards,
            lambda error: self.post(ChunkReady(error)),
        )
        self._writes: list[WriteRecord] = []
        self._report = RoomReport(machine.room, context.observer, context.now())
        self.chunks = 0
        self.is_told_to_look = False
        self._pages = 0  # that were handed in
        self._next_pages: dict[str, int] = {}  # by group: the position of the page behind them
        self.sender = Sender(
            machine.room,
            ChunkSequence(machine.room, context.identity.layout.groups, context.identity.layout.shards),
            partial(run_queue.hand_in, self),
            lambda reason: self.post(AbortRequested(reason)),
            context.callbacks,
            now=context.now,
            observer=context.observer,
            report=self._report,
        )

    def _line_up(self, event: RoomEvent) -> None:
        if isinstance(event, PostNextPart):
            # Another receiver's may stand behind it that is due before.
            self._gathering.put(self, min(each.staged.turn_due_at for each in list(self._receivers.values())))
        elif isinstance(event, _ENDS):
            super()._line_up(event)
        else:
            self._run_queue.put(self, _BEHIND_ENDS)

    @property
    def state(self) -> TransferState:
        """The state of its transfer; this and what follows may be read from any thread."""
        return self.machine.state

    @property
    def quarantined_pages(self) -> int:
        """Pages that a write may still read, though it has failed."""
        return self._pages if self.machine.detailed_state is SenderState.DRAINING else 0

    def age_s(self, now: float) -> float:
        """Returns how long ago it was opened, in seconds."""
        return now - self.sender.stats.opened_at

    def failed_for_s(self, now: float) -> float:
        """Returns how long ago it ended, in seconds; 0 if it has not."""
        ended_at = self.sender.stats.ended_at
        return now - ended_at if ended_at is not None else 0.0

    def status(self, now: float) -> RoomStatus:
        """Returns the room's status. May be called from any thread."""
        machine, writes = self.machine, list(self._writes)
        receivers = list(self._receivers.items())
        staged = [write for _, receiver in receivers for write in list(receiver.staged.writes.values())]
        waiting = [name for name, receiver in receivers if receiver.staged.is_waiting]
        parts = [part for write in staged for part in list(write.parts)]
        path = staged[-1].choice.path if staged else writes[-1].path if writes else None
        return RoomStatus(
            room=self.room,
            state=machine.state.value,
            age_s=self.age_s(now),
            chunks=self.chunks,
            path=path.value if path is not None else "",
            moved_bytes=sum(write.total_bytes for write in writes) + sum(part.num_bytes for part in parts),
            waits_for=self._waits_for(waiting),
            peers=tuple(self.generations),
            quarantined_pages=self.quarantined_pages,
            failed_for_s=self.failed_for_s(now),
        )

    def _waits_for(self, waiting: list[str]) -> str:
        if waiting:
            return f"staging memory for {', '.join(waiting)}"
        is_idle = self.machine.is_drained and self.machine.state in _AWAITING_CHUNKS
        if is_idle and (unready := self._unread.unready) is not None:
            return f"the caller's signal that chunk {unready.number} is ready"
        return self.machine.waits_for

    @property
    def waiting_chunks(self) -> int:
        """Chunks that wait for receivers or for a turn, or of which a write is deferred: always the last ones."""
        waiting = [self.machine.first_waiting, *(each.direct.deferred_chunk for each in self._receivers.values())]
        return self.chunks - min((chunk for chunk in waiting if chunk is not None), default=self.chunks)

    @property
    def waits_for_memory(self) -> bool:
        """Whether a sub-chunk waits for staging memory. May be read from any thread."""
        return any(receiver.staged.is_waiting for receiver in list(self._receivers.values()))

    def _opened(self, request: OpenReceived) -> ReceiverOpened:
        attachment, message, checked = request.attachment, request.message, request.request
        coordinates = self._context.identity.coordinates
        elected = attachment.elected(self.room, coordinates.group_rank)
        if attachment.receiver not in self._receivers:  # else the same request has come again
            self._receivers[attachment.receiver] = ReceiverWrites(Target(self, attachment, elected, self._context))
        self._context.observer.requested(self.room, message.trace)
        return ReceiverOpened(
            receiver=attachment.receiver,
            generation=message.generation,
            expected_receivers=message.receivers,
            request=checked or attachment.checked(message, elected),
            sends_aux=coordinates.is_aux_writer,
            verifies=attachment.verifies,
            held=message.held,
            rank=attachment.rank,
        )

    def handle(self, event: RoomEvent, worker: Worker) -> None:
        """Passes an event to the machine, executes its commands, and updates what the caller sees."""
        is_final = self.machine.state.is_final
        match event:
            case OpenReceived():
                if self.takes(event.attachment.receiver, event.message):
                    self.apply(self._opened(event), worker)
            case ReceiverMessage(receiver, messages.AbortRoom() as message):
                self.aborted(receiver, message, worker)
            case ReceiverMessage(receiver, messages.RefuseRoom() as message):
                self.refused(receiver, message, worker)
            case HandedIn() if (self._unread or event.is_ready or not event.completes) and not is_final:
                self._unread.add(event)
            case HandedIn():
                self._take(ReadyChunk(event, event.submitted_at, event.submitted_at), worker)
            case ChunkReady(error):
                if (raised := self._unread.signalled(error, self._context.now(), worker.code)) is not None:
                    self.apply(Broke(raised), worker)
            case Admitted():
                self._receivers[event.receiver].direct.post_admitted(event, worker)
            case PostNextPart():
                if not is_final:
                    self._receivers[event.receiver].staged.post_next(worker)
            case StagedPart():
                self._receivers[event.receiver].staged.landed(event, worker)
            case Tick():
                self.is_told_to_look = False
                self._take_over_progress()
                self.apply(event, worker)
            case _:
                self.apply(event, worker)
        if self._unread and not self.machine.state.is_final:
            self._take_unread(worker)
        if self.machine.state is TransferState.FAILED:  # perhaps by what was taken just now
            self._cancel(worker)
        self._show()

    def _take(self, ready: ReadyChunk, worker: Worker) -> None:
        """Takes a chunk whose pages may be read."""
        chunk = ready.chunk.chunk()
        self._submitted_at[chunk.number] = ready.ready_at
        if chunk.is_last:
            self.sender.stats = replace(self.sender.stats, last_submitted_at=ready.last_ready_at)
        for part in chunk.parts:
            if part.stop > self._next_pages.get(part.group, 0):  # else they come again, with other layers
                self._next_pages[part.group] = part.stop
                self._pages += len(part.pages)
        self.apply(ChunkSubmitted(chunk, is_followed=self._has_next and chunk.layers is None), worker)
        self.chunks += ready.count

    @property
    def _has_next(self) -> bool:
        """Whether the next chunk is there, too; it may have to wait for a signal."""
        return self._unread.has_ready or (bool(self.events) and isinstance(self.events[0], HandedIn))

    def _take_unread(self, worker: Worker) -> None:
        """Takes what may be read and need not wait for more layers; then awaits the next signal."""
        while (ready := self._unread.next(is_wire_busy=self.machine.is_busy)) is not None:
            self._take(ready, worker)
        if not self.machine.state.is_final:
            self._unread.await_signal(worker)

    # ---- what the room has done ---------------------------------------------------------------------------------

    def write(self, command: Write, worker: Worker) -> None:
        submitted_at = max(self._submitted_at.get(command.chunk, self.now()), self.all_open_at or 0.0)
        self._receivers[command.receiver].write(command, worker, submitted_at=submitted_at)

    def tell_failed(self, command: SendFailed) -> None:
        self._context.tell_failed(command.receiver, self.room, command.generation, command.error)

    def tell_drained(self, command: SendDrained, *, is_another_use: bool) -> None:
        # Of another use of the number this room knows nothing.
        after_failure = command.after_failure or (is_another_use and command.receiver in self._context.broken_off)
        self._context.tell_drained(
            command.receiver, self.room, command.generation, after_failure=after_failure, error=command.error
        )

    def notify(self, command: SendFinish) -> Exception | None:
        message = messages.WriterFinished(
            room=self.room,
            generation=command.generation,
            writer=self._context.engine_rank,
            chunks=command.chunks,
            aux=command.aux,
        )
        try:
            self._context.transport.notify(command.receiver, self._context.encoded(command.receiver, message))
        except Exception as error:
            return error
        return None

    # ---- what its caller sees -----------------------------------------------------------------------------------

    def broke(self, error: BaseException, worker: Worker) -> None:
        """Fails the room with an unexpected error."""
        self.apply(Broke(error), worker)
        self._cancel(worker)
        self._show()

    def _cancel(self, worker: Worker) -> None:
        """Posts nothing more of a room that has failed, and drops what was not ready."""
        self.chunks += self._unread.drop()
        error = self.machine.error or TransferFailedError("the room has failed")
        for receiver in self._receivers.values():
            receiver.cancel(error, worker)

    def _show(self) -> None:
        machine = self.machine
        self._rooms.timers.set(self, machine.deadline)
        self.sender._proceed(self.chunks, waiting=self.waiting_chunks, is_drained=machine.is_drained)
        if machine.state.is_final:
            stats = self.sender.stats
            ended_at = self._context.now() if stats.ended_at is None else stats.ended_at
            self.sender.stats = replace(stats, ended_at=ended_at, writes=tuple(self._writes))
            if stats.ended_at is None:
                self._report.end()
                self._context.observer.sent(self.room, self.sender.stats, machine.error)
        if machine.is_done:
            self._rooms.forget(self)
            self.pass_next_on()
        self.sender.prefix_tokens = machine.held_tokens if self.all_open_at is not None else None
        self.sender._update(machine.state, machine.error, pages_reusable=machine.is_done)

    def _take_over_progress(self) -> None:
        """Notifies the machine of what others' writes to the same receivers have done: they share what carries them."""
        if self.machine.state.is_final:
            return
        now = self._context.now()
        for name, receiver in self._receivers.items():
            self.machine.handle(WriteProgressed(name), receiver.moved_at(now))

    def keep(self, record: WriteRecord) -> None:
        """Takes the record of a write that is through."""
        self._writes.append(record)
        self._report.wrote(record)
