"""When what is due: a look finds what has come due without looking at the rest.

Deadlines move with every sign of progress, nearly always later. So a timer that moves later is only noted: when its
earlier time has come it is put back, once for each time that it has waited and not for each time that it has moved.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

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
