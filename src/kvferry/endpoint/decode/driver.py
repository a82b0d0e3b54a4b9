"""The one thread of a decode endpoint: it drives rooms, messages, notifications and deadlines; `Links` has the links.

The thread owns everything that it touches; callers queue work for it and wake it. Messages wake it, too, but no
transport says by itself that bytes have arrived. So while rooms are open it looks, ever less often the longer nothing
has happened; when there are none it sleeps for half a second, or until it is woken.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from functools import partial

from kvferry.control.ends import Connection
from kvferry.control.registry_client import RegistryClient
from kvferry.endpoint.decode.arrivals import Arrivals
from kvferry.endpoint.decode.links import Links
from kvferry.endpoint.decode.refused_rooms import Refusals
from kvferry.endpoint.decode.room import ReceivingRoom
from kvferry.endpoint.runtime.platform import Platform
from kvferry.endpoint.runtime.settling import Settling
from kvferry.endpoint.runtime.threads import Loop, ThreadHealth
from kvferry.endpoint.runtime.timers import Timers
from kvferry.errors import KVFerryError, PeerError
from kvferry.observe.observer import Observer
from kvferry.observe.status import LostPeerStatus, PeerStatus, RoomStatus, StagingStatus
from kvferry.protocol.links.link import Link, LinkKey, LinkState
from kvferry.protocol.transfer.receiver import (
    AwaitArrival,
    ConnectFailed,
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
    SenderSettled,
    SendOpen,
    SendVerified,
    Verify,
)
from kvferry.protocol.wire import messages
from kvferry.protocol.wire.rank_identity import Identity
from kvferry.settings import Settings
from kvferry.staging.receiving import ReceivingStaging
from kvferry.transport import Transport

log = logging.getLogger(__name__)

_SHORTEST_SLEEP_S = 100e-6
_LONGEST_SLEEP_S = 0.01
_SLEEP_OF_QUIET = 1 / 16
"""Of the time that nothing has happened: what arrives is noticed that much later than it might be, at the most."""
_MESSAGES_S = 1e-3
_LINKS_OPEN_MS = 50
_IDLE_MS = 500
_TICK_S = 0.1
_MOST_AWAKE_S = 0.5
"""Of the time between two ticks: more than there is even where nothing happens."""


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
            observer: notified of what happens.
            forget_room: called with the number of a room that is done.
        """
        self._identity = identity
        self._transport = transport
        self._settings = settings
        self._staging = staging
        self._forget_room = forget_room
        self._platform = platform
        self._observer = observer
        self._end = platform.connect_as(identity.endpoint, settings)
        self._inbox: deque[Callable[[float], None]] = deque()
        # What a freeze right after a look adds must be less than what is waited for.
        most_at_once_s = min(_MOST_AWAKE_S, settings.quarantine_s / 4)
        self._settling = Settling(settings.quarantine_s, platform.now, most_at_once_s=most_at_once_s)
        self._links = Links(
            identity,
            registry,
            settings,
            staging,
            end=self._end,
            platform=platform,
            promises=transport.promises,
            observer=observer,
            settling=self._settling,
            user=self,
        )
        self._refusals = Refusals(
            identity,
            self._links,
            pause_s=settings.heartbeat_interval_s,
            keep_s=settings.bootstrap_timeout_s,
            most=settings.max_rooms,
        )
        self._waiting: dict[Link, dict[ReceivingRoom, None]] = {}
        self._awaited: dict[ReceivingRoom, Link] = {}  # the same, by room
        self._rooms: dict[int, ReceivingRoom] = {}
        self._room_links: dict[int, Link] = {}
        self._rooms_through: dict[Link, dict[int, None]] = {}  # the same, by link
        self._unanswered: dict[int, None] = {}  # rooms that are over here, and may not be everywhere
        self._timers: Timers[int] = Timers()
        # Links of verified rooms that a rank has not confirmed yet, by room, generation and rank.
        self._unconfirmed: dict[tuple[int, int, int], Link] = {}
        self._last_news_at = 0.0
        self._next_messages_at = 0.0
        self._next_tick_at = 0.0
        self._next_ping_at = 0.0
        self._is_stopping = threading.Event()
        name = f"kvferry-decode-{identity.coordinates.engine_rank}"
        self._arrivals = Arrivals(
            transport, staging, settings, self, settling=self._settling, platform=platform, name=name
        )
        self._thread = platform.start(name, self)

    # ---- from any thread ----------------------------------------------------------------------------------------

    @property
    def health(self) -> tuple[ThreadHealth, ...]:
        """Health of every thread."""
        return tuple(thread.health for thread in (self._thread, *self._arrivals.threads))

    def rooms(self, now: float) -> list[RoomStatus]:
        """Returns the status of every room."""
        shown = []
        for room in list(self._rooms.values()):
            link = self._room_links.get(room.room)
            peers = tuple(peer.endpoint for peer in link.peers) if link is not None else ()
            shown.append(room.status(now, peers))
        return shown

    def peers(self, now: float) -> list[PeerStatus]:
        """Returns the status of every prefill rank that is connected or looked up."""
        return self._links.statuses(now)

    def quarantine(self, now: float) -> list[LostPeerStatus]:
        """Returns the prefill ranks that were lost, and what they may still write to."""
        pages: dict[str, int] = {}
        for room in list(self._rooms.values()):
            link = self._room_links.get(room.room)
            for rank in room.machine.undrained if link is not None and room.is_quarantined else ():
                peer = link.endpoint_of(rank) if link is not None else None
                if peer is not None:
                    pages[peer] = pages.get(peer, 0) + room.pages
        return self._links.lost(pages, now)

    def release(self, endpoint: str) -> None:
        """Queues an operator's word that a lost rank has ended."""
        self.submit(partial(self._links.release, endpoint))

    @property
    def staging(self) -> StagingStatus:
        """How much memory this rank's rings have, and how much of it is in use."""
        rings = list(self._staging.rings.values())
        return StagingStatus(
            total_bytes=sum(ring.memory.num_bytes for ring in rings), used_bytes=sum(ring.held_bytes for ring in rings)
        )

    def open_room(self, room: ReceivingRoom, key: LinkKey) -> None:
        """Queues a new room for the thread."""
        self.submit(lambda now: self._take_room(room, key, now))

    def refuse_room(self, room: int, key: LinkKey, reason: str) -> None:
        """Queues the news that a room will not be opened."""

        def refuse(now: float) -> None:
            holder = self._rooms.get(room)
            link = self._links.to(key, now + self._settings.bootstrap_timeout_s)
            self._refusals.add(
                room,
                link,
                generation=self._platform.random_bits(63),
                reason=reason,
                now=now,
                holder=holder.generation if holder is not None else None,
            )

        self.submit(refuse)

    def post_event(self, room: int, generation: int, event: ReceiverEvent) -> None:
        """Queues an event for a room; it is dropped if the room has another generation by then, or has gone."""

        def deliver(now: float) -> None:
            opened = self._rooms.get(room)
            if opened is not None and opened.generation == generation:
                self.apply(opened, event, now)

        self.submit(deliver)

    def connect(self, key: LinkKey, timeout_s: float) -> None:
        """Waits until a link is ready; see `DecodeEndpoint.connect`."""
        self._links.wait_ready(key, timeout_s)

    def closing(self) -> Iterator[tuple[Callable[[], bool], float]]:
        """Ends the threads and closes every link, step by step: yields what to wait for, and until when."""
        self._is_stopping.set()
        self._end.wake()
        yield lambda: not self._thread.is_alive, float("inf")
        self._end_rooms(self._platform.now())
        self._arrivals.stop()
        yield lambda: not any(thread.is_alive for thread in self._arrivals.threads), float("inf")
        self._links.close()
        self._end.close()

    def _end_rooms(self, now: float) -> None:
        """Ends what was queued too late for the thread, once that has ended."""
        self._work_inbox(now)
        for room in list(self._rooms.values()):
            if not room.machine.state.is_final:
                self.apply(room, ReceiverAbortRequested("the decode endpoint was closed"), now)

    def submit(self, work: Callable[[float], None]) -> None:
        """Runs work soon, on the thread, with the time as its argument."""
        self._inbox.append(work)
        self._end.wake()

    # ---- the thread ---------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        return bool(self._inbox) or self._is_stopping.is_set() or self._platform.now() >= self._next_tick_at

    def turn(self, *, may_wait: bool) -> bool:
        if self._is_stopping.is_set():
            return False
        ready = self._wait() if may_wait else self._end.wait(0)
        now = self._platform.now()
        self._work_inbox(now)
        if self._rooms:  # before messages: a peer's close must not discard what has arrived from it
            self._arrivals.take(now)
        for channel in ready:
            if self._links.owns(channel):
                self._receive(channel, now)
        if now >= self._next_tick_at:
            self._next_tick_at = now + _TICK_S
            self._tick(now)
        return True

    def _wait(self) -> Collection[Connection]:
        """Waits for what there is to do; returns the connections that have news."""
        if not self._rooms:
            return self._end.wait(_LINKS_OPEN_MS if self._waiting or self._links.are_awaited else _IDLE_MS)
        now = self._platform.now()
        sleep_s = min(max(_SHORTEST_SLEEP_S, (now - self._last_news_at) * _SLEEP_OF_QUIET), _LONGEST_SLEEP_S)
        if sleep_s < _MESSAGES_S and now < self._next_messages_at:
            if not self._inbox:
                self._platform.pause(sleep_s)
            return ()
        # Each call to the system hands the interpreter to others, which may keep it: messages come seldom, and wait.
        self._next_messages_at = now + _MESSAGES_S
        return self._end.wait(int(sleep_s / _MESSAGES_S))

    def _work_inbox(self, now: float) -> None:
        while self._inbox:
            self._inbox.popleft()(now)

    # ---- rooms --------------------------------------------------------------------------------------------------

    def _take_room(self, room: ReceivingRoom, key: LinkKey, now: float) -> None:
        self._rooms[room.room] = room
        self._refusals.forget(room.room)
        link = self._links.to(key, room.machine.deadline or now)
        if link.state is LinkState.READY:
            self._connect_room(room, link, now)
        else:
            self._waiting.setdefault(link, {})[room] = None
            self._awaited[room] = link
            self._timers.set(room.room, room.machine.deadline)

    def _connect_room(self, room: ReceivingRoom, link: Link, now: float) -> None:
        self._room_links[room.room] = link
        self._rooms_through.setdefault(link, {})[room.room] = None
        room.serial = link.next_serial()
        self.apply(room, link.connected(room.room), now)

    def apply(self, room: ReceivingRoom, event: ReceiverEvent, now: float) -> None:
        """Passes an event to a room's machine, executes its commands, and forgets the room once it is done."""
        self._last_news_at = now  # heartbeats' answers do not count: nothing follows them
        try:
            commands = room.handle(event, now)
        except Exception as error:
            log.exception("room %d met an unexpected error", room.room)
            commands = room.handle(ReceiverBroke(error), now)
        link = self._room_links.get(room.room)
        if room.machine.is_done and self._rooms.get(room.room) is room:
            del self._rooms[room.room]
            self._forget_link(room.room)
            self._timers.set(room.room, None)
            self._unanswered.pop(room.room, None)
            self._refuse_unopened(room, now)
            self._forget_room(room.room)  # before the caller sees the end: it may use the number again then
        elif self._rooms.get(room.room) is room:
            self._timers.set(room.room, room.machine.deadline)
            if room.machine.state.is_final:
                self._unanswered[room.room] = None
        had_ended = room.receiver.stats.ended_at is not None
        room.show(now)
        if room.machine.state.is_final and not had_ended:
            self._observer.received(room.room, room.receiver.stats, room.machine.error)
        for command in commands:
            # A room that could not be opened at one rank has failed, and its aborts were sent already.
            is_too_late = isinstance(command, SendOpen) and room.machine.state.is_final
            if link is not None and not is_too_late:
                self._execute(room, link, command, now)

    def _refuse_unopened(self, room: ReceivingRoom, now: float) -> None:
        """Tells the prefill side of a room that has ended while it waited for its link."""
        link = self._stop_waiting(room)
        if link is not None and room.machine.error is not None:
            error = room.machine.error
            cause = error.__cause__
            reason = str(error) if cause is None else f"{type(cause).__name__}: {cause}"
            self._refusals.add(room.room, link, generation=room.generation, reason=reason, now=now)

    def _stop_waiting(self, room: ReceivingRoom) -> Link | None:
        """Takes a room from those that wait for a link. Returns the link; None if it waited for none."""
        link = self._awaited.pop(room, None)
        if link is not None:
            del self._waiting[link][room]
            if not self._waiting[link]:
                del self._waiting[link]
        return link

    def _forget_link(self, room: int) -> None:
        link = self._room_links.pop(room, None)
        if link is not None:
            del self._rooms_through[link][room]
            if not self._rooms_through[link]:
                del self._rooms_through[link]

    def _execute(self, room: ReceivingRoom, link: Link, command: ReceiverCommand, now: float) -> None:
        message: messages.Message
        match command:
            case SendOpen(rank, filled):
                message = messages.OpenRoom(
                    room=room.room,
                    generation=room.generation,
                    attempt=link.attempt,
                    serial=room.serial,
                    receivers=self._identity.coordinates.group_size,
                    tokens=room.tokens,
                    groups=tuple(group for group in room.groups if group.name in filled),
                    trace=room.trace,
                    held=max((group.held for group in room.groups), default=0),
                    depends_on=room.depends_on,
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
                self._arrivals.begin(room.room, command)
                return
            case AwaitArrival(rank):
                self._settling.add(partial(self.post_event, room.room, room.generation, SenderSettled(rank)))
                return
        try:
            link.send(rank, message)
        except KVFerryError as error:
            self.apply(room, SenderLost(rank, error), now)

    # ---- what arrives -------------------------------------------------------------------------------------------

    def running(self) -> list[ReceivingRoom]:
        """Returns the rooms that have not ended."""
        return [room for room in self._rooms.values() if not room.machine.state.is_final]

    def find(self, room: int, generation: int) -> tuple[ReceivingRoom, Link] | None:
        """Returns a room and its link; None if it is over, has no link yet, or is another use of the number."""
        found, link = self._rooms.get(room), self._room_links.get(room)
        return (found, link) if found is not None and link is not None and found.generation == generation else None

    # ---- links --------------------------------------------------------------------------------------------------

    @property
    def links_with_rooms(self) -> Collection[Link]:
        """Links through which rooms are open."""
        return self._rooms_through.keys()

    @property
    def links_with_refusals(self) -> Collection[Link]:
        """Links to ranks that are still to hear of rooms that were refused."""
        return self._refusals.links

    def link_looked_up(self, link: Link, now: float) -> None:
        """Tells the ranks that were found of rooms that were refused."""
        self._refusals.link_looked_up(link)

    def link_ready(self, link: Link, now: float) -> None:
        """Opens the rooms that waited for a link."""
        for room in list(self._waiting.get(link, ())):
            self._stop_waiting(room)
            self._connect_room(room, link, now)

    def link_failed(self, link: Link, error: KVFerryError, now: float) -> None:
        """Fails the rooms that rely on a link."""
        for room in list(self._waiting.get(link, ())):
            self.apply(room, ConnectFailed(error), now)
        for number in list(self._rooms_through.get(link, ())):
            self.apply(self._rooms[number], ConnectFailed(error), now)

    def rank_settled(self, endpoint: str, now: float) -> None:
        """Marks a prefill rank that will not write again as drained in every room."""
        for link, numbers in list(self._rooms_through.items()):
            rank = link.rank_of(endpoint)
            if rank is not None:
                for number in list(numbers):
                    self.apply(self._rooms[number], SenderDrained(rank), now)

    def _retransmit(self, channel: Connection, now: float) -> None:
        """Retransmits what a broken connection may have lost, or whose answer it may have; receivers deduplicate."""
        self._refusals.repeat(now, is_due=True)
        for link in self._links.through(channel):
            rank = link.rank_behind(channel)
            if rank is None or not self._links.retransmit(link, now):
                continue
            for number in list(self._rooms_through.get(link, ())):
                room = self._rooms.get(number)
                if room is None:
                    continue
                if not room.machine.state.is_final:
                    self._execute(room, link, room.machine.open_of(rank), now)
                elif rank in room.machine.unanswered:
                    self._execute(room, link, room.machine.abort_of(rank), now)

    def _receive(self, channel: Connection, now: float) -> None:
        received = channel.receive()  # first: retransmitting may close the connection
        if channel.take_break():
            self._retransmit(channel, now)
        for data in received:
            link = self._links.behind(channel)
            if link is not None:
                link.record_answer(channel)
            try:
                message = messages.decode_to_decode(data)
                match message:
                    case messages.RoomFailed() | messages.Drained():
                        self._room_message(channel, message, now)
                    case messages.Confirmed():
                        self._confirmed(message)
                    case messages.SpanReleased():
                        if self._links.carries_messages_of(channel, message.endpoint):
                            self._arrivals.span_released(message)
                    case _:
                        self._links.received(channel, link, message, now)
            except KVFerryError as error:
                if link is not None:
                    self._links.fail(link, error, now)
            except Exception as error:
                log.exception("a message from %s met an unexpected error", channel.address)
                if link is not None:
                    problem = PeerError(f"a message from {channel.address} met {type(error).__name__}: {error}")
                    problem.__cause__ = error
                    self._links.fail(link, problem, now)

    def _room_message(self, channel: Connection, message: messages.RoomFailed | messages.Drained, now: float) -> None:
        if isinstance(message, messages.Drained) and self._refusals.take_answer(channel, message):
            self._links.close_retired()  # nobody needs them for that any more
        found = self.find(message.room, message.generation)
        if found is None:
            return
        room, link = found
        if isinstance(message, messages.Drained) and not link.is_rank(message.writer, message.endpoint):
            return  # from a later start of the rank, which proves nothing about the earlier one's writes
        if link.rank_behind(channel) != message.writer:
            log.warning("dropped a message: %s is not rank %d, room %d", channel.address, message.writer, message.room)
            return
        match message:
            case messages.RoomFailed():
                self.apply(room, SenderFailed(message.writer, message.error, message.reason), now)
            case messages.Drained():
                self.apply(room, SenderDrained(message.writer, message.after_failure), now)

    def _confirmed(self, message: messages.Confirmed) -> None:
        """Ends the retransmission of a verified room, which its prefill rank has confirmed."""
        key = message.room, message.generation, message.writer
        link = self._unconfirmed.get(key)
        if link is not None and link.is_rank(message.writer, message.endpoint):
            del self._unconfirmed[key]

    # ---- time ---------------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        self._links.tick(now)
        self._settling.look()
        for number in self._timers.due(now):
            room = self._rooms[number]
            self.apply(room, self._why_late(room), now)
        self._links.release_settled_ranks(now)
        if now >= self._next_ping_at:
            self._next_ping_at = now + self._settings.heartbeat_interval_s
            self._links.heartbeat(now, longest_sleep_s=_IDLE_MS / 1000)
            if not self._rooms:  # what arrives for rooms that are over holds staging memory until it is taken
                self._arrivals.take(now)
            self._repeat(now)
        if self._links.retired:
            self._links.close_retired()

    def _why_late(self, room: ReceivingRoom) -> ReceiverEvent:
        """Returns the event for a room whose deadline has passed: why its link is not ready, if it waits for one."""
        link = self._awaited.get(room)
        if link is None:
            return ReceiverTick()
        return ConnectFailed(self._links.why_not_ready(link))

    def _repeat(self, now: float) -> None:
        """Retransmits what was not answered: a connection that broke may have lost it, or the answer."""
        for ring in self._staging.rings.values():
            ring.report()
        for key, link in list(self._unconfirmed.items()):
            if not self._links.is_current(link):  # its ranks have given this one up, too, and wait no longer
                del self._unconfirmed[key]
                continue
            verified, generation, rank = key
            with contextlib.suppress(KVFerryError):
                link.send(rank, messages.RoomVerified(room=verified, generation=generation))
        self._refusals.repeat(now)
        self._links.ask_about_lost_ranks(now)
        for number in list(self._unanswered):
            room, its_link = self._rooms[number], self._room_links.get(number)
            if its_link is not None:
                for rank in room.machine.unanswered:
                    self._execute(room, its_link, room.machine.abort_of(rank), now)
