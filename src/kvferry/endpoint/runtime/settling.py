"""Writes that have failed, until all that was sent of them has had time to arrive.

A transport that reports an error sends nothing more. What it had sent lies in buffers of both machines, and lands when
the receiver's processor comes to it: after the error. Until then the receiver's memory is not its own again. Both sides
count: the writer before it says that nothing is on its way, and the receiver, which may have been frozen all that time
and reads its sockets only now, from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.protocol.time_awake import TimeAwake

_MOST_AT_ONCE_S = 0.05
"""Of the time between two looks. A worker looks every millisecond unless it is busy; a clock that jumps, or a machine
that stood still, must not add up to what is waited for."""


@dataclass(slots=True, eq=False)
class _Failed:
    on_settled: Callable[[], None]
    counted_s: float = 0.0


class Settling:
    """Counts the time since each write failed. For one thread."""

    def __init__(self, settle_s: float, now: Callable[[], float], *, most_at_once_s: float = _MOST_AT_ONCE_S) -> None:
        """Starts with no writes.

        Args:
            settle_s: how long what was sent may take to arrive.
            now: the time, in seconds of a steady clock.
            most_at_once_s: the most that counts between two looks; longer than they are apart while all is well.
        """
        self._settle_s = settle_s
        self._now = now
        self._failed: list[_Failed] = []
        self._awake = TimeAwake(most_at_once_s=most_at_once_s)

    def __bool__(self) -> bool:
        return bool(self._failed)

    def add(self, on_settled: Callable[[], None]) -> None:
        """Begins to count for a write that has just failed, or of which that was just heard."""
        self.look()
        self._failed.append(_Failed(on_settled))

    def look(self) -> bool:
        """Calls `on_settled` of those that have settled; returns whether there were any. Must be called often.

        Of a longer time between two calls only a part counts: this process was frozen, or its clock jumped.
        """
        passed_s = self._awake.passed_s(self._now())
        for each in self._failed:
            each.counted_s += passed_s
        settled = [each for each in self._failed if each.counted_s >= self._settle_s]
        if settled:
            self._failed = [each for each in self._failed if each.counted_s < self._settle_s]
        for each in settled:
            each.on_settled()
        return bool(settled)
