"""The staged writes of a room to one receiver: gathered by sub-chunks, each written into the receiver's ring in bulk.

In a turn a room does a run of those for which there is memory, and then queues again (`due_at`). Once somebody has come
who is due before, no more are prepared, and the run ends; what is prepared goes first, since it keeps memory. So a huge
request delays a small one by a run at most. Where memory is short, on this side or the receiver's, the room waits for
its turn at that ring and holds up no room that needs another.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvferry.endpoint.prefill.admission import due_at
from kvferry.endpoint.prefill.room_write import RoomWrite, Target
from kvferry.endpoint.runtime.workers import Worker
from kvferry.errors import KVFerryError, TransferTimeoutError
from kvferry.layout import Region
from kvferry.observe.records import PartRecord
from kvferry.plan import Choice
from kvferry.protocol.transfer.events import Broke, Write, WriteProgressed
from kvferry.protocol.wire import messages
from kvferry.staging.gathering import Gathering
from kvferry.staging.rings import SharedRing, Span
from kvferry.staging.runs import Comings, Step
from kvferry.staging.slots import Slot, SourceMemory
from kvferry.transport import TransferHandle, TransferReport


@dataclass(frozen=True, slots=True)
class PostNextPart:
    """It is the room's turn to post the next sub-chunks to a receiver."""

    receiver: str


@dataclass(slots=True, eq=False)
class StagedPart:
    """A sub-chunk, from when there is memory for it until nothing of it can arrive any more.

    Attributes:
        write: what it is a part of.
        step: what gathers and posts it.
        slot: what it keeps of this side's staging memory; None once nothing reads that any more.
        memory: what the slot is of.
        span: what it keeps of the receiver's ring.
        record: makes its record, given when it was begun, gathered, posted and noticed to have ended.
        is_new: whether the room's turn that posts it has not ended.
        may_arrive: whether it has failed, and something of it may arrive yet, or might have.
        landed_at: when its end was noticed.
        result: the transport's report, or why the write failed; None while it is on its way.
    """

    write: StagedWrite
    step: Step
    slot: Slot | None
    memory: SourceMemory
    span: Span
    record: Callable[..., PartRecord]
    is_new: bool = True
    may_arrive: bool = False
    landed_at: float = 0.0
    result: TransferReport | Exception | None = None

    @property
    def receiver(self) -> str:
        """Whose memory is written."""
        return self.write.receiver

    @property
    def transfer(self) -> TransferHandle:
        """The bulk write's handle, once it is posted."""
        assert self.step.transfer is not None
        return self.step.transfer

    def begun(self, worker: Worker) -> None:
        """Takes what came of its step."""
        if self.step.transfer is not None:
            worker.watch(self)
        elif self.step.gathered_at is not None:
            worker.post_raised(self, self.step.error or RuntimeError("nothing was posted"))
        else:
            self.drop(self.step.error)

    def drop(self, error: Exception | None) -> None:
        """Gives its memory back, since nothing of it was posted, or will be."""
        self._give_slot_back()
        _give_up(self.write.target, self.span)
        self.write.dropped(error)

    def done(self, report: TransferReport) -> None:
        """Gives the slot back: it is in the receiver's ring."""
        self._give_slot_back()
        self._land(report)

    def failed(self, error: Exception, *, is_read: bool) -> None:
        """Gives the slot back, if nothing more is read of it. It may arrive yet."""
        self.may_arrive = True
        target = self.write.target
        kept_until = target.context.now() + 2 * target.context.settings.quarantine_s
        target.attachment.spans_kept_until = kept_until
        if is_read:
            self.memory.kept_until = kept_until
        else:
            self._give_slot_back()
        target.room.post(self.write.failure(error, may_arrive=True, is_read=is_read))

    def settled(self, error: Exception) -> None:
        """Gives the slot and the span back: nothing of it can arrive any more."""
        self._give_slot_back()
        _give_up(self.write.target, self.span, after_failure=self.may_arrive)
        self._land(error)

    def _give_slot_back(self) -> None:
        slot, self.slot = self.slot, None
        if slot is not None:
            self.memory.give_back(slot)

    def broke(self, error: BaseException) -> None:
        """Fails the room: whether the write has ended is not known."""
        self.write.target.room.post(Broke(error))

    def _land(self, result: TransferReport | Exception) -> None:
        self.landed_at, self.result = self.write.target.context.now(), result
        if not self.is_new:
            self.write.target.room.post(self)


class StagedWrite(RoomWrite):
    """A write through the receiver's ring, sub-chunk by sub-chunk.

    Attributes:
        in_flight: sub-chunks that are prepared, or on their way.
        left_bytes: of the cache, that no sub-chunk carries yet.
        error: why it cannot be completed; None if it can.
    """

    def __init__(self, command: Write, target: Target, choice: Choice, *, submitted_at: float, begun_at: float) -> None:
        """Begins with nothing posted."""
        super().__init__(command, target, choice, submitted_at=submitted_at, begun_at=begun_at)
        self.in_flight = 0
        self.left_bytes = self.num_bytes
        self.error: Exception | None = None
        self._gathering = Gathering(
            target.room.room,
            command,
            target.elected,
            target.attachment.plan.packed_pieces(command.unit),
            target.staged.kernels,
            chunk_bytes=target.staged.chunk_bytes,
            writer=target.context.engine_rank,
            is_digested=target.attachment.digests is not None,
            is_put_off=target.staged.runs.most_steps > 1,
        )

    @property
    def next_bytes(self) -> int | None:
        """Bytes of the next sub-chunk; None if all were posted, or no more are to be."""
        return self._gathering.next_bytes if self.error is None else None

    @property
    def is_through(self) -> bool:
        """Whether nothing of it is on its way, and nothing more is to be posted."""
        return self.next_bytes is None and self.in_flight == 0

    def prepare(self, slot: Slot, span: Span, memory: SourceMemory, *, ready_at: float | None) -> StagedPart | None:
        """Prepares the next sub-chunk. Returns None if it cannot be gathered: `error` says why.

        Args:
            slot: where to gather it, of `memory`.
            span: where it goes in the receiver's ring, as many bytes as it has.
            ready_at: since when it has waited for either; None if it has not.
        """
        context, peer = self.target.context, self.target.staged.peer
        begun_at = context.now()
        try:
            gathered = self._gathering.gather(slot.address, span, epoch=peer.epoch)
            notification = context.encoded(self.receiver, gathered.notification)
        except Exception as error:  # nothing was posted
            memory.give_back(slot)
            _give_up(self.target, span)
            self.error = error
            return None
        source, to = Region(slot.address, span.num_bytes), peer.address + peer.ring.place(span)
        step = Step(gathered.blocks, source, to, notification)
        if not step.blocks:
            step.begun_at, step.gathered_at = begun_at, context.now()
        record = partial(
            PartRecord,
            ready_at=begun_at if ready_at is None else ready_at,
            num_bytes=gathered.cache_bytes,
            runs=gathered.runs,
            thread=threading.current_thread().name,
        )
        self.in_flight += 1
        self.left_bytes -= gathered.cache_bytes
        return StagedPart(self, step, slot, memory, span, record)

    def dropped(self, error: Exception | None) -> None:
        """Takes a sub-chunk of which nothing was posted: the write cannot be completed."""
        self.in_flight -= 1
        self.error = self.error or error

    def landed(self, part: StagedPart) -> None:
        """Takes a sub-chunk that is no longer on its way."""
        self.in_flight -= 1
        if isinstance(part.result, Exception):
            self.error = self.error or part.result
        elif part.result is not None:
            step = part.step
            record = part.record(
                begun_at=step.begun_at, gathered_at=step.gathered_at, posted_at=step.posted_at, landed_at=part.landed_at
            )
            self.arrived(part.result, record, descriptors=1)


class StagedWrites:
    """Those of a room to one receiver, in order. Only the room's own turns use it, where nothing else is said.

    Attributes:
        writes: those that have not ended, by sequence; of the first that is not all posted the next part is.
    """

    def __init__(self, target: Target) -> None:
        """Starts empty."""
        self.writes: dict[int, StagedWrite] = {}
        self._target = target
        self._is_awake = False  # whether a turn of the room is scheduled
        self._due_at = 0.0
        self._span: Span | None = None  # of the receiver's ring, for the next part, while a slot is waited for
        self._prepared: deque[StagedPart] = deque()  # those that are posted next
        self._waits_at: SharedRing | SourceMemory | None = None
        self._waits_since: float | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether the next sub-chunk waits for memory, on this side or the receiver's. May be read from any thread."""
        return self._waits_since is not None

    @property
    def turn_due_at(self) -> float:
        """When the room's next turn is due here, behind others that are due before; inf if none is scheduled."""
        return self._due_at if self._is_awake else float("inf")

    @property
    def moved_at(self) -> float:
        """Until when nothing need get on: the receiver's ring or memory on this side is kept by writes that failed."""
        if not self.is_waiting:
            return float("-inf")
        kept_until = self._target.attachment.spans_kept_until
        return max(kept_until, self._waits_at.kept_until) if isinstance(self._waits_at, SourceMemory) else kept_until

    def write(self, write: StagedWrite) -> None:
        """Posts a write behind those before it, when there is memory for it."""
        self.writes[write.command.sequence] = write
        self._go_on()

    def _go_on(self) -> None:
        """Schedules a turn of the room behind others that are due before, if there is anything to post."""
        first = self._next
        if self._prepared:  # whoever is due before may wait for the memory that these keep
            self._due_at = 0.0
            self.wake()
        elif first is not None:
            self._due_at = due_at(first.submitted_at, sum(write.left_bytes for write in self.writes.values()))
            self.wake()

    def wake(self) -> None:
        """Schedules a turn of the room, unless one is scheduled already. For any thread."""
        if not self._is_awake:  # it turns false before the room looks again, so that nothing is missed
            self._is_awake = True
            self._target.room.post(PostNextPart(self._target.receiver))

    def post_next(self, worker: Worker) -> None:
        """Posts the next sub-chunks, if there are any and memory for them."""
        self._is_awake = False
        comings = worker.comings(self._due_at)
        if not self._prepared:
            if not self._prepare_first(worker):
                return
            most_steps = self._most_steps
            while len(self._prepared) < most_steps and not comings.any and self._prepare_another(worker.memory):
                pass
        for part in self._run(comings):
            try:
                self._take(part, worker)
            except BaseException as error:  # those behind it have been posted, too
                part.broke(error)
        self._drop_prepared(worker)
        self._go_on()

    @property
    def _most_steps(self) -> int:
        """How many sub-chunks a turn posts at most: one where each is digested, and so gathered beforehand."""
        runs, receiver = self._target.staged.runs, self._target.receiver
        return runs.steps_to(receiver) if self._target.attachment.digests is None else 1

    def _run(self, comings: Comings) -> list[StagedPart]:
        """Runs what is prepared. Returns those that were begun."""
        parts = list(self._prepared)
        if not parts:
            return []
        self._prepared.clear()
        try:
            begun = self._target.staged.runs.run([part.step for part in parts], self._target.receiver, comings)
        except BaseException as error:
            known = [part for part in parts if part.step.transfer is not None]
            for part in parts:
                if part not in known:  # it may be on its way
                    part.broke(error)
            return known
        self._prepared.extend(parts[begun:])
        return parts[:begun]

    def _take(self, part: StagedPart, worker: Worker) -> None:
        """Takes what came of a sub-chunk that was begun."""
        try:
            part.begun(worker)
        finally:
            part.is_new = False
        if part.result is not None:  # ended at once, as on shared memory: no need for a turn of its own
            self.landed(part, worker)

    def _prepare_first(self, worker: Worker) -> bool:
        """Prepares the next sub-chunk, or waits for memory for it. Returns whether the turn goes on."""
        write, memory = self._next, worker.memory
        if write is None:
            self._stop_waiting()  # those queued behind must not wait for this one
            return False
        # The receiver's memory first: while it is held, only writes to this receiver are held up.
        if self._span is None:
            self._span = self._reserve(write)
        slot = self._take_slot(memory) if self._span is not None else None
        if self._span is None or slot is None:
            if self._waits_since is None:
                self._waits_since = self._target.context.now()
                self._target.context.observer.deferred(self._target.receiver)
            return False
        span, self._span = self._span, None
        since, self._waits_since = self._waits_since, None
        self._prepare(write, slot, span, memory, ready_at=since)
        return True

    def _prepare_another(self, memory: SourceMemory) -> bool:
        """Prepares the next sub-chunk, if there is memory for it that is nobody else's turn. Returns whether it did."""
        write = self._next
        slot = memory.take_now(self._target.receiver, self._due_at) if write is not None else None
        if write is None or slot is None:
            return False
        assert write.next_bytes is not None
        span = self._target.staged.peer.ring.reserve_now(write.next_bytes, self._due_at)
        if span is None:
            memory.give_back(slot)
            return False
        return self._prepare(write, slot, span, memory, ready_at=None)

    def _prepare(
        self, write: StagedWrite, slot: Slot, span: Span, memory: SourceMemory, *, ready_at: float | None
    ) -> bool:
        part = write.prepare(slot, span, memory, ready_at=ready_at)
        if part is not None:
            self._prepared.append(part)
        return part is not None

    def _drop_prepared(self, worker: Worker) -> None:
        """Drops sub-chunks of writes that cannot be completed."""
        for part in [part for part in self._prepared if part.write.error is not None]:
            self._prepared.remove(part)
            part.drop(None)
        for write in [write for write in self.writes.values() if write.error is not None]:
            self._end_if_through(write, worker)

    @property
    def _next(self) -> StagedWrite | None:
        """The write of which the next sub-chunk is posted next."""
        return next((write for write in self.writes.values() if write.next_bytes is not None), None)

    def landed(self, part: StagedPart, worker: Worker) -> None:
        """Takes a sub-chunk that is no longer on its way."""
        part.write.landed(part)
        if isinstance(part.result, TransferReport):
            self._target.room.apply(WriteProgressed(self._target.receiver), worker)
        else:
            self._drop_prepared(worker)
        self._end_if_through(part.write, worker)

    def cancel(self, error: KVFerryError, worker: Worker) -> None:
        """Posts nothing more; those with parts on their way end when these have."""
        if isinstance(error, TransferTimeoutError) and self._waits_in_vain:
            self._target.context.write_failed(self._target.attachment, error)
        self._stop_waiting()
        if self._span is not None:
            span, self._span = self._span, None
            _give_up(self._target, span)
        for write in self.writes.values():
            write.error = write.error or error
        self._drop_prepared(worker)

    @property
    def _waits_in_vain(self) -> bool:
        """Whether the ring is full, and nothing at all has got on there for as long as a write may take.

        What tells the receiver of a part may be lost with the connection. Then no credit comes, so that nothing is
        posted that would meet the loss: only connecting anew mends that.
        """
        still_s = self._target.context.now() - self._target.attachment.moved_at
        return isinstance(self._waits_at, SharedRing) and still_s >= self._target.context.settings.write_timeout_s

    def _end_if_through(self, write: StagedWrite, worker: Worker) -> None:
        if not write.is_through:
            return
        self.writes.pop(write.command.sequence, None)
        event = write.end(write.error)
        if event is not None:
            self._target.room.apply(event, worker)

    def _reserve(self, write: StagedWrite) -> Span | None:
        num_bytes, ring = write.next_bytes, self._target.staged.peer.ring
        assert num_bytes is not None
        span = ring.reserve(num_bytes, self, self._due_at)
        self._waits_at = ring if span is None else None
        return span

    def _take_slot(self, memory: SourceMemory) -> Slot | None:
        if self._waits_at is not memory:
            self._withdraw()  # woken on another worker, which has memory of its own
        slot = memory.take(self._target.receiver, self, self._due_at)
        self._waits_at = memory if slot is None else None
        return slot

    def _stop_waiting(self) -> None:
        self._waits_since = None
        self._withdraw()

    def _withdraw(self) -> None:
        if self._waits_at is not None:
            where, self._waits_at = self._waits_at, None
            where.withdraw(self)


def _give_up(target: Target, span: Span, *, after_failure: bool = False) -> None:
    """Gives up a span of the receiver's ring, of which nothing will be posted any more."""
    message = messages.SpanReleased(
        endpoint=target.context.identity.endpoint,
        epoch=target.staged.peer.epoch,
        start=span.start,
        begin=span.begin,
        stop=span.stop,
        after_failure=after_failure,
    )
    target.context.send(target.receiver, message)
