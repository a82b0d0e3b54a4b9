"""Half-open ranges of global indices, and boxes of them.

A box is one interval per logical axis. Everything that tensor parallelism, pipeline stages or replication do to a
cache is to choose the box that a rank holds; nothing here knows their names.
"""

from __future__ import annotations

from math import prod
from typing import Annotated, TypeAlias

import msgspec

from kvferry.errors import LayoutError

LARGEST_INDEX = 1 << 48
"""Largest index on any axis, far beyond real ones. Messages with a larger number are refused."""

WireIndex: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_INDEX)]


class Interval(msgspec.Struct, frozen=True, order=True, array_like=True):
    """The global indices start, start + 1, ..., stop - 1 of one logical axis.

    Attributes:
        start: the first.
        stop: the one after the last.

    Raises:
        LayoutError: if start is negative or lies behind stop.
    """

    start: WireIndex
    stop: WireIndex

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise LayoutError(f"interval [{self.start}, {self.stop}) must satisfy 0 <= start <= stop")

    def __len__(self) -> int:
        return self.stop - self.start

    def __bool__(self) -> bool:
        return self.stop > self.start

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"

    def overlap(self, other: Interval) -> Interval | None:
        """Returns the indices in both intervals, or None if there are none."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Interval(start, stop) if start < stop else None

    def covers(self, other: Interval) -> bool:
        """Returns whether every index of `other` is in this interval."""
        return self.start <= other.start and other.stop <= self.stop


Box: TypeAlias = tuple[Interval, ...]
"""One interval per axis, in the order of the component's axes."""


def overlap(left: Box, right: Box) -> Box | None:
    """Returns the box of elements that lie in both, axis by axis; None if there are none."""
    shared = []
    for one, other in zip(left, right, strict=True):
        both = one.overlap(other)
        if both is None:
            return None
        shared.append(both)
    return tuple(shared)


def covers(outer: Box, inner: Box) -> bool:
    """Returns whether every element of `inner` lies in `outer`."""
    return all(one.covers(other) for one, other in zip(outer, inner, strict=True))


def volume(box: Box) -> int:
    """Returns how many elements a box has."""
    return prod(len(interval) for interval in box)
