"""Time during which this process ran: what may arrive late arrives then, and nothing is heard while it stands still."""

from __future__ import annotations

_MOST_AT_ONCE_S = 0.5
"""As far apart looks are while nothing happens, and about so far beside a thread that keeps the interpreter's lock."""


class TimeAwake:
    """Counts the time between looks; of a long one only a part, since the process was frozen, or its clock jumped.

    That part is so small that after a freeze most of what is waited for is still to pass, and after another one much.
    """

    def __init__(self, awaited_s: float) -> None:
        """Counts from the first look on.

        Args:
            awaited_s: how long whoever counts here waits.
        """
        self._most_at_once_s = min(_MOST_AT_ONCE_S, awaited_s / 4)
        self._looked_at = 0.0

    def passed_s(self, now: float) -> float:
        """Returns how much time counts since the last look, in seconds.

        Args:
            now: the time, in seconds of a steady clock.
        """
        passed_s, self._looked_at = min(max(0.0, now - self._looked_at), self._most_at_once_s), now
        return passed_s


class Lateness:
    """How late looks come that should be regular: what was not heard meanwhile is nobody's silence."""

    def __init__(self) -> None:
        """The first look is not late."""
        self._looked_at = float("inf")

    def seconds(self, now: float, *, most_apart_s: float) -> float:
        """Returns how much later this look comes than it should: the process was frozen, or had no processor.

        Args:
            now: the time, in seconds of a steady clock.
            most_apart_s: the longest time between two looks while all is well.
        """
        late_s, self._looked_at = max(0.0, now - self._looked_at - most_apart_s), now
        return late_s
