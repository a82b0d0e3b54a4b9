"""A histogram to which adding costs a fraction of what it costs in the Prometheus client: each write adds several."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Distribution:
    """Counts of values between bounds, as `HistogramMetricFamily` takes them. One thread at a time may use it."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """Begins with no values.

        Args:
            bounds: rising; a value that equals one is below it.
        """
        self._bounds = tuple(bounds)
        self._names = (*(str(float(bound)) for bound in bounds), "+Inf")
        self._counts = [0] * len(self._names)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Counts a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Returns every bound, as Prometheus writes it, and how many values were not above it."""
        return list(zip(self._names, accumulate(self._counts), strict=True))
