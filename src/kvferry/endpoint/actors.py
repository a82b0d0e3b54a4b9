"""Rooms and peers as actors: each handles its events one at a time, on whichever worker is free.

What an actor owns needs no lock, because no two workers ever run it at once. An actor takes one event per turn and then
queues behind the others, so that a request of many chunks delays a small one by a chunk at most.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvferry.endpoint.threads import Loop

if TYPE_CHECKING:
    from kvferry.endpoint.workers import Worker

_LOOK_S = 1e-3
_LINGER_S = 0.1  # rooms often follow each other, and beginning takes the caller's time


class RunQueue:
    """Actors that have something to do; None tells a worker to stop.

    Not `queue.SimpleQueue`: its `get` looks twice at what is left of the time, and waits for ever if that has become
    negative in between, as a few microseconds do when the thread is held up.
    """

    def __init__(self) -> None:
        # One call changes either, and none is interrupted: a worker that is held up holds up nobody who puts.
        self._actors: deque[Actor | None] = deque()
        self._handed_in: deque[tuple[Actor, Any]] = deque()
        self._waiting: deque[threading.Lock] = deque()  # of every worker that waits, a lock that it cannot have yet
        # Keeps the events that were handed in in order, while several workers take.
        self._hand_out = threading.Lock()

    def put(self, actor: Actor | None) -> None:
        """Adds to the end, from any thread."""
        self._actors.append(actor)
        self._wake_one()

    def hand_in(self, actor: Actor, event: Any) -> None:
        """Posts an event to an actor, soon, without waking anybody: for callers who have no time for that.

        Waking a thread takes longer than all the rest of handing in, and may cost the caller its processor. Whichever
        worker next looks finds it; if all sleep, a `Lookout` must wake one.
        """
        self._handed_in.append((actor, event))

    def rouse(self) -> None:
        """Wakes a worker if all sleep beside something that was handed in."""
        if self._handed_in:
            self._wake_one()

    def take(self, timeout_s: float | None) -> Actor | None:
        """Takes from the front, waiting as long as timeout_s, or for ever if that is None.

        Raises:
            queue.Empty: if there was nothing in time.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if self._handed_in:
                self._post_handed_in()
            try:
                return self._actors.popleft()
            except IndexError:
                self._wait(deadline)

    def _wait(self, deadline: float | None) -> None:
        """Waits until there may be something to take.

        Raises:
            queue.Empty: at the deadline.
        """
        woken = threading.Lock()
        woken.acquire()
        self._waiting.append(woken)
        left_s = -1.0 if deadline is None else max(0.0, deadline - time.monotonic())
        # Looked at again: what was put before anybody could see that we wait, woke nobody.
        if not self.has_any and woken.acquire(timeout=left_s):
            return
        self._withdraw(woken)
        if not self.has_any and deadline is not None and time.monotonic() >= deadline:
            raise queue.Empty

    @property
    def has_any(self) -> bool:
        """Whether there is anything to take."""
        return bool(self._actors or self._handed_in)

    def _post_handed_in(self) -> None:
        with self._hand_out:
            while self._handed_in:
                actor, event = self._handed_in.popleft()
                actor.post(event)

    def _wake_one(self) -> None:
        """Wakes whoever came to wait last: what it needs is still in its processor's cache."""
        try:
            woken = self._waiting.pop()
        except IndexError:
            return
        woken.release()

    def _withdraw(self, woken: threading.Lock) -> None:
        """Waits no longer. If somebody was about to wake us, another worker is woken in our place."""
        try:
            self._waiting.remove(woken)
        except ValueError:
            self._wake_one()


class Lookout(Loop):
    """Sees to it that what was handed in is found soon: the waking that callers are spared.

    It looks as long as somebody may hand something in, and sleeps otherwise.

    Attributes:
        is_resting: whether it sleeps until it is told to begin.
    """

    def __init__(self, queues: Sequence[RunQueue], is_needed: Callable[[], object]) -> None:
        """Args:
        is_needed: whether something may be handed in; once it may, `begin` must be called.
        """
        self._queues = queues
        self._is_needed = is_needed
        self.is_resting = False
        self._is_stopping = False
        self._begun = threading.Event()
        self._needed_until = 0.0

    def begin(self) -> None:
        """Says that something may be handed in from now on. Returns at once."""
        if not self._begun.is_set():
            self._begun.set()

    def stop(self) -> None:
        """Lets it end."""
        self._is_stopping = True
        self._begun.set()

    def has_work(self) -> bool:
        return self._is_stopping

    def turn(self, *, may_wait: bool) -> bool:
        for run_queue in self._queues:
            run_queue.rouse()
        if may_wait:
            self._wait()
        return not self._is_stopping

    def _wait(self) -> None:
        now = time.monotonic()
        if self._is_needed():
            self._needed_until = now + _LINGER_S
        if now < self._needed_until:
            time.sleep(_LOOK_S)
            return
        self._begun.clear()
        self.is_resting = not (self._is_needed() or self._is_stopping)  # again: it may have become so in between
        if self.is_resting:
            self._begun.wait()
        self.is_resting = False


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
        self._queue_for(event).put(self)

    def _queue_for(self, event: Any) -> RunQueue:
        """Where the actor stands in line to handle an event, which comes first of those that it has."""
        return self._run_queue

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
                self._queue_for(self._events[0]).put(self)

    @abstractmethod
    def handle(self, event: Any, worker: Worker) -> None:
        """Does what an event asks for."""

    @abstractmethod
    def broke(self, error: Exception, worker: Worker) -> None:
        """`handle` raised, which it should not have. Must not raise."""
