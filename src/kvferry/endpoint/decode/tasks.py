"""The threads of a decode endpoint that scatter staging memory into pages, and compare digests of what is there."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from kvferry.endpoint.decode.room import ReceivingRoom
from kvferry.endpoint.runtime.platform import Platform
from kvferry.endpoint.runtime.threads import Loop
from kvferry.observe.records import PlacedRecord
from kvferry.plan import PairPlan
from kvferry.protocol.transfer.events import PartPlaced
from kvferry.protocol.wire.messages import ChunkArrived, StagedArrived
from kvferry.staging import Kernels
from kvferry.staging.digests import DigestMemory, verify_chunk
from kvferry.staging.receiving import WriterRing, scatter_part
from kvferry.staging.rings import Span


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


class _Scatterer(Loop):
    def __init__(self, tasks: queue.SimpleQueue[ArrivalTask | None], work: Callable[[ArrivalTask], None]) -> None:
        self._tasks = tasks
        self._work = work

    def has_work(self) -> bool:
        return not self._tasks.empty()

    def turn(self, *, may_wait: bool) -> bool:
        try:
            task = self._tasks.get(block=may_wait)
        except queue.Empty:
            return True
        if task is None:
            return False
        self._work(task)
        return True


class Scatterers:
    """Threads that run the tasks of what has arrived. There may be none: then `submit` runs them."""

    def __init__(
        self,
        count: int,
        kernels: Kernels,
        on_done: Callable[[ArrivalTask, PlacedRecord, BaseException | None], None],
        *,
        platform: Platform,
        name: str,
    ) -> None:
        """Starts the threads.

        Args:
            count: how many.
            on_done: called with every task that is done, its record and the error that it raised; from the threads, if
                there are any.
        """
        self._now = platform.now
        self._kernels = kernels
        self._on_done = on_done
        self._tasks: queue.SimpleQueue[ArrivalTask | None] = queue.SimpleQueue()
        self.threads = tuple(
            platform.start(f"{name}-scatter-{index}", _Scatterer(self._tasks, self._work)) for index in range(count)
        )

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

    def _work(self, task: ArrivalTask) -> None:
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
