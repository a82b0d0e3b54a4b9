"""The staged writes of a room: gathered sub-chunk by sub-chunk, and written into the receiver's staging ring."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvferry.endpoint.prefill.write_account import Target, WriteAccount, WritingRoom
from kvferry.endpoint.runtime.workers import Worker
from kvferry.errors import KVFerryError
from kvferry.observe.observer import Observer
from kvferry.observe.records import PartRecord
from kvferry.protocol.transfer.credits import Span
from kvferry.protocol.transfer.sender_events import SenderBroke, Write, WriteDone, WriteFailed, WriteProgressed
from kvferry.protocol.wire import field_types, messages
from kvferry.staging.gathering import Packing, PeerMemory, Posted, StagedQueue, StagedWrite
from kvferry.transport import TransferReport, Transport


@dataclass(frozen=True, slots=True)
class PostNextPart:
    """It is the room's turn to post the next sub-chunk to a receiver."""

    receiver: str


@dataclass(frozen=True, slots=True)
class PartLanded:
    """A sub-chunk is in the receiver's staging memory, or its write failed.

    Attributes:
        write: what it is a part of.
        posted: what it was.
        landed_at: when that was noticed.
        thread: the one that did the work.
        result: the transport's report, or why the write failed.
    """

    write: AccountedWrite
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


class AccountedWrite(StagedWrite):
    """A staged write of a room.

    Attributes:
        target: where it goes.
        account: its record.
    """

    def __init__(self, room: int, command: Write, packing: Packing, target: Target, account: WriteAccount) -> None:
        """Begins with nothing posted."""
        super().__init__(room, command, packing)
        self.target = target
        self.account = account


class StagedWrites:
    """The staged writes of one room. Only the room's own turns use it, where nothing else is said."""

    def __init__(
        self,
        number: int,
        room: WritingRoom,
        *,
        transport: Transport,
        writer: int,
        quarantine_s: float,
        send: Callable[[str, field_types.Message], None],
        observer: Observer,
        now: Callable[[], float],
    ) -> None:
        """Begins with none.

        Args:
            number: the room's.
            room: is told what becomes of each write.
            writer: this rank's engine rank.
            quarantine_s: how long what was sent of a write that failed may take to arrive.
            send: sends a control message to a decode rank.
            observer: is told of each wait for memory.
            now: the time, in seconds of a steady clock.
        """
        self._number = number
        self._room = room
        self._transport = transport
        self._writer = writer
        self._quarantine_s = quarantine_s
        self._send = send
        self._observer = observer
        self._now = now
        self._queues: dict[str, StagedQueue[AccountedWrite]] = {}  # by receiver

    @property
    def accounts(self) -> list[WriteAccount]:
        """The records of those that have not ended. May be read from any thread."""
        return [write.account for queue in list(self._queues.values()) for write in queue.writes]

    @property
    def waiting(self) -> list[str]:
        """The receivers whose next sub-chunk waits for memory. May be read from any thread."""
        return [receiver for receiver, queue in list(self._queues.items()) if queue.waits_since is not None]

    def write(self, command: Write, target: Target, account: WriteAccount) -> None:
        """Queues a write. It holds the receiver's lists (`Attachment.begin_write`)."""
        queue = self._queues.get(target.receiver)
        if queue is None:
            queue = self._queues[target.receiver] = self._queue(target)
        queue.add(AccountedWrite(self._number, command, queue.packing, target, account))
        queue.wake()

    def _queue(self, target: Target) -> StagedQueue[AccountedWrite]:
        attachment, staged = target.attachment, target.attachment.paths.staged
        assert staged is not None
        packing = Packing(
            receiver=target.receiver,
            elected=target.elected,
            packed=attachment.plan.packed_pieces,
            kernels=staged.kernels,
            transport=self._transport,
            peer=staged.peer,
            chunk_bytes=staged.chunk_bytes,
            writer=self._writer,
            give_up=partial(self._give_up, target.receiver, staged.peer),
            now=self._now,
            is_digested=attachment.digests is not None,
        )
        return StagedQueue(packing, wake=lambda: self._room.post(PostNextPart(target.receiver)))

    def _give_up(self, receiver: str, memory: PeerMemory, span: Span, *, after_failure: bool = False) -> None:
        """Gives up a span of a receiver's ring, of which nothing will be posted any more."""
        self._send(
            receiver,
            messages.SpanReleased(
                endpoint=self._transport.endpoint_name,
                epoch=memory.epoch,
                start=span.start,
                begin=span.begin,
                stop=span.stop,
                after_failure=after_failure,
            ),
        )

    def post_next(self, receiver: str, worker: Worker, *, is_over: bool) -> None:
        """Posts the next sub-chunk to a receiver, if there is memory for it, and the room is not over."""
        queue = self._queues[receiver]
        had_waited = queue.waits_since is not None
        found = queue.post_next(worker.memory) if not is_over else None
        if found is None:
            if queue.waits_since is not None and not had_waited:
                self._observer.deferred(receiver)
            return
        write, posted = found
        if posted is None:
            self._maybe_end(write, worker)
        else:
            self._watch(queue, write, posted, worker)
        if queue.has_more:
            queue.wake()  # behind others that wait for a turn

    def _watch(self, queue: StagedQueue[AccountedWrite], write: AccountedWrite, posted: Posted, worker: Worker) -> None:
        receiver, sequence, attachment = write.target.receiver, write.command.sequence, write.target.attachment
        may_deliver_late = self._transport.may_deliver_late
        is_posting = True
        thread = threading.current_thread().name
        landed: list[PartLanded] = []

        def done(report: TransferReport) -> None:
            posted.memory.give_back(posted.slot)
            ended(report)

        def failed(error: Exception) -> None:
            posted.memory.give_back(posted.slot)
            if may_deliver_late:
                attachment.spans_kept_until = self._now() + 2 * self._quarantine_s
                self._room.post(WriteFailed(receiver, sequence, error, may_arrive=True))

        def settled(error: Exception) -> None:
            self._give_up(receiver, queue.packing.peer, posted.span, after_failure=may_deliver_late)
            ended(error)

        def ended(result: TransferReport | Exception) -> None:
            event = PartLanded(write, posted, self._now(), thread, result)
            if is_posting:
                landed.append(event)
            else:
                self._room.post(event)

        def broke(error: Exception) -> None:
            self._room.post(SenderBroke(error))

        worker.watch(posted.transfer, done, failed, broke, settled, peer=receiver)
        is_posting = False
        for event in landed:  # ended at once, as on shared memory: no need for a turn of its own
            self.landed(event, worker)

    def landed(self, event: PartLanded, worker: Worker) -> None:
        """Takes a sub-chunk that is no longer on its way."""
        write, result = event.write, event.result
        write.landed(result if isinstance(result, Exception) else None)
        if isinstance(result, TransferReport):
            write.target.attachment.moved_at = event.landed_at
            write.account.add(result, event.record, descriptors=1)
            self._room.apply(WriteProgressed(write.target.receiver), worker)
        self._maybe_end(write, worker)

    def _maybe_end(self, write: AccountedWrite, worker: Worker) -> None:
        """Ends a write that is complete, or of which nothing more will be posted, and notifies the machine."""
        if not write.has_ended:
            return
        receiver, sequence = write.target.receiver, write.command.sequence
        self._queues[receiver].ended(write)
        write.target.attachment.end_write()
        if write.error is None:
            self._room.keep(write.account.record(receiver, self._now()))
            self._room.apply(WriteDone(receiver, sequence), worker)
        else:
            self._room.apply(WriteFailed(receiver, sequence, write.error), worker)

    def cancel(self, error: KVFerryError, worker: Worker) -> None:
        """Posts nothing more of a room that has failed."""
        for queue in self._queues.values():
            for write in queue.cancel(error):
                self._maybe_end(write, worker)

    def moved_at(self, target: Target) -> float:
        """Returns until when nothing need get on at a receiver: its ring waits for what failed writes had sent."""
        queue = self._queues.get(target.receiver)
        is_waiting = queue is not None and queue.waits_since is not None
        return target.attachment.spans_kept_until if is_waiting else float("-inf")
