"""The one thread of a decode endpoint: links, rooms, messages, notifications, deadlines.

It owns everything that it touches. Callers hand in work through a queue and wake it up; registry look-ups, which block,
run on a small pool and hand their results in the same way. The loop sleeps as long as it can: hardly while rooms are
open and something happened just now, a millisecond while they are, and until somebody knocks when there are none.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial

from kvferry.control.credentials import secret_hint
from kvferry.control.ends import Connection
from kvferry.control.registry_client import RegistryClient
from kvferry.endpoint.platform import Platform
from kvferry.endpoint.receiving import ReceivingRoom
from kvferry.endpoint.scattering import ArrivalTask, Scatterers, ScatterTask, VerifyTask
from kvferry.endpoint.threads import Loop, ThreadHealth
from kvferry.errors import (
    EndpointClosedError,
    KVFerryError,
    PeerDisconnectedError,
    PeerError,
    RegistryAccessError,
    RegistryError,
    TransferTimeoutError,
)
from kvferry.observe.logs import tell_silence
from kvferry.observe.observer import Observer, Retry
from kvferry.observe.records import PlacedRecord
from kvferry.observe.status import PeerStatus, RoomStatus, StagingStatus
from kvferry.protocol import messages
from kvferry.protocol.credits import Span
from kvferry.protocol.link import Channel, Identity, Link, LinkKey, LinkState
from kvferry.protocol.lost_ranks import LostRanks
from kvferry.protocol.receiver import (
    Arrived,
    ArrivedUnverified,
    ConnectFailed,
    Finished,
    PartArrived,
    ReceiverAbortRequested,
    ReceiverBroke,
    ReceiverCommand,
    ReceiverEvent,
    ReceiverTick,
    Scatter,
    SendAbort,
    SenderDrained,
    SenderFailed,
    SenderLost,
    SendOpen,
    SendVerified,
    Verify,
)
from kvferry.protocol.registrations import RankRegistration
from kvferry.settings import Settings
from kvferry.staging.receiving import ReceivingStaging
from kvferry.transport import Transport

log = logging.getLogger(__name__)

_HOT_S = 0.02
_HOT_SLEEP_S = 100e-6
_ROOMS_OPEN_MS = 1
_LINKS_OPEN_MS = 50
_IDLE_MS = 500
_TICK_S = 0.1


class DecodeDriver(Loop):
    """Runs a decode endpoint."""

    reads_input = True

    def __init__(
        self,
        identity: Identity,
        transport: Transport,
        registry: RegistryClient,
        settings: Settings,
        staging: ReceivingStaging,
        *,
        platform: Platform,
        observer: Observer,
        forget_room: Callable[[int], None],
    ) -> None:
        """Starts the thread.

        Args:
            platform: the machine.
            observer: is told what happens.
            forget_room: called with the number of a room that is over and done with.
        """
        self._identity = identity
        self._transport = transport
        self._registry = registry
        self._settings = settings
        self._staging = staging
        self._forget_room = forget_room
        self._platform = platform
        self._observer = observer
        self._end = platform.connect_as(identity.endpoint, settings)
        self._resolvers = platform.aside("kvferry-decode-resolver")
        self._inbox: deque[Callable[[float], None]] = deque()
        self._channels: dict[str, Connection] = {}  # by address; links to the same rank share one
        self._links: dict[LinkKey, Link] = {}
        self._retired_links: list[Link] = []
        self._waiting: dict[LinkKey, list[ReceivingRoom]] = {}
        self._connecting: dict[LinkKey, list[Future[None]]] = {}
        self._callers: set[Future[None]] = set()  # everyone who waits in connect
        self._rooms: dict[int, ReceivingRoom] = {}
        self._room_links: dict[int, Link] = {}
        self._lost = LostRanks(settle_s=settings.quarantine_s)
        self._next_attempt = partial(next, itertools.count(1))
        self._attempts: dict[str, int] = {}  # by address, the last that was begun there
        # Rooms that were verified, by number, generation and rank, of which that rank may not know yet.
        self._unconfirmed: dict[tuple[int, int, int], Link] = {}
        self._arriving: ArrivalTask | None = None  # while its room is told of it
        self._hot_until = 0.0
        self._next_tick_at = 0.0
        self._next_ping_at = 0.0
        self._silent: frozenset[tuple[LinkKey, int]] = frozenset()  # prefill ranks that the log has been told of
        self._last_heartbeat_at = float("inf")
        self._is_stopping = threading.Event()
        name = f"kvferry-decode-{identity.coordinates.engine_rank}"
        self._scatterers: Scatterers | None = None
        checks = staging.checks
        kernels = checks.memory.kernels if checks is not None else staging.kernels
        if kernels is not None:
            # To verify all that came in one direct write takes longer than our own thread may be away.
            count = settings.scatter_workers if checks is None else max(1, settings.scatter_workers)
            self._scatterers = Scatterers(count, kernels, self._on_task_done, platform=platform, name=name)
        self._thread = platform.start(name, self)

    # ---- from any thread ----------------------------------------------------------------------------------------

    @property
    def health(self) -> tuple[ThreadHealth, ...]:
        """How the threads are."""
        scatterers = self._scatterers.threads if self._scatterers is not None else ()
        return tuple(thread.health for thread in (self._thread, *scatterers))

    def rooms(self, now: float) -> list[RoomStatus]:
        """Where every room stands."""
        shown = []
        for room in list(self._rooms.values()):
            link = self._room_links.get(room.room)
            peers = tuple(peer.endpoint for peer in link.peers) if link is not None else ()
            shown.append(room.status(now, peers))
        return shown

    def peers(self, now: float) -> list[PeerStatus]:
        """How every prefill rank is that is known or looked for."""
        shown = []
        for link in list(self._links.values()):
            ranks = link.standing(now)
            is_ready = link.state is LinkState.READY
            if not ranks:
                name = f"{link.key.engine}/dp{link.key.dp_rank}"
                shown.append(PeerStatus(name=name, state=link.state.value, is_ready=False, silent_s=0.0))
            for rank in ranks:
                name = rank.endpoint or f"{link.key.engine}/{rank.rank}"
                state = "ready" if is_ready else link.state.value
                shown.append(PeerStatus(name=name, state=state, is_ready=is_ready, silent_s=rank.silent_s))
        return shown

    @property
    def staging(self) -> StagingStatus:
        """Our rings."""
        rings = list(self._staging.rings.values())
        return StagingStatus(
            total_bytes=sum(ring.memory.num_bytes for ring in rings), used_bytes=sum(ring.held_bytes for ring in rings)
        )

    def open_room(self, room: ReceivingRoom, key: LinkKey) -> None:
        """Takes a new room in."""
        self._submit(lambda now: self._take_room(room, key, now))

    def post_event(self, room: int, generation: int, event: ReceiverEvent) -> None:
        """Hands an event to a room, if it is still the same one."""

        def deliver(now: float) -> None:
            opened = self._rooms.get(room)
            if opened is not None and opened.generation == generation:
                self._handle(opened, event, now)

        self._submit(deliver)

    def connect(self, key: LinkKey, timeout_s: float) -> None:
        """Waits until a link is ready; see `DecodeEndpoint.connect`."""
        ready: Future[None] = Future()
        self._callers.add(ready)
        try:
            if self._is_stopping.is_set():
                raise EndpointClosedError("the endpoint was closed")
            self._submit(lambda now: self._take_connect(key, ready, now))
            ready.result(timeout_s)
        except FutureTimeoutError:
            link = self._links.get(key)
            problem = link.problem if link is not None else None
            raise TransferTimeoutError(
                f"prefill engine {key.engine!r} was not connected within {timeout_s:g} s; is it running, and "
                f"registered at the same registry, {self._registry.url}? {problem or ''}"
            ) from problem
        finally:
            self._callers.discard(ready)

    def closing(self) -> Iterator[tuple[Callable[[], bool], float]]:
        """Ends the threads and says goodbye to every peer, step by step: yields what to wait for, and how long."""
        self._is_stopping.set()
        self._end.wake()
        yield lambda: not self._thread.is_alive, float("inf")
        self._end_rooms(self._platform.now())
        scatterers = self._scatterers
        if scatterers is not None:
            scatterers.stop()
            yield lambda: not any(thread.is_alive for thread in scatterers.threads), float("inf")
        self._resolvers.close()
        self._keep_rings_in_doubt()
        for channel in list(self._channels.values()):
            self._close_channel(channel)
        for future in list(self._callers):
            if not future.done():
                future.set_exception(EndpointClosedError("the endpoint was closed"))
        self._end.close()

    def _end_rooms(self, now: float) -> None:
        """After the thread has ended: what was handed in too late for it ends as well."""
        self._work_inbox(now)
        for room in list(self._rooms.values()):
            if not room.machine.state.is_final:
                self._handle(room, ReceiverAbortRequested("the decode endpoint was closed"), now)

    def _keep_rings_in_doubt(self) -> None:
        """Nothing that we could do stops whoever may still write into staging memory: that stays for good."""
        ready = [link for link in self._links.values() if link.state is LinkState.READY]
        settled = {peer.endpoint for link in set(ready) - self._links_with_rooms for peer in link.peers}
        kept = self._staging.keep_for_good(settled)
        if kept:
            log.warning("%d bytes of staging memory are kept for good: prefill ranks may still write to them", kept)

    def _submit(self, work: Callable[[float], None]) -> None:
        self._inbox.append(work)
        self._end.wake()

    # ---- the thread ---------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        return bool(self._inbox) or self._is_stopping.is_set() or self._platform.now() >= self._next_tick_at

    def turn(self, *, may_wait: bool) -> bool:
        if self._is_stopping.is_set():
            return False
        now = self._platform.now()
        is_hot = bool(self._rooms) and now < self._hot_until  # a heartbeat's answer is no reason
        ready = self._end.wait(self._longest_wait_ms() if may_wait and not is_hot else 0)
        now = self._platform.now()
        happened = self._work_inbox(now)
        if self._rooms:  # before what peers say: that they leave is no reason to forget what has arrived from them
            happened |= self._take_notifications(now)
        for channel in ready:
            if self._channels.get(channel.address) is channel:
                happened = True
                self._receive(channel, now)
        if now >= self._next_tick_at:
            self._next_tick_at = now + _TICK_S
            self._tick(now)
        if happened:
            self._hot_until = self._platform.now() + _HOT_S
        elif is_hot and may_wait:
            self._platform.pause(_HOT_SLEEP_S)
        return True

    def _longest_wait_ms(self) -> int:
        if self._rooms:
            return _ROOMS_OPEN_MS
        return _LINKS_OPEN_MS if self._waiting or self._connecting else _IDLE_MS

    def _work_inbox(self, now: float) -> bool:
        happened = False
        while self._inbox:
            happened = True
            self._inbox.popleft()(now)
        return happened

    # ---- rooms --------------------------------------------------------------------------------------------------

    def _take_room(self, room: ReceivingRoom, key: LinkKey, now: float) -> None:
        self._rooms[room.room] = room
        link = self._link(key, room.machine.deadline or now)
        if link.state is LinkState.READY:
            self._connect_room(room, link, now)
        else:
            self._waiting.setdefault(key, []).append(room)

    def _take_connect(self, key: LinkKey, ready: Future[None], now: float) -> None:
        if self._link(key, now + self._settings.bootstrap_timeout_s).state is LinkState.READY:
            ready.set_result(None)
        else:
            self._connecting.setdefault(key, []).append(ready)

    def _connect_room(self, room: ReceivingRoom, link: Link, now: float) -> None:
        self._room_links[room.room] = link
        room.serial = link.next_serial()
        self._handle(room, link.connected(room.room), now)

    def _handle(self, room: ReceivingRoom, event: ReceiverEvent, now: float) -> None:
        """Tells a room what happened, does what it says, and forgets it when it is over."""
        try:
            commands = room.handle(event, now)
        except Exception as error:
            log.exception("room %d met an unexpected error", room.room)
            commands = room.handle(ReceiverBroke(error), now)
        link = self._room_links.get(room.room)
        if room.machine.is_done and self._rooms.get(room.room) is room:
            del self._rooms[room.room]
            self._room_links.pop(room.room, None)
            self._forget_room(room.room)  # before the caller learns of the end, who may use the number again then
        had_ended = room.receiver.stats.ended_at is not None
        room.show(now)
        if room.machine.state.is_final and not had_ended:
            self._observer.received(room.room, room.receiver.stats, room.machine.error)
        for command in commands:
            # A room that could not be opened at one rank has failed, and the others were told so already.
            is_too_late = isinstance(command, SendOpen) and room.machine.state.is_final
            if link is not None and not is_too_late:
                self._execute(room, link, command, now)

    def _execute(self, room: ReceivingRoom, link: Link, command: ReceiverCommand, now: float) -> None:
        message: messages.Message
        match command:
            case SendOpen(rank):
                message = messages.OpenRoom(
                    room=room.room,
                    generation=room.generation,
                    attempt=link.attempt,
                    serial=room.serial,
                    receivers=self._identity.coordinates.group_size,
                    tokens=room.tokens,
                    groups=room.groups,
                    trace=room.trace,
                )
            case SendAbort(rank, reason, error):
                message = messages.AbortRoom(
                    room=room.room,
                    generation=room.generation,
                    reason=reason,
                    error=error,
                    attempt=link.attempt,
                    serial=room.serial,
                )
            case SendVerified(rank):
                self._unconfirmed[room.room, room.generation, rank] = link
                message = messages.RoomVerified(room=room.room, generation=room.generation)
            case Scatter() | Verify():
                self._begin_task()
                return
        try:
            link.send(rank, message)
        except KVFerryError as error:
            self._handle(room, SenderLost(rank, error), now)

    def _take_notifications(self, now: float) -> bool:
        """Takes what has arrived; returns whether anything has."""
        try:
            notifications = self._transport.take_notifications()
        except Exception as error:
            running = [room for room in self._rooms.values() if not room.machine.state.is_final]
            if running:
                log.exception("notifications could not be taken; %d rooms fail", len(running))
            for room in running:
                self._handle(room, ReceiverBroke(error), now)
            return False
        for peer, data in notifications:
            self._notified(peer, data, now)
        return bool(notifications)

    def _notified(self, peer: str, data: bytes, now: float) -> None:
        """Counts an arrival, if it is of a room that is open, and from the rank that it names."""
        try:
            message = messages.decode_notification(data)
        except PeerError as error:
            log.warning("dropped a notification from %s: %s", peer, error)
            return
        if isinstance(message, messages.StagedArrived):
            self._part_arrived(peer, message, now)
            return
        room = self._rooms.get(message.room)
        link = self._room_links.get(message.room)
        if room is None or link is None or room.generation != message.generation:
            return  # belongs to a room that is over
        if not link.is_rank(message.writer, peer):
            log.warning("dropped a notification for room %d: %s is not rank %d", message.room, peer, message.writer)
            return
        match message:
            case messages.ChunkArrived(writer=writer, sequence=sequence):
                plan = self._staging.checks.plan(peer) if self._staging.checks is not None else None
                if self._staging.checks is None:
                    self._handle(room, Arrived(writer, sequence), now)
                elif plan is None:
                    log.warning("dropped a notification for room %d: rank %d has nothing to send", message.room, writer)
                else:
                    self._arriving = VerifyTask(room, now, plan, message, self._staging.checks.memory)
                    self._handle(room, ArrivedUnverified(writer, sequence), now)
                    self._arriving = None
            case messages.WriterFinished(writer=writer, chunks=chunks, aux=aux):
                self._handle(room, Finished(writer, chunks, aux), now)

    # ---- staging memory -----------------------------------------------------------------------------------------

    def _part_arrived(self, peer: str, message: messages.StagedArrived, now: float) -> None:
        """Takes a part of a chunk that is in staging memory, which is given back whether anybody wants it or not."""
        span = Span(message.start, message.begin, message.stop)
        ring = self._staging.ring(peer, message.epoch)
        if ring is None or not ring.take(span):
            log.warning("dropped a notification from %s: it has no such part of a ring: %s", peer, span)
            return
        room, link = self._rooms.get(message.room), self._room_links.get(message.room)
        task = None
        if room is not None and link is not None and room.generation == message.generation:
            if link.is_rank(message.writer, peer):
                task = ScatterTask(room, now, ring, span, message, is_verified=self._staging.checks is not None)
            else:
                log.warning("dropped a notification for room %d: %s is not rank %d", message.room, peer, message.writer)
        if task is None:
            ring.give_back(span)
            return
        self._arriving = task
        self._handle(task.room, PartArrived(message.writer, message.sequence, message.part, message.is_last), now)
        if self._arriving is not None:  # it was not wanted
            self._arriving = None
            ring.give_back(span)

    def _begin_task(self) -> None:
        """Hands what is arriving to a thread that does what is to be done with it."""
        task, self._arriving = self._arriving, None
        assert task is not None
        assert self._scatterers is not None
        self._scatterers.submit(task)

    def _on_task_done(self, task: ArrivalTask, record: PlacedRecord, error: Exception | None) -> None:
        """From the threads that scatter and verify; from ours where there are none."""
        assert self._scatterers is not None
        if self._scatterers.threads:
            self._submit(lambda now: self._task_done(task, record, error, now))
        else:
            self._task_done(task, record, error, self._platform.now())

    def _task_done(self, task: ArrivalTask, record: PlacedRecord, error: Exception | None, now: float) -> None:
        task.give_back()
        task.room.placed(record)
        self._handle(task.room, task.event(error), now)

    def _span_void(self, message: messages.SpanVoid) -> None:
        """Nothing came, or will come, of a span."""
        ring = self._staging.ring(message.endpoint, message.epoch)
        span = Span(message.start, message.begin, message.stop)
        if ring is not None and ring.take(span):
            ring.give_back(span)

    # ---- links --------------------------------------------------------------------------------------------------

    @property
    def _all_links(self) -> tuple[Link, ...]:
        return *self._links.values(), *self._retired_links

    @property
    def _links_with_rooms(self) -> set[Link]:
        return set(self._room_links.values())

    def _link(self, key: LinkKey, deadline: float) -> Link:
        """The link of that key, begun if there is none. Whoever waits for it has no earlier deadline."""
        if key in self._links:
            self._links[key].deadline = max(self._links[key].deadline, deadline)
        else:
            self._links[key] = Link(
                key, self._identity, self._staging, next_attempt=self._next_attempt, deadline=deadline
            )
            self._resolvers.submit(partial(self._look_up, self._links[key]))
        return self._links[key]

    def _look_up(self, link: Link) -> None:
        """Asks the registry, once. Runs on the pool."""
        problem: KVFerryError
        try:
            view = self._registry.engine(link.key.engine)
            if view.complete:
                self._submit(partial(self._resolved, link, view.registrations))
                return
            problem = PeerDisconnectedError(
                f"the registry at {self._registry.url} knows {len(view.registrations)} of "
                f"{view.world_size or 'an unknown number of'} ranks of engine {link.key.engine!r}"
            )
        except RegistryAccessError as error:  # asking again would not help
            self._submit(partial(self._fail_link, link, error))
            return
        except RegistryError as error:
            problem = error
        except Exception as error:
            problem = RegistryError(f"looking up {link.key.engine!r} failed: {type(error).__name__}: {error}")
            problem.__cause__ = error
        self._submit(partial(self._not_resolved, link, problem))

    def _not_resolved(self, link: Link, problem: KVFerryError, now: float) -> None:
        link.problem = problem
        link.look_up_at = now + link.next_pause_s(self._platform.jitter())

    def _resolved(self, link: Link, registrations: tuple[RankRegistration, ...], now: float) -> None:
        if self._links.get(link.key) is not link:
            return
        try:
            link.resolved(registrations, self._channel, now)
            for channel in link.channels:
                self._attempts[channel.address] = link.attempt
        except KVFerryError as error:
            self._fail_link(link, error, now)

    def _channel(self, address: str) -> Connection:
        """The connection to an address, made if there is none."""
        if address not in self._channels:
            self._channels[address] = self._end.connect(address)
        return self._channels[address]

    def _close_unused_channels(self) -> None:
        in_use = {channel.address for link in self._all_links for channel in link.channels}
        for channel in [channel for address, channel in self._channels.items() if address not in in_use]:
            self._close_channel(channel)

    def _close_channel(self, channel: Connection) -> None:
        """Says goodbye and closes."""
        del self._channels[channel.address]
        try:
            attempt = self._attempts.pop(channel.address, 0)
            channel.send(messages.encode(messages.Detach(endpoint=self._identity.endpoint, attempt=attempt)))
        except PeerDisconnectedError as error:
            log.debug("no goodbye to %s: %s", channel.address, error)
        self._end.disconnect(channel)

    def _say_again(self, channel: Connection, now: float) -> None:
        """Repeats what may have been lost with a connection, or whose answer may. Nobody minds hearing it twice."""
        for link in dict.fromkeys((*self._links.values(), *self._room_links.values())):
            rank = link.rank_behind(channel)
            if rank is None:
                continue
            if self._links.get(link.key) is link:
                try:
                    self._refuse_the_dead(link, now)
                    link.ask(now)  # first: a later start of the rank says so, and the link ends
                except KVFerryError as error:
                    self._fail_link(link, error, now)
                    continue
            for number in [number for number, its_link in self._room_links.items() if its_link is link]:
                room = self._rooms.get(number)
                if room is None:
                    continue
                if not room.machine.state.is_final:
                    self._execute(room, link, SendOpen(rank), now)
                elif rank in room.machine.unanswered:
                    self._execute(room, link, room.machine.abort_of(rank), now)

    def _receive(self, channel: Connection, now: float) -> None:
        received = channel.receive()  # first: to say everything again may close the connection
        if channel.take_break():
            self._say_again(channel, now)
        for data in received:
            link = next((link for link in self._links.values() if link.rank_behind(channel) is not None), None)
            if link is not None:
                link.heard(channel)
            try:
                message = messages.decode_to_decode(data)
                match message:
                    case messages.RoomFailed() | messages.Drained():
                        self._room_message(channel, message, now)
                    case messages.Confirmed():
                        self._confirmed(message)
                    case messages.SpanVoid():
                        if channel in self._channels_of(message.endpoint):
                            self._span_void(message)
                    case messages.Closed():
                        if channel in self._channels_of(message.endpoint):
                            self._rank_closed(message.endpoint, now)
                    case messages.Gone(process):
                        if any(each.knows_machine(channel, process.machine) for each in self._all_links):
                            self._lost.gone(process)
                    case messages.Welcome() if self._channels_of(message.endpoint) - {channel}:
                        raise PeerError(f"at {channel.address} somebody answers under the name of another prefill rank")
                    case _ if link is not None:
                        if link.received(channel, message, now):
                            self._link_ready(link, now)
                        elif link.state is LinkState.RESOLVING:
                            self._started_over(link)
            except KVFerryError as error:
                if link is not None:
                    self._fail_link(link, error, now)
            except Exception as error:
                log.exception("a message from %s met an unexpected error", channel.address)
                if link is not None:
                    problem = PeerError(f"a message from {channel.address} met {type(error).__name__}: {error}")
                    problem.__cause__ = error
                    self._fail_link(link, problem, now)

    def _channels_of(self, endpoint: str) -> set[Channel]:
        """The connections behind which an endpoint has answered: one, or none. Nobody else may speak for it."""
        return {channel for link in self._all_links if (channel := link.channel_of(endpoint)) is not None}

    def _rank_closed(self, endpoint: str, now: float) -> None:
        """A prefill rank has gone in order: it serves nobody any more, and will not write again."""
        for link in list(self._links.values()):
            rank = link.rank_of(endpoint)
            if rank is not None:
                problem = PeerDisconnectedError(f"prefill rank {rank} of {link.key.engine!r} was closed")
                self._fail_link(link, problem, now)
        self._will_not_write(endpoint, now)

    def _room_message(self, channel: Connection, message: messages.RoomFailed | messages.Drained, now: float) -> None:
        room, link = self._rooms.get(message.room), self._room_links.get(message.room)
        if room is None or link is None or room.generation != message.generation:
            return  # belongs to a room that is over
        if isinstance(message, messages.Drained) and not link.is_rank(message.writer, message.endpoint):
            return  # from a later start of the rank, which cannot speak for the earlier one
        if link.rank_behind(channel) != message.writer:
            log.warning("dropped what %s says for rank %d in room %d", channel.address, message.writer, message.room)
            return
        match message:
            case messages.RoomFailed():
                self._handle(room, SenderFailed(message.writer, message.error, message.reason), now)
            case messages.Drained():
                self._handle(room, SenderDrained(message.writer), now)

    def _confirmed(self, message: messages.Confirmed) -> None:
        """A prefill rank has heard that all of its digests are right."""
        key = message.room, message.generation, message.writer
        link = self._unconfirmed.get(key)
        if link is not None and link.is_rank(message.writer, message.endpoint):
            del self._unconfirmed[key]

    def _link_ready(self, link: Link, now: float) -> None:
        for peer in link.peers:
            self._lost.discard(peer.endpoint)
        for future in self._connecting.pop(link.key, []):
            future.set_result(None)
        for room in self._waiting.pop(link.key, []):
            if self._rooms.get(room.room) is room:
                self._connect_room(room, link, now)

    def _started_over(self, link: Link) -> None:
        """What the ranks were offered before may be written to until they are connected anew, or known to be gone."""
        self._observer.retried(Retry.CONNECT)
        while link.left_behind:
            peer = link.left_behind.pop()
            self._lost.add(peer.endpoint, peer.process)
        self._close_unused_channels()

    def _fail_link(self, link: Link, error: KVFerryError, now: float) -> None:
        """Fails everything that relies on a link. It stays connected for as long as a rank may still write."""
        if self._links.get(link.key) is not link:
            return
        log.error("the link to prefill engine %r is down: %s", link.key.engine, error)
        self._observer.peer_lost(f"{link.key.engine}/dp{link.key.dp_rank}", error)
        del self._links[link.key]
        self._retired_links.append(link)
        for peer in link.peers:
            self._lost.add(peer.endpoint, peer.process)
        for future in self._connecting.pop(link.key, []):
            future.set_exception(error)
        for room in self._waiting.pop(link.key, []):
            if self._rooms.get(room.room) is room:
                self._handle(room, ConnectFailed(error), now)
        for number in [number for number, its_link in self._room_links.items() if its_link is link]:
            self._handle(self._rooms[number], ConnectFailed(error), now)
        self._close_retired_links()

    def _close_retired_links(self) -> None:
        """Closes those that nobody will say anything through that matters here."""
        in_use = self._links_with_rooms
        self._retired_links = [link for link in self._retired_links if link in in_use or self._has_ring_in_doubt(link)]
        self._close_unused_channels()

    def _has_ring_in_doubt(self, link: Link) -> bool:
        """Whether a rank that was lost may write into staging memory still; it may yet say that it will not."""
        return any(peer.endpoint in self._staging.rings and peer.endpoint in self._lost for peer in link.peers)

    # ---- time ---------------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        for link in list(self._links.values()):
            if link.look_up_at is not None and link.look_up_at <= now < link.deadline:
                link.look_up_at = None
                self._observer.retried(Retry.LOOK_UP)
                self._resolvers.submit(partial(self._look_up, link))
            elif link.state is not LinkState.READY and now >= link.deadline:
                self._fail_link(link, self._why_not_ready(link), now)
        for room in list(self._rooms.values()):
            deadline = room.machine.deadline
            if deadline is not None and now >= deadline:
                self._handle(room, self._why_late(room), now)
        if len(self._lost):
            self._release_what_is_proved(now)
        if now >= self._next_ping_at:
            self._next_ping_at = now + self._settings.heartbeat_interval_s
            self._heartbeat(now)
        if self._retired_links:
            self._close_retired_links()

    def _why_late(self, room: ReceivingRoom) -> ReceiverEvent:
        """What to tell a room whose time is up: what its link waits for, if it waits for one."""
        for key, rooms in self._waiting.items():
            if room in rooms and key in self._links:
                rooms.remove(room)
                return ConnectFailed(self._why_not_ready(self._links[key]))
        return ReceiverTick()

    def _why_not_ready(self, link: Link) -> KVFerryError:
        if link.state is LinkState.RESOLVING and link.problem is not None:
            return link.problem
        hint = ""
        if link.state is LinkState.GREETING:
            mine = secret_hint(has_secret=self._settings.has_secret)
            hint = f". Nobody answered, or whoever did has another secret: {mine}"
        return PeerDisconnectedError(
            f"prefill engine {link.key.engine!r}: still {link.state.value} after "
            f"{self._settings.bootstrap_timeout_s:g} s (KVFERRY_BOOTSTRAP_TIMEOUT_S){hint}"
        )

    def _heartbeat(self, now: float) -> None:
        # While this process was frozen, or had no processor, it heard nobody: that is not their fault.
        late_s = max(0.0, now - self._last_heartbeat_at - 2 * self._settings.heartbeat_interval_s - _IDLE_MS / 1000)
        self._last_heartbeat_at = now
        for link in self._links.values():
            link.forgive(late_s, now)
        self._tell_silence(now)
        for link in list(self._links.values()):
            silent = link.silent_rank(now, self._settings.peer_timeout_s)
            try:
                self._refuse_the_dead(link, now)
                if silent is not None and link.state is LinkState.GREETING:
                    link.start_over(now)
                    self._started_over(link)
                elif silent is not None:
                    raise PeerDisconnectedError(
                        f"prefill rank {silent[0]} of {link.key.engine!r} has been silent for {silent[1]:.1f} s "
                        "(KVFERRY_PEER_TIMEOUT_S)"
                    )
                link.ask(now)
            except KVFerryError as error:
                self._fail_link(link, error, now)
        if not self._rooms:  # what comes for rooms that are over keeps staging memory until it is taken
            self._take_notifications(now)
        self._repeat(now)

    def _tell_silence(self, now: float) -> None:
        """Writes to the log, once for each, which prefill ranks have fallen silent."""
        silent = {}
        for link in self._links.values():
            for rank in link.standing(now):
                if rank.silent_s > 2 * self._settings.heartbeat_interval_s:
                    silent[link.key, rank.rank] = rank
        for (key, number), rank in silent.items():
            if (key, number) not in self._silent:
                who = f"prefill rank {number} of {key.engine!r} ({rank.endpoint or 'not connected yet'})"
                tell_silence(who, rank.endpoint, rank.silent_s)
        self._silent = frozenset(silent)

    def _release_what_is_proved(self, now: float) -> None:
        """Gives back what lost ranks might have written to, of those that will not write again."""
        at_stake = {peer.endpoint for link in self._room_links.values() for peer in link.peers}
        self._lost.keep_only(at_stake | self._staging.writers)
        self._lost.look(self._platform.is_gone)
        for endpoint in self._lost.take_settled(now):
            self._will_not_write(endpoint, now)

    def _will_not_write(self, endpoint: str, now: float) -> None:
        """A prefill rank has gone for good."""
        self._lost.discard(endpoint)
        self._staging.closed(endpoint)
        for number, link in list(self._room_links.items()):
            rank = link.rank_of(endpoint)
            if rank is not None:
                self._handle(self._rooms[number], SenderDrained(rank), now)
        self._close_retired_links()

    def _refuse_the_dead(self, link: Link, now: float) -> None:
        """Starts a link over whose rank's process is known to have ended, as long as no room relies on it.

        Raises:
            PeerDisconnectedError: if rooms do.
        """
        for peer in link.peers:
            if not self._platform.is_gone(peer.process):
                continue
            if link.state is LinkState.READY:
                raise PeerDisconnectedError(
                    f"prefill rank {link.rank_of(peer.endpoint)} of {link.key.engine!r} has ended: its process "
                    f"{peer.process.pid} is gone"
                )
            link.start_over(now)
            self._started_over(link)
            return

    def _repeat(self, now: float) -> None:
        """Says again what was not answered: a connection that broke may have lost it, or the answer."""
        for ring in self._staging.rings.values():
            ring.report()
        for key, link in list(self._unconfirmed.items()):
            if self._links.get(link.key) is not link:  # whoever is behind it has lost us, too, and waits no longer
                del self._unconfirmed[key]
                continue
            verified, generation, rank = key
            with contextlib.suppress(KVFerryError):
                link.send(rank, messages.RoomVerified(room=verified, generation=generation))
        for _, process in self._lost.doubtful:
            for link in self._all_links:
                with contextlib.suppress(KVFerryError):
                    link.ask_whether_gone(process)
        # Whoever has its place now may know what became of it; and if it lives, it gives the old ring up for a new one.
        doubtful = [endpoint for endpoint, _ in self._lost.doubtful]
        for link in self._retired_links:
            if link.key not in self._links and any(link.rank_of(endpoint) is not None for endpoint in doubtful):
                self._link(link.key, now + self._settings.bootstrap_timeout_s)
        for number, link in list(self._room_links.items()):
            room = self._rooms[number]
            if room.machine.state.is_final:
                for rank in room.machine.unanswered:
                    self._execute(room, link, room.machine.abort_of(rank), now)
