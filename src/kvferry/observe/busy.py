"""For how long a wire was busy: the union of the intervals in which something was on it."""

from __future__ import annotations

import threading


class BusyTime:
    """Adds up the time during which at least one of several things was going on.

    Bytes divided by it never exceed what the wire carries, however many writes overlap: time counts once. It counts
    when something ends, together with the bytes that it carried.
    """

    def __init__(self) -> None:
        # Guards all of it: things begin and end in any thread.
        self._lock = threading.Lock()
        self._going_on = 0
        self._counted_until = 0.0
        self._total_s = 0.0

    def begin(self, now: float) -> None:
        """Something begins."""
        with self._lock:
            if not self._going_on:
                self._counted_until = max(self._counted_until, now)
            self._going_on += 1

    def end(self, now: float) -> float:
        """Something that began has ended; returns the time that is counted for it."""
        with self._lock:
            self._going_on -= 1
            counted_s = max(0.0, now - self._counted_until)
            self._counted_until = max(self._counted_until, now)
            self._total_s += counted_s
            return counted_s

    @property
    def total_s(self) -> float:
        """All that was counted so far."""
        with self._lock:
            return self._total_s
