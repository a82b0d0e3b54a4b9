"""Who waits for memory that is short."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

Need = TypeVar("Need")
Grant = TypeVar("Grant")


class Waiter(Protocol):
    """Whoever waits for memory. Told apart by identity."""

    def wake(self) -> None:
        """It is your turn: try again. From any thread; returns at once."""


class WaitQueue(Generic[Need, Grant]):
    """Hands memory out to whoever asks, and what is not free to those who wait for it, first come, first served.

    A waiter that is woken asks again, or withdraws; until then nobody who came later is served in its place.

    Attributes:
        lock: guards the queue and the memory that it is for. Workers take on any thread, and others give back.
    """

    def __init__(
        self, grant: Callable[[Need], Grant | None], is_free: Callable[[Need], bool], *, may_overtake: bool
    ) -> None:
        """Both functions are called with the lock held.

        Args:
            grant: takes what is needed; None if that is not free.
            is_free: whether what is needed is.
            may_overtake: whether those for whom something is free go before those for whom nothing is.
        """
        self.lock = threading.Lock()
        self._grant = grant
        self._is_free = is_free
        self._may_overtake = may_overtake
        self._waiting: dict[Waiter, Need] = {}  # in the order of their coming

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, need: Need, waiter: Waiter) -> Grant | None:
        """Takes what is needed; None if the waiter must wait: it is woken when it is free, or `withdraw`s."""
        with self.lock:
            grant = self._grant(need) if self._first() in (None, waiter) else None
            if grant is None:
                self._waiting[waiter] = need  # keeps its place, if it has one
                return None
            self._waiting.pop(waiter, None)
        self.wake_next()
        return grant

    def withdraw(self, waiter: Waiter) -> None:
        """Ends a wait. Whoever does not wait is ignored."""
        with self.lock:
            if self._waiting.pop(waiter, None) is None:
                return
        self.wake_next()

    def wake_next(self) -> None:
        """Wakes the first waiter if there is something for it now; to be called, unlocked, when memory was freed."""
        with self.lock:
            waiter = self._next_to_wake()
        if waiter is not None:
            waiter.wake()

    def _next_to_wake(self) -> Waiter | None:
        first = self._first()
        return first if first is not None and self._is_free(self._waiting[first]) else None

    def _first(self) -> Waiter | None:
        """The waiter that nobody else may go before."""
        for waiter, need in self._waiting.items():
            if not self._may_overtake or self._is_free(need):
                return waiter
        return None
