"""Actors, the queues in which they wait for a turn on a worker, the thread that wakes workers for callers, and timers.

Rooms and peers are actors: each handles its events one at a time, on whichever worker is free. What an actor owns needs
no lock, because no two workers ever run it at once. It takes one event per turn and then queues again, so that a
request of many chunks delays another by a write at most.

A look at timers finds what has come due without looking at the rest. Deadlines move with every sign of progress, nearly
always later. So a timer that moves later is only noted: when its earlier time has come it is put back, once for each
time that it has waited and not for each time that it has moved.
"""

from __future__ import annotations

import heapq
import itertools
import math
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import Any, Generic, TypeVar

from kvferry.endpoint.runtime.threads import Loop
from kvferry.staging.runs import Comings

_LOOK_S = 1e-3
_release = methodcaller("release")
_LINGER_S = 0.01  # chunks often follow each other, and to end the rest takes the caller's time


class Actor(ABC):
    """Handles events one at a time, in the order in which they were posted.

    Attributes:
        events: those that it has not handled.
    """

    def __init__(self, run_queue: RunQueue) -> None:
        self._run_queue = run_queue
        self.events: deque[Any] = deque()
        # Guards the decision whether the actor is in its run queue, which several threads make.
        self._lock = threading.Lock()
        self._is_queued = False
        self._is_running = False

    def post(self, event: Any) -> None:
        """Queues an event for this actor. Returns at once; may be called from any thread."""
        with self._lock:
            self.events.append(event)
            if not self._is_queued:
                # In this order: of whoever is interrupted in between (Ctrl-C) a turn too many is left, and not none.
                self._line_up(event)
                self._is_queued = True

    def _line_up(self, event: Any) -> None:
        """Waits in a run queue for the turn in which it handles an event, the first of those it has."""
        self._run_queue.put(self, due_at=0.0)

    def take_turn(self, worker: Any) -> None:
        """Handles the first event. For workers only."""
        with self._lock:
            if self._is_running or not self.events:
                return  # a turn too many
            self._is_running = True
            event = self.events.popleft()
        try:
            self.handle(event, worker)
        except BaseException as error:
            self.broke(error, worker)
        finally:
            with self._lock:
                self._is_running = False
                self._is_queued = bool(self.events)
                again = self._is_queued
            if again:
                self._line_up(self.events[0])

    @abstractmethod
    def handle(self, event: Any, worker: Any) -> None:
        """Handles one event."""

    @abstractmethod
    def broke(self, error: BaseException, worker: Any) -> None:
        """Called after `handle` has raised, which it should not. Must not raise."""


class RunQueue:
    """Queue of the actors that have events to handle; a None in it stops one worker, once it has taken the others.

    Not a `queue.SimpleQueue`: its `get` computes the remaining time twice, and waits for ever if that has become
    negative in between, as a remainder of a few microseconds does when the thread is held up.

    Attributes:
        waiting: the workers that sleep.
        waker: looks after what is handed in, once there is one.
    """

    def __init__(self) -> None:
        # Each is changed by single calls that no thread interrupts, so that a worker that is held up delays no `put`.
        self._actors: list[tuple[float, int, Actor | None]] = []  # a heap
        self._comings = itertools.count()
        # By the worker's thread: when the actor was due that had its last turn with `comings`, and those.
        self._turns: dict[int, tuple[float, Comings]] = {}
        self._handed_in: deque[tuple[Actor, Any]] = deque()
        self.waiting: deque[threading.Lock] = deque()  # a held lock per waiting worker: releasing wakes it
        # Keeps handed-in events in order while several workers take them.
        self._hand_out = threading.Lock()
        self.waker: Waker | None = None
        # Each step takes a lock out of those that wait, and releases it: in one call, which no signal interrupts.
        self._wake_next = map(_release, iter(self.waiting.pop, None))

    def put(self, actor: Actor | None, due_at: float = math.inf) -> None:
        """Adds an actor, in front of those that are due later. May be called from any thread."""
        heapq.heappush(self._actors, (due_at, next(self._comings), actor))
        for turn_due_at, comings in list(self._turns.values()):
            if due_at < turn_due_at:
                comings.come()
        self.wake_one()

    def hand_in(self, actor: Actor, event: Any) -> None:
        """Queues an event for an actor without waking a worker: for callers to whom waking would cost too much.

        Waking a thread takes longer than the rest of the call, and may cost the caller its processor. The next worker
        that takes an actor posts the event first; if all sleep, the `Waker` wakes one.
        """
        self._handed_in.append((actor, event))
        if self.waker is not None:
            self.waker.look()

    def rouse(self) -> None:
        """Wakes a worker if an event was handed in that none has posted yet."""
        if self._handed_in:
            self.wake_one()

    def comings(self, due_at: float) -> Comings:
        """Returns what says whether anybody who is due before has come, until this thread calls again.

        Args:
            due_at: when the actor that has its turn was due.
        """
        comings = Comings()
        self._turns[threading.get_ident()] = due_at, comings  # before it looks who waits: nobody is missed
        if any(each[0] < due_at for each in self._actors[:1]):
            comings.come()
        return comings

    def take(self, timeout_s: float | None) -> Actor | None:
        """Removes and returns who is due first, waiting up to timeout_s, or for ever if that is None.

        Raises:
            queue.Empty: if there was nothing in time.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if self._handed_in:
                self._post_handed_in()
            try:
                return heapq.heappop(self._actors)[2]
            except IndexError:
                self._wait(deadline)

    def _wait(self, deadline: float | None) -> None:
        """Waits until there may be something to take.

        Raises:
            queue.Empty: at the deadline.
        """
        woken = threading.Lock()
        woken.acquire()
        self.waiting.append(woken)
        left_s = -1.0 if deadline is None else max(0.0, deadline - time.monotonic())
        # Checked again: what was put before this thread stood among the waiting woke no thread.
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

    def wake_one(self) -> None:
        """Wakes the worker that began to wait last: its processor's cache still has what it needs."""
        try:
            next(self._wake_next)
        except IndexError:
            return  # none waits

    def _withdraw(self, woken: threading.Lock) -> None:
        """Ends this thread's wait. If another thread was about to wake it, wakes another worker instead."""
        try:
            self.waiting.remove(woken)
        except ValueError:
            self.wake_one()


class Waker(Loop):
    """Wakes a worker within 1 ms of an event being handed in, so that callers need not.

    It looks every millisecond while events are handed in, and rests when none was for some time. Only the first event
    after that wakes a thread: this one.
    """

    def __init__(self, queues: Sequence[RunQueue]) -> None:
        """Looks after the queues of workers."""
        self._queues = queues
        self._is_stopping = False
        self._is_called = False  # whether anything was handed in since the last look
        self._looks_until = 0.0
        # Held while it rests, and released by the first who has something for it. An event would cost callers more.
        self._rests_on: deque[threading.Lock] = deque()
        for run_queue in queues:
            run_queue.waker = self

    @property
    def is_resting(self) -> bool:
        """Whether it sleeps until the next event is handed in."""
        return bool(self._rests_on)

    def look(self) -> None:
        """Takes notice of an event that was handed in. Returns at once."""
        self._is_called = True
        if self._rests_on:
            self._end_rest()

    def _end_rest(self) -> None:
        try:
            self._rests_on[-1].release()
        except (IndexError, RuntimeError):
            return  # another thread has done it

    def stop(self) -> None:
        """Ends the loop after its turn."""
        self._is_stopping = True
        self._end_rest()

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
        if self._is_called:
            self._is_called = False
            self._looks_until = now + _LINGER_S
        if now < self._looks_until:
            time.sleep(_LOOK_S)
            return
        rest = threading.Lock()
        rest.acquire()
        self._rests_on.append(rest)
        if not (self._is_called or self._is_stopping):  # looked at now: before, nobody woke this thread
            rest.acquire()
        self._rests_on.clear()


KeyT = TypeVar("KeyT", bound=Hashable)

_FEW = 64


@dataclass(slots=True)
class _Timer(Generic[KeyT]):
    key: KeyT | None  # None once it was taken out
    due_at: float
    queued_at: float  # where it stands in the queue: when it is due, or earlier


class Timers(Generic[KeyT]):
    """Times by key. May be used from any thread.

    Attributes:
        queue: the times, the earliest first; some are not meant any more.
    """

    def __init__(self) -> None:
        """Begins with none."""
        # Guards both tables: rooms move their deadlines on whichever thread has their turn.
        self._lock = threading.Lock()
        self._timers: dict[KeyT, _Timer[KeyT]] = {}
        self.queue: list[tuple[float, int, _Timer[KeyT]]] = []
        self._numbers = itertools.count()  # timers of one time stand in the order in which they were put

    def __len__(self) -> int:
        return len(self._timers)

    def set(self, key: KeyT, due_at: float | None) -> None:
        """Sets when a key is due, in place of any time before; None takes it out."""
        with self._lock:
            timer = self._timers.get(key)
            if due_at is None:
                if timer is not None:
                    del self._timers[key]
                    timer.key = None
            elif timer is None:
                self._put(self._timers.setdefault(key, _Timer(key, due_at, due_at)))
            else:
                timer.due_at = due_at
                if due_at < timer.queued_at:
                    self._put(timer)

    def _put(self, timer: _Timer[KeyT]) -> None:
        timer.queued_at = timer.due_at
        if len(self.queue) > 2 * len(self._timers) + _FEW:  # what was taken out, or moved earlier, is still in it
            self.queue = [each for each in self.queue if each[2].key is not None and each[0] == each[2].queued_at]
            heapq.heapify(self.queue)
        heapq.heappush(self.queue, (timer.due_at, next(self._numbers), timer))

    def due(self, now: float) -> list[KeyT]:
        """Returns the keys that are due, the longest overdue first, until they are set to a later time."""
        due: list[_Timer[KeyT]] = []
        with self._lock:
            while self.queue and self.queue[0][0] <= now:
                queued_at, _, timer = heapq.heappop(self.queue)
                if timer.key is None or timer.queued_at != queued_at:
                    continue
                if timer.due_at > now:
                    self._put(timer)
                else:
                    timer.queued_at = float("inf")
                    due.append(timer)
            due.sort(key=lambda timer: timer.due_at)  # one that was set to a later time stood where it was
            for timer in due:
                self._put(timer)
            return [timer.key for timer in due if timer.key is not None]
