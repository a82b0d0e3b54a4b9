"""Dictionaries of bounded size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


def forget_oldest(remembered: dict[KeyT, ValueT], limit: int) -> None:
    """Drops the oldest entries until no more than `limit` are left."""
    while len(remembered) > limit:
        del remembered[next(iter(remembered))]


def remember(remembered: OrderedDict[KeyT, ValueT], key: KeyT, value: ValueT, limit: int) -> None:
    """Puts an entry in as the youngest, and drops the oldest until no more than `limit` are left.

    A thread that looks an entry up meanwhile, without a lock, finds the earlier value or this one.
    """
    remembered[key] = value
    remembered.move_to_end(key)
    forget_oldest(remembered, limit)


class ForAWhile(Generic[KeyT, ValueT]):
    """Entries that are forgotten when their time is over."""

    def __init__(self, keep_s: float) -> None:
        """Begins empty.

        Args:
            keep_s: how long an entry is kept, in seconds.
        """
        self._keep_s = keep_s
        self._entries: OrderedDict[KeyT, tuple[float, ValueT]] = (
            OrderedDict()
        )  # until when, and what; the youngest stand last

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[KeyT]:
        return iter(self._entries)

    def __contains__(self, key: KeyT) -> bool:
        return key in self._entries

    def get(self, key: KeyT) -> ValueT | None:
        """Returns the value of an entry; None if there is no such entry."""
        entry = self._entries.get(key)
        return entry[1] if entry is not None else None

    def put(self, key: KeyT, value: ValueT, now: float, *, limit: int) -> None:
        """Puts an entry in as the youngest, and drops the oldest until no more than `limit` are left."""
        remember(self._entries, key, (now + self._keep_s, value), limit)

    def pop(self, key: KeyT) -> ValueT | None:
        """Returns and forgets the value of an entry; None if there is no such entry."""
        entry = self._entries.pop(key, None)
        return entry[1] if entry is not None else None

    def forget_old(self, now: float) -> list[ValueT]:
        """Drops the entries whose time is over. Returns their values."""
        old = []
        while self._entries and now >= next(iter(self._entries.values()))[0]:
            old.append(self._entries.pop(next(iter(self._entries)))[1])
        return old
