"""The control thread of a prefill endpoint: messages from and to decode ranks, and time.

Rooms run on workers. They and callers queue messages for this thread and wake it; `SendingRooms` has the rooms,
`DecodeRanks` the decode ranks.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import msgspec

from kvferry.endpoint.early_warnings import UnaskedRooms
from kvferry.endpoint.prefill.admission import Admission
from kvferry.endpoint.prefill.attachment import Attachment
from kvferry.endpoint.prefill.context import PrefillContext
from kvferry.endpoint.prefill.decode_ranks import DecodeRanks, refused
from kvferry.endpoint.prefill.paths import SendingStaging
from kvferry.endpoint.prefill.registration import Registration
from kvferry.endpoint.prefill.rooms import SendingRooms
from kvferry.endpoint.runtime.callers_code import Callbacks
from kvferry.endpoint.runtime.platform import Closing, Platform
from kvferry.endpoint.runtime.rests import LONGEST_S
from kvferry.endpoint.runtime.run_queue import Waker
from kvferry.endpoint.runtime.threads import THREADS_END_S, Loop, RunningLoop, do_each
from kvferry.endpoint.runtime.workers import WorkerPool
from kvferry.errors import (
    EndpointClosedError,
    KVFerryError,
    MessageError,
    PeerDisconnectedError,
    PeerError,
    TransferError,
    VersionError,
)
from kvferry.loggers import logger_of
from kvferry.observe.observer import Observer
from kvferry.observe.status import StagingStatus, ThreadStatus
from kvferry.protocol.time_awake import Lateness
from kvferry.protocol.wire import codec, field_types, messages
from kvferry.protocol.wire.field_types import DecodeRank, Identity
from kvferry.protocol.wire.versions import SpokenVersions
from kvferry.settings import Settings, bracketed
from kvferry.transport import Transport

log = logger_of(__name__)

_TICK_S = 0.1
_ROOMS_OPEN_MS = 100
_IDLE_MS = 1000
_CONNECTING_MS = 5
_CONNECTING_S = 1.0  # after a decode rank has asked for it; while its bytes move, workers make the progress
_LAST_MOMENT_S = 1.0  # for workers to end that have no room any more, however long writes took


class PrefillDriver(Loop):
    """Runs a prefill endpoint.

    Attributes:
        port: on which it listens for decode ranks.
        control_address: where they reach it.
        rooms: all rooms.
        ranks: decode ranks, and the connections to them.
        admission: says when a direct write may be posted.
        workers: run rooms and connections.
        waker: wakes them.
        callbacks: calls the caller back.
        context: what its parts share.
        channel: to decode ranks.
        welcome: what a decode rank is answered that connects.
        connecting_until: as long as a decode rank may be connecting, the transport is looked after more often.
    """

    reads_input = True

    def __init__(
        self,
        identity: Identity,
        transport: Transport,
        settings: Settings,
        *,
        platform: Platform,
        observer: Observer,
        registration: Registration,
    ) -> None:
        """Registers the memory, listens for decode ranks and starts the threads.

        Args:
            transport: moves the bytes; closed by the control thread, once nothing is on its way any more.
            platform: the machine.
            observer: is told what happens.
            registration: where decode ranks find this one; hears how far a drain is, and says who has its place.

        Raises:
            SettingsError: if the port is taken, or a setting is impossible.
            TransportError: if the memory cannot be registered.
        """
        staging = SendingStaging(settings, identity.layout, transport, platform)
        transport.register(identity.layout.regions(), identity.layout.device)
        self._identity = identity
        self._transport = transport
        self._settings = settings
        self._platform = platform
        self._observer = observer
        self._now = platform.now
        self._registration = registration
        self.welcome = messages.Welcome(
            endpoint=identity.endpoint,
            engine=identity.engine,
            coordinates=identity.coordinates,
            layout=identity.layout,
            transport=identity.transport,
            process=platform.identity(settings),
            fingerprint=dict(identity.fingerprint),
            requires=identity.requires,
        )
        self.admission = Admission(
            most_bytes=int(settings.direct_mib * 2**20),
            most_bytes_of_one=int(settings.direct_receiver_mib * 2**20),
            stalls_after_s=settings.write_timeout_s / 2,
            now=platform.now,
        )
        name = f"kvferry-prefill-{identity.coordinates.engine_rank}"
        self.callbacks = Callbacks(platform, name)
        self.context = PrefillContext(
            identity=identity,
            transport=transport,
            settings=settings,
            staging=staging,
            admission=self.admission,
            observer=observer,
            callbacks=self.callbacks,
            now=platform.now,
            send=self.send,
            write_failed=self.write_failed,
            spoken=SpokenVersions(identity.versions),
        )
        self._outbox: deque[tuple[str, field_types.Message]] = deque()
        self._renewals: deque[tuple[str, threading.Event]] = deque()  # why, and told when it is done
        self._failed_writes: deque[tuple[Attachment, Exception]] = deque()  # whose connections broke
        self._is_closing_down = False  # rooms are not waited for any more
        self._is_lingering = False  # closed, with writes still in flight
        self._release_error: Exception | None = None
        self.connecting_until = 0.0
        self._next_tick_at = 0.0
        self._lateness = Lateness()
        of_rank = settings.of_rank(identity.coordinates.engine_rank)
        self.channel = platform.listen(of_rank)
        self.port = self.channel.port
        host, port = settings.advertise_host or settings.host, of_rank.advertise_port or self.port
        self.control_address = f"tcp://{bracketed(host)}:{port}"
        self._threads: tuple[RunningLoop, ...] = ()
        with contextlib.ExitStack() as undo:
            undo.callback(self.channel.close)
            self.workers = WorkerPool(
                settings.workers,
                settings.used_queues,
                transport,
                staging.source_memories,
                settle_s=settings.quarantine_s,
                platform=platform,
                name=name,
                device=identity.layout.device,
            )
            undo.callback(self.workers.stop)
            unasked = UnaskedRooms(
                f"prefill rank {identity.coordinates.engine_rank} of {identity.engine!r}",
                f"Does the decode side look for an engine named {identity.engine!r}, at the registry "
                f"{registration.registry_url}?",
            )
            self.ranks = DecodeRanks(self.context, queue_of=self.workers.queue_of)
            self.rooms = SendingRooms(self.context, self.ranks, self.workers, unasked)
            self.waker = Waker(self.workers.queues)
            undo.callback(self.waker.stop)
            waker = platform.start(f"{name}-waker", self.waker)
            self._threads = platform.start(f"{name}-control", self), waker
            undo.pop_all()

    # ---- from any thread ----------------------------------------------------------------------------------------

    @property
    def health(self) -> tuple[ThreadStatus, ...]:
        """Health of every thread."""
        return tuple(thread.health for thread in (*self._threads, *self.workers.threads, *self.callbacks.threads))

    @property
    def open_rooms(self) -> int:
        """Number of rooms that have not ended, or still have writes in flight."""
        return len(self.rooms)

    @property
    def staging(self) -> StagingStatus:
        """How much memory the rings of decode ranks have, how much of it is in use, and how many rooms wait for it."""
        attached = [each for peer in self.ranks.peers() if (each := peer.attachment) is not None]
        rings = [each.paths.staged.peer.ring for each in attached if each.paths.staged is not None]
        return StagingStatus(
            total_bytes=sum(ring.num_bytes for ring in rings),
            used_bytes=sum(ring.in_use for ring in rings),
            waiting_rooms=sum(room.waits_for_memory for room in self.rooms.all()) if rings else 0,
        )

    def bytes_in_flight(self, staging: StagingStatus) -> int:
        """Returns the bytes that were posted, or wait in rings, and that decode ranks do not have yet."""
        return self.admission.num_bytes + staging.used_bytes

    def send(self, receiver: str, message: field_types.Message) -> None:
        """Sends a control message, from the control thread, soon."""
        self._outbox.append((receiver, message))
        self.wake()

    def renew(self, fingerprint: Mapping[str, str], reason: str) -> None:
        """Changes the fingerprint, see `Endpoint.renew`. Returns once no decode rank is attached that saw another."""
        self.context.identity = replace(self.context.identity, fingerprint=fingerprint)
        renewed = threading.Event()
        self._renewals.append((reason, renewed))
        self.wake()
        if not renewed.wait(self._settings.close_timeout_s):
            raise TransferError(
                f"the prefill endpoint does not answer within {self._settings.close_timeout_s:g} s "
                "(KVFERRY_CLOSE_TIMEOUT_S), and may still serve what its earlier fingerprint said"
            )

    def _renew(self, reason: str) -> None:
        fingerprint = dict(self.context.identity.fingerprint)
        self.welcome = msgspec.structs.replace(self.welcome, fingerprint=fingerprint)
        self._dismiss_all(reason)

    def wake(self) -> None:
        """Lets the control thread have a turn, soon."""
        self.channel.wake()

    def write_failed(self, attachment: Attachment, error: Exception) -> None:
        """A write failed in a way that only connecting anew mends: the decode rank is given up."""
        self._failed_writes.append((attachment, error))
        self.wake()

    # ---- draining -----------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Goes on with a drain that has begun, and tells how far it is. From any thread; returns at once."""
        self.rooms.drain()
        self._registration.drain(self.rooms.num_known, is_drained=self.rooms.is_drained)

    # ---- closing ------------------------------------------------------------------------------------------------

    def close_down(self) -> None:
        """Ends the threads as soon as no room is left. May be called again."""
        self._is_closing_down = True
        self.wake()

    def closing(self, deadline: float) -> Closing:
        """Waits for what `close_down` began, step by step: yields what to wait for, and until when at most."""
        if not len(self.rooms):
            yield lambda: not self.workers.running, max(self._now(), deadline) + _LAST_MOMENT_S
        if self.workers.running:
            # Taking memory away under a write corrupts whatever lives there next: better to keep all of it.
            self._is_lingering = True
            held_up = "".join(f"; held up by {each}" for each in self.workers.held_up_by)
            log.error(
                "writes are still on their way, %d rooms' too; the endpoint stays until they end%s",
                len(self.rooms),
                held_up,
            )
            return
        latest = self._now() + THREADS_END_S
        yield lambda: not any(thread.is_alive for thread in self._threads), latest
        yield from self.callbacks.closing()

    def raise_release_error(self) -> None:
        """Raises, once, what went wrong when memory was given back."""
        error, self._release_error = self._release_error, None
        if error is not None:
            raise error

    def _has_closed(self) -> bool:
        """Closes everything once no write is in flight. Returns True when it has."""
        if len(self.rooms):
            return False
        self.workers.stop()
        if self.workers.running:
            return False
        for receiver in self.ranks.all:
            after_failure = receiver in self.context.broken_off
            self.send(receiver, messages.Closed(endpoint=self._identity.endpoint, after_failure=after_failure))
        self._flush()
        self.waker.stop()
        self.callbacks.stop()
        try:
            self.channel.close()
            self._transport.close()
        except Exception as error:  # for `close` to raise
            self._release_error = error
            if self._is_lingering:
                log.exception("what the endpoint had could not be given back")
        return True

    # ---- the control thread -------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        may_leave = self._is_closing_down and not len(self.rooms)
        return (
            bool(self._outbox or self._failed_writes or self._renewals)
            or self._now() >= self._next_tick_at
            or may_leave
        )

    def turn(self, *, may_wait: bool) -> bool:
        wait_ms = self._longest_wait_ms()
        self.channel.wait(wait_ms if may_wait else 0)
        now = self._now()
        while self._renewals:  # before messages, which may belong to what was compared before
            reason, renewed = self._renewals.popleft()
            self._renew(reason)
            renewed.set()
        for identity, data in self.channel.receive():
            self.receive_one(identity, data, now)
        while self._failed_writes:
            self._connection_broke(*self._failed_writes.popleft())
        self._flush()
        is_due = now >= self._next_tick_at
        if is_due:
            self._next_tick_at = now + _TICK_S
            self.tick(now, longest_wait_s=wait_ms / 1000)
        if self._is_closing_down and self._has_closed():
            return False
        if is_due or now < self.connecting_until:
            # No decode rank sends any, but connections need progress. Last, since rooms must end also where it fails.
            self._transport.take_notifications()
        return True

    def _longest_wait_ms(self) -> int:
        """Returns how long the control thread may wait, unless a message or `wake` ends that."""
        if self._is_closing_down or self._now() < self.connecting_until:
            return _CONNECTING_MS
        is_quiet = self.rooms.table.is_quiet and not self.rooms.draining.has_begun
        return _IDLE_MS if is_quiet else _ROOMS_OPEN_MS

    def _flush(self) -> None:
        while self._outbox:
            receiver, message = self._outbox.popleft()
            try:
                for each in self.ranks.channels.outgoing(receiver, message):
                    self.channel.send(receiver, self.context.encoded(receiver, each))
            except KVFerryError as error:
                # A closed endpoint misses neither a close message nor the answer to a heartbeat, and what has a number
                # is sent again.
                is_moot = isinstance(message, messages.Closed | messages.Pong | messages.NumberedToDecode)
                level = logging.DEBUG if is_moot else logging.WARNING
                log.log(level, "%s to %s was lost: %s", type(message).__name__, receiver, error)

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
        message = codec.decode_to_prefill(data, self._identity.versions)
        self.context.spoken.record(identity, codec.version_of(data))
        peer = self.ranks.peer(identity)
        if peer is not None:
            peer.last_message_at = now
        match message:
            case messages.Hello() if self._is_lingering:
                pass  # the decode rank looks the engine up again, and may find a successor
            case messages.Hello():
                self.send(identity, self.welcome)
            case messages.Attach():
                self._attach(identity, message)
            case messages.Detach() if peer is not None and peer.attempt > message.attempt:
                pass
            case messages.Detach():
                self.ranks.forgive(identity)
                self.rooms.lost(identity, self.ranks.lose(identity), PeerDisconnectedError("it was closed"))
            case messages.Ping() if self._is_lingering or not self.ranks.is_attached(identity):
                self.send(identity, self._not_attached(identity))
            case messages.Ping():
                for answer in self.ranks.channels.answer(identity, message):
                    self.send(identity, answer)
            case messages.Numbered():
                self.take_numbered(identity, message)
            case messages.IsGone(process):
                if self._platform.is_gone(process):
                    self.send(identity, messages.Gone(process=process))
            case messages.AbortRoom():
                is_unopened = self.ranks.channels.take_back(identity, message.epoch, message.number)
                self.rooms.take_abort(identity, message, is_unopened=is_unopened)
            case messages.RefuseRoom():
                self.rooms.refused(identity, message)
            case messages.ExpectRooms(rooms):
                if self.ranks.is_attached(identity):
                    self.rooms.expected(rooms, now)

    def take_numbered(self, identity: str, message: messages.Numbered) -> None:
        """Takes a message of a reliable channel, in its order."""
        taken = self.ranks.channels.take(identity, message)
        if taken is None:
            # Else it hears of that with its next heartbeat, and loses every room that it opens until then.
            self.send(identity, self._not_attached(identity))
            return
        do_each(taken, partial(self._take_one, identity), f"a message from {identity}")
        for acknowledgement in self.ranks.channels.unasked_acknowledgement(identity):
            self.send(identity, acknowledgement)

    def _take_one(self, identity: str, message: messages.NumberedToPrefill) -> None:
        match message:
            case messages.OpenRoom():
                self.rooms.take_open(identity, message)
            case messages.RoomVerified():
                self.rooms.verified(identity, message)
            case messages.Credit():
                attachment = self.ranks.attachment(identity)
                if attachment is not None:
                    attachment.paths.credited(message.epoch, message.position)

    def _not_attached(self, identity: str) -> messages.Pong:
        given_up = self.ranks.given_up(identity)
        reason = "" if given_up is None else f"it was given up: {given_up.error}"
        return messages.Pong(endpoint=self._identity.endpoint, attached=False, reason=reason)

    # ---- decode ranks -------------------------------------------------------------------------------------------

    def _attach(self, identity: str, message: messages.Attach) -> None:
        problem = self._why_not_attached(identity, message)
        if problem is None:
            now = self._now()
            self.connecting_until = now + _CONNECTING_S
            if self.ranks.attach(message, now):
                self.rooms.attached(identity, DecodeRank(message.engine, message.coordinates))
            return
        self._observer.refused(problem)
        self.send(identity, refused(message.attempt, problem))

    def _why_not_attached(self, identity: str, message: messages.Attach) -> KVFerryError | None:
        if message.endpoint != identity:
            return PeerError(f"endpoint {message.endpoint!r} speaks through the connection of {identity!r}")
        if self._is_lingering:
            return EndpointClosedError("the prefill endpoint was closed")
        if self.rooms.replaced is not None:
            return PeerDisconnectedError(str(self.rooms.replaced))
        if self.ranks.peer(identity) is None and len(self.ranks) >= self._settings.max_decode_ranks:
            return PeerError(f"{len(self.ranks)} decode ranks are connected already (KVFERRY_MAX_DECODE_RANKS)")
        return None

    def _connection_broke(self, attachment: Attachment, error: Exception) -> None:
        receiver = attachment.receiver
        if self.ranks.attachment(receiver) is attachment:  # else it was given up, or made anew, meanwhile
            self.give_up(receiver, PeerDisconnectedError(f"the connection for its bytes broke: {error}"))

    def give_up(self, receiver: str, error: KVFerryError) -> None:
        """Loses a decode rank that may live: the answer to its next heartbeat makes it connect anew."""
        log.error("lost decode rank %s: %s", receiver, error)
        self._observer.peer_lost(receiver, error)
        self.rooms.lost(receiver, self.ranks.give_up(receiver, error), error)

    def _look_whether_replaced(self) -> None:
        """Serves nobody while another start of this rank has its place at the registry.

        Decode ranks hear of it at once, and look the engine up again. One that drains has made way by itself.
        """
        replaced = self._registration.replaced
        if replaced is None:
            self.rooms.replaced = None
        elif self.rooms.replaced is None and not self.rooms.draining.has_begun:
            self.rooms.replaced = replaced
            self._dismiss_all(str(replaced))

    def _dismiss_all(self, reason: str) -> None:
        """Ends all rooms and loses all decode ranks, which hear why, and may connect anew."""
        peers = self.ranks.peers()
        for peer in peers:  # first, so that they hear the reason before anything else of their rooms
            self.send(peer.name, messages.Pong(endpoint=self._identity.endpoint, attached=False, reason=reason))
        self.rooms.end_all(reason)
        for peer in peers:
            self.give_up(peer.name, PeerDisconnectedError(reason))

    # ---- time ---------------------------------------------------------------------------------------------------

    def tick(self, now: float, *, longest_wait_s: float) -> None:
        """Does what time asks for."""
        self.callbacks.report()
        self.workers.report_held_up()
        self.admission.tick()
        self.rooms.look(now)
        self._look_whether_replaced()
        if self.rooms.draining.has_begun:
            self.drain()
        late_s = self._lateness.seconds(now, most_apart_s=longest_wait_s + 2 * _TICK_S + LONGEST_S)
        for peer in self.ranks.peers():
            peer.last_message_at = min(now, peer.last_message_at + late_s)
            silence_s = now - peer.last_message_at
            peer.report_silence(silence_s, 2 * self._settings.heartbeat_interval_s)
            if silence_s > self._settings.peer_timeout_s:
                silent = f"silent for {silence_s:.1f} s (KVFERRY_PEER_TIMEOUT_S)"
                self.give_up(peer.name, PeerDisconnectedError(silent))
