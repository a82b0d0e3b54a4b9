"""What a prefill rank knows of decode ranks: who they are, who was given up, and whose writes broke off."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass

from kvferry.endpoint.prefill.attachment import Attachment
from kvferry.endpoint.prefill.peers import DecodePeers
from kvferry.errors import KVFerryError
from kvferry.protocol.bounded import forget_oldest
from kvferry.protocol.wire.rank_identity import DecodeRank

_MOST_BROKEN_OFF = 1 << 12  # names of decode ranks: a thousand times as many as may be frozen at a time


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A decode rank that was given up, and may come back.

    Attributes:
        rank: which it is; None if it had not attached.
        error: why.
    """

    rank: DecodeRank | None
    error: KVFerryError


class DecodeRanks:
    """Decode ranks by name: those that are connected, and what is remembered of others. May be read from any thread."""

    def __init__(self, peers: DecodePeers, *, most_given_up: int) -> None:
        """Begins with nothing to remember.

        Args:
            peers: the connections.
            most_given_up: how many that were given up are remembered.
        """
        self._peers = peers
        self._most_given_up = most_given_up
        self._given_up: dict[str, GivenUp] = {}  # the latest stand last
        # Guards the numbers of the last failed writes, which workers give.
        self._lock = threading.Lock()
        self._last_failures: dict[str, int] = {}  # the latest stand last
        self._failure_numbers = itertools.count(1)

    def attachment(self, name: str) -> Attachment | None:
        """Returns what is prepared for a decode rank; None if it is not connected."""
        peer = self._peers.get(name)
        return peer.attachment if peer is not None else None

    def rank(self, name: str) -> DecodeRank | None:
        """Returns which decode rank has that name; None if it has not attached."""
        attachment, given_up = self.attachment(name), self._given_up.get(name)
        return attachment.rank if attachment is not None else given_up.rank if given_up is not None else None

    def connected(self) -> list[DecodeRank | None]:
        """Returns which decode ranks are connected; None for one that has not attached yet."""
        return [each.rank if (each := peer.attachment) is not None else None for peer in self._peers.all()]

    def given_up(self, name: str) -> GivenUp | None:
        """Returns what is known of a decode rank that was given up; None if it was not, or has come back."""
        return self._given_up.get(name)

    def give_up(self, name: str, error: KVFerryError) -> None:
        """Remembers a decode rank, still connected, that is given up. For the control thread."""
        attachment = self.attachment(name)
        self._given_up[name] = GivenUp(attachment.rank if attachment is not None else None, error)
        forget_oldest(self._given_up, self._most_given_up)

    def forgive(self, name: str) -> None:
        """Forgets that a decode rank was given up. For the control thread."""
        self._given_up.pop(name, None)

    @property
    def all(self) -> list[str]:
        """All that are connected or were given up."""
        return [*(peer.name for peer in self._peers.all()), *self._given_up]

    def broken_off(self, name: str) -> None:
        """Remembers a decode rank to which a write failed of which something had been sent."""
        with self._lock:
            self._last_failures.pop(name, None)
            self._last_failures[name] = next(self._failure_numbers)
            forget_oldest(self._last_failures, _MOST_BROKEN_OFF)

    def was_broken_off(self, name: str) -> bool:
        """Whether such a write ever failed."""
        return name in self._last_failures

    def last_failure_to(self, name: str) -> int:
        """Returns the number of the last such write; 0 if there was none."""
        return self._last_failures.get(name, 0)
