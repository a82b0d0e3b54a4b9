"""Gives decode ranks up that are silent, whose connection broke, or that another start of this rank serves now."""

from __future__ import annotations

from kvferry.endpoint.prefill.attachment import Attachment
from kvferry.endpoint.prefill.context import PrefillContext
from kvferry.endpoint.prefill.decode_ranks import DecodePeer, DecodeRanks
from kvferry.endpoint.prefill.rooms import SendingRooms
from kvferry.errors import KVFerryError, PeerDisconnectedError, RankReplacedError
from kvferry.loggers import logger_of
from kvferry.protocol.time_awake import Lateness

log = logger_of(__name__)


class Dismissals:
    """Loses decode ranks, with their rooms. For the control thread."""

    def __init__(self, context: PrefillContext, ranks: DecodeRanks, rooms: SendingRooms) -> None:
        """Begins with none."""
        self._context = context
        self._ranks = ranks
        self._rooms = rooms
        self._lateness = Lateness()

    def connection_broke(self, attachment: Attachment, error: Exception) -> None:
        """Gives up a decode rank, unless it was given up, or connected anew, since a write to it failed."""
        receiver = attachment.receiver
        if self._ranks.attachment(receiver) is attachment:
            self.give_up(receiver, PeerDisconnectedError(f"the connection for its bytes broke: {error}"))

    def give_up(self, receiver: str, error: KVFerryError) -> None:
        """Loses a decode rank that may live, and tells it: rooms that it opens before it connects anew are lost."""
        if (peer := self._ranks.peer(receiver)) is not None:
            self._tell(peer, f"it was given up: {error}")
        self._lose(receiver, error)

    def _tell(self, peer: DecodePeer, reason: str) -> None:
        self._context.tell_not_attached(peer.name, reason, attempt=peer.attempt)

    def _lose(self, receiver: str, error: KVFerryError) -> None:
        log.error("lost decode rank %s: %s", receiver, error)
        self._context.observer.peer_lost(receiver, error)
        self._rooms.lost(receiver, self._ranks.give_up(receiver, error), error)

    def dismiss_all(self, reason: str) -> None:
        """Ends all rooms and loses all decode ranks, which hear why, and may connect anew."""
        peers = self._ranks.peers()
        for peer in peers:  # first, so that they hear the reason before anything else of their rooms
            self._tell(peer, reason)
        self._rooms.end_all(reason)
        for peer in peers:
            self._lose(peer.name, PeerDisconnectedError(reason))

    def look_whether_replaced(self, replaced: RankReplacedError | None) -> None:
        """Serves nobody while another start of this rank has its place at the registry.

        Decode ranks hear of it at once, and look the engine up again. One that drains has made way by itself.
        """
        if replaced is None:
            self._rooms.replaced = None
        elif self._rooms.replaced is None and not self._rooms.draining.has_begun:
            self._rooms.replaced = replaced
            self.dismiss_all(str(replaced))

    def look(self, now: float, *, most_apart_s: float) -> None:
        """Gives up those that were silent for too long.

        Args:
            most_apart_s: how far two looks are apart at most, if nothing holds this process up.
        """
        settings, late_s = self._context.settings, self._lateness.seconds(now, most_apart_s=most_apart_s)
        for peer in self._ranks.peers():
            peer.last_message_at = min(now, peer.last_message_at + late_s)
            silence_s = now - peer.last_message_at
            peer.report_silence(silence_s, 2 * settings.heartbeat_interval_s)
            if silence_s > settings.peer_timeout_s:
                silent = f"silent for {silence_s:.1f} s (KVFERRY_PEER_TIMEOUT_S)"
                self.give_up(peer.name, PeerDisconnectedError(silent))
