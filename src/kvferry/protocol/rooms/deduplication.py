"""Tells retransmitted open requests from new ones, however late they arrive.

A decode rank retransmits its open requests when a connection broke, and the network may hold the second copy for as
long as it likes: until the room is over, forgotten, and its number in use for another request. So open requests are
numbered, without gaps within one attempt to connect, and what was received is remembered as the highest number and
those missing below it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvferry.protocol.bounded import forget_oldest

MOST_RECEIVERS = 1 << 16
MOST_MISSING = 1 << 16
"""Most missing open requests of one decode rank, lost or sent where no endpoint listened; the oldest are dropped."""


class Delivery(Enum):
    """How an open request was received."""

    FIRST = "for the first time"
    DUPLICATE = "as a retransmission"
    STALE = "after a newer attempt to connect, with which everything before it was given up"


@dataclass(slots=True)
class _Attempt:
    number: int
    highest: int = 0
    missing: dict[int, None] = field(default_factory=dict)  # in order


class OpenDeduplicator:
    """Remembers the open requests received, by decode rank. The rank that was silent for longest is forgotten first."""

    def __init__(self) -> None:
        self._attempts: dict[str, _Attempt] = {}  # the most recent stand last

    def attached(self, receiver: str, attempt: int) -> bool:
        """Records that a decode rank connects: open requests of its earlier attempts are ignored from now on.

        Returns whether it is a newer attempt than any before.
        """
        known = self._attempts.get(receiver)
        self._attempt(receiver, attempt)
        return known is None or known.number < attempt

    def receive(self, receiver: str, attempt: int, serial: int) -> Delivery:
        """Records an open request, or an abort that belongs to it. Returns which delivery it is.

        Args:
            attempt: the attempt to connect that it belongs to.
            serial: its number, from 1 on.
        """
        known = self._attempt(receiver, attempt)
        if known.number > attempt:
            return Delivery.STALE
        if serial > known.highest:
            first = max(known.highest + 1, serial - MOST_MISSING)
            known.missing.update(dict.fromkeys(range(first, serial)))
            known.highest = serial
            forget_oldest(known.missing, MOST_MISSING)
            return Delivery.FIRST
        if serial in known.missing:
            del known.missing[serial]
            return Delivery.FIRST
        return Delivery.DUPLICATE

    def has_received(self, receiver: str, attempt: int, serial: int) -> bool:
        """Returns whether an open request, or an abort that belongs to it, was received, or came too late to count.

        Args:
            attempt: as in `receive`.
            serial: likewise.
        """
        known = self._attempts.get(receiver)
        if known is None or known.number < attempt:
            return False
        return known.number > attempt or (serial <= known.highest and serial not in known.missing)

    def _attempt(self, receiver: str, attempt: int) -> _Attempt:
        known = self._attempts.pop(receiver, None)
        if known is None or known.number < attempt:
            known = _Attempt(attempt)
        self._attempts[receiver] = known
        forget_oldest(self._attempts, MOST_RECEIVERS)
        return known
