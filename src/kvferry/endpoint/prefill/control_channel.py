"""The control channel to decode ranks: what is sent to them, what they send and are answered, and who is given up."""

from __future__ import annotations

import logging
from collections import deque
from functools import partial

from kvferry.endpoint.prefill.attachment import Attachment
from kvferry.endpoint.prefill.context import PrefillContext
from kvferry.endpoint.prefill.decode_ranks import DecodePeer, DecodeRanks, refused
from kvferry.endpoint.prefill.rooms import SendingRooms
from kvferry.endpoint.runtime.platform import Platform
from kvferry.endpoint.runtime.threads import do_each
from kvferry.errors import (
    EndpointClosedError,
    KVFerryError,
    MessageError,
    PeerDisconnectedError,
    PeerError,
    RankReplacedError,
    VersionError,
)
from kvferry.hosts import bracketed
from kvferry.loggers import logger_of
from kvferry.protocol.time_awake import Lateness
from kvferry.protocol.wire import codec, field_types, messages
from kvferry.protocol.wire.field_types import DecodeRank, Identity
from kvferry.settings import Settings

log = logger_of(__name__)

_CONNECTING_S = 1.0  # after a decode rank has asked for it; while its bytes move, workers make the progress


class ControlChannel:
    """The channel, and what waits to be sent. For the control thread, but for `send` and `wake`.

    Attributes:
        connection: the end on which decode ranks are listened for.
        port: its port.
        address: where they reach it.
    """

    def __init__(self, identity: Identity, settings: Settings, platform: Platform) -> None:
        """Listens for decode ranks.

        Raises:
            SettingsError: if the port is taken, or a setting is impossible.
        """
        of_rank = settings.of_rank(identity.coordinates.engine_rank)
        self.connection = platform.listen(of_rank)
        self.port = self.connection.port
        host, port = settings.advertise_host or settings.host, of_rank.advertise_port or self.port
        self.address = f"tcp://{bracketed(host)}:{port}"
        self._outbox: deque[tuple[str, field_types.Message]] = deque()

    @property
    def has_any(self) -> bool:
        """Whether a message waits to be sent."""
        return bool(self._outbox)

    def send(self, receiver: str, message: field_types.Message) -> None:
        """Sends a control message, from the control thread, soon. From any thread."""
        self._outbox.append((receiver, message))
        self.wake()

    def wake(self) -> None:
        """Lets the control thread have a turn, soon. From any thread."""
        self.connection.wake()

    def flush(self, context: PrefillContext, ranks: DecodeRanks) -> None:
        """Sends what waits."""
        while self._outbox:
            receiver, message = self._outbox.popleft()
            try:
                for each in ranks.channels.outgoing(receiver, message):
                    self.connection.send(receiver, context.encoded(receiver, each))
            except KVFerryError as error:
                # A closed endpoint misses neither a close message nor the answer to a heartbeat, and what has a number
                # is sent again.
                is_moot = isinstance(message, messages.Closed | messages.Pong | messages.NumberedToDecode)
                level = logging.DEBUG if is_moot else logging.WARNING
                log.log(level, "%s to %s was lost: %s", type(message).__name__, receiver, error)


class Answers:
    """Takes what decode ranks send, and answers it. For the control thread.

    Attributes:
        welcome: what a decode rank is answered that connects.
        connecting_until: as long as a decode rank may be connecting, the transport is looked after more often.
        is_lingering: whether the endpoint was closed, with writes still in flight.
    """

    def __init__(self, context: PrefillContext, ranks: DecodeRanks, rooms: SendingRooms, platform: Platform) -> None:
        """Begins with no decode rank."""
        identity = context.identity
        self.welcome = messages.Welcome(
            endpoint=identity.endpoint,
            engine=identity.engine,
            coordinates=identity.coordinates,
            layout=identity.layout,
            transport=identity.transport,
            process=platform.identity(context.settings),
            fingerprint=dict(identity.fingerprint),
            requires=identity.requires,
        )
        self.connecting_until = 0.0
        self.is_lingering = False
        self._context = context
        self._ranks = ranks
        self._rooms = rooms
        self._platform = platform

    def receive_one(self, identity: str, data: bytes, now: float) -> None:
        """Takes a message of a decode rank. What is wrong with it is logged."""
        try:
            self.receive(identity, data, now)
        except (MessageError, VersionError) as error:
            log.warning("dropped a message from %s: %s", identity, error)
        except BaseException:
            log.exception("a message from %s met an unexpected error; the others go on", identity)

    def receive(self, identity: str, data: bytes, now: float) -> None:
        """Takes a message of a decode rank; raises MessageError or VersionError if it makes no sense."""
        message = codec.decode_to_prefill(data, self._context.identity.versions)
        self._context.spoken.record(identity, codec.version_of(data))
        peer = self._ranks.peer(identity)
        if peer is not None:
            peer.last_message_at = now
        match message:
            case messages.Hello() if self.is_lingering:
                pass  # the decode rank looks the engine up again, and may find a successor
            case messages.Hello():
                self._context.send(identity, self.welcome)
            case messages.Attach():
                self._attach(identity, message, now)
            case messages.Detach() if peer is not None and peer.attempt > message.attempt:
                pass
            case messages.Detach():
                self._ranks.forgive(identity)
                self._rooms.lost(identity, self._ranks.lose(identity), PeerDisconnectedError("it was closed"))
            case messages.Ping() if self.is_lingering or not self._ranks.is_attached(identity):
                self._tell_not_attached(identity)
            case messages.Ping():
                for answer in self._ranks.channels.answer(identity, message):
                    self._context.send(identity, answer)
            case messages.Numbered():
                self.take_numbered(identity, message)
            case messages.IsGone(process):
                if self._platform.is_gone(process):
                    self._context.send(identity, messages.Gone(process=process))
            case messages.AbortRoom():
                is_unopened = self._ranks.channels.take_back(identity, message.epoch, message.number)
                self._rooms.take_abort(identity, message, is_unopened=is_unopened)
            case messages.RefuseRoom():
                self._rooms.refused(identity, message)
            case messages.ExpectRooms(rooms):
                if self._ranks.is_attached(identity):
                    self._rooms.expected(rooms, now)

    def take_numbered(self, identity: str, message: messages.Numbered) -> None:
        """Takes a message of a reliable channel, in its order."""
        taken = self._ranks.channels.take(identity, message)
        if taken is None:
            # Else it hears of that with its next heartbeat, and loses every room that it opens until then.
            self._tell_not_attached(identity)
            return
        do_each(taken, partial(self._take_one, identity), f"a message from {identity}")
        for acknowledgement in self._ranks.channels.unasked_acknowledgement(identity):
            self._context.send(identity, acknowledgement)

    def _take_one(self, identity: str, message: messages.NumberedToPrefill) -> None:
        match message:
            case messages.OpenRoom():
                self._rooms.take_open(identity, message)
            case messages.RoomVerified():
                self._rooms.verified(identity, message)
            case messages.Credit():
                attachment = self._ranks.attachment(identity)
                if attachment is not None:
                    attachment.paths.credited(message.epoch, message.position)

    def _tell_not_attached(self, identity: str, *, attempt: int = 0) -> None:
        given_up = self._ranks.given_up(identity)
        reason = "" if given_up is None else f"it was given up: {given_up.error}"
        self._context.tell_not_attached(identity, reason, attempt=attempt)

    def _attach(self, identity: str, message: messages.Attach, now: float) -> None:
        problem = self._why_not_attached(identity, message)
        if problem is None and self._ranks.channels.is_over(identity, message.attempt):
            self._tell_not_attached(identity, attempt=message.attempt)
            return
        if problem is None:
            self.connecting_until = now + _CONNECTING_S
            if self._ranks.attach(message, now):
                self._rooms.attached(identity, DecodeRank(message.engine, message.coordinates))
            return
        self._context.observer.refused(problem)
        self._context.send(identity, refused(message.attempt, problem))

    def _why_not_attached(self, identity: str, message: messages.Attach) -> KVFerryError | None:
        if message.endpoint != identity:
            return PeerError(f"endpoint {message.endpoint!r} speaks through the connection of {identity!r}")
        if self.is_lingering:
            return EndpointClosedError("the prefill endpoint was closed")
        if self._rooms.replaced is not None:
            return PeerDisconnectedError(str(self._rooms.replaced))
        most = self._context.settings.max_decode_ranks
        if self._ranks.peer(identity) is None and len(self._ranks) >= most:
            return PeerError(f"{len(self._ranks)} decode ranks are connected already (KVFERRY_MAX_DECODE_RANKS)")
        return None


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
