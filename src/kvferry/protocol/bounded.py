"""Memories with a limit."""

from __future__ import annotations

from typing import TypeVar

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


def forget_oldest(remembered: dict[KeyT, ValueT], limit: int) -> None:
    """Drops what was remembered first, until no more than `limit` entries are left."""
    while len(remembered) > limit:
        del remembered[next(iter(remembered))]
