"""Lines of those who wait: who is due first stands first, and of equals who came first."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

Who = TypeVar("Who")
Need = TypeVar("Need")

Turn: TypeAlias = tuple[float, int]
"""When somebody is due, and how many came before."""


@dataclass(frozen=True, slots=True, eq=False)
class Standing(Generic[Who, Need]):
    """Somebody who waits, and for what."""

    turn: Turn
    who: Who
    need: Need


def _turn_of(standing: Standing[Who, Need]) -> Turn:
    return standing.turn


class Line(Generic[Who, Need]):
    """Those who wait, in the order of their turns. Whoever has it guards it."""

    def __init__(self) -> None:
        self._turns: dict[Who, Turn] = {}
        self._standing: list[Standing[Who, Need]] = []

    def __len__(self) -> int:
        return len(self._standing)

    def __iter__(self) -> Iterator[Standing[Who, Need]]:
        return iter(self._standing)

    @property
    def first(self) -> Standing[Who, Need] | None:
        """Whose turn is next."""
        return self._standing[0] if self._standing else None

    def join(self, standing: Standing[Who, Need]) -> None:
        """Adds somebody who does not stand in it."""
        self._turns[standing.who] = standing.turn
        insort(self._standing, standing, key=_turn_of)

    def leave(self, who: Who) -> Turn | None:
        """Takes somebody out; returns the turn that was given up, None if there was none."""
        turn = self._turns.pop(who, None)
        if turn is not None:
            del self._standing[bisect_left(self._standing, turn, key=_turn_of)]
        return turn
