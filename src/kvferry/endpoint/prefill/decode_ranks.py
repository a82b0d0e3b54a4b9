"""Decode ranks by name: those that are connected to a prefill rank, and what it remembers of others.

Of each there is a connection, which workers make and undo, and a reliable channel; and it is remembered who was given
up.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.endpoint.prefill.attachment import Attachment
from kvferry.endpoint.prefill.context import PrefillContext
from kvferry.endpoint.prefill.peers import DecodePeer, DetachRequested, EarlierUndone
from kvferry.endpoint.runtime.run_queue import RunQueue
from kvferry.errors import KVFerryError
from kvferry.protocol.bounded import remember
from kvferry.protocol.links.reliable_channel import DecodeChannels
from kvferry.protocol.wire.field_types import DecodeRank
from kvferry.protocol.wire.messages import Attach


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

    def __init__(self, context: PrefillContext, *, queue_of: Callable[[bytes], RunQueue]) -> None:
        """Begins with nobody connected, and nothing to remember.

        Args:
            queue_of: returns where a connection waits for a worker.
        """
        self.channels = DecodeChannels(context.identity.endpoint)
        self._queue_of = queue_of
        self._context = context
        # Guards both tables of connections, which workers read while the control thread adds and removes.
        self._lock = threading.Lock()
        self._peers: dict[str, DecodePeer] = {}
        self._detaching: dict[str, DecodePeer] = {}
        self._given_up: OrderedDict[str, GivenUp] = OrderedDict()  # the latest stand last

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
                known = DecodePeer(
                    name,
                    self._queue_of(name.encode()),
                    self._context,
                    attempt=attempt,
                    must_wait=earlier is not None,
                    on_undone=self._undone,
                    now=now,
                )
                if earlier is not None:
                    earlier.later = known
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

    def _undone(self, peer: DecodePeer) -> None:
        """Forgets a connection that is undone; the one that waits for that goes on."""
        with self._lock:
            if self._detaching.get(peer.name) is peer:
                del self._detaching[peer.name]
            later = peer.later
        if later is not None:
            later.post(EarlierUndone())

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
        remember(self._given_up, name, GivenUp(self.rank(name), error), self._context.settings.max_decode_ranks)
        return self.lose(name)

    def forgive(self, name: str) -> None:
        """Forgets that a decode rank was given up."""
        self._given_up.pop(name, None)

    def given_up(self, name: str) -> GivenUp | None:
        """Returns what is known of a decode rank that was given up; None if it was not, or has come back."""
        return self._given_up.get(name)
