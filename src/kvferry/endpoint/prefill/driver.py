"""The control thread of a prefill endpoint: messages from and to decode ranks, and time; and its place at the registry.

Rooms run on workers. They and callers queue messages for this thread and wake it; `SendingRooms` has the rooms,
`DecodeRanks` the decode ranks, `Answers` what they are answered.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

import msgspec
from msgspec import structs

from kvferry.control.renewals import LeaseKeeper
from kvferry.endpoint.early_warnings import UnaskedRooms
from kvferry.endpoint.prefill.admission import Admission
from kvferry.endpoint.prefill.attachment import Attachment
from kvferry.endpoint.prefill.context import PrefillContext
from kvferry.endpoint.prefill.control_channel import Answers, ControlChannel, Dismissals
from kvferry.endpoint.prefill.decode_ranks import DecodeRanks
from kvferry.endpoint.prefill.paths import SendingStaging
from kvferry.endpoint.prefill.rooms import SendingRooms
from kvferry.endpoint.runtime.callers_code import Callbacks
from kvferry.endpoint.runtime.platform import Closing, Platform
from kvferry.endpoint.runtime.run_queue import Waker
from kvferry.endpoint.runtime.threads import SLOW_TURN_S, THREADS_END_S, Loop, RunningLoop
from kvferry.endpoint.runtime.workers import WorkerPool
from kvferry.errors import RankReplacedError, TransferError
from kvferry.loggers import logger_of
from kvferry.observe.records import Observer
from kvferry.observe.status import StagingStatus, ThreadStatus
from kvferry.protocol.wire import messages
from kvferry.protocol.wire.field_types import Identity
from kvferry.protocol.wire.registrations import RankRegistration, check_instance
from kvferry.protocol.wire.versions import SpokenVersions
from kvferry.settings import Settings
from kvferry.transport import Transport

log = logger_of(__name__)

_COUNT_S = 0.5
"""How often the registry hears how many rooms are open, while the rank drains."""


class Registration:
    """Keeps a rank registered, and runs the registry where it is asked to.

    Attributes:
        registry_url: where the registry is.
        rank: what is registered.
        client: of the registry.
    """

    def __init__(self, settings: Settings, platform: Platform, instance: str | None, *, hosts_registry: bool) -> None:
        """Starts the registry if it is hosted here. Nothing is registered yet.

        Args:
            instance: this start of the engine; None if it has no name.

        Raises:
            SettingsError: if the registry's port is taken, or a setting or that name is impossible.
        """
        if instance is not None:
            check_instance(instance)
        self._platform = platform
        self._instance = instance or ""
        self._server = platform.serve_registry(settings) if hosts_registry else None
        self._lease: LeaseKeeper | None = None
        self.rank: RankRegistration | None = None  # what is registered
        self._told_at = 0.0  # when it was last changed
        self.registry_url = self._server.url if self._server is not None else settings.registry_address
        try:
            self.client = platform.registry(settings, self.registry_url)
        except BaseException:
            if self._server is not None:
                self._server.close()
            raise

    def announce(self, identity: Identity, control_address: str, on_drain: Callable[[], None]) -> None:
        """Registers the rank, as soon as the registry can be reached, and keeps it registered. For the first call.

        Args:
            identity: who it is.
            control_address: where decode ranks reach it.
            on_drain: called when an operator has told it to drain.
        """
        if self._lease is not None:
            return
        self.rank = rank = RankRegistration(
            engine=identity.engine,
            incarnation=identity.endpoint,
            coordinates=identity.coordinates,
            control_address=control_address,
            layout_digest=identity.layout.digest,
            started_at=self._platform.unix_time(),
            protocol_version=identity.versions.oldest,
            newest_protocol_version=identity.versions.newest,
            instance=self._instance,
        )

        def report(error: Exception) -> None:
            log.error("prefill rank %d of %r is not registered: %s", rank.coordinates.engine_rank, rank.engine, error)

        self._lease = self._platform.keep_registered(self.client, rank, report, on_drain)

    def drain(self, open_rooms: int, *, is_drained: bool) -> None:
        """Has the registry show that the rank drains, and how far it is. May be called often."""
        if self.rank is None or self._lease is None:
            return
        now = self._platform.now()
        changed = structs.replace(self.rank, draining=True, drained=is_drained, open_rooms=open_rooms)
        is_news = (changed.draining, changed.drained) != (self.rank.draining, self.rank.drained)
        if is_news or (changed != self.rank and now >= self._told_at + _COUNT_S):
            self.rank, self._told_at = changed, now
            self._lease.update(changed)

    def wait(self, timeout_s: float) -> bool:
        """Waits until the rank is registered; False if it is not after timeout_s, or was not announced."""
        return self._lease is not None and self._lease.registered.wait(timeout_s)

    @property
    def is_registered(self) -> bool:
        """Whether the registry holds a lease of the rank, as far as is known."""
        return self._lease is not None and self._lease.registered.is_set()

    @property
    def error(self) -> Exception | None:
        """Why the rank could not be registered, or its lease renewed; None if there was no problem."""
        return self._lease.last_error if self._lease is not None else None

    @property
    def replaced(self) -> RankReplacedError | None:
        """That another start of the rank has its place at the registry; None if it has not, as far as is known."""
        return self._lease.replaced if self._lease is not None else None

    def leave(self) -> None:
        """Ends the registration. May be called again."""
        if self._lease is not None:
            self._lease.close()

    def close(self) -> None:
        """Ends the registration, and the registry if it is hosted here. May be called again."""
        self.leave()
        self.client.close()
        if self._server is not None:
            self._server.close()


_TICK_S = 0.1
_ROOMS_OPEN_MS = 100
_IDLE_MS = 1000
_CONNECTING_MS = 5
_LAST_MOMENT_S = 1.0  # for workers to end that have no room any more, however long writes took


class PrefillDriver(Loop):
    """Runs a prefill endpoint.

    Attributes:
        context: what its parts share.
        callbacks: calls the caller back.
        channel: to decode ranks.
        answers: takes what they send.
        rooms: all rooms.
        ranks: decode ranks, and the connections to them.
        dismissals: gives them up.
        workers: run rooms and connections.
        waker: wakes them.
    """

    reads_input = True

    answers: Answers
    rooms: SendingRooms
    ranks: DecodeRanks
    dismissals: Dismissals
    workers: WorkerPool
    waker: Waker

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
            registration: where decode ranks find this one; hears how far a drain is, and says who has its place.

        Raises:
            SettingsError: if the port is taken, or a setting is impossible.
            TransportError: if the memory cannot be registered.
        """
        staging = SendingStaging(settings, identity.layout, transport, platform)
        transport.register(identity.layout.regions(), identity.layout.device)
        self._registration = registration
        self._renewals: deque[tuple[str, threading.Event]] = deque()  # why, and told when it is done
        self._failed_writes: deque[tuple[Attachment, Exception]] = deque()  # whose connections broke
        self._is_closing_down = False  # rooms are not waited for any more
        self._release_error: Exception | None = None
        self._next_tick_at = 0.0
        self._threads: tuple[RunningLoop, ...] = ()
        name = f"kvferry-prefill-{identity.coordinates.engine_rank}"
        self.channel = ControlChannel(identity, settings, platform)
        self.context = PrefillContext(
            identity=identity,
            transport=transport,
            settings=settings,
            staging=staging,
            admission=Admission.of(settings, platform.now),
            observer=observer,
            callbacks=Callbacks(platform, name),
            now=platform.now,
            send=self.channel.send,
            write_failed=self.write_failed,
            spoken=SpokenVersions(identity.versions),
        )
        self.callbacks = self.context.callbacks
        self._start(platform, name)

    def _start(self, platform: Platform, name: str) -> None:
        """Starts all threads; ends those that run if one cannot be started."""
        context, identity = self.context, self.context.identity
        with contextlib.ExitStack() as undo:
            undo.callback(self.channel.connection.close)
            self.workers = WorkerPool(
                context.settings.workers,
                context.settings.used_queues,
                context.transport,
                context.staging.source_memories,
                settle_s=context.settings.quarantine_s,
                platform=platform,
                name=name,
                device=identity.layout.device,
            )
            undo.callback(self.workers.stop)
            unasked = UnaskedRooms(
                f"prefill rank {identity.coordinates.engine_rank} of {identity.engine!r}",
                f"Does the decode side look for an engine named {identity.engine!r}, at the registry "
                f"{self._registration.registry_url}?",
            )
            self.ranks = DecodeRanks(context, queue_of=self.workers.queue_of)
            self.rooms = SendingRooms(context, self.ranks, self.workers, unasked)
            self.answers = Answers(context, self.ranks, self.rooms, platform)
            self.dismissals = Dismissals(context, self.ranks, self.rooms)
            self.waker = Waker(self.workers.queues)
            undo.callback(self.waker.stop)
            waker = platform.start(f"{name}-waker", self.waker)
            self._threads = platform.start(f"{name}-control", self), waker
            undo.pop_all()

    # ---- from any thread ----------------------------------------------------------------------------------------

    @property
    def health(self) -> tuple[ThreadStatus, ...]:
        """Health of every thread."""
        threads = *self._threads, *self.workers.threads, *self.callbacks.threads
        return tuple(thread.health for thread in threads)

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

    def renew(self, fingerprint: Mapping[str, str], reason: str) -> None:
        """Changes the fingerprint, see `Endpoint.renew`. Returns once no decode rank is attached that saw another."""
        self.context.identity = replace(self.context.identity, fingerprint=fingerprint)
        renewed = threading.Event()
        self._renewals.append((reason, renewed))
        self.wake()
        if not renewed.wait(self.context.settings.close_timeout_s):
            raise TransferError(
                f"the prefill endpoint does not answer within {self.context.settings.close_timeout_s:g} s "
                "(KVFERRY_CLOSE_TIMEOUT_S), and may still serve what its earlier fingerprint said"
            )

    def _renew(self, reason: str) -> None:
        fingerprint = dict(self.context.identity.fingerprint)
        self.answers.welcome = msgspec.structs.replace(self.answers.welcome, fingerprint=fingerprint)
        self.dismissals.dismiss_all(reason)

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
            yield lambda: not self.workers.running, max(self.context.now(), deadline) + _LAST_MOMENT_S
        if self.workers.running:
            # Taking memory away under a write corrupts whatever lives there next: better to keep all of it.
            self.answers.is_lingering = True
            held_up = "".join(f"; held up by {each}" for each in self.workers.held_up_by)
            log.error(
                "writes are still on their way, %d rooms' too; the endpoint stays until they end%s",
                len(self.rooms),
                held_up,
            )
            return
        latest = self.context.now() + THREADS_END_S
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
        endpoint = self.context.identity.endpoint
        for receiver in self.ranks.all:
            after_failure = receiver in self.context.broken_off
            self.channel.send(receiver, messages.Closed(endpoint=endpoint, after_failure=after_failure))
        self.channel.flush(self.context, self.ranks)
        self.waker.stop()
        self.callbacks.stop()
        try:
            with contextlib.closing(self.context.transport):
                self.channel.connection.close()
        except Exception as error:  # for `close` to raise
            self._release_error = error
            if self.answers.is_lingering:
                log.exception("what the endpoint had could not be given back")
        return True

    # ---- the control thread -------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        may_leave = self._is_closing_down and not len(self.rooms)
        return (
            bool(self.channel.has_any or self._failed_writes or self._renewals)
            or self.context.now() >= self._next_tick_at
            or may_leave
        )

    def turn(self, *, may_wait: bool) -> bool:
        wait_ms = self._longest_wait_ms()
        self.channel.connection.wait(wait_ms if may_wait else 0)
        now = self.context.now()
        while self._renewals:  # before messages, which may belong to what was compared before
            reason, renewed = self._renewals.popleft()
            self._renew(reason)
            renewed.set()
        for identity, data in self.channel.connection.receive():
            self.answers.receive_one(identity, data, now)
        while self._failed_writes:
            self.dismissals.connection_broke(*self._failed_writes.popleft())
        self.channel.flush(self.context, self.ranks)
        is_due = now >= self._next_tick_at
        if is_due:
            self._next_tick_at = now + _TICK_S
            self.tick(now, longest_wait_s=wait_ms / 1000)
        if self._is_closing_down and self._has_closed():
            return False
        if is_due or now < self.answers.connecting_until:
            # No decode rank sends any, but connections need progress. Last, since rooms must end also where it fails.
            self.context.transport.take_notifications()
        return True

    def _longest_wait_ms(self) -> int:
        """Returns how long the control thread may wait, unless a message or `wake` ends that."""
        if self._is_closing_down or self.context.now() < self.answers.connecting_until:
            return _CONNECTING_MS
        is_quiet = self.rooms.table.is_quiet and not self.rooms.draining.has_begun
        return _IDLE_MS if is_quiet else _ROOMS_OPEN_MS

    # ---- time ---------------------------------------------------------------------------------------------------

    def tick(self, now: float, *, longest_wait_s: float) -> None:
        """Does what time asks for."""
        self.callbacks.report()
        self.workers.report_held_up()
        self.context.admission.tick()
        self.rooms.look(now)
        self.dismissals.look_whether_replaced(self._registration.replaced)
        if self.rooms.draining.has_begun:
            self.drain()
        self.dismissals.look(now, most_apart_s=longest_wait_s + 2 * _TICK_S + SLOW_TURN_S)
