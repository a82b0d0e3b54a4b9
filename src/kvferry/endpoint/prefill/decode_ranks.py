"""Decode ranks by name: those that are connected to a prefill rank, and what it remembers of others.

Of each there is a connection, which workers make and undo, and a reliable channel; and it is remembered who was given
up, and whose writes broke off.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvferry.endpoint.prefill.attachment import Attachment
from kvferry.endpoint.prefill.paths import SendingStaging
from kvferry.endpoint.prefill.peers import DecodePeer, DetachRequested, PeerContext
from kvferry.endpoint.runtime.run_queue import RunQueue
from kvferry.errors import KVFerryError
from kvferry.observe.observer import Observer
from kvferry.protocol.bounded import remember
from kvferry.protocol.links.decode_channels import DecodeChannels
from kvferry.protocol.wire.field_types import Message
from kvferry.protocol.wire.messages import Attach
from kvferry.protocol.wire.rank_identity import DecodeRank, Identity
from kvferry.transport import Transport

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
    """All decode ranks. May be read from any thread; the control thread attaches, loses and forgives them.

    Attributes:
        channels: the reliable channels to them, for the control thread.
    """

    def __init__(
        self,
        identity: Identity,
        transport: Transport,
        staging: SendingStaging,
        *,
        most_given_up: int,
        queue_of: Callable[[bytes], RunQueue],
        observer: Observer,
        send: Callable[[str, Message], None],
    ) -> None:
        """Begins with nobody connected, and nothing to remember.

        Args:
            identity: the prefill rank's, as `transport` and `staging` are.
            most_given_up: how many that were given up are remembered.
            queue_of: returns where a connection waits for a worker.
            observer: is told what happens.
            send: sends a control message to a decode rank.
        """
        self.channels = DecodeChannels(identity.endpoint)
        self._queue_of = queue_of
        self._context = PeerContext(identity, transport, staging, observer, send, self.broken_off, self.last_failure_to)
        # Guards both tables of connections, which workers read while the control thread adds and removes, and the
        # numbers of the last failed writes, which workers give.
        self._lock = threading.Lock()
        self._peers: dict[str, DecodePeer] = {}
        self._detaching: dict[str, DecodePeer] = {}
        self._most_given_up = most_given_up
        self._given_up: dict[str, GivenUp] = {}  # the latest stand last
        self._last_failures: dict[str, int] = {}  # the latest stand last
        self._failure_numbers = itertools.count(1)

    # ---- connections --------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Returns the number of connections, those that are being undone included."""
        with self._lock:
            return len(self._peers) + len(self._detaching)

    def peers(self) -> list[DecodePeer]:
        """Returns the connections."""
        with self._lock:
            return list(self._peers.values())

    def peer(self, name: str) -> DecodePeer | None:
        """Returns the connection to a decode rank; None if it is not connected."""
        with self._lock:
            return self._peers.get(name)

    def attachment(self, name: str) -> Attachment | None:
        """Returns what is prepared for a decode rank; None if it is not connected."""
        peer = self.peer(name)
        return peer.attachment if peer is not None else None

    def is_attached(self, name: str) -> bool:
        """Whether a decode rank is connected, and messages to it come."""
        return self.attachment(name) is not None and self.channels.is_open(name)

    def attach(self, message: Attach, now: float) -> bool:
        """Connects a decode rank, perhaps anew. Returns whether it does so for the first time with this attempt."""
        self.forgive(message.endpoint)
        is_first = self.channels.attached(message.endpoint, message.attempt)
        self._connect(message, now)
        return is_first

    def _connect(self, message: Attach, now: float) -> None:
        """Makes a new connection to a decode rank. An earlier one is undone first; a later one stays."""
        name, attempt = message.endpoint, message.attempt
        known = self.peer(name)
        if known is not None and known.attempt > attempt:
            return
        if known is None or known.attempt < attempt:
            self._disconnect(name)
            with self._lock:
                earlier = self._detaching.get(name)
                queue = self._queue_of(name.encode())
                known = DecodePeer(name, queue, self._context, attempt=attempt, earlier=earlier, now=now)
                self._peers[name] = known
        known.post(message)

    def _disconnect(self, name: str) -> None:
        """Takes a connection out of the table and undoes it."""
        with self._lock:
            peer = self._peers.pop(name, None)
            if peer is None:
                return
            self._detaching[name] = peer
        peer.post(DetachRequested())
        peer.when_undone(partial(self._forget, peer))

    def _forget(self, peer: DecodePeer) -> None:
        with self._lock:
            if self._detaching.get(peer.name) is peer:
                del self._detaching[peer.name]

    # ---- who they are, and were ---------------------------------------------------------------------------------

    @property
    def all(self) -> list[str]:
        """All that are connected or were given up."""
        return [*(peer.name for peer in self.peers()), *self._given_up]

    def rank(self, name: str) -> DecodeRank | None:
        """Returns which decode rank has that name; None if it has not attached."""
        attachment, given_up = self.attachment(name), self._given_up.get(name)
        return attachment.rank if attachment is not None else given_up.rank if given_up is not None else None

    def connected(self) -> list[DecodeRank | None]:
        """Returns which decode ranks are connected; None for one that has not attached yet."""
        return [each.rank if (each := peer.attachment) is not None else None for peer in self.peers()]

    def lose(self, name: str) -> DecodeRank | None:
        """Ends all that there is to a decode rank. Returns which it was; None if it had not attached."""
        rank = self.rank(name)
        self.channels.close(name)
        self._disconnect(name)
        return rank

    def give_up(self, name: str, error: KVFerryError) -> DecodeRank | None:
        """Loses a decode rank that may come back, and remembers why; returns as `lose`."""
        remember(self._given_up, name, GivenUp(self.rank(name), error), self._most_given_up)
        return self.lose(name)

    def forgive(self, name: str) -> None:
        """Forgets that a decode rank was given up."""
        self._given_up.pop(name, None)

    def given_up(self, name: str) -> GivenUp | None:
        """Returns what is known of a decode rank that was given up; None if it was not, or has come back."""
        return self._given_up.get(name)

    # ---- writes that failed -------------------------------------------------------------------------------------

    def broken_off(self, name: str) -> None:
        """Remembers a decode rank to which a write failed of which something had been sent."""
        with self._lock:
            remember(self._last_failures, name, next(self._failure_numbers), _MOST_BROKEN_OFF)

    def was_broken_off(self, name: str) -> bool:
        """Whether such a write ever failed."""
        return name in self._last_failures

    def last_failure_to(self, name: str) -> int:
        """Returns the number of the last such write; 0 if there was none."""
        return self._last_failures.get(name, 0)
