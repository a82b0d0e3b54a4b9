"""The turns of a room on a prefill rank's workers: chunks come, writes begin and end, and its caller sees it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

from kvferry.endpoint.prefill.admission import Admitted
from kvferry.endpoint.prefill.attachment import Attachment
from kvferry.endpoint.prefill.context import PrefillContext
from kvferry.endpoint.prefill.room import SendingRoom
from kvferry.endpoint.prefill.room_write import DirectWrite, DirectWrites, Target
from kvferry.endpoint.prefill.staged_writes import PostNextPart, StagedPart, StagedWrite, StagedWrites
from kvferry.endpoint.prefill.unread_chunks import ReadyChunk, UnreadChunks
from kvferry.endpoint.runtime.run_queue import Actor
from kvferry.endpoint.runtime.workers import Worker, WorkerPool
from kvferry.endpoint.transfer import RoomReport, Sender
from kvferry.errors import KVFerryError, PeerDisconnectedError, TransferFailedError
from kvferry.observe.records import SenderStats, WriteRecord
from kvferry.observe.status import RoomStatus
from kvferry.plan import TransferPath
from kvferry.plan.requests.chunks import ChunkSequence, HandedIn
from kvferry.protocol.transfer.events import (
    AbortRequested,
    Broke,
    ChunkSubmitted,
    ReceiverMessage,
    ReceiverOpened,
    SendDrained,
    SenderEvent,
    SendFailed,
    SendFinish,
    Tick,
    Write,
    WriteFailed,
    WriteProgressed,
)
from kvferry.protocol.transfer.room_table import RoomMessage
from kvferry.protocol.transfer.sender import SenderMachine
from kvferry.protocol.transfer.states import SenderState, TransferState
from kvferry.protocol.wire import messages


@dataclass(frozen=True, slots=True, eq=False)
class OpenReceived:
    """A decode rank's open request for the room."""

    attachment: Attachment
    message: messages.OpenRoom


_AWAITING_CHUNKS = (TransferState.WAITING_FOR_INPUT, TransferState.TRANSFERRING)


@dataclass(frozen=True, slots=True)
class ChunkReady:
    """The pages of the first chunk that waited for that hold what is to be sent; or looking whether they do failed."""

    error: BaseException | None


RoomEvent: TypeAlias = SenderEvent | HandedIn | ChunkReady | OpenReceived | PostNextPart | StagedPart | Admitted


class ReceiverWrites:
    """Those of a room to one receiver. Only the room's own turns use it, where nothing else is said.

    Attributes:
        direct: those into its pages.
        staged: those through its ring.
    """

    def __init__(self, target: Target) -> None:
        """Begins with none."""
        self._target = target
        self.direct = DirectWrites(target)
        self.staged = StagedWrites(target)

    def write(self, command: Write, worker: Worker, *, submitted_at: float) -> None:
        """Begins a write: it is posted when there is memory for it, or when it is admitted.

        Args:
            submitted_at: when the first of its chunks was handed in, and all receivers had opened the room.
        """
        target, attachment = self._target, self._target.attachment
        if not attachment.begin_write():
            self._fail(command, PeerDisconnectedError(f"{command.receiver} is not connected any more"))
            return
        begun_at = target.context.now()
        try:
            choice = attachment.paths.choose(command.unit, target.elected, command.moves)
            if choice.path is TransferPath.STAGED:
                self.staged.write(StagedWrite(command, target, choice, submitted_at=submitted_at, begun_at=begun_at))
                return
        except Exception as error:
            attachment.end_write()
            self._fail(command, error)
            return
        self.direct.write(DirectWrite(command, target, choice, submitted_at=submitted_at, begun_at=begun_at), worker)

    def _fail(self, command: Write, error: Exception) -> None:
        self._target.report_failure(error)
        self._target.room.post(WriteFailed(command.receiver, command.sequence, error))

    def cancel(self, error: KVFerryError, worker: Worker) -> None:
        """Posts nothing more."""
        self.direct.drop()
        self.staged.cancel(error, worker)

    def moved_at(self, now: float) -> float:
        """Returns when something last got on that the writes wait for, also others' to the same receiver."""
        return max(self.direct.moved_at, min(self.staged.moved_at, now), self._target.attachment.moved_at)


class AllRooms(Protocol):
    """What a room needs of whoever has all of them. May be called from any worker."""

    def pass_on(self, receiver: str, message: RoomMessage) -> None:
        """Takes a decode rank's message for whoever has the room now, or will have it."""

    def forget(self, room: RoomActor) -> None:
        """Drops a room, which is done."""

    def set_deadline(self, room: RoomActor, deadline: float | None) -> None:
        """Takes a room's next deadline, every time that something happened in it."""


class RoomActor(Actor):
    """Runs one room on whichever worker is free, and does what it wants done outside of itself (`RoomPort`).

    Attributes:
        machine: the room's state.
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
        super().__init__(run_queue)
        self._gathering = workers.gathering
        self.room = machine.room
        self.machine = machine
        self._context = context
        self._rooms = rooms
        self._sending = SendingRoom(machine, self)
        self.generations = self._sending.generations
        self._receivers: dict[str, ReceiverWrites] = {}  # those that have opened the room
        self._submitted_at: dict[int, float] = {}
        self._unread = UnreadChunks(
            machine.room,
            context.identity.layout.shards,
            lambda error: self.post(ChunkReady(error)),
        )
        self._writes: list[WriteRecord] = []
        self._report = RoomReport(machine.room, context.observer, context.now())
        self._last_submitted_at: float | None = None
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
            self._gathering.put(self, event.due_at)
        else:
            super()._line_up(event)

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
    def deadline(self) -> float | None:
        """When it must be looked at; None if it has ended."""
        return self.machine.deadline

    @property
    def has_ended(self) -> bool:
        """Whether its transfer has ended, though writes may still be in flight. May be read from any thread."""
        return self.machine.state.is_final

    @property
    def waits_for_memory(self) -> bool:
        """Whether a sub-chunk waits for staging memory. May be read from any thread."""
        return any(receiver.staged.is_waiting for receiver in list(self._receivers.values()))

    @property
    def failed_alone(self) -> bool:
        """Whether the room failed before every receiver had opened it, so that some were not notified yet."""
        return self._sending.failed_alone

    @property
    def error(self) -> KVFerryError | None:
        """Why it failed, once it has."""
        return self.machine.error

    def _opened(self, request: OpenReceived) -> ReceiverOpened:
        attachment, message = request.attachment, request.message
        coordinates = self._context.identity.coordinates
        elected = attachment.elected(self.room, coordinates.group_rank)
        if attachment.receiver not in self._receivers:  # else the same request has come again
            self._receivers[attachment.receiver] = ReceiverWrites(Target(self, attachment, elected, self._context))
        self._context.observer.requested(self.room, message.trace)
        return ReceiverOpened(
            receiver=attachment.receiver,
            generation=message.generation,
            expected_receivers=message.receivers,
            request=message.checked(attachment.layout, elected, where=f"room {self.room} on {attachment.receiver}"),
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
                if self._sending.takes(event.attachment.receiver, event.message):
                    self.apply(self._opened(event), worker)
            case ReceiverMessage(receiver, messages.AbortRoom() as message):
                self._sending.aborted(receiver, message, worker)
            case ReceiverMessage(receiver, messages.RefuseRoom() as message):
                self._sending.refused(receiver, message, worker)
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
            self._last_submitted_at = ready.last_ready_at
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

    def apply(self, event: SenderEvent, worker: Worker) -> None:
        """Passes an event to the room, in its turn."""
        self._sending.apply(event, worker)

    # ---- what the room has done ---------------------------------------------------------------------------------

    def now(self) -> float:
        return self._context.now()

    def write(self, command: Write, worker: Worker) -> None:
        submitted_at = max(self._submitted_at.get(command.chunk, self.now()), self._sending.all_open_at or 0.0)
        self._receivers[command.receiver].write(command, worker, submitted_at=submitted_at)

    def tell_failed(self, command: SendFailed) -> None:
        self._context.tell_failed(command.receiver, self.room, command.generation, command.error)

    def tell_drained(self, command: SendDrained, *, is_another_use: bool) -> None:
        # Of another use of the number this room knows nothing.
        after_failure = command.after_failure or (is_another_use and command.receiver in self._context.broken_off)
        self._context.tell_drained(
            command.receiver, self.room, command.generation, after_failure=after_failure, error=command.error
        )

    def pass_on(self, receiver: str, message: RoomMessage) -> None:
        self._rooms.pass_on(receiver, message)

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
        self._rooms.set_deadline(self, machine.deadline)
        self.sender._proceed(self.chunks, waiting=self.waiting_chunks, is_drained=machine.is_drained)
        stats = self.sender.stats
        if machine.state.is_final or stats.last_submitted_at != self._last_submitted_at:
            ended_at = (stats.ended_at or self._context.now()) if machine.state.is_final else None
            self.sender.stats = SenderStats(
                opened_at=stats.opened_at,
                last_submitted_at=self._last_submitted_at,
                ended_at=ended_at,
                writes=tuple(self._writes) if machine.state.is_final else (),
            )
            if ended_at is not None and stats.ended_at is None:
                self._report.end()
                self._context.observer.sent(self.room, self.sender.stats, machine.error)
        if machine.is_done:
            self._rooms.forget(self)
            self._sending.pass_next_on()
        self.sender.prefix_tokens = machine.held_tokens if self._sending.all_open_at is not None else None
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
