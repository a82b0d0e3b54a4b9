"""The one thread of a decode endpoint: it waits, and drives messages, arrivals and time; `rooms` has the rest.

The thread owns everything that it touches; callers queue work for it and wake it. Messages wake it, too, but no
transport says by itself that bytes have arrived. So while rooms run it looks, ever less often the longer nothing has
happened; when there are none, or all have ended and only wait for what prefill ranks say, it sleeps for half a second,
or until it is woken.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial

from kvferry.control.ends import Connection
from kvferry.control.registry import Registry
from kvferry.endpoint.decode.context import DecodeContext
from kvferry.endpoint.decode.links import Links
from kvferry.endpoint.decode.rooms import ReceivingRooms
from kvferry.endpoint.runtime.platform import Closing, Platform
from kvferry.endpoint.runtime.threads import SLOW_TURN_S, THREADS_END_S, Loop, RunningLoop, SleepBounds
from kvferry.errors import KVFerryError, PeerDisconnectedError, PeerError, UnknownMessageError
from kvferry.loggers import logger_of
from kvferry.observe.logs import report_silence
from kvferry.observe.records import Observer, Retry
from kvferry.observe.status import StagingStatus, ThreadStatus
from kvferry.protocol.links.link import Link, LinkKey, LinkState
from kvferry.protocol.time_awake import Lateness
from kvferry.protocol.wire import codec, messages
from kvferry.protocol.wire.field_types import Identity
from kvferry.settings import Settings
from kvferry.staging.receiving import ReceivingStaging
from kvferry.transport import Transport

log = logger_of(__name__)

_SLEEPS = SleepBounds(shortest_s=100e-6, of_quiet=1 / 16, longest_s=0.01)
_MESSAGES_S = 1e-3
_LINKS_OPEN_MS = 50
_IDLE_MS = 500
_TICK_S = 0.1


class Heartbeats:
    """Keeps links alive: asks prefill ranks whether they are there, and gives up those to silent or dead ones."""

    def __init__(self, context: DecodeContext, links: Links) -> None:
        """Begins with nobody silent."""
        self._settings = context.settings
        self._observer = context.observer
        self._links = links
        self._silent: frozenset[tuple[LinkKey, int]] = frozenset()  # prefill ranks whose silence was logged
        self._lateness = Lateness()

    def send(self, now: float, *, longest_sleep_s: float) -> None:
        """Sends a heartbeat to every rank, and gives up or starts over links to those that are silent or dead.

        Args:
            longest_sleep_s: by how much a heartbeat may come later than it should while all is well.
        """
        most_apart_s = 2 * self._settings.heartbeat_interval_s + longest_sleep_s + SLOW_TURN_S
        late_s = self._lateness.seconds(now, most_apart_s=most_apart_s)
        self._links.connections.forgive(late_s, now)
        for link in self._links.current:
            link.forgive(late_s, now)
        self._report_silence(now)
        for link in self._links.current:
            try:
                self._check_processes(link, now)
                if (silent := link.silent_rank(now, self._settings.peer_timeout_s)) is not None:
                    why = f"has been silent for {silent[1]:.1f} s (KVFERRY_PEER_TIMEOUT_S)"
                    self._lost(link, silent[0], why, now)
                self._links.send_all(link.ask(now))
            except KVFerryError as error:
                self._links.fail(link, error, now)

    def renew_silent(self, now: float) -> bool:
        """Makes connections anew whose silence has lasted half as long as it may; returns whether there were any.

        The other half is for the new one to carry an answer, before the rank is given up.
        """
        renewed = self._links.connections.renew_silent(now, self._settings.peer_timeout_s / 2)
        for address in renewed:
            self._observer.retried(Retry.CONNECT)
            self.broke(address, now)
        return bool(renewed)

    def broke(self, address: str, now: float) -> None:
        """A connection broke: what was on its way through its links may be lost."""
        link = self._links.connections.behind(address)
        if link is None:
            return
        try:
            self._check_processes(link, now)
            if link.rank_at(address) is not None:
                self._links.send_all(link.broke(address, now))
        except KVFerryError as error:
            self._links.fail(link, error, now)

    def _report_silence(self, now: float) -> None:
        """Logs, once for each, which prefill ranks have fallen silent."""
        silent = {
            (link.key, number): rank
            for link in self._links.current
            for number, rank in link.ranks.items()
            if rank.silent_s(now) > 2 * self._settings.heartbeat_interval_s
        }
        for (key, number), rank in silent.items():
            if (key, number) not in self._silent:
                who = f"prefill rank {number} of {key.engine!r} ({rank.endpoint or 'not connected yet'})"
                report_silence(who, rank.endpoint or "", rank.silent_s(now))
        self._silent = frozenset(silent)

    def _check_processes(self, link: Link, now: float) -> None:
        """Looks whether the process of one of a link's ranks is known to have ended; raises as `_lost`."""
        for peer in link.peers:
            if self._links.quarantine.is_gone(peer.process):
                why = f"has ended: its process {peer.process.pid} is gone"
                self._lost(link, link.rank_of(peer.endpoint), why, now)
                return

    def _lost(self, link: Link, rank: int | None, why: str, now: float) -> None:
        """Starts a link over that has lost a rank before it was ready: its rooms wait for whoever is found then.

        Raises:
            PeerDisconnectedError: if it was ready, so that rooms rely on that rank.
        """
        if link.state is LinkState.READY:
            raise PeerDisconnectedError(f"prefill rank {rank} of {link.key.engine!r} {why}")
        self._links.start_over(link, now)


class DecodeDriver(Loop):
    """Runs a decode endpoint.

    Attributes:
        context: what its parts share.
        callbacks: calls the caller back.
        rooms: all rooms, and what they rely on.
        heartbeats: keep the links to prefill ranks alive.
        next_ping_at: when heartbeats are next sent.
        is_stopping: set once the thread is to end.
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
        registry: Registry,
    ) -> None:
        """Registers the memory and starts the thread.

        Raises:
            SettingsError: if a setting is impossible.
            TransportError: if the memory cannot be registered.
        """
        staging = ReceivingStaging(settings, identity.layout, transport, platform.staging)
        transport.register(identity.layout.regions(), identity.layout.device)
        self.context = DecodeContext(
            identity=identity,
            transport=transport,
            registry=registry,
            settings=settings,
            staging=staging,
            platform=platform,
            observer=observer,
        )
        self.callbacks = self.context.callbacks
        self._now = platform.now
        self.rooms = ReceivingRooms(self.context)
        self._links = self.rooms.links
        self.heartbeats = Heartbeats(self.context, self._links)
        self._connections = self.rooms.links.connections
        self._next_messages_at = 0.0
        self._next_tick_at = 0.0
        self.next_ping_at = 0.0
        self.is_stopping = threading.Event()
        self._thread = platform.start(self.context.thread_name, self)

    # ---- from any thread ----------------------------------------------------------------------------------------

    @property
    def health(self) -> tuple[ThreadStatus, ...]:
        """Health of every thread."""
        return tuple(thread.health for thread in (*self._own_threads, *self.callbacks.threads))

    def renew(self, fingerprint: Mapping[str, str], reason: str) -> None:
        """Changes the fingerprint, see `Endpoint.renew`: before any room that is opened from now on."""
        self.context.submit(partial(self._renew, fingerprint, reason))

    def _renew(self, fingerprint: Mapping[str, str], reason: str, now: float) -> None:
        self.context.identity = replace(self.context.identity, fingerprint=fingerprint)
        for link in self._links.current:
            self._links.fail(link, PeerDisconnectedError(reason), now)

    @property
    def _own_threads(self) -> tuple[RunningLoop, ...]:
        return self._thread, *self.rooms.arrivals.scatterers.threads

    @property
    def has_ended(self) -> bool:
        """Whether all threads have that do anything with memory and connections."""
        return not any(thread.is_alive for thread in self._own_threads)

    @property
    def staging(self) -> StagingStatus:
        """How much memory this rank's rings have, and how much of it is in use."""
        rings = list(self.context.staging.rings.values())
        return StagingStatus(
            total_bytes=sum(ring.memory.num_bytes for ring in rings), used_bytes=sum(ring.held_bytes for ring in rings)
        )

    @property
    def open_rooms(self) -> int:
        """Number of rooms that have not ended, still quarantine pages, or may still be open on a prefill rank."""
        return len(self.rooms.open)

    def closing(self, deadline: float) -> Closing:
        """Fails open rooms, ends the threads and closes every link, step by step: yields what to wait for, until when.

        Where threads do not end it closes nothing that they may use; called again, it goes on.

        Args:
            deadline: until when rooms may take to end.
        """
        self.rooms.close()
        # Also rooms whose pages are reusable: prefill ranks may still write into staging memory for them.
        yield lambda: not self.rooms.open, deadline
        self.is_stopping.set()
        self.context.end.wake()
        latest = self._now() + THREADS_END_S
        yield lambda: not self._thread.is_alive, latest
        if not self._thread.is_alive:
            self._work_last()
            self.rooms.arrivals.scatterers.stop()
            yield lambda: self.has_ended, latest
        if self.has_ended:
            self._work_last()  # what was being scattered has come to its end
            yield from self.callbacks.closing()
            self.rooms.say_what_is_kept()
            self._links.close()
            self.context.end.close()
        else:
            running = ", ".join(thread.health.name for thread in self._own_threads if thread.is_alive)
            log.error("threads do not end: %s. The endpoint stays until close() is called when they have", running)

    # ---- the thread ---------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        return bool(self.context.inbox) or self.is_stopping.is_set() or self._now() >= self._next_tick_at

    def turn(self, *, may_wait: bool) -> bool:
        if self.is_stopping.is_set():
            return False
        ready = self._wait() if may_wait else self.context.end.wait(0)
        now = self._now()
        self._work_inbox(now)
        if self.rooms.open:  # before messages: a peer's close must not discard what has arrived from it
            self.rooms.arrivals.take(now)
        for connection in ready:
            if self._connections.owns(connection):
                self.receive(connection, now)
        if now >= self._next_tick_at:
            self._next_tick_at = now + _TICK_S
            self.tick(now)
        self.context.staging.send_credits()
        return True

    def _wait(self) -> Collection[Connection]:
        """Waits for what there is to do; returns the connections that have news."""
        if not self.rooms.any_runs:
            is_near = self._links.are_awaited or self.context.settling
            return self.context.end.wait(_LINKS_OPEN_MS if is_near else _IDLE_MS)
        now = self._now()
        sleep_s = _SLEEPS.next_s(now - self.rooms.last_news_at)
        if sleep_s < _MESSAGES_S and now < self._next_messages_at:
            if not self.context.inbox:
                self.context.platform.pause(sleep_s)
            return ()
        # A call to the system hands the interpreter to others, which may keep it: messages come seldom, and wait.
        self._next_messages_at = now + _MESSAGES_S
        return self.context.end.wait(int(sleep_s / _MESSAGES_S))

    def _work_inbox(self, now: float) -> None:
        while self.context.inbox:
            self.context.inbox.popleft()(now)

    def _work_last(self) -> None:
        """Works the inbox in the place of the thread, which has ended."""
        if not self._links.is_closed:  # a look-up that ends later finds the registry's client closed
            self._work_inbox(self._now())

    # ---- messages -----------------------------------------------------------------------------------------------

    def receive(self, connection: Connection, now: float) -> None:
        """Takes what has come through a connection."""
        address = connection.address
        received = connection.receive()  # first: to hear of a break may close the connection
        if received:
            self._connections.record_answer(address)
        if connection.take_break():
            self.broke(address, now)
        for data in received:
            link = self._connections.behind(address)
            if link is not None:
                link.record_answer(address)
            try:
                self._take(address, link, codec.decode_to_decode(data, self.context.identity.versions), now)
            except UnknownMessageError as error:
                log.warning("ignored a message from %s: %s", address, error)
            except KVFerryError as error:
                if link is not None:
                    self._links.fail(link, error, now)
            except BaseException as error:
                log.exception("a message from %s met an unexpected error", address)
                if link is not None:
                    problem = PeerError(f"a message from {address} met {type(error).__name__}: {error}")
                    problem.__cause__ = error
                    self._links.fail(link, problem, now)

    def broke(self, address: str, now: float) -> None:
        """A connection broke: asks again what may be lost of it, or the answer."""
        self.rooms.refusals.repeat(now, at_once=True)
        self.heartbeats.broke(address, now)
        self.rooms.ask_again(address, now)

    def _take(self, address: str, link: Link | None, message: messages.ToDecode, now: float) -> None:
        match message:
            case messages.Drained():
                self.rooms.received(address, message, now)
            case messages.Numbered():
                for each in self._links.take(address, message):
                    match each:
                        case messages.RoomFailed():
                            self.rooms.received(address, each, now)
                        case messages.SpanReleased():
                            if self._connections.carries_messages_of(address, each.endpoint):
                                self.rooms.arrivals.span_released(each)
            case _:
                self._links.received(address, link, message, now)

    # ---- time ---------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Does what time asks for."""
        self.callbacks.report()
        self._links.tick(now)
        self.context.settling.look()
        self.rooms.look_at_deadlines(now)
        self.rooms.drain()
        self._links.release_settled_ranks(now)
        if now >= self.next_ping_at:
            self.next_ping_at = now + self.context.settings.heartbeat_interval_s
            self.heartbeats.send(now, longest_sleep_s=_IDLE_MS / 1000)
            self.rooms.expected.say(now)
            if not self.rooms.open:  # what arrives for rooms that are over holds staging memory until it is taken
                self.rooms.arrivals.take(now)
            self.rooms.repeat(now, at_once=self.heartbeats.renew_silent(now))
        if self._links.retired:
            self._links.close_retired()
