"""The threads of a decode endpoint that empty staging memory into pages."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.endpoint.platform import Platform
from kvferry.endpoint.receiving import ReceivingRoom
from kvferry.endpoint.threads import Loop
from kvferry.protocol.credits import Span
from kvferry.protocol.messages import StagedArrived
from kvferry.staging import Kernels
from kvferry.staging.receiving import WriterRing
from kvferry.staging.scattering import scatter_part


@dataclass(frozen=True, slots=True, eq=False)
class ScatterTask:
    """A part of a chunk that is in staging memory and belongs into pages.

    Attributes:
        room: whose it is.
        ring, span: where it is.
        message: what it is.
    """

    room: ReceivingRoom
    ring: WriterRing
    span: Span
    message: StagedArrived

    def run(self, kernels: Kernels) -> Exception | None:
        """Puts it into its pages, unless nobody wants it any more; returns the error that it met."""
        if self.room.machine.state.is_final:
            return None
        try:
            scatter_part(self.message, self.ring, self.span, self.room.places, kernels)
        except Exception as problem:
            return problem
        return None


class _Scatterer(Loop):
    def __init__(self, tasks: queue.SimpleQueue[ScatterTask | None], work: Callable[[ScatterTask], None]) -> None:
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
    """Threads that put what is in staging memory into its pages. There may be none: then whoever submits does it."""

    def __init__(
        self,
        count: int,
        kernels: Kernels,
        on_done: Callable[[ScatterTask, Exception | None], None],
        *,
        platform: Platform,
        name: str,
    ) -> None:
        """Starts them.

        Args:
            count: how many.
            on_done: called with every task, once it is through, and the error that it met; from the threads, if any.
        """
        self._kernels = kernels
        self._on_done = on_done
        self._tasks: queue.SimpleQueue[ScatterTask | None] = queue.SimpleQueue()
        self.threads = tuple(
            platform.start(f"{name}-scatter-{index}", _Scatterer(self._tasks, self._work)) for index in range(count)
        )

    def submit(self, task: ScatterTask) -> None:
        """Hands a task to whichever is free."""
        if self.threads:
            self._tasks.put(task)
        else:
            self._work(task)

    def stop(self) -> None:
        """Lets them end, once all tasks are through."""
        for _ in self.threads:
            self._tasks.put(None)

    def _work(self, task: ScatterTask) -> None:
        self._on_done(task, task.run(self._kernels))
