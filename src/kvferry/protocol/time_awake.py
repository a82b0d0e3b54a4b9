"""Time during which this process ran: what may arrive late arrives then, and nothing is heard while it stands still."""

from __future__ import annotations


class TimeAwake:
    """Counts the time between looks; of a long one only a part, since the process was frozen, or its clock jumped.

    That part is half of what is waited for: a freeze right after a look never counts as all of it, and looks that are
    far apart, as beside a thread that keeps the interpreter's lock, lose nothing.
    """

    def __init__(self, awaited_s: float) -> None:
        """Counts from the first look on.

        Args:
            awaited_s: how long whoever counts here waits.
        """
        self._most_at_once_s = awaited_s / 2
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
