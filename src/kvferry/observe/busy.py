"""How long a wire was busy: the union of the intervals in which something was on it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

MOST_INTERVALS = 4096


class BusyTime:
    """Adds up the time during which at least one of several things was going on.

    Bytes divided by it never exceed what the wire carries, however many writes overlap: time counts once. Intervals may
    come in any order. One thread at a time may use it.
    """

    def __init__(self, most_intervals: int = MOST_INTERVALS) -> None:
        """Begins with nothing counted.

        Args:
            most_intervals: that are remembered. Beyond that the older half is forgotten, and a write that began before
                those has their time counted again: busy too long rather than not long enough.
        """
        self._most_intervals = most_intervals
        # Disjoint, with gaps between them, in the order of time: where each begins, and where it ends.
        self._begins: list[float] = []
        self._ends: list[float] = []
        self._total_s = 0.0

    def add(self, begin: float, end: float) -> float:
        """Counts the time between two points; returns how much of it was not counted before, in seconds."""
        begins, ends = self._begins, self._ends
        first, stop = bisect_left(ends, begin), bisect_right(begins, end)  # those that it touches
        counted_s = 0.0
        if first < stop:
            counted_s = sum(ends[each] - begins[each] for each in range(first, stop))
            begin, end = min(begin, begins[first]), max(end, ends[stop - 1])
        begins[first:stop], ends[first:stop] = [begin], [end]
        if len(begins) > self._most_intervals:
            del begins[: len(begins) // 2], ends[: len(ends) // 2]
        new_s = max(0.0, end - begin - counted_s)
        self._total_s += new_s
        return new_s

    @property
    def total_s(self) -> float:
        """Seconds that were counted so far."""
        return self._total_s
