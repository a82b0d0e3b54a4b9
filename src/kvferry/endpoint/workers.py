"""The threads that move chunks, and the writes that they have on their way.

A worker never waits for a write: it starts the next one and looks at those on their way in between.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.endpoint.actors import RunQueue
from kvferry.endpoint.slots import SourceMemory
from kvferry.errors import TransportError
from kvferry.transport import Flight, FlightReport, Transport

log = logging.getLogger(__name__)

_SHORTEST_SLEEP_S = 50e-6
_LONGEST_SLEEP_S = 1e-3


@dataclass(slots=True, eq=False)
class _Watched:
    flight: Flight
    on_done: Callable[[FlightReport], None]
    on_failed: Callable[[Exception], None]
    on_broke: Callable[[Exception], None]
    is_broken: bool = False


class Worker:
    """One thread, which runs the actors of one queue and polls the writes that they started."""

    def __init__(
        self, name: str, run_queue: RunQueue, transport: Transport, memory: SourceMemory | None = None
    ) -> None:
        """Args:
        run_queue: whose actors it runs.
        transport: polls the writes.
        memory: staging memory of its own, if it gathers.
        """
        self._run_queue = run_queue
        self._transport = transport
        self._memory = memory
        self._watched: list[_Watched] = []
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread to end, which it does once it was told to stop and its writes have ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def memory(self) -> SourceMemory:
        """Staging memory of this worker, for actors that run on it. Only workers that gather have any."""
        assert self._memory is not None
        return self._memory

    def watch(
        self,
        flight: Flight,
        on_done: Callable[[FlightReport], None],
        on_failed: Callable[[Exception], None],
        on_broke: Callable[[Exception], None],
    ) -> None:
        """Polls a write until it ends, then calls `on_done` or `on_failed`. For actors that run on this worker.

        Args:
            on_broke: called, once, if polling raises what no transport should; whether the write has ended is not
                known then, and polling goes on.
        """
        watched = _Watched(flight, on_done, on_failed, on_broke)
        if not self._has_ended(watched):
            self._watched.append(watched)

    def _run(self) -> None:
        sleep_s = _SHORTEST_SLEEP_S
        while not (self._is_stopping and not self._watched):
            try:
                if self._take_one(sleep_s) | self._poll():
                    sleep_s = _SHORTEST_SLEEP_S
                else:
                    sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)
            except Exception:
                log.exception("a transfer worker met an error that it did not expect; it goes on")

    def _take_one(self, sleep_s: float) -> bool:
        """Runs the next actor; with writes on their way waits for one only so long, else until there is one."""
        if self._is_stopping:
            time.sleep(sleep_s)
            return False
        try:
            actor = self._run_queue.take(sleep_s if self._watched else None)
        except queue.Empty:
            return False
        if actor is None:
            self._is_stopping = True
        else:
            actor.take_turn(self)
        return True

    def _poll(self) -> bool:
        before = len(self._watched)
        self._watched = [watched for watched in self._watched if not self._has_ended(watched)]
        return len(self._watched) < before

    def _has_ended(self, watched: _Watched) -> bool:
        try:
            report = self._transport.poll(watched.flight)
        except TransportError as error:
            self._release(watched.flight)
            watched.on_failed(error)
            return True
        except Exception as error:
            if not watched.is_broken:
                watched.is_broken = True
                log.exception("the transport broke while a write was polled")
                watched.on_broke(error)
            return False
        if report is None:
            return False
        self._release(watched.flight)
        watched.on_done(report)
        return True

    def _release(self, flight: Flight) -> None:
        try:
            self._transport.release(flight)
        except Exception as error:
            log.warning("a finished write could not be released: %s", error)


class WorkerPool:
    """All workers of a prefill endpoint: some for rooms and peers, and some that gather.

    Attributes:
        queues: of the actors that the first kind runs.
        gathering: of the actors whose next event is to gather.
    """

    def __init__(
        self, count: int, num_queues: int, transport: Transport, memories: Sequence[SourceMemory], *, name: str
    ) -> None:
        """Starts them.

        Args:
            count: workers for rooms and peers, spread over num_queues queues in turn.
            memories: staging memory of every worker that gathers.
        """
        self.queues = tuple(RunQueue() for _ in range(num_queues))
        self.gathering = RunQueue()
        queues = [self.queues[index % num_queues] for index in range(count)]
        self._workers = [
            *(Worker(f"{name}-worker-{index}", each, transport) for index, each in enumerate(queues)),
            *(
                Worker(f"{name}-gather-{index}", self.gathering, transport, memory)
                for index, memory in enumerate(memories)
            ),
        ]
        self._stops = [*queues, *(self.gathering for _ in memories)]
        for worker in self._workers:
            worker.start()

    @property
    def are_alive(self) -> bool:
        """Whether all of them run."""
        return all(worker.is_alive for worker in self._workers)

    def queue_of(self, key: bytes) -> RunQueue:
        """The queue of whatever has that key; the same one every time."""
        return self.queues[zlib.crc32(key) % len(self.queues)]

    def stop(self, timeout_s: float) -> int:
        """Tells all to end once their writes have, and waits so long; returns how many still run."""
        deadline = time.monotonic() + timeout_s
        for run_queue in self._stops:
            run_queue.put(None)
        return sum(not worker.join(max(0.0, deadline - time.monotonic())) for worker in self._workers)
