"""Rooms and peers as actors: each handles its events one at a time, on whichever worker is free.

What an actor owns needs no lock, because no two workers ever run it at once. An actor takes one event per turn and then
queues behind the others, so that a request of many chunks delays a small one by a chunk at most.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.endpoint.workers import Worker


class RunQueue:
    """Actors that have something to do; None tells a worker to stop.

    Workers wait in it one behind the other. With several waiting at a time, `SimpleQueue.get` can forget its timeout:
    if another takes the item that woke it, what is left of the time is negative, which it takes for endless.
    """

    def __init__(self) -> None:
        self._actors: queue.SimpleQueue[Actor | None] = queue.SimpleQueue()
        self._turn = threading.Lock()

    def put(self, actor: Actor | None) -> None:
        """Adds to the end, from any thread."""
        self._actors.put(actor)

    def take(self, timeout_s: float | None) -> Actor | None:
        """Takes from the front, waiting as long as timeout_s, or for ever if that is None.

        Raises:
            queue.Empty: if there was nothing in time.
        """
        if not self._turn.acquire(timeout=-1 if timeout_s is None else timeout_s):
            raise queue.Empty
        try:
            return self._actors.get(timeout=timeout_s)
        finally:
            self._turn.release()


class Actor(ABC):
    """Something that handles events in order."""

    def __init__(self, run_queue: RunQueue) -> None:
        self._run_queue = run_queue
        self._events: deque[Any] = deque()
        # Guards the decision whether the actor stands in the run queue, which several threads take.
        self._lock = threading.Lock()
        self._is_queued = False

    def post(self, event: Any) -> None:
        """Hands in an event, from any thread. Returns at once."""
        with self._lock:
            self._events.append(event)
            if self._is_queued:
                return
            self._is_queued = True
        self._run_queue.put(self)

    def take_turn(self, worker: Worker) -> None:
        """Handles one event; for workers only."""
        event = self._events.popleft()
        try:
            self.handle(event, worker)
        except Exception as error:
            self.broke(error, worker)
        finally:
            with self._lock:
                self._is_queued = bool(self._events)
                again = self._is_queued
            if again:
                self._run_queue.put(self)

    @abstractmethod
    def handle(self, event: Any, worker: Worker) -> None:
        """Does what an event asks for."""

    @abstractmethod
    def broke(self, error: Exception, worker: Worker) -> None:
        """`handle` raised, which it should not have. Must not raise."""
