"""Rooms and peers as actors: each handles its events one at a time, on whichever worker is free.

What an actor owns needs no lock, because no two workers ever run it at once. An actor takes one event per turn and then
queues behind the others, so that a request of many chunks delays a small one by a chunk at most.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from typing import Any

from kvferry.endpoint.runtime.run_queue import RunQueue
from kvferry.endpoint.runtime.workers import Worker


class Actor(ABC):
    """Handles events one at a time, in the order in which they were posted."""

    def __init__(self, run_queue: RunQueue) -> None:
        self._run_queue = run_queue
        self._events: deque[Any] = deque()
        # Guards the decision whether the actor is in its run queue, which several threads make.
        self._lock = threading.Lock()
        self._is_queued = False

    def post(self, event: Any) -> None:
        """Queues an event for this actor. Returns at once; may be called from any thread."""
        with self._lock:
            self._events.append(event)
            if self._is_queued:
                return
            self._is_queued = True
        self._queue_for(event).put(self)

    def _queue_for(self, event: Any) -> RunQueue:
        """Returns the run queue in which the actor waits to handle an event, the first of those it has."""
        return self._run_queue

    def take_turn(self, worker: Worker) -> None:
        """Handles the first event. For workers only."""
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
                self._queue_for(self._events[0]).put(self)

    @abstractmethod
    def handle(self, event: Any, worker: Worker) -> None:
        """Handles one event."""

    @abstractmethod
    def broke(self, error: Exception, worker: Worker) -> None:
        """Called after `handle` has raised, which it should not. Must not raise."""
