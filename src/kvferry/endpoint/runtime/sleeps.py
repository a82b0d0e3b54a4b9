"""How long a thread sleeps between two looks at what nobody tells it of: writes that end, bytes that arrive."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SleepBounds:
    """How long sleeps are.

    Attributes:
        shortest_s: right after something has happened.
        of_quiet: of the time that nothing has: what happens is noticed that much later than it might be.
        longest_s: after a long time.
    """

    shortest_s: float
    of_quiet: float
    longest_s: float

    def next_s(self, quiet_s: float) -> float:
        """Returns how long to sleep.

        Args:
            quiet_s: since when nothing has happened.
        """
        return min(max(self.shortest_s, quiet_s * self.of_quiet), self.longest_s)
