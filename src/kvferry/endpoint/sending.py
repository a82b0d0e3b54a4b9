"""One room on a prefill rank: the actor behind the caller's `Sender`, which runs the state machine."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias

from kvferry.endpoint.actors import Actor, RunQueue
from kvferry.endpoint.attachment import Attachment
from kvferry.endpoint.reporting import RoomReport
from kvferry.endpoint.sender import Sender
from kvferry.endpoint.workers import Worker, WorkerPool
from kvferry.errors import KVFerryError, PeerDisconnectedError, TransferFailedError
from kvferry.layout import PageGroup
from kvferry.observe.observer import Observer
from kvferry.observe.records import PartRecord, SenderStats, WriteRecord
from kvferry.observe.status import RoomStatus
from kvferry.plan import Choice, ElectedRoute, Path, Unit
from kvferry.protocol import messages
from kvferry.protocol.chunks import ChunkSequence, HandedIn
from kvferry.protocol.credits import Span
from kvferry.protocol.demands import wanted_groups
from kvferry.protocol.moves import ReceiverRequest
from kvferry.protocol.sender import (
    ChunkSubmitted,
    FinishFailed,
    FinishSent,
    ReceiverAborted,
    ReceiverAskedAgain,
    ReceiverOpened,
    SendDrained,
    SenderAbortRequested,
    SenderBroke,
    SenderCommand,
    SenderEvent,
    SenderMachine,
    SendFailed,
    SendFinish,
    Write,
    WriteDone,
    WriteFailed,
    WriteProgressed,
)
from kvferry.protocol.states import TransferState
from kvferry.settings import Settings
from kvferry.staging.gathering import Packing, Posted, StagedQueue, StagedWrite
from kvferry.transport import FlightReport, Transport


@dataclass(frozen=True, slots=True, eq=False)
class OpenReceived:
    """A decode rank asked for the room.

    Attributes:
        attachment: the decode rank.
        message: its wish.
    """

    attachment: Attachment
    message: messages.OpenRoom


@dataclass(frozen=True, slots=True)
class PostNextPart:
    """It is the room's turn to post the next sub-chunk to a receiver."""

    receiver: str


@dataclass(frozen=True, slots=True)
class PartLanded:
    """A sub-chunk is in the receiver's staging memory, or its write failed.

    Attributes:
        posted: what it was.
        landed_at: when we saw that.
        thread: whose work it was.
        result: the transport's report, or why the write failed.
    """

    receiver: str
    sequence: int
    posted: Posted
    landed_at: float
    thread: str
    result: FlightReport | Exception

    @property
    def record(self) -> PartRecord:
        """What is recorded of it."""
        posted = self.posted
        return PartRecord(
            ready_at=posted.ready_at,
            begun_at=posted.begun_at,
            gathered_at=posted.gathered_at,
            posted_at=posted.posted_at,
            landed_at=self.landed_at,
            num_bytes=posted.num_bytes,
            runs=posted.runs,
            thread=self.thread,
        )


RoomEvent: TypeAlias = SenderEvent | HandedIn | OpenReceived | PostNextPart | PartLanded


@dataclass(slots=True, eq=False)
class _Account:
    """What is recorded of a write on its way.

    Attributes:
        choice: its path, and why.
        submitted_at, begun_at: when its chunk was handed in and when this was begun.
        descriptors, post_s, transfer_s, parts: of the parts that are through.
    """

    choice: Choice
    submitted_at: float
    begun_at: float
    descriptors: int = 0
    post_s: float = 0.0
    transfer_s: float = 0.0
    parts: list[PartRecord] = field(default_factory=list)

    def add(self, report: FlightReport, part: PartRecord, *, descriptors: int) -> None:
        """Counts a part that is through."""
        self.parts.append(part)
        self.descriptors += descriptors
        self.post_s += report.post_s
        self.transfer_s += report.transfer_s

    def record(self, receiver: str, now: float) -> WriteRecord:
        """The whole write, which is through now."""
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


def void(endpoint: str, epoch: int, span: Span) -> messages.SpanVoid:
    """Says that nothing will come of a span of a receiver's ring.

    Args:
        endpoint: our own.
        epoch: of the ring.
    """
    return messages.SpanVoid(endpoint=endpoint, epoch=epoch, start=span.start, begin=span.begin, stop=span.stop)


class Surroundings(Protocol):
    """What a sending room needs of its endpoint. All of it may be called from any worker."""

    transport: Transport
    observer: Observer
    engine_rank: int
    group_rank: int
    page_groups: tuple[PageGroup, ...]
    is_aux_writer: bool

    def now(self) -> float:
        """The time, in seconds of a steady clock."""

    def send(self, receiver: str, message: messages.Message) -> None:
        """Sends a control message."""

    def open_room(self, receiver: str, message: messages.OpenRoom) -> None:
        """Takes a decode rank's wish for whoever has the room now, or will have it."""

    def abort_room(self, receiver: str, message: messages.AbortRoom) -> None:
        """Takes back such a wish."""

    def write_failed(self, attachment: Attachment, error: Exception) -> None:
        """A write to a decode rank failed: where the connection broke, nothing else will get there either."""

    def forget_room(self, room: SendingRoom) -> None:
        """Drops a room that is done."""


class SendingRoom(Actor):
    """Runs one room's state machine on whichever worker is free, and does what it says."""

    def __init__(
        self, machine: SenderMachine, workers: WorkerPool, surroundings: Surroundings, settings: Settings
    ) -> None:
        synchronous = settings.synchronous
        run_queue = workers.queue_of(machine.room.to_bytes(8, "little"))
        super().__init__(run_queue)
        self._gathering = workers.gathering
        self.room = machine.room
        self.next_deadline = machine.deadline
        self._machine = machine
        self._surroundings = surroundings
        self._attachments: dict[str, Attachment] = {}
        self._elected: dict[str, tuple[ElectedRoute, ...]] = {}
        self._generations: dict[str, int] = {}  # of the receivers that have opened the room
        self._next_opens: dict[str, messages.OpenRoom] = {}
        self._submitted_at: dict[int, float] = {}
        self._all_open_at: float | None = None
        self._writes: list[WriteRecord] = []
        self._observer = surroundings.observer
        self._report = RoomReport(machine.room, surroundings.observer, surroundings.now())
        self._staged: dict[str, StagedQueue] = {}  # by receiver
        self._accounts: dict[tuple[str, int], _Account] = {}  # of staged writes, by receiver and sequence
        self._last_submitted_at: float | None = None
        self._handled_chunks = self._settled_chunks = 0
        self._pages = 0  # that were handed in
        # In synchronous mode, guards the number of settled chunks and wakes the caller who waits for it.
        self._progress = threading.Condition() if synchronous else None
        self.sender = Sender(
            machine.room,
            ChunkSequence(machine.room, surroundings.page_groups),
            self.post if synchronous else partial(run_queue.hand_in, self),
            lambda reason: self.post(SenderAbortRequested(reason)),
            settle=self._wait_settled if synchronous else None,
            most_waiting=settings.max_waiting_chunks,
            now=surroundings.now,
            observer=surroundings.observer,
            report=self._report,
        )

    def _queue_for(self, event: RoomEvent) -> RunQueue:
        return self._gathering if isinstance(event, PostNextPart) else super()._queue_for(event)

    def status(self, now: float) -> RoomStatus:
        """Where the room stands, for others to see. From any thread."""
        machine, writes = self._machine, list(self._writes)
        accounts = list(self._accounts.values())
        parts = [part for account in accounts for part in list(account.parts)]
        waiting = [receiver for receiver, queue in list(self._staged.items()) if queue.waits_since is not None]
        path = accounts[-1].choice.path if accounts else writes[-1].path if writes else None
        return RoomStatus(
            room=self.room,
            state=machine.state.value,
            age_s=now - self.sender.stats.opened_at,
            chunks=self._handled_chunks,
            path=path.value if path is not None else "",
            moved_bytes=sum(write.total_bytes for write in writes) + sum(part.num_bytes for part in parts),
            waits_for=f"staging memory for {', '.join(waiting)}" if waiting else machine.waits_for,
            peers=tuple(self._generations),
            quarantined_pages=self._pages if machine.state is TransferState.FAILED and not machine.is_drained else 0,
            failed_for_s=now - ended_at if (ended_at := self.sender.stats.ended_at) is not None else 0.0,
        )

    @property
    def waits_for_memory(self) -> bool:
        """Whether a sub-chunk waits for staging memory. From any thread."""
        return any(queue.waits_since is not None for queue in list(self._staged.values()))

    @property
    def failed_alone(self) -> bool:
        """Whether the room failed before every receiver had opened it, so that some do not know yet."""
        return self._machine.state is TransferState.FAILED and self._all_open_at is None

    @property
    def error(self) -> KVFerryError | None:
        """Why it failed, once it has."""
        return self._machine.error

    @property
    def generations(self) -> Mapping[str, int]:
        """The decode ranks that have opened the room, and the generation of each."""
        return self._generations

    def _wait_settled(self, chunk: int) -> None:
        """Waits until a chunk is written, or kept because there is nobody yet to write it to."""
        assert self._progress is not None
        with self._progress:
            self._progress.wait_for(lambda: self._settled_chunks > chunk or self._machine.state.is_final)

    def _is_for_next_use(self, wish: OpenReceived) -> bool:
        """Whether a wish is not for this transfer but for the next one of this number.

        A decode rank may be through with a room before we are, and ask again.
        """
        known = self._generations.get(wish.attachment.receiver)
        if known is None:
            return self._machine.state is TransferState.SUCCESS
        return known != wish.message.generation

    def _opened(self, wish: OpenReceived) -> ReceiverOpened:
        attachment, message = wish.attachment, wish.message
        elected = attachment.elected(self.room, self._surroundings.group_rank)
        self._attachments[attachment.receiver] = attachment
        self._elected[attachment.receiver] = elected
        self._generations[attachment.receiver] = message.generation
        self._observer.asked(self.room, message.trace)
        return ReceiverOpened(
            receiver=attachment.receiver,
            generation=message.generation,
            expected_receivers=message.receivers,
            request=ReceiverRequest(
                tokens=message.tokens,
                wanted=wanted_groups(message, attachment.layout, where=f"room {self.room} on {attachment.receiver}"),
                routes=tuple(each.route for each in elected),
            ),
            sends_aux=self._surroundings.is_aux_writer,
            verifies=attachment.verifies,
        )

    def handle(self, event: RoomEvent, worker: Worker) -> None:
        """Tells the machine what happened, does what it says, and shows the caller where the room stands."""
        match event:
            case OpenReceived() if self._generations.get(event.attachment.receiver) == event.message.generation:
                self._tell(ReceiverAskedAgain(event.attachment.receiver, event.message.generation), worker)
            case OpenReceived():
                if self._is_for_next_use(event):
                    self._next_opens[event.attachment.receiver] = event.message
                else:
                    self._tell(self._opened(event), worker)
            case ReceiverAborted():
                self._aborted(event, worker)
            case HandedIn():
                self._submitted_at[event.number] = event.submitted_at
                if event.is_last:
                    self._last_submitted_at = event.submitted_at
                chunk = event.chunk()
                self._pages += sum(len(part.pages) for part in chunk.parts)
                self._tell(ChunkSubmitted(chunk), worker)
                self._handled_chunks += 1
            case PostNextPart(receiver):
                self._post_next_part(receiver, worker)
            case PartLanded():
                self._part_landed(event, worker)
            case _:
                self._tell(event, worker)
        if self._machine.state is TransferState.FAILED and self._staged:
            self._cancel_staged(worker)
        self._show()

    def _aborted(self, event: ReceiverAborted, worker: Worker) -> None:
        receiver, generation = event.receiver, event.generation
        if self._machine.is_done and self._generations.get(receiver) != generation:
            # Came while we ended. What it gives up was passed on already; so is this.
            message = messages.AbortRoom(room=self.room, generation=generation, reason=event.reason, error=event.error)
            self._surroundings.abort_room(receiver, message)
            return
        kept = self._next_opens.get(receiver)
        if kept is not None and kept.generation == generation:
            del self._next_opens[receiver]
        self._tell(event, worker)

    def _tell(self, event: SenderEvent, worker: Worker) -> None:
        if isinstance(event, WriteFailed):
            self._observer.write_failed(self.room, event.receiver, event.error)
            self._surroundings.write_failed(self._attachments[event.receiver], event.error)
        now = self._surroundings.now()
        commands = self._machine.handle(event, now)
        if self._all_open_at is None and self._machine.state not in (TransferState.BOOTSTRAPPING, TransferState.FAILED):
            self._all_open_at = now
        for command in commands:
            self._execute(command, worker)

    def broke(self, error: Exception, worker: Worker) -> None:
        """Fails the room for an error that should not have been."""
        self._tell(SenderBroke(error), worker)
        self._cancel_staged(worker)
        self._show()

    def _show(self) -> None:
        machine = self._machine
        self.next_deadline = machine.deadline
        self.sender._proceed(self._handled_chunks, waiting=machine.waiting_chunks, is_drained=machine.is_drained)
        stats = self.sender.stats
        if machine.state.is_final or stats.last_submitted_at != self._last_submitted_at:
            ended_at = (stats.ended_at or self._surroundings.now()) if machine.state.is_final else None
            self.sender.stats = SenderStats(
                opened_at=stats.opened_at,
                last_submitted_at=self._last_submitted_at,
                ended_at=ended_at,
                writes=tuple(self._writes) if machine.state.is_final else (),
            )
            if ended_at is not None and stats.ended_at is None:
                self._report.end()
                self._observer.sent(self.room, self.sender.stats, machine.error)
        if machine.is_done:
            self._surroundings.forget_room(self)
            while self._next_opens:
                self._surroundings.open_room(*self._next_opens.popitem())
        self.sender._update(machine.state, machine.error, pages_reusable=machine.is_done)
        if self._progress is not None:
            with self._progress:
                self._settled_chunks = self._handled_chunks if machine.is_drained else self._settled_chunks
                self._progress.notify_all()

    def _execute(self, command: SenderCommand, worker: Worker) -> None:
        match command:
            case Write():
                self._write(command, worker)
            case SendFinish():
                self._finish(command)
            case SendFailed(receiver, generation, error):
                self._surroundings.send(
                    receiver,
                    messages.RoomFailed(
                        room=self.room,
                        generation=generation,
                        writer=self._surroundings.engine_rank,
                        error=type(error).__name__,
                        reason=str(error),
                    ),
                )
            case SendDrained(receiver, generation):
                self._surroundings.send(
                    receiver,
                    messages.Drained(
                        endpoint=self._surroundings.transport.endpoint_name,
                        room=self.room,
                        generation=generation,
                        writer=self._surroundings.engine_rank,
                    ),
                )

    def _write(self, command: Write, worker: Worker) -> None:
        attachment = self._attachments[command.receiver]
        if not attachment.begin_write():
            gone = PeerDisconnectedError(f"{command.receiver} is not connected any more")
            self.post(WriteFailed(command.receiver, command.sequence, gone))
            return
        begun_at = self._surroundings.now()
        try:
            choice = attachment.paths.choose(command.unit, self._elected[command.receiver], command.moves)
        except Exception as error:
            attachment.end_write()
            self.post(WriteFailed(command.receiver, command.sequence, error))
            return
        submitted_at = max(self._submitted_at.get(command.chunk, begun_at), self._all_open_at or 0.0)
        account = _Account(choice, submitted_at, begun_at)
        if choice.path is Path.STAGED:
            try:
                self._write_staged(command, attachment, account)
            except Exception as error:
                attachment.end_write()
                self.post(WriteFailed(command.receiver, command.sequence, error))
        else:
            self._write_directly(command, attachment, account, worker)

    def _write_directly(self, command: Write, attachment: Attachment, account: _Account, worker: Worker) -> None:
        surroundings = self._surroundings
        begun_at = surroundings.now()
        try:
            elected = self._elected[command.receiver]
            selected = attachment.select(command.unit, elected, command.moves)
            gathered_at = surroundings.now()
            segments: tuple[messages.StagedSegment, ...] = ()
            if attachment.digests is not None:
                segments = attachment.digests.of_write(command.unit, elected, command.moves, attachment.paths.packed)
            flight = surroundings.transport.post(
                selected.local,
                selected.local_indices,
                selected.remote,
                selected.remote_indices,
                messages.encode(
                    messages.ChunkArrived(
                        room=self.room,
                        generation=command.generation,
                        writer=surroundings.engine_rank,
                        sequence=command.sequence,
                        unit=command.unit if segments else Unit.GRANULE,
                        segments=segments,
                    )
                ),
            )
        except Exception as error:
            attachment.end_write()
            self.post(WriteFailed(command.receiver, command.sequence, error))
            return

        posted_at = surroundings.now()
        thread = threading.current_thread().name

        def done(report: FlightReport) -> None:
            now = surroundings.now()
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
            account.add(report, part, descriptors=report.descriptors)
            self._keep(account.record(command.receiver, now))
            attachment.end_write()
            self.post(WriteDone(command.receiver, command.sequence))

        def failed(error: Exception) -> None:
            attachment.end_write()
            self.post(WriteFailed(command.receiver, command.sequence, error))

        def broke(error: Exception) -> None:
            self.post(SenderBroke(error))

        worker.watch(flight, done, failed, broke)

    def _keep(self, record: WriteRecord) -> None:
        self._writes.append(record)
        self._report.wrote(record)

    def _write_staged(self, command: Write, attachment: Attachment, account: _Account) -> None:
        receiver = command.receiver
        if receiver not in self._staged:
            self._staged[receiver] = self._staged_queue(attachment)
        queue = self._staged[receiver]
        write = StagedWrite(self.room, command, queue.packing)
        self._accounts[receiver, command.sequence] = account
        queue.add(write)
        queue.wake()

    def _staged_queue(self, attachment: Attachment) -> StagedQueue:
        surroundings, receiver, staged = self._surroundings, attachment.receiver, attachment.paths.staged
        assert staged is not None

        def give_up(span: Span) -> None:
            staged.peer.ring.give_up(span)
            surroundings.send(receiver, void(surroundings.transport.endpoint_name, staged.peer.epoch, span))

        packing = Packing(
            receiver=receiver,
            elected=self._elected[receiver],
            packed=attachment.paths.packed,
            kernels=staged.kernels,
            transport=surroundings.transport,
            peer=staged.peer,
            chunk_bytes=staged.chunk_bytes,
            writer=surroundings.engine_rank,
            give_up=give_up,
            now=surroundings.now,
            is_digested=attachment.digests is not None,
        )
        return StagedQueue(packing, wake=lambda: self.post(PostNextPart(receiver)))

    def _post_next_part(self, receiver: str, worker: Worker) -> None:
        queue = self._staged[receiver]
        had_waited = queue.waits_since is not None
        found = queue.post_next(worker.memory) if not self._machine.state.is_final else None
        if found is None:
            if queue.waits_since is not None and not had_waited:
                self._observer.deferred(receiver)
            return
        write, posted = found
        if posted is None:
            self._maybe_end(write, worker)
        else:
            self._watch_part(queue, write, posted, worker)
        if queue.has_more:
            queue.wake()  # behind whoever else waits for a turn

    def _watch_part(self, queue: StagedQueue, write: StagedWrite, posted: Posted, worker: Worker) -> None:
        receiver, sequence = write.command.receiver, write.command.sequence
        is_posting = True
        thread = threading.current_thread().name
        landed: list[PartLanded] = []

        def done(report: FlightReport) -> None:
            posted.memory.give_back(posted.slot)
            ended(report)

        def failed(error: Exception) -> None:
            posted.memory.give_back(posted.slot)
            queue.packing.give_up(posted.span)
            ended(error)

        def ended(result: FlightReport | Exception) -> None:
            now = self._surroundings.now()
            event = PartLanded(receiver, sequence, posted, now, thread, result)
            if is_posting:
                landed.append(event)
            else:
                self.post(event)

        def broke(error: Exception) -> None:
            self.post(SenderBroke(error))

        worker.watch(posted.flight, done, failed, broke)
        is_posting = False
        for event in landed:  # at once, as on shared memory: no need for a turn of its own
            self._part_landed(event, worker)

    def _part_landed(self, event: PartLanded, worker: Worker) -> None:
        receiver, sequence, result = event.receiver, event.sequence, event.result
        write = self._staged[receiver].landed(sequence, result if isinstance(result, Exception) else None)
        if isinstance(result, FlightReport):
            self._accounts[receiver, sequence].add(result, event.record, descriptors=1)
            self._tell(WriteProgressed(receiver, sequence), worker)
        self._maybe_end(write, worker)

    def _maybe_end(self, write: StagedWrite, worker: Worker) -> None:
        """Tells the machine of a staged write that is through, or of which nothing more will come."""
        if not write.has_ended:
            return
        receiver, sequence = write.command.receiver, write.command.sequence
        account = self._accounts.pop((receiver, sequence))
        self._staged[receiver].ended(write)
        self._attachments[receiver].end_write()
        if write.error is None:
            self._keep(account.record(receiver, self._surroundings.now()))
            self._tell(WriteDone(receiver, sequence), worker)
        else:
            self._tell(WriteFailed(receiver, sequence, write.error), worker)

    def _cancel_staged(self, worker: Worker) -> None:
        """Posts no more of a room that has failed."""
        for queue in self._staged.values():
            for write in queue.cancel(self._machine.error or TransferFailedError("the room has failed")):
                self._maybe_end(write, worker)

    def _finish(self, command: SendFinish) -> None:
        message = messages.WriterFinished(
            room=self.room,
            generation=command.generation,
            writer=self._surroundings.engine_rank,
            chunks=command.chunks,
            aux=command.aux,
        )
        try:
            self._surroundings.transport.notify(command.receiver, messages.encode(message))
        except Exception as error:
            self.post(FinishFailed(command.receiver, error))
        else:
            self.post(FinishSent(command.receiver))
