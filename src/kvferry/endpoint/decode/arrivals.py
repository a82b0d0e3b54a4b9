"""What arrives at a decode rank: notifications, and the work on staging memory and pages that they ask for.

That work, scattering staging memory into pages and comparing digests of what is there, is done by threads of its own.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from kvferry.endpoint.decode.context import DecodeContext
from kvferry.endpoint.decode.room import ReceivingRoom
from kvferry.endpoint.runtime.platform import Platform
from kvferry.endpoint.runtime.threads import Loop, do_each
from kvferry.errors import PeerError
from kvferry.loggers import logger_of
from kvferry.observe.records import PlacedRecord
from kvferry.plan import PairPlan
from kvferry.protocol.transfer.events import Broke, PartArrived, PartPlaced
from kvferry.protocol.wire import codec, messages
from kvferry.protocol.wire.messages import ChunkArrived, StagedArrived
from kvferry.staging import Kernels
from kvferry.staging.digests import DigestMemory, verify_chunk
from kvferry.staging.receiving import WriterRing, scatter_part
from kvferry.staging.rings import Span

log = logger_of(__name__)


class ArrivalTask(ABC):
    """Work on data that has arrived for a room, done before the arrival counts.

    Attributes:
        arrived_at: when the arrival was noticed.
        message: what said so.
        purpose: what is done with it, in words.
    """

    __slots__ = ()

    room: ReceivingRoom
    arrived_at: float
    message: StagedArrived | ChunkArrived
    purpose: ClassVar[str]

    @property
    def num_bytes(self) -> int:
        """How many bytes of staging memory it puts into pages."""
        return 0

    def run(self, kernels: Kernels) -> BaseException | None:
        """Does the work, unless the room has ended; returns the error that it raised."""
        if not self.is_wanted():
            return None
        try:
            self.work(kernels)
        except BaseException as problem:  # of a kernel, too
            return problem
        return None

    def is_wanted(self) -> bool:
        """Whether the room still runs."""
        return not self.room.machine.state.is_final

    @abstractmethod
    def work(self, kernels: Kernels) -> None:
        """Does the work; may raise anything."""

    def event(self, error: BaseException | None) -> PartPlaced:
        """Returns the event for the room once the work is done."""
        return PartPlaced(self.message.writer, self.message.sequence, error, self.purpose)

    @abstractmethod
    def give_back(self) -> None:
        """Gives back the memory that the task is about, once it is done or dropped. For the driver's thread."""


@dataclass(frozen=True, slots=True, eq=False)
class ScatterTask(ArrivalTask):
    """A part of a chunk that is in staging memory and belongs into pages.

    Attributes:
        ring: the ring that it is in.
        span: where in the ring.
        is_verified: whether its digests are to be compared.
    """

    room: ReceivingRoom
    arrived_at: float
    ring: WriterRing
    span: Span
    message: StagedArrived
    is_verified: bool = False
    purpose: ClassVar[str] = "put into its pages"

    @property
    def num_bytes(self) -> int:
        return self.span.num_bytes

    def work(self, kernels: Kernels) -> None:
        scatter_part(self.message, self.ring, self.span, self.room.places, kernels, is_verified=self.is_verified)

    def give_back(self) -> None:
        self.ring.give_back(self.span)


@dataclass(frozen=True, slots=True, eq=False)
class VerifyTask(ArrivalTask):
    """A chunk that is in its pages and whose digests are to be compared.

    Attributes:
        plan: what its writer may send.
        memory: what digests of the pages are computed with.
    """

    room: ReceivingRoom
    arrived_at: float
    plan: PairPlan
    message: ChunkArrived
    memory: DigestMemory
    purpose: ClassVar[str] = "verified"

    def work(self, kernels: Kernels) -> None:
        verify_chunk(self.message, self.plan, self.room.places, self.memory, is_wanted=self.is_wanted)

    def give_back(self) -> None:
        pass


class Scatterers(Loop):
    """Threads that run the tasks of what has arrived. There may be none: then `submit` runs them."""

    def __init__(
        self,
        count: int,
        kernels: Kernels | None,
        on_done: Callable[[ArrivalTask, PlacedRecord, BaseException | None], None],
        *,
        platform: Platform,
        name: str,
    ) -> None:
        """Starts the threads.

        Args:
            count: how many.
            kernels: what copies; None where nothing can arrive in staging memory.
            on_done: called with every task that is done, its record and the error that it raised; from the threads, if
                there are any.
        """
        self._now = platform.now
        self._kernels = kernels
        self._on_done = on_done
        self._tasks: queue.SimpleQueue[ArrivalTask | None] = queue.SimpleQueue()
        self.threads = tuple(platform.start(f"{name}-scatter-{index}", self) for index in range(count))

    def submit(self, task: ArrivalTask) -> None:
        """Queues a task for the threads; runs it where there are none."""
        if self.threads:
            self._tasks.put(task)
        else:
            self._work(task)

    def stop(self) -> None:
        """Ends the threads once all tasks are done."""
        for _ in self.threads:
            self._tasks.put(None)

    def has_work(self) -> bool:
        return not self._tasks.empty()

    def turn(self, *, may_wait: bool) -> bool:
        try:
            task = self._tasks.get(block=may_wait)
        except queue.Empty:
            return True
        if task is not None:
            self._work(task)
        return task is not None

    def _work(self, task: ArrivalTask) -> None:
        assert self._kernels is not None  # else nothing would have been offered that the task is about
        begun_at = self._now()
        error = task.run(self._kernels)
        record = PlacedRecord(
            writer=task.message.writer,
            arrived_at=task.arrived_at,
            begun_at=begun_at,
            done_at=self._now(),
            num_bytes=task.num_bytes,
            thread=threading.current_thread().name,
        )
        self._on_done(task, record, error)


class Arrivals:
    """Takes notifications, and has what they tell of scattered or verified. For the endpoint's thread.

    Attributes:
        scatterers: the threads that do so.
    """

    def __init__(
        self,
        context: DecodeContext,
        rooms: Mapping[int, ReceivingRoom],
    ) -> None:
        """Starts the threads that scatter and verify, if the settings ask for any.

        Args:
            rooms: those that are open.
        """
        self._context = context
        self._rooms = rooms
        checks = context.staging.checks
        kernels = checks.memory.kernels if checks is not None else context.staging.kernels
        # Verifying one direct write would hold the endpoint's thread up for too long.
        count = 0 if kernels is None else max(context.settings.scatter_workers, 0 if checks is None else 1)
        self.scatterers = Scatterers(count, kernels, self._on_done, platform=context.platform, name=context.thread_name)

    def take(self, now: float) -> None:
        """Handles the transport's notifications."""
        try:
            notifications = self._context.transport.take_notifications()
        except BaseException as error:
            running = [room for room in list(self._rooms.values()) if not room.machine.state.is_final]
            if running:
                log.exception("notifications could not be taken; %d rooms fail", len(running))
            for room in running:
                room.apply(Broke(error), now)
            return
        do_each(notifications, lambda each: self._notified(*each, now), "a notification")

    def _notified(self, peer: str, data: bytes, now: float) -> None:
        """Handles a notification, if its room is open and it comes from the rank that it names."""
        try:
            message = codec.decode_notification(data, self._context.identity.versions)
        except PeerError as error:
            log.warning("dropped a notification from %s: %s", peer, error)
            return
        if isinstance(message, messages.StagedArrived):
            self._part_arrived(peer, message, now)
            return
        room = self._room_of(peer, message)
        match message:
            case _ if room is None:
                return
            case messages.WriterFinished():
                room.apply(message, now)
            case messages.ChunkArrived():
                self._chunk_arrived(peer, room, message, now)

    def _room_of(self, peer: str, message: messages.Notification) -> ReceivingRoom | None:
        """Returns the room that a notification is for; None if it is over, or the notification is not its sender's."""
        room = self._rooms.get(message.room)
        if room is None or not room.is_meant(message.generation):
            return None
        if room.is_rank(message.writer, peer):
            return room
        log.warning("dropped a notification for room %d: %s is not rank %d", message.room, peer, message.writer)
        return None

    def _chunk_arrived(self, peer: str, room: ReceivingRoom, message: messages.ChunkArrived, now: float) -> None:
        checks = self._context.staging.checks
        plan = checks.plan(peer) if checks is not None else None
        if checks is None:
            room.apply(message, now)
        elif plan is None:
            log.warning("dropped a notification for room %d: rank %d has nothing to send", message.room, message.writer)
        else:
            task = VerifyTask(room, now, plan, message, checks.memory)
            room.apply(PartArrived(message.writer, message.sequence, work=task), now)

    def _part_arrived(self, peer: str, message: messages.StagedArrived, now: float) -> None:
        """Handles a part of a chunk in staging memory. Its span is given back, whether or not a room takes the part."""
        span = Span(message.start, message.begin, message.stop)
        ring = self._context.staging.ring(peer, message.epoch)
        if ring is None or not ring.take(span):
            log.warning("dropped a notification from %s: it has no such part of a ring: %s", peer, span)
            return
        room = self._room_of(peer, message)
        if room is None:
            ring.give_back(span)
            return
        task = ScatterTask(room, now, ring, span, message, is_verified=self._context.staging.checks is not None)
        room.apply(PartArrived(message.writer, message.sequence, message.part, message.is_last, task), now)

    def _on_done(self, task: ArrivalTask, record: PlacedRecord, error: BaseException | None) -> None:
        """Takes a task's result: on the thread that ran it, which is this one where no others scatter and verify."""
        if self.scatterers.threads:
            self._context.submit(partial(self._done, task, record, error))
        else:
            self._done(task, record, error, self._context.platform.now())

    def _done(self, task: ArrivalTask, record: PlacedRecord, error: BaseException | None, now: float) -> None:
        task.give_back()
        task.room.placed(record)
        task.room.apply(task.event(error), now)

    def span_released(self, message: messages.SpanReleased) -> None:
        """Gives back a span that its writer has released: nothing arrived in it, or will, but of a failed write."""
        ring = self._context.staging.ring(message.endpoint, message.epoch)
        span = Span(message.start, message.begin, message.stop)
        if ring is None or not ring.take(span):  # the same again
            return
        if message.after_failure:
            self._context.settling.add(partial(ring.give_back, span))
        else:
            ring.give_back(span)
