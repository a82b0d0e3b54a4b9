"""Rings of staging memory, and the credits that say how much of one is free.

Positions count the bytes of a ring for ever: divided by its size they give a round and a place in it. The writing side
hands spans out in order, and the reading side reports up to which position everything was read: the watermark. What is
between the two is in use, and must never be more than the ring. The writing side asks for nothing before it writes, and
a watermark that is late or comes twice does no harm. Several rooms of the writing side share a ring, and who finds no
memory free waits in a queue, as those do who wait for a slot (`slots`).
"""

from __future__ import annotations

import itertools
import math
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from kvferry.plan.packing import aligned
from kvferry.staging.lines import Line, Standing, Turn

_BEHIND_ALL = (math.inf, 0)

Need = TypeVar("Need")
Grant = TypeVar("Grant")


class Waiter(Protocol):
    """Whoever waits for memory. Told apart by identity."""

    def wake(self) -> None:
        """It is your turn: try again. From any thread; returns at once."""


class WaitQueue(Generic[Need, Grant]):
    """Hands memory out to whoever asks, and what is not free to those who wait for it: first who is due first.

    Of those that are due at the same time whoever came first is. A waiter that is woken asks again, or withdraws; until
    then nobody who stands behind it is served in its place.

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
        self._comings = itertools.count()
        self.lock = threading.Lock()
        self._grant = grant
        self._is_free = is_free
        self._may_overtake = may_overtake
        self._line: Line[Waiter, Need] = Line()

    def __len__(self) -> int:
        return len(self._line)

    def take(self, need: Need, waiter: Waiter, due_at: float = 0.0) -> Grant | None:
        """Takes what is needed; None if the waiter must wait: it is woken when it is free, or `withdraw`s."""
        with self.lock:
            if not self._line and (grant := self._grant(need)) is not None:
                return grant
            was_next = self._next_to_wake() is waiter
            before = self._line.leave(waiter)
            turn = due_at, next(self._comings) if before is None else before[1]
            grant = self._grant(need) if self._first_before(turn) is None else None
            if grant is None:
                self._line.join(Standing(turn, waiter, need))
            following = self._next_to_wake()
        # Whoever was woken and stands behind another by now leaves its turn to that one.
        if (grant is not None or was_next) and following is not None and following is not waiter:
            following.wake()
        return grant

    def take_now(self, need: Need, due_at: float) -> Grant | None:
        """Takes what is needed if it is free and nobody waits who is due before, or then; and does not wait for it."""
        with self.lock:
            is_first = self._first_before((due_at, sys.maxsize)) is None
            return self._grant(need) if is_first and self._is_free(need) else None

    def withdraw(self, waiter: Waiter) -> None:
        """Ends a wait. Whoever does not wait is ignored."""
        with self.lock:
            if self._line.leave(waiter) is None:
                return
        self.wake_next()

    def wake_next(self) -> None:
        """Wakes the first waiter if there is something for it now; to be called, unlocked, when memory was freed."""
        with self.lock:
            waiter = self._next_to_wake()
        if waiter is not None:
            waiter.wake()

    def _next_to_wake(self) -> Waiter | None:
        first = self._first_before(_BEHIND_ALL)
        return first.who if first is not None and self._is_free(first.need) else None

    def _first_before(self, turn: Turn) -> Standing[Waiter, Need] | None:
        """The waiter that nobody behind it may go before; None if none stands before a turn."""
        for standing in self._line:
            if standing.turn >= turn:
                break
            if not self._may_overtake or self._is_free(standing.need):
                return standing
        return None


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a ring.

    Attributes:
        start: where it begins, with the gap before its first byte.
        begin: the position of its first byte.
        stop: the position after its last.
    """

    start: int
    begin: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds."""
        return self.stop - self.begin


class WritingRing:
    """The side that hands spans out.

    Attributes:
        num_bytes: the ring's size.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._head = 0
        self._read = 0

    @property
    def in_use(self) -> int:
        """Bytes between the watermark and what was handed out last."""
        return self._head - self._read

    def reserve(self, num_bytes: int) -> Span | None:
        """Reserves the next span of so many bytes, which lie together; returns None while they are not free.

        Raises:
            ValueError: if no ring of this size has such a span; callers check that first, and name the setting.
        """
        if not 0 < num_bytes <= self.num_bytes:
            raise ValueError(f"a span of {num_bytes} bytes in a ring of {self.num_bytes}")
        span = self._next(num_bytes)
        if not self._is_free(span):
            return None
        if not self.in_use:
            self._read = span.begin  # the gap before it holds nothing
        self._head = span.stop
        return span

    def can_reserve(self, num_bytes: int) -> bool:
        """Returns whether `reserve` would give so many bytes now."""
        return 0 < num_bytes <= self.num_bytes and self._is_free(self._next(num_bytes))

    def _next(self, num_bytes: int) -> Span:
        place = self._head % self.num_bytes
        skipped = aligned(place) - place  # so that what is aligned within a span is aligned in memory
        # A span does not wrap around; and an empty ring begins in front, where memory is in the cache still.
        if place + skipped + num_bytes > self.num_bytes or (place and not self.in_use):
            skipped = self.num_bytes - place
        begin = self._head + skipped
        return Span(self._head, begin, begin + num_bytes)

    def _is_free(self, span: Span) -> bool:
        oldest = self._read if self.in_use else span.begin
        return span.stop - oldest <= self.num_bytes

    def place(self, span: Span) -> int:
        """Returns where a span begins in the ring's memory, in bytes."""
        return span.begin % self.num_bytes

    def read_until(self, position: int) -> bool:
        """Applies a watermark. Returns whether it is news; an impossible one is ignored."""
        if not self._read < position <= self._head:
            return False
        self._read = position
        return True


@dataclass(slots=True)
class ReadingRing:
    """The side that reads spans, in any order.

    Attributes:
        num_bytes: the ring's size.
        position: the watermark: up to here everything was read.
    """

    num_bytes: int
    position: int = 0
    _ahead: dict[int, int] = field(default_factory=dict)  # start -> stop of spans that were read before their turn

    def can_hold(self, span: Span) -> bool:
        """Returns whether a span that a peer names can be one of this ring: it lies together, and is not read."""
        return (
            self.position <= span.start <= span.begin < span.stop <= self.position + 2 * self.num_bytes
            and span.begin // self.num_bytes == (span.stop - 1) // self.num_bytes
            and span.start not in self._ahead
        )

    def release(self, span: Span) -> None:
        """Marks a span as read, or as released unwritten."""
        self._ahead[span.start] = span.stop
        while (stop := self._ahead.pop(self.position, None)) is not None:
            self.position = stop


class SharedRing:
    """Hands out spans of a ring, and queues those who must wait for one.

    None of them overtakes another because it needs less, so that a room whose next sub-chunk is large is not passed by.

    Attributes:
        writing: what is written, and what is free.
    """

    def __init__(self, num_bytes: int) -> None:
        self.writing = WritingRing(num_bytes)
        # Its lock guards all of it: rooms on several workers ask, and credits come to the control thread.
        self._queue = WaitQueue(self.writing.reserve, self.writing.can_reserve, may_overtake=False)

    @property
    def num_bytes(self) -> int:
        """The ring's size."""
        return self.writing.num_bytes

    @property
    def in_use(self) -> int:
        """Bytes that were handed out and not read yet."""
        with self._queue.lock:
            return self.writing.in_use

    def place(self, span: Span) -> int:
        """Returns where a span begins in the ring's memory, in bytes."""
        return self.writing.place(span)

    def reserve(self, num_bytes: int, waiter: Waiter, due_at: float = 0.0) -> Span | None:
        """Reserves a span. If it returns None, the waiter is woken when there is one, unless it `withdraw`s."""
        return self._queue.take(num_bytes, waiter, due_at)

    def reserve_now(self, num_bytes: int, due_at: float) -> Span | None:
        """Reserves a span if there is one, as `WaitQueue.take_now`."""
        return self._queue.take_now(num_bytes, due_at)

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
            if not self.writing.read_until(position):
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
