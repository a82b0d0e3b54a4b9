"""A receiver's ring of staging memory, which several rooms of this side write to, in turn."""

from __future__ import annotations

import threading
from typing import Protocol

from kvferry.protocol.credits import Span, WritingRing


class Waiter(Protocol):
    """Whoever waits for a part of a ring. Told apart by identity."""

    def wake(self) -> None:
        """It is your turn: try again. From any thread; returns at once."""


class SharedRing:
    """Hands out spans to whoever asks, and what is not free to those who wait for it, first come, first served.

    Nobody overtakes, so that a room that needs much waits no longer than one that needs little.
    """

    def __init__(self, num_bytes: int) -> None:
        # Guards all of it: rooms on several workers ask, and credits come to the control thread.
        self._lock = threading.Lock()
        self._writing = WritingRing(num_bytes)
        self._voids: dict[int, Span] = {}  # by where they start
        self._waiting: dict[Waiter, int] = {}  # in the order of their coming, with the bytes that each needs

    @property
    def num_bytes(self) -> int:
        """The ring's size."""
        return self._writing.num_bytes

    @property
    def in_use(self) -> int:
        """Bytes that were handed out and not read yet."""
        with self._lock:
            return self._writing.in_use

    def place(self, span: Span) -> int:
        """Where a span begins in the ring's memory, in bytes."""
        return self._writing.place(span)

    def reserve(self, num_bytes: int, waiter: Waiter) -> Span | None:
        """A span of so many bytes, or None: then the waiter is woken when there is one, or `withdraw`s."""
        with self._lock:
            is_next = not self._waiting or next(iter(self._waiting)) is waiter
            span = self._writing.reserve(num_bytes) if is_next else None
            if span is None:
                self._waiting[waiter] = num_bytes  # keeps its place, if it has one
                return None
            self._waiting.pop(waiter, None)
            woken = self._next_to_wake()
        if woken is not None:
            woken.wake()
        return span

    def withdraw(self, waiter: Waiter) -> None:
        """Waits no more. Whoever does not wait is ignored."""
        with self._lock:
            if self._waiting.pop(waiter, None) is None:
                return
            woken = self._next_to_wake()
        if woken is not None:
            woken.wake()

    def give_up(self, span: Span) -> None:
        """Says that nothing will come of a span. The reading side must learn of it."""
        with self._lock:
            self._voids[span.start] = span

    @property
    def voids(self) -> list[Span]:
        """Spans that were given up, and of which the reading side may not know."""
        with self._lock:
            return list(self._voids.values())

    def read_until(self, position: int) -> None:
        """Takes in up to where the ring was read."""
        with self._lock:
            is_news = self._writing.read_until(position)
            for start in [start for start in self._voids if start < position] if is_news else ():
                del self._voids[start]
            woken = self._next_to_wake() if is_news else None
        if woken is not None:
            woken.wake()

    def _next_to_wake(self) -> Waiter | None:
        """Whoever waits longest, if there is enough for it now."""
        for waiter, num_bytes in self._waiting.items():
            return waiter if self._writing.can_reserve(num_bytes) else None
        return None
