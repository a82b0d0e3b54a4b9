"""A receiver's ring of staging memory, which several rooms of this side write to, in turn."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.protocol.transfer.credits import Span, WritingRing
from kvferry.staging.waiting import Waiter, WaitQueue


class SharedRing:
    """Hands out spans of a ring, and queues those who must wait for one: first come, first served.

    No waiter overtakes another, so that a room that needs much waits no longer than one that needs little.
    """

    def __init__(self, num_bytes: int) -> None:
        self._writing = WritingRing(num_bytes)
        # Its lock guards all of it: rooms on several workers ask, and credits come to the control thread.
        self._queue = WaitQueue(self._writing.reserve, self._writing.can_reserve, may_overtake=False)

    @property
    def num_bytes(self) -> int:
        """The ring's size."""
        return self._writing.num_bytes

    @property
    def in_use(self) -> int:
        """Bytes that were handed out and not read yet."""
        with self._queue.lock:
            return self._writing.in_use

    def place(self, span: Span) -> int:
        """Returns where a span begins in the ring's memory, in bytes."""
        return self._writing.place(span)

    def reserve(self, num_bytes: int, waiter: Waiter) -> Span | None:
        """Reserves a span. If it returns None, the waiter is woken when there is one, unless it `withdraw`s."""
        return self._queue.take(num_bytes, waiter)

    def withdraw(self, waiter: Waiter) -> None:
        """Takes a waiter out of the queue. One that does not wait is ignored."""
        self._queue.withdraw(waiter)

    @property
    def num_waiting(self) -> int:
        """How many waiters there are."""
        return len(self._queue)

    def read_until(self, position: int) -> None:
        """Applies a credit: up to where the ring was read."""
        with self._queue.lock:
            if not self._writing.read_until(position):
                return
        self._queue.wake_next()


@dataclass(frozen=True, slots=True, eq=False)
class PeerMemory:
    """Staging memory of a receiver that this rank writes to.

    Attributes:
        address: where it is.
        epoch: distinguishes credits for it from those for an earlier one.
        ring: what of it is free.
    """

    address: int
    epoch: int
    ring: SharedRing
