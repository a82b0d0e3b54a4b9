"""The rooms of a decode rank, and what they rely on: links to prefill ranks, refusals, arrivals.

All of it belongs to the endpoint's one thread, where nothing else is said.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial

from kvferry.control.ends import ConnectingEnd
from kvferry.control.registry_client import RegistryClient
from kvferry.endpoint.decode.arrivals import Arrivals
from kvferry.endpoint.decode.links import Links
from kvferry.endpoint.decode.refused_rooms import Refusals
from kvferry.endpoint.decode.room import ReceivingRoom
from kvferry.endpoint.runtime.platform import Platform
from kvferry.endpoint.runtime.settling import Settling
from kvferry.endpoint.runtime.timers import Timers
from kvferry.errors import KVFerryError, MessageError
from kvferry.observe.observer import Observer
from kvferry.observe.status import LostPeerStatus, RoomStatus
from kvferry.protocol.links.link import Link, LinkKey, LinkState
from kvferry.protocol.transfer.receiver_events import (
    ArrivedUnverified,
    AwaitArrival,
    ConnectFailed,
    Drop,
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


class ReceivingRooms:
    """All rooms of a decode rank.

    Attributes:
        open: those that are not done, by number.
        links: to prefill ranks.
        refusals: of rooms that will not be opened.
        arrivals: what comes for rooms.
        last_news_at: when anything last happened in a room.
    """

    def __init__(
        self,
        identity: Identity,
        transport: Transport,
        registry: RegistryClient,
        settings: Settings,
        staging: ReceivingStaging,
        *,
        end: ConnectingEnd,
        settling: Settling,
        platform: Platform,
        observer: Observer,
        submit: Callable[[Callable[[float], None]], None],
        forget_room: Callable[[int], None],
        name: str,
    ) -> None:
        """Begins with none; the threads that scatter and verify are started.

        Args:
            end: what connections are made with; it stays the caller's.
            settling: counts the time in which what failed writes had sent may arrive here.
            platform: the machine.
            observer: notified of what happens.
            submit: runs work soon, on the endpoint's thread, with the time as its argument. From any thread.
            forget_room: called with the number of a room that is done.
            name: of the endpoint's thread.
        """
        self._identity = identity
        self._settings = settings
        self._platform = platform
        self._observer = observer
        self._settling = settling
        self._forget_room = forget_room
        self.submit = submit
        self.links = Links(
            identity,
            registry,
            settings,
            staging,
            end=end,
            platform=platform,
            promises=transport.promises,
            observer=observer,
            settling=settling,
            user=self,
        )
        self.refusals = Refusals(
            identity,
            self.links,
            pause_s=settings.heartbeat_interval_s,
            keep_s=settings.bootstrap_timeout_s,
            most=settings.max_rooms,
        )
        self.open: dict[int, ReceivingRoom] = {}
        self._links_of: dict[int, Link] = {}  # of rooms that are connected
        self._through: dict[Link, dict[int, None]] = {}  # the same, by link
        self._waiting: dict[Link, dict[ReceivingRoom, None]] = {}
        self._awaited: dict[ReceivingRoom, Link] = {}  # the same, by room
        self._unanswered: dict[int, None] = {}  # rooms that are over here, and may not be everywhere
        self._timers: Timers[int] = Timers()
        self.last_news_at = 0.0
        self.arrivals = Arrivals(transport, staging, settings, self, settling=settling, platform=platform, name=name)

    # ---- from any thread ----------------------------------------------------------------------------------------

    def statuses(self, now: float) -> list[RoomStatus]:
        """Returns the status of every room."""
        shown = []
        for room in list(self.open.values()):
            link = self._links_of.get(room.room)
            peers = tuple(peer.endpoint for peer in link.peers) if link is not None else ()
            shown.append(room.status(now, peers))
        return shown

    def quarantine(self, now: float) -> list[LostPeerStatus]:
        """Returns the prefill ranks that were lost, and what they may still write to."""
        pages: dict[str, int] = {}
        for room in list(self.open.values()):
            link = self._links_of.get(room.room)
            for rank in room.machine.undrained if link is not None and room.is_quarantined else ():
                peer = link.endpoint_of(rank) if link is not None else None
                if peer is not None:
                    pages[peer] = pages.get(peer, 0) + room.pages
        return self.links.lost(pages, now)

    # ---- one room -----------------------------------------------------------------------------------------------

    def take(self, room: ReceivingRoom, key: LinkKey, now: float) -> None:
        """Takes a new room: connects it, or has it wait for its link."""
        self.open[room.room] = room
        self.refusals.forget(room.room)
        link = self.links.to(key, room.machine.deadline or now)
        if link.state is LinkState.READY:
            self._connect_room(room, link, now)
        else:
            self._waiting.setdefault(link, {})[room] = None
            self._awaited[room] = link
            self._timers.set(room.room, room.machine.deadline)

    def _connect_room(self, room: ReceivingRoom, link: Link, now: float) -> None:
        self._links_of[room.room] = link
        self._through.setdefault(link, {})[room.room] = None
        self.apply(room, link.connected(room.room), now)

    def apply(self, room: ReceivingRoom, event: ReceiverEvent, now: float) -> None:
        """Passes an event to a room's machine, executes its commands, and forgets the room once it is done."""
        self.last_news_at = now  # heartbeats' answers do not count: nothing follows them
        try:
            commands = room.handle(event, now)
        except Exception as error:
            log.exception("room %d met an unexpected error", room.room)
            commands = room.handle(ReceiverBroke(error), now)
            if isinstance(event, PartArrived | ArrivedUnverified):
                commands.append(Drop(event.work))
        link = self._links_of.get(room.room)
        if room.machine.is_done and self.open.get(room.room) is room:
            del self.open[room.room]
            self._forget_link(room.room)
            self._timers.set(room.room, None)
            self._unanswered.pop(room.room, None)
            self._refuse_unopened(room, now)
            self._forget_room(room.room)  # before the caller sees the end: it may use the number again then
        elif self.open.get(room.room) is room:
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
            self.refusals.add(room.room, link, generation=room.generation, reason=reason, now=now)

    def _stop_waiting(self, room: ReceivingRoom) -> Link | None:
        """Takes a room from those that wait for a link. Returns the link; None if it waited for none."""
        link = self._awaited.pop(room, None)
        if link is not None:
            del self._waiting[link][room]
            if not self._waiting[link]:
                del self._waiting[link]
        return link

    def _forget_link(self, room: int) -> None:
        link = self._links_of.pop(room, None)
        if link is not None:
            del self._through[link][room]
            if not self._through[link]:
                del self._through[link]

    def _execute(self, room: ReceivingRoom, link: Link, command: ReceiverCommand, now: float) -> None:
        match command:
            case SendOpen(rank, filled):
                self._send(room, link, rank, self._open_request(room, filled), now)
                room.open_numbers[rank] = link.last_number(rank)
            case SendAbort(rank, reason, error):
                number = room.open_numbers.get(rank, 0)
                message = messages.AbortRoom(
                    room=room.room,
                    generation=room.generation,
                    reason=reason,
                    error=error,
                    epoch=link.attempt if number else 0,
                    number=number,
                )
                self.links.execute(link, link.send_unnumbered(rank, message), now)
            case SendVerified(rank):
                self._send(room, link, rank, messages.RoomVerified(room=room.room, generation=room.generation), now)
            case Scatter(work) | Verify(work):
                self.arrivals.begin(work)
            case Drop(work):
                self.arrivals.drop(work)
            case AwaitArrival(rank):
                self._settling.add(partial(self.post_event, room.room, room.generation, SenderSettled(rank)))

    def _open_request(self, room: ReceivingRoom, filled: frozenset[str]) -> messages.OpenRoom:
        return messages.OpenRoom(
            room=room.room,
            generation=room.generation,
            receivers=self._identity.coordinates.group_size,
            tokens=room.tokens,
            groups=tuple(group for group in room.groups if group.name in filled),
            trace=room.trace,
            held=max((group.held for group in room.groups), default=0),
            depends_on=room.depends_on,
        )

    def _send(
        self, room: ReceivingRoom, link: Link, rank: int, message: messages.NumberedToPrefill, now: float
    ) -> None:
        """Sends a message of a room, which fails if it is one that cannot be sent."""
        try:
            sends = link.send(rank, message)
        except MessageError as error:
            self.apply(room, ReceiverBroke(error), now)
        else:
            self.links.execute(link, sends, now)

    def post_event(self, room: int, generation: int, event: ReceiverEvent) -> None:
        """Queues an event for a room; it is dropped if the room has another generation by then, or has gone."""

        def deliver(now: float) -> None:
            opened = self.open.get(room)
            if opened is not None and opened.generation == generation:
                self.apply(opened, event, now)

        self.submit(deliver)

    def refuse(self, room: int, key: LinkKey, reason: str, now: float) -> None:
        """Tells a prefill engine that a room will not be opened."""
        holder = self.open.get(room)
        self.refusals.add(
            room,
            self.links.to(key, now + self._settings.bootstrap_timeout_s),
            generation=self._platform.random_bits(63),
            reason=reason,
            now=now,
            holder=holder.generation if holder is not None else None,
        )

    def close(self, now: float) -> None:
        """Ends what was queued too late for the thread."""
        for room in list(self.open.values()):
            if not room.machine.state.is_final:
                self.apply(room, ReceiverAbortRequested("the decode endpoint was closed"), now)

    # ---- for arrivals -------------------------------------------------------------------------------------------

    def running(self) -> list[ReceivingRoom]:
        """Returns the rooms that have not ended."""
        return [room for room in self.open.values() if not room.machine.state.is_final]

    def find(self, room: int, generation: int) -> tuple[ReceivingRoom, Link] | None:
        """Returns a room and its link; None if it is over, has no link yet, or is another use of the number."""
        found, link = self.open.get(room), self._links_of.get(room)
        return (found, link) if found is not None and link is not None and found.generation == generation else None

    # ---- for links ----------------------------------------------------------------------------------------------

    @property
    def links_with_rooms(self) -> Collection[Link]:
        """Links through which rooms are open."""
        return self._through.keys()

    @property
    def links_with_refusals(self) -> Collection[Link]:
        """Links to ranks that are still to hear of rooms that were refused."""
        return self.refusals.links

    def link_looked_up(self, link: Link, now: float) -> None:
        """Tells the ranks that were found of rooms that were refused."""
        self.refusals.link_looked_up(link)

    def link_ready(self, link: Link, now: float) -> None:
        """Opens the rooms that waited for a link."""
        for room in list(self._waiting.get(link, ())):
            self._stop_waiting(room)
            self._connect_room(room, link, now)

    def link_failed(self, link: Link, error: KVFerryError, now: float) -> None:
        """Fails the rooms that rely on a link."""
        for room in list(self._waiting.get(link, ())):
            self.apply(room, ConnectFailed(error), now)
        for number in list(self._through.get(link, ())):
            self.apply(self.open[number], ConnectFailed(error), now)

    def rank_settled(self, endpoint: str, now: float) -> None:
        """Marks a prefill rank that will not write again as drained in every room."""
        for link, numbers in list(self._through.items()):
            rank = link.rank_of(endpoint)
            if rank is not None:
                for number in list(numbers):
                    self.apply(self.open[number], SenderDrained(rank), now)

    def broke(self, address: str, now: float) -> None:
        """A connection broke: asks again what may be lost of it, or the answer."""
        self.refusals.repeat(now, is_due=True)
        self.links.broke(address, now)
        for link in self.links.through(address):
            for number in list(self._through.get(link, ())):
                if number in self._unanswered:
                    self._ask_to_stop(self.open[number], link, now)

    # ---- messages -----------------------------------------------------------------------------------------------

    def received(self, address: str, message: messages.RoomFailed | messages.Drained, now: float) -> None:
        """Takes what the prefill rank at an address says of a room."""
        if isinstance(message, messages.Drained) and self.refusals.take_answer(address, message):
            self.links.close_retired()  # nobody needs them for that any more
        found = self.find(message.room, message.generation)
        if found is None:
            return
        room, link = found
        if isinstance(message, messages.Drained) and not link.is_rank(message.writer, message.endpoint):
            return  # from a later start of the rank, which proves nothing about the earlier one's writes
        if link.rank_at(address) != message.writer:
            log.warning("dropped a message: %s is not rank %d, room %d", address, message.writer, message.room)
            return
        match message:
            case messages.RoomFailed():
                self.apply(room, SenderFailed(message.writer, message.error, message.reason), now)
            case messages.Drained():
                self.apply(room, SenderDrained(message.writer, message.after_failure), now)

    # ---- time ---------------------------------------------------------------------------------------------------

    def look_at_deadlines(self, now: float) -> None:
        """Notifies the rooms whose deadlines have passed."""
        for number in self._timers.due(now):
            room = self.open[number]
            self.apply(room, self._why_late(room), now)

    def _why_late(self, room: ReceivingRoom) -> ReceiverEvent:
        """Returns the event for a room whose deadline has passed: why its link is not ready, if it waits for one."""
        link = self._awaited.get(room)
        if link is None:
            return ReceiverTick()
        return ConnectFailed(self.links.why_not_ready(link))

    def repeat(self, now: float) -> None:
        """Asks again what was not answered: a connection that broke may have lost it, or the answer."""
        self.refusals.repeat(now)
        self.links.ask_about_lost_ranks(now)
        for number in list(self._unanswered):
            room, link = self.open[number], self._links_of.get(number)
            if link is not None:
                self._ask_to_stop(room, link, now)

    def _ask_to_stop(self, room: ReceivingRoom, link: Link, now: float) -> None:
        """Repeats a room's aborts to ranks that have not answered."""
        for rank in room.machine.unanswered:
            self._execute(room, link, room.machine.abort_of(rank), now)
