"""How long a thread sleeps between two looks at what nobody tells it of: writes that end, bytes that arrive.

A look takes the interpreter's lock. As long as that is free, looks cost next to nothing, and come soon. A thread that
computes all the time gives the lock away only when it is asked to, after 5 ms (`sys.getswitchinterval`), and loses a
part of a step each time; and a look costs 5 ms whenever it is due. So where sleeps end late, looks are few.
"""

from __future__ import annotations

from dataclasses import dataclass

_LATE_S = 2e-3
"""From this on a sleep ended late for the lock, and not for want of a processor."""

_LOOKS_REMEMBERED = 2
_CONTENDED_OF_QUIET = 0.5


@dataclass(frozen=True, slots=True)
class SleepBounds:
    """How long sleeps are.

    Attributes:
        shortest_s: right after something has happened.
        of_quiet: of the time that nothing has: what happens is noticed that much later than it might be.
        longest_s: after a long time, while the lock is free.
        longest_contended_s: after a long time, while another thread keeps it.
    """

    shortest_s: float
    of_quiet: float
    longest_s: float
    longest_contended_s: float


class Sleeps:
    """Chooses how long the next sleep is. For one thread."""

    def __init__(self, bounds: SleepBounds) -> None:
        """Begins as if the lock were free."""
        self._bounds = bounds
        self._remembered = 0  # looks for which the lock still counts as kept

    def next_s(self, quiet_s: float) -> float:
        """Returns how long to sleep.

        Args:
            quiet_s: since when nothing has happened.
        """
        bounds = self._bounds
        asked_s = min(max(bounds.shortest_s, quiet_s * bounds.of_quiet), bounds.longest_s)
        if self._remembered:
            asked_s = max(asked_s, min(quiet_s * _CONTENDED_OF_QUIET, bounds.longest_contended_s))
        return asked_s

    def slept(self, asked_s: float, took_s: float) -> None:
        """Takes note of a sleep. One that something else ended says nothing."""
        if took_s - asked_s >= _LATE_S:
            self._remembered = _LOOKS_REMEMBERED
        elif took_s >= asked_s:
            self._remembered = max(0, self._remembered - 1)
