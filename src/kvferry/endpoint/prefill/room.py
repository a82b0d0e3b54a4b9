"""One room on a prefill rank: the actor behind the caller's `Sender`, which runs the state machine."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from kvferry.endpoint.prefill.admission import Admission, Admitted
from kvferry.endpoint.prefill.attachment import Attachment
from kvferry.endpoint.reporting import RoomReport
from kvferry.endpoint.runtime.actors import Actor
from kvferry.endpoint.runtime.run_queue import RunQueue
from kvferry.endpoint.runtime.workers import Worker, WorkerPool
from kvferry.endpoint.transfer import Sender
from kvferry.errors import KVFerryError, PeerDisconnectedError, TransferFailedError
from kvferry.layout import PageGroup, RankCoordinates
from kvferry.observe.observer import Observer
from kvferry.observe.records import PartRecord, SenderStats, WriteRecord
from kvferry.observe.status import RoomStatus
from kvferry.plan import Choice, ElectedRoute, TransferPath, Unit
from kvferry.protocol import messages
from kvferry.protocol.chunks import ChunkSequence, HandedIn
from kvferry.protocol.credits import Span
from kvferry.protocol.moves import request_of
from kvferry.protocol.refusals import DecodeRank
from kvferry.protocol.sender import (
    AwaitTurn,
    ChunkSubmitted,
    FinishFailed,
    FinishSent,
    OpenRetransmitted,
    ReceiverAborted,
    ReceiverOpened,
    ReceiverRefused,
    SendDrained,
    SenderAbortRequested,
    SenderBroke,
    SenderCommand,
    SenderEvent,
    SenderMachine,
    SenderTick,
    SendFailed,
    SendFinish,
    TurnCame,
    Write,
    WriteAdmitted,
    WriteDeferred,
    WriteDone,
    WriteFailed,
    WriteProgressed,
)
from kvferry.protocol.states import TransferState
from kvferry.settings import Settings
from kvferry.staging.gathering import Packing, PeerMemory, Posted, StagedQueue, StagedWrite
from kvferry.staging.rings import ReleasedSpan
from kvferry.transport import TransferReport, Transport


@dataclass(frozen=True, slots=True, eq=False)
class OpenReceived:
    """A decode rank's open request for the room.

    Attributes:
        attachment: the decode rank.
        message: its open request.
    """

    attachment: Attachment
    message: messages.OpenRoom


@dataclass(frozen=True, slots=True)
class RefusalReceived:
    """A decode rank's refusal to open the room.

    Attributes:
        receiver: the decode rank.
        message: its refusal.
    """

    receiver: str
    message: messages.RefuseRoom


@dataclass(frozen=True, slots=True)
class PostNextPart:
    """It is the room's turn to post the next sub-chunk to a receiver."""

    receiver: str


@dataclass(frozen=True, slots=True)
class PartLanded:
    """A sub-chunk is in the receiver's staging memory, or its write failed.

    Attributes:
        posted: what it was.
        landed_at: when that was noticed.
        thread: the one that did the work.
        result: the transport's report, or why the write failed.
    """

    receiver: str
    sequence: int
    posted: Posted
    landed_at: float
    thread: str
    result: TransferReport | Exception

    @property
    def record(self) -> PartRecord:
        """The record of the sub-chunk."""
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


RoomEvent: TypeAlias = SenderEvent | HandedIn | OpenReceived | RefusalReceived | PostNextPart | PartLanded | Admitted


@dataclass(slots=True, eq=False)
class _Account:
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


@dataclass(slots=True, eq=False)
class _DirectQueue:
    """Direct writes of a room to one receiver that are not posted yet: the first has applied to be admitted.

    Attributes:
        admitted: called, on any thread, when it is its turn.
        writes: with the record of each.
    """

    admitted: Callable[[Admitted], None]
    writes: deque[tuple[Write, _Account]] = field(default_factory=deque)


def released_span(endpoint: str, epoch: int, released: ReleasedSpan) -> messages.SpanReleased:
    """Makes the message that releases a span of a receiver's ring: nothing will be written to it.

    Args:
        endpoint: our own.
        epoch: of the ring.
    """
    span = released.span
    return messages.SpanReleased(
        endpoint=endpoint,
        epoch=epoch,
        start=span.start,
        begin=span.begin,
        stop=span.stop,
        after_failure=released.after_failure,
    )


@dataclass(frozen=True, slots=True)
class RoomContext:
    """What a sending room has of its endpoint. All of it may be called from any worker.

    Attributes:
        transport: moves the bytes.
        admission: says when a direct write may be posted.
        observer: is told what happens.
        coordinates: the rank's place in its engine.
        page_groups: of the rank's layout.
        now: the time, in seconds of a steady clock.
        send: sends a control message to a decode rank.
        open_room: takes a decode rank's open request for whoever has the room now, or will have it.
        abort_room: takes back such an open request.
        refuse_room: takes a decode rank's refusal for whoever has the room now, or will have it.
        write_failed: is told that a write to a decode rank failed: where the connection broke, nothing else will get
            there either.
        broken_off: is told of a decode rank that a write to it failed of which something had been sent.
        was_broken_off: whether that was ever the case.
        forget_room: drops a room that is done.
        set_deadline: is told when a room's next deadline is, every time that something happened in the room.
    """

    transport: Transport
    admission: Admission
    observer: Observer
    coordinates: RankCoordinates
    page_groups: tuple[PageGroup, ...]
    now: Callable[[], float]
    send: Callable[[str, messages.Message], None]
    open_room: Callable[[str, messages.OpenRoom], None]
    abort_room: Callable[[str, messages.AbortRoom], None]
    refuse_room: Callable[[str, messages.RefuseRoom], None]
    write_failed: Callable[[Attachment, Exception], None]
    broken_off: Callable[[str], None]
    was_broken_off: Callable[[str], bool]
    forget_room: Callable[[SendingRoom], None]
    set_deadline: Callable[[SendingRoom, float | None], None]


class SendingRoom(Actor):
    """Runs one room's state machine on whichever worker is free, and executes its commands."""

    def __init__(self, machine: SenderMachine, workers: WorkerPool, context: RoomContext, settings: Settings) -> None:
        synchronous = settings.synchronous
        self._quarantine_s = settings.quarantine_s
        run_queue = workers.queue_of(machine.room.to_bytes(8, "little"))
        super().__init__(run_queue)
        self._gathering = workers.gathering
        self.room = machine.room
        self._machine = machine
        self._context = context
        self._attachments: dict[str, Attachment] = {}
        self._elected: dict[str, tuple[ElectedRoute, ...]] = {}
        self._generations: dict[str, int] = {}  # of the receivers that have opened the room
        self._next_opens: dict[str, messages.OpenRoom] = {}
        self._submitted_at: dict[int, float] = {}
        self._all_open_at: float | None = None
        self._writes: list[WriteRecord] = []
        self._observer = context.observer
        self._report = RoomReport(machine.room, context.observer, context.now())
        self._staged: dict[str, StagedQueue] = {}  # by receiver
        self._accounts: dict[tuple[str, int], _Account] = {}  # of staged writes, by receiver and sequence
        self._direct: dict[str, _DirectQueue] = {}  # by receiver
        self._failed_writes: set[tuple[str, int]] = set()  # those that were reported, by receiver and sequence
        self._last_submitted_at: float | None = None
        self._handled_chunks = self._settled_chunks = 0
        self._pages = 0  # that were handed in
        # In synchronous mode, guards the number of settled chunks and wakes the caller who waits for it.
        self._progress = threading.Condition() if synchronous else None
        self.sender = Sender(
            machine.room,
            ChunkSequence(machine.room, context.page_groups),
            self.post if synchronous else partial(run_queue.hand_in, self),
            lambda reason: self.post(SenderAbortRequested(reason)),
            settle=self._wait_settled if synchronous else None,
            most_waiting=settings.max_waiting_chunks,
            now=context.now,
            observer=context.observer,
            report=self._report,
        )

    def _queue_for(self, event: RoomEvent) -> RunQueue:
        return self._gathering if isinstance(event, PostNextPart) else super()._queue_for(event)

    def status(self, now: float) -> RoomStatus:
        """Returns the room's status. May be called from any thread."""
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
    def _waiting_chunks(self) -> int:
        """Chunks that wait for receivers or for a turn, or of which a write is deferred: always the last ones."""
        first = self._handled_chunks - self._machine.waiting_chunks
        return self._handled_chunks - min([first, *(q.writes[0][0].chunk for q in self._direct.values() if q.writes)])

    @property
    def waits_for_memory(self) -> bool:
        """Whether a sub-chunk waits for staging memory. May be read from any thread."""
        return any(queue.waits_since is not None for queue in list(self._staged.values()))

    @property
    def failed_alone(self) -> bool:
        """Whether the room failed before every receiver had opened it, so that some were not notified yet."""
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
        """Waits until a chunk is written, or kept because no receiver has opened the room yet."""
        assert self._progress is not None
        with self._progress:
            self._progress.wait_for(lambda: self._settled_chunks > chunk or self._machine.state.is_final)

    def _is_for_next_use(self, request: OpenReceived) -> bool:
        """Whether an open request is not for this transfer but for the next one of this number.

        A decode rank may end a room before this rank does, and open the next one.
        """
        known = self._generations.get(request.attachment.receiver)
        if known is None:
            return self._machine.state is TransferState.SUCCESS
        return known != request.message.generation

    def _opened(self, request: OpenReceived) -> ReceiverOpened:
        attachment, message = request.attachment, request.message
        elected = attachment.elected(self.room, self._context.coordinates.group_rank)
        self._attachments[attachment.receiver] = attachment
        self._elected[attachment.receiver] = elected
        self._generations[attachment.receiver] = message.generation
        self._observer.requested(self.room, message.trace)
        return ReceiverOpened(
            receiver=attachment.receiver,
            generation=message.generation,
            expected_receivers=message.receivers,
            request=request_of(message, attachment.layout, elected, where=f"room {self.room} on {attachment.receiver}"),
            sends_aux=self._context.coordinates.is_aux_writer,
            verifies=attachment.verifies,
            held=message.held,
            rank=attachment.rank,
        )

    def handle(self, event: RoomEvent, worker: Worker) -> None:
        """Passes an event to the machine, executes its commands, and updates what the caller sees."""
        match event:
            case OpenReceived() if self._generations.get(event.attachment.receiver) == event.message.generation:
                self._handle(OpenRetransmitted(event.attachment.receiver, event.message.generation), worker)
            case OpenReceived():
                if self._is_for_next_use(event):
                    self._next_opens[event.attachment.receiver] = event.message
                else:
                    self._handle(self._opened(event), worker)
            case ReceiverAborted():
                self._aborted(event, worker)
            case RefusalReceived():
                self._refused(event, worker)
            case HandedIn():
                self._submitted_at[event.number] = event.submitted_at
                if event.is_last:
                    self._last_submitted_at = event.submitted_at
                chunk = event.chunk()
                self._pages += sum(len(part.pages) for part in chunk.parts)
                self._handle(ChunkSubmitted(chunk), worker)
                self._handled_chunks += 1
            case PostNextPart(receiver):
                self._post_next_part(receiver, worker)
            case PartLanded():
                self._part_landed(event, worker)
            case Admitted():
                self._admitted(event, worker)
            case SenderTick():
                self._take_over_progress()
                self._handle(event, worker)
            case _:
                self._handle(event, worker)
        if self._machine.state is TransferState.FAILED:
            self._cancel(worker)
        self._show()

    def _aborted(self, event: ReceiverAborted, worker: Worker) -> None:
        receiver, generation = event.receiver, event.generation
        if self._machine.is_done and self._generations.get(receiver) != generation:
            # Came while this room ended. The open request that it aborts was passed on already; so is the abort.
            message = messages.AbortRoom(room=self.room, generation=generation, reason=event.reason, error=event.error)
            self._context.abort_room(receiver, message)
            return
        kept = self._next_opens.get(receiver)
        if kept is not None and kept.generation == generation:
            del self._next_opens[receiver]
        self._handle(event, worker)

    def _refused(self, event: RefusalReceived, worker: Worker) -> None:
        receiver, message = event.receiver, event.message
        if self._machine.is_done:  # came while this room ended, and may be for the next one
            self._context.refuse_room(receiver, message)
            return
        rank = DecodeRank(message.engine, message.coordinates)
        self._handle(ReceiverRefused(receiver, rank, message.reason), worker)
        if self._machine.state is TransferState.FAILED:  # it is not to be notified: the next that it opens is another
            self._generations.setdefault(receiver, message.generation)

    def _handle(self, event: SenderEvent, worker: Worker) -> None:
        if isinstance(event, WriteFailed) and event.may_arrive:
            self._context.broken_off(event.receiver)  # before anything is said of this room when it is forgotten
        if isinstance(event, WriteFailed) and (event.receiver, event.sequence) not in self._failed_writes:
            self._failed_writes.add((event.receiver, event.sequence))
            self._observer.write_failed(self.room, event.receiver, event.error)
            self._context.write_failed(self._attachments[event.receiver], event.error)
        now = self._context.now()
        commands = self._machine.handle(event, now)
        if self._all_open_at is None and self._machine.state not in (TransferState.BOOTSTRAPPING, TransferState.FAILED):
            self._all_open_at = now
        for command in commands:
            self._execute(command, worker)

    def broke(self, error: Exception, worker: Worker) -> None:
        """Fails the room with an unexpected error."""
        self._handle(SenderBroke(error), worker)
        self._cancel(worker)
        self._show()

    def _cancel(self, worker: Worker) -> None:
        """Posts nothing more of a room that has failed."""
        self._drop_deferred()
        self._cancel_staged(worker)

    def _show(self) -> None:
        machine = self._machine
        self._context.set_deadline(self, machine.deadline)
        self.sender._proceed(self._handled_chunks, waiting=self._waiting_chunks, is_drained=machine.is_drained)
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
                self._observer.sent(self.room, self.sender.stats, machine.error)
        if machine.is_done:
            self._context.forget_room(self)
            while self._next_opens:
                self._context.open_room(*self._next_opens.popitem())
        self.sender.prefix_tokens = machine.held_tokens if self._all_open_at is not None else None
        self.sender._update(machine.state, machine.error, pages_reusable=machine.is_done)
        if self._progress is not None:
            with self._progress:
                is_settled = machine.is_drained and (self._all_open_at is None or not machine.waiting_chunks)
                self._settled_chunks = self._handled_chunks if is_settled else self._settled_chunks
                self._progress.notify_all()

    def _execute(self, command: SenderCommand, worker: Worker) -> None:
        match command:
            case Write():
                self._write(command, worker)
            case AwaitTurn():
                self.post(TurnCame())
            case SendFinish():
                self._finish(command)
            case SendFailed(receiver, generation, error):
                self._context.send(
                    receiver,
                    messages.RoomFailed(
                        room=self.room,
                        generation=generation,
                        writer=self._context.coordinates.engine_rank,
                        error=type(error).__name__,
                        reason=str(error),
                    ),
                )
            case SendDrained(receiver, generation, after_failure):
                # Of another use of the number this room knows nothing.
                is_another = self._generations.get(receiver) != generation
                self._context.send(
                    receiver,
                    messages.Drained(
                        endpoint=self._context.transport.endpoint_name,
                        room=self.room,
                        generation=generation,
                        writer=self._context.coordinates.engine_rank,
                        after_failure=after_failure or (is_another and self._context.was_broken_off(receiver)),
                    ),
                )

    def _write(self, command: Write, worker: Worker) -> None:
        attachment = self._attachments[command.receiver]
        if not attachment.begin_write():
            gone = PeerDisconnectedError(f"{command.receiver} is not connected any more")
            self.post(WriteFailed(command.receiver, command.sequence, gone))
            return
        begun_at = self._context.now()
        try:
            choice = attachment.paths.choose(command.unit, self._elected[command.receiver], command.moves)
        except Exception as error:
            attachment.end_write()
            self.post(WriteFailed(command.receiver, command.sequence, error))
            return
        submitted_at = max(self._submitted_at.get(command.chunk, begun_at), self._all_open_at or 0.0)
        account = _Account(choice, submitted_at, begun_at)
        if choice.path is TransferPath.STAGED:
            try:
                self._write_staged(command, attachment, account)
            except Exception as error:
                attachment.end_write()
                self.post(WriteFailed(command.receiver, command.sequence, error))
        else:
            self._write_when_admitted(command, account, worker)

    def _write_when_admitted(self, command: Write, account: _Account, worker: Worker) -> None:
        receiver = command.receiver
        if receiver not in self._direct:
            self._direct[receiver] = _DirectQueue(self.post)
        queue = self._direct[receiver]
        admitted = self._apply(queue, command) if not queue.writes else None
        if admitted is not None:
            self._write_directly(command, account, admitted, worker)
            return
        queue.writes.append((command, account))
        self._handle(WriteDeferred(receiver, command.sequence), worker)

    def _apply(self, queue: _DirectQueue, command: Write) -> Admitted | None:
        receiver = command.receiver
        num_bytes = self._attachments[receiver].bytes_of(command.unit, self._elected[receiver], command.moves)
        return self._context.admission.admit(receiver, num_bytes, queue)

    def _admitted(self, admitted: Admitted, worker: Worker) -> None:
        """It is the turn of the first write that waits for a receiver; the next one stands in line behind others."""
        queue = self._direct[admitted.receiver]
        if not queue.writes:  # dropped meanwhile
            self._context.admission.give_back(admitted)
            return
        command, account = queue.writes.popleft()
        self._handle(WriteAdmitted(command.receiver, command.sequence), worker)
        self._write_directly(command, account, admitted, worker)
        if queue.writes:
            following = self._apply(queue, queue.writes[0][0])
            if following is not None:
                self.post(following)

    def _drop_deferred(self) -> None:
        for receiver, queue in self._direct.items():
            self._context.admission.withdraw(receiver, queue)
            for _ in queue.writes:
                self._attachments[receiver].end_write()
            queue.writes.clear()

    def _take_over_progress(self) -> None:
        """Notifies the machine of what others' writes to the same receivers have done: they share what carries them."""
        if self._machine.state.is_final:
            return
        for receiver, attachment in self._attachments.items():
            queue = self._direct.get(receiver)
            is_deferred = queue is not None and queue.writes
            moved_at = (self._context.admission.moved_at(receiver) or 0.0) if is_deferred else attachment.moved_at
            staged = self._staged.get(receiver)
            if staged is not None and staged.waits_since is not None:
                moved_at = max(moved_at, min(attachment.spans_kept_until, self._context.now()))
            self._machine.handle(WriteProgressed(receiver), max(moved_at, attachment.moved_at))

    def _write_directly(self, command: Write, account: _Account, admitted: Admitted, worker: Worker) -> None:
        context, attachment = self._context, self._attachments[command.receiver]
        begun_at = context.now()

        def ended() -> None:
            context.admission.give_back(admitted)
            attachment.end_write()

        try:
            elected = self._elected[command.receiver]
            selected = attachment.select(command.unit, elected, command.moves)
            gathered_at = context.now()
            segments: tuple[messages.StagedSegment, ...] = ()
            if attachment.digests is not None:
                packed = attachment.plan.packed_pieces(command.unit)
                segments = attachment.digests.of_write(elected, command.moves, packed)
            transfer = context.transport.post(
                selected.local,
                selected.local_indices,
                selected.remote,
                selected.remote_indices,
                messages.encode(
                    messages.ChunkArrived(
                        room=self.room,
                        generation=command.generation,
                        writer=context.coordinates.engine_rank,
                        sequence=command.sequence,
                        unit=command.unit if segments else Unit.WHOLE,
                        segments=segments,
                    )
                ),
            )
        except Exception as error:
            ended()
            self.post(WriteFailed(command.receiver, command.sequence, error))
            return

        posted_at = context.now()
        thread = threading.current_thread().name

        def done(report: TransferReport) -> None:
            now = context.now()
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
            self._keep(account.record(command.receiver, now))
            ended()
            self.post(WriteDone(command.receiver, command.sequence))

        def failed(error: Exception) -> None:
            context.admission.give_back(admitted)  # nothing more is sent
            if context.transport.may_deliver_late:
                self.post(WriteFailed(command.receiver, command.sequence, error, may_arrive=True))

        def settled(error: Exception) -> None:
            attachment.end_write()
            self.post(WriteFailed(command.receiver, command.sequence, error))

        def broke(error: Exception) -> None:
            self.post(SenderBroke(error))

        worker.watch(transfer, done, failed, broke, settled, peer=command.receiver)

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
        context, receiver, staged = self._context, attachment.receiver, attachment.paths.staged
        assert staged is not None
        packing = Packing(
            receiver=receiver,
            elected=self._elected[receiver],
            packed=attachment.plan.packed_pieces,
            kernels=staged.kernels,
            transport=context.transport,
            peer=staged.peer,
            chunk_bytes=staged.chunk_bytes,
            writer=context.coordinates.engine_rank,
            give_up=partial(self._give_up, receiver, staged.peer),
            now=context.now,
            is_digested=attachment.digests is not None,
        )
        return StagedQueue(packing, wake=lambda: self.post(PostNextPart(receiver)))

    def _give_up(self, receiver: str, memory: PeerMemory, span: Span, *, after_failure: bool = False) -> None:
        """Gives up a span of a receiver's ring, and notifies the receiver."""
        released = ReleasedSpan(span, after_failure)
        memory.ring.give_up(released)
        self._context.send(receiver, released_span(self._context.transport.endpoint_name, memory.epoch, released))

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
            queue.wake()  # behind others that wait for a turn

    def _watch_part(self, queue: StagedQueue, write: StagedWrite, posted: Posted, worker: Worker) -> None:
        receiver, sequence = write.command.receiver, write.command.sequence
        attachment = self._attachments[receiver]
        may_deliver_late = self._context.transport.may_deliver_late
        is_posting = True
        thread = threading.current_thread().name
        landed: list[PartLanded] = []

        def done(report: TransferReport) -> None:
            posted.memory.give_back(posted.slot)
            ended(report)

        def failed(error: Exception) -> None:
            posted.memory.give_back(posted.slot)
            if may_deliver_late:
                attachment.spans_kept_until = self._context.now() + 2 * self._quarantine_s
                self.post(WriteFailed(receiver, sequence, error, may_arrive=True))

        def settled(error: Exception) -> None:
            self._give_up(receiver, queue.packing.peer, posted.span, after_failure=may_deliver_late)
            ended(error)

        def ended(result: TransferReport | Exception) -> None:
            now = self._context.now()
            event = PartLanded(receiver, sequence, posted, now, thread, result)
            if is_posting:
                landed.append(event)
            else:
                self.post(event)

        def broke(error: Exception) -> None:
            self.post(SenderBroke(error))

        worker.watch(posted.transfer, done, failed, broke, settled, peer=receiver)
        is_posting = False
        for event in landed:  # ended at once, as on shared memory: no need for a turn of its own
            self._part_landed(event, worker)

    def _part_landed(self, event: PartLanded, worker: Worker) -> None:
        receiver, sequence, result = event.receiver, event.sequence, event.result
        write = self._staged[receiver].landed(sequence, result if isinstance(result, Exception) else None)
        if isinstance(result, TransferReport):
            self._attachments[receiver].moved_at = event.landed_at
            self._accounts[receiver, sequence].add(result, event.record, descriptors=1)
            self._handle(WriteProgressed(receiver), worker)
        self._maybe_end(write, worker)

    def _maybe_end(self, write: StagedWrite, worker: Worker) -> None:
        """Ends a staged write that is complete, or of which nothing more will be posted, and notifies the machine."""
        if not write.has_ended:
            return
        receiver, sequence = write.command.receiver, write.command.sequence
        account = self._accounts.pop((receiver, sequence))
        self._staged[receiver].ended(write)
        self._attachments[receiver].end_write()
        if write.error is None:
            self._keep(account.record(receiver, self._context.now()))
            self._handle(WriteDone(receiver, sequence), worker)
        else:
            self._handle(WriteFailed(receiver, sequence, write.error), worker)

    def _cancel_staged(self, worker: Worker) -> None:
        """Cancels the staged writes of a room that has failed."""
        for queue in self._staged.values():
            for write in queue.cancel(self._machine.error or TransferFailedError("the room has failed")):
                self._maybe_end(write, worker)

    def _finish(self, command: SendFinish) -> None:
        message = messages.WriterFinished(
            room=self.room,
            generation=command.generation,
            writer=self._context.coordinates.engine_rank,
            chunks=command.chunks,
            aux=command.aux,
        )
        try:
            self._context.transport.notify(command.receiver, messages.encode(message))
        except Exception as error:
            self.post(FinishFailed(command.receiver, error))
        else:
            self.post(FinishSent(command.receiver))
