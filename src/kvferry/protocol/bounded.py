"""Dictionaries of bounded size."""

from __future__ import annotations

from typing import TypeVar

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


def forget_oldest(remembered: dict[KeyT, ValueT], limit: int) -> None:
    """Drops the oldest entries until no more than `limit` are left."""
    while len(remembered) > limit:
        del remembered[next(iter(remembered))]
