"""Which wishes of decode ranks have come: one that comes again is known, however late it does.

A decode rank says a wish again when a connection broke, and the network may keep the second one for as long as it
likes: until the room is over, forgotten, and its number in use for another request. So wishes are numbered, without
gaps within one attempt to connect, and what has come is remembered as the highest number and those missing below it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvferry.protocol.bounded import forget_oldest

MOST_RECEIVERS = 1 << 16
MOST_MISSING = 1 << 16
"""Of one decode rank: wishes that a connection lost, or took to where nobody listened. Older ones are given up."""


class Heard(Enum):
    """How a wish has come."""

    FIRST = "for the first time"
    AGAIN = "again"
    TOO_LATE = "after a newer attempt to connect, with which everything before it was given up"


@dataclass(slots=True)
class _Attempt:
    number: int
    highest: int = 0
    missing: dict[int, None] = field(default_factory=dict)  # in order


class HeardWishes:
    """The wishes that have come, by decode rank. Those that have not been heard of for longest are forgotten."""

    def __init__(self) -> None:
        self._attempts: dict[str, _Attempt] = {}  # those heard of last stand last

    def attached(self, receiver: str, attempt: int) -> None:
        """A decode rank connects: wishes of earlier attempts do not count any more."""
        self._attempt(receiver, attempt)

    def hear(self, receiver: str, attempt: int, serial: int) -> Heard:
        """A wish has come, or an abort that belongs to it.

        Args:
            attempt: the attempt to connect that it belongs to.
            serial: its number, from 1 on.
        """
        known = self._attempt(receiver, attempt)
        if known.number > attempt:
            return Heard.TOO_LATE
        if serial > known.highest:
            first = max(known.highest + 1, serial - MOST_MISSING)
            known.missing.update(dict.fromkeys(range(first, serial)))
            known.highest = serial
            forget_oldest(known.missing, MOST_MISSING)
            return Heard.FIRST
        if serial in known.missing:
            del known.missing[serial]
            return Heard.FIRST
        return Heard.AGAIN

    def _attempt(self, receiver: str, attempt: int) -> _Attempt:
        known = self._attempts.pop(receiver, None)
        if known is None or known.number < attempt:
            known = _Attempt(attempt)
        self._attempts[receiver] = known
        forget_oldest(self._attempts, MOST_RECEIVERS)
        return known
