"""Writes that have failed, until all that was sent of them has had time to arrive.

A transport that reports an error sends nothing more. What it had sent lies in buffers of both machines, and lands when
the receiver's processor comes to it: after the error. Until then the receiver's memory is not its own again. Both sides
count: the writer before it says that nothing is on its way, and the receiver, which may have been frozen all that time
and reads its sockets only now, from then on.

The writer's kernel sends whether or not the writer runs, so that there a late look loses nothing but a jump of the
clock; the receiver must not count the time of its own freeze. Hence on both sides half of the time at most counts at a
look.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvferry.protocol.time_awake import TimeAwake


class Settling:
    """Counts the time since each write failed. For one thread."""

    def __init__(self, settle_s: float, now: Callable[[], float]) -> None:
        """Starts with no writes.

        Args:
            settle_s: how long what was sent may take to arrive.
        """
        self._settle_s = settle_s
        self._now = now
        self._awake = TimeAwake(settle_s)
        self._awake_s = 0.0  # that has passed
        self._failed: deque[tuple[float, Callable[[], None]]] = deque()  # with when they settle, in that time

    def __bool__(self) -> bool:
        return bool(self._failed)

    def add(self, on_settled: Callable[[], None]) -> None:
        """Begins to count for a write that has just failed, or of which that was just heard."""
        self.look()
        self._failed.append((self._awake_s + self._settle_s, on_settled))

    def look(self) -> bool:
        """Calls `on_settled` of those that have settled; returns whether there were any. Must be called often.

        Of a long time between two calls only a part counts: this process was frozen, or its clock jumped.
        """
        self._awake_s += self._awake.passed_s(self._now())
        has_settled = False
        while self._failed and self._failed[0][0] <= self._awake_s:
            _, on_settled = self._failed.popleft()
            on_settled()
            has_settled = True
        return has_settled
