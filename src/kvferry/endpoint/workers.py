"""The threads that move chunks, and the writes that they have on their way.

A worker never waits for a write: it starts the next one and looks at those on their way in between.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.endpoint.actors import RunQueue
from kvferry.endpoint.slots import SourceMemory
from kvferry.errors import TransportError
from kvferry.transport import Flight, FlightReport, Transport

log = logging.getLogger(__name__)

_SHORTEST_SLEEP_S = 20e-6
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
        self, name: str, run_queue: RunQueue, transport: Transport, make_memory: Callable[[], SourceMemory]
    ) -> None:
        """Args:
        run_queue: whose actors it runs.
        transport: polls the writes.
        make_memory: takes staging memory for this worker.
        """
        self._run_queue = run_queue
        self._transport = transport
        self._make_memory = make_memory
        self._memory: SourceMemory | None = None
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

    def memory(self) -> SourceMemory:
        """Staging memory of this worker, taken when first asked for. For actors that run on it.

        Raises:
            TransportError: if there is no such memory.
        """
        if self._memory is None:
            self._memory = self._make_memory()
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


def start_workers(
    count: int,
    queues: Sequence[RunQueue],
    transport: Transport,
    make_memory: Callable[[], SourceMemory],
    *,
    name: str,
) -> list[Worker]:
    """Starts workers, spread over the queues in turn; arguments as for `Worker`."""
    workers = [
        Worker(f"{name}-worker-{index}", queues[index % len(queues)], transport, make_memory) for index in range(count)
    ]
    for worker in workers:
        worker.start()
    return workers
