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

RunQueue = queue.SimpleQueue["Actor | None"]
"""Actors that have something to do; None tells a worker to stop."""


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

    @property
    def has_events(self) -> bool:
        """Whether something waits to be handled."""
        return bool(self._events)

    @abstractmethod
    def handle(self, event: Any, worker: Worker) -> None:
        """Does what an event asks for."""

    @abstractmethod
    def broke(self, error: Exception, worker: Worker) -> None:
        """`handle` raised, which it should not have. Must not raise."""
