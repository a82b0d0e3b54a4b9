"""The rooms of a decode rank, and what they rely on: links to prefill ranks, refusals, arrivals.

All of it belongs to the endpoint's one thread, where nothing else is said.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial

from kvferry.endpoint.construction import Draining, check_may_open, deadlines
from kvferry.endpoint.decode.arrivals import Arrivals, ArrivalTask
from kvferry.endpoint.decode.connections import Repetition, why_gone, why_not_ready
from kvferry.endpoint.decode.context import DecodeContext
from kvferry.endpoint.decode.links import Links
from kvferry.endpoint.decode.room import ReceivingRoom
from kvferry.endpoint.runtime.run_queue import Timers
from kvferry.endpoint.transfer import Receiver
from kvferry.errors import KVFerryError, UnknownRoomError
from kvferry.loggers import logger_of
from kvferry.observe.status import LostPeerStatus
from kvferry.plan import check_share_tokens
from kvferry.plan.fingerprint import checked_conditions
from kvferry.plan.requests.demands import demands_of
from kvferry.plan.requests.moved_blocks import UnitPlaces
from kvferry.plan.requests.page_numbers import AnyPages
from kvferry.protocol.bounded import forget_oldest
from kvferry.protocol.links.link import Link, LinkKey, LinkState
from kvferry.protocol.transfer.events import (
    AbortRequested,
    AnswersOverdue,
    ConnectFailed,
    ReceiverEvent,
    SenderDrained,
    SenderSettled,
    Tick,
)
from kvferry.protocol.transfer.receiver import ReceiverMachine
from kvferry.protocol.wire import messages
from kvferry.protocol.wire.field_types import MAX_EXPECTED
from kvferry.protocol.wire.registrations import EngineView

log = logger_of(__name__)


class ReceivingRooms:
    """All rooms of a decode rank.

    Attributes:
        open: those that are not done, by number.
        links: to prefill ranks.
        send: sends what a link says.
        refusals: of rooms that will not be opened.
        expected: rooms that will be opened later.
        arrivals: what comes for rooms.
        is_closed: whether no more are opened.
        draining: whether new ones are taken.
        last_news_at: when anything last happened in a room.
    """

    def __init__(self, context: DecodeContext) -> None:
        """Begins with none; the threads that scatter and verify are started."""
        self._context = context
        self._deadlines = deadlines(context.settings)
        # Guards that rooms are opened one at a time, and none behind the close.
        self._lock = threading.Lock()
        self.is_closed = False
        self.draining = Draining(f"decode engine {context.identity.engine!r}", context.platform.now)
        self.links = Links(context, self._take_again)
        self.send = self.links.send_all
        self.refusals = self.links.refusals
        self.expected = ExpectedRooms(context, self.links)
        self.open: dict[int, ReceivingRoom] = {}
        # Those of them that have ended here, and may not have everywhere; and of these, those that hold no pages.
        self._ended: dict[ReceivingRoom, Repetition] = {}
        self._unanswered: set[ReceivingRoom] = set()
        self._timers: Timers[ReceivingRoom] = Timers()
        self.last_news_at = 0.0
        self.arrivals = Arrivals(context, self.open)

    # ---- for callers --------------------------------------------------------------------------------------------

    def made(
        self,
        number: int,
        pages: AnyPages,
        prefix_tokens: int,
        tokens: int | None,
        share_tokens: int | None,
        depends_on: Mapping[str, bytes] | None,
        instance: str | None,
    ) -> ReceivingRoom:
        """Makes a room, which is not open yet; arguments and errors are those of `DecodeEndpoint.open`."""
        where, identity, now = f"room {number}", self._context.identity, self._context.platform.now()
        groups = demands_of(identity.layout, pages, prefix_tokens=prefix_tokens, tokens=tokens, where=where)
        check_share_tokens(identity.layout.tokens, tokens, share_tokens, where=where)
        tokens = None if tokens is None else int(tokens)  # a plain integer, which is what travels

        def abort(reason: str) -> None:
            self._post_event(room, AbortRequested(reason))

        room = ReceivingRoom(
            ReceiverMachine(number, rank=identity.coordinates.engine_rank, deadlines=self._deadlines, now=now),
            generation=self._context.platform.random_bits(63),
            groups=groups,
            tokens=tokens,
            depends_on=checked_conditions(depends_on, where=where),
            receiver=Receiver(number, abort, self._context.callbacks, now),
            places=UnitPlaces(identity.layout, groups, tokens),
            port=self,
            receivers=identity.coordinates.group_size,
            instance=instance or "",
        )
        return room

    def add(self, room: ReceivingRoom, key: LinkKey) -> None:
        """Opens a room; errors are those of `DecodeEndpoint.open`."""
        with self._lock:
            check_may_open(
                room.room,
                self.open,
                most=self._context.settings.max_rooms + len(self._unanswered),
                who=f"decode rank {self._context.identity.coordinates.engine_rank}",
                is_closed=self.is_closed,
                refusal=None if self.draining.takes_rooms else self.draining.refusal(room.room),
            )
            self._timers.set(room, room.machine.deadline)  # before it is open: it ends, whatever interrupts the rest
            self.open[room.room] = room
            room.trace = self._context.observer.begin_receiving(room.room)
            # Under the lock, so that a close that aborts this room comes behind it.
            self._context.submit(partial(self._take, room, key))

    def receiver(self, room: int) -> Receiver:
        """Returns the open transfer of that number.

        Raises:
            UnknownRoomError: if there is none, or it has ended.
        """
        found = self.open.get(room)
        if found is None:
            raise UnknownRoomError(
                f"room {room} is not open on decode rank {self._context.identity.coordinates.engine_rank}"
            )
        return found.receiver

    def refuse(self, room: int, key: LinkKey, reason: str) -> None:
        """Tells a prefill engine, soon, that a room will not be opened; see `DecodeEndpoint.refuse`."""
        with self._lock:
            if not self.is_closed:
                self._context.submit(partial(self._refuse, room, key, reason))

    def expect(self, room: int, key: LinkKey) -> None:
        """Tells a prefill engine, soon and until then, that a room will be opened; see `DecodeEndpoint.expect`."""
        with self._lock:
            if not self.is_closed:
                self._context.submit(partial(self.expected.add, room, key))

    def drain(self) -> None:
        """Aborts the rooms that have had their time, where the endpoint drains. May be called again."""
        if self.draining.is_overdue:
            for room in list(self.open.values()):
                if not room.machine.state.is_final:
                    room.receiver.abort(self.draining.overdue)

    @property
    def is_drained(self) -> bool:
        """Whether the endpoint drains, takes no new rooms, and nothing is open or may still be written to.

        Once it is overdue, ranks that have not confirmed the end of a room are not waited for.
        """
        num_open = len(self.open)  # first: a room that is forgotten meanwhile must not make up for one that is not
        return self.draining.awaits_none and num_open == (len(self._unanswered) if self.draining.is_overdue else 0)

    @property
    def any_runs(self) -> bool:
        """Whether a room has not ended here: what arrives is looked for."""
        return len(self.open) > len(self._ended)

    def close(self) -> None:
        """Aborts all rooms and opens no more. May be called again."""
        with self._lock:
            self.is_closed = True
            rooms = list(self.open.values())
        for room in rooms:
            room.receiver.abort("the decode endpoint was closed")

    def quarantine(self, now: float) -> list[LostPeerStatus]:
        """Returns the prefill ranks that were lost, and what they may still write to."""
        return self.links.quarantine.statuses(self._quarantined_pages(), now)

    def say_what_is_kept(self) -> None:
        """Says which pages are never given back, as where the endpoint has closed: no peer is heard any more."""
        for room in self._quarantined():
            room.receiver._keep_pages()
        for endpoint, pages in self._quarantined_pages().items():
            log.warning(
                "%d pages are never given back: %s may still write to them. Do not free their memory before its "
                "process has ended",
                pages,
                endpoint,
            )

    def _quarantined(self) -> list[ReceivingRoom]:
        """Returns the failed rooms to whose pages somebody may still write."""
        return [each for each in list(self.open.values()) if each.is_quarantined and each.machine.undrained]

    def _quarantined_pages(self) -> dict[str, int]:
        """Returns how many pages of failed rooms each prefill rank may still write to, by endpoint."""
        pages: dict[str, int] = {}
        for room in self._quarantined():
            for rank in room.machine.undrained:
                peer = room.link.endpoint_of(rank) if room.link is not None else None
                if peer is not None:
                    pages[peer] = pages.get(peer, 0) + room.pages
        return pages

    # ---- one room -----------------------------------------------------------------------------------------------

    def _take(self, room: ReceivingRoom, key: LinkKey, now: float) -> None:
        """Takes a new room: connects it, or has it wait for its link."""
        if self.open.get(room.room) is not room:
            return  # it has ended since
        self.refusals.forget(room.room)
        self.expected.forget(room.room)
        link = self.links.to(key, room.machine.deadline or now)
        if why_gone(link, room.instance) is not None:  # the start that it names may be newer than what the link knows
            self.links.look_up_again(key, partial(self._take_again, room, key))
        else:
            self._join(room, link, None, now)

    def _take_again(self, room: ReceivingRoom, key: LinkKey, view: EngineView | None, now: float) -> None:
        """Takes a room once the registry has said which start is there now; None if it does not answer."""
        if view is not None:
            self.links.replace(key, view, room.instance, now)
        if self.open.get(room.room) is room:
            link = self.links.to(key, room.machine.deadline or now)
            self._join(room, link, why_gone(link, room.instance), now)
        else:
            self._refuse(room.room, key, str(room.machine.error), now)

    def _join(self, room: ReceivingRoom, link: Link, gone: KVFerryError | None, now: float) -> None:
        """Has a room rely on a link, and fail if the start that it names has gone."""
        room.link = link
        self.links.rooms_of.setdefault(link, {})[room] = None
        if gone is not None:
            room.apply(ConnectFailed(gone), now)
        elif room.waits_for_link:
            self._timers.set(room, room.machine.deadline)
        else:
            room.apply(link.connected(room.room), now)

    # ---- what rooms have done -----------------------------------------------------------------------------------

    def place(self, work: object) -> None:
        assert isinstance(work, ArrivalTask)
        self.arrivals.scatterers.submit(work)

    def drop(self, work: object) -> None:
        assert isinstance(work, ArrivalTask)
        work.give_back()

    def settle(self, room: ReceivingRoom, rank: int) -> None:
        self._context.settling.add(partial(self._post_event, room, SenderSettled(rank)))

    def raised(self, room: ReceivingRoom, error: BaseException) -> None:
        log.error("room %d met an unexpected error", room.room, exc_info=error)

    def moved(self, room: ReceivingRoom, now: float) -> None:
        """Minds a room's deadline, shows it to its caller, and forgets it once it is done."""
        self.last_news_at = now  # heartbeats' answers do not count: nothing follows them
        is_open = self.open.get(room.room) is room
        if is_open and room.machine.is_done:
            self._forget(room, now)  # before the caller sees the end: it may use the number again then
        elif is_open:
            self._timers.set(room, room.machine.deadline)
            if room.machine.state.is_final:
                self._keep_asking(room, now)
        had_ended = room.receiver.stats.ended_at is not None
        room.show(now)
        if room.machine.state.is_final and not had_ended:
            self._context.observer.received(room.room, room.receiver.stats, room.machine.error)

    def _keep_asking(self, room: ReceivingRoom, now: float) -> None:
        """Has the aborts of a room that has ended here repeated. What is kept for the answers alone has an end.

        A rank that was given up has been silent for long, and that as long again: if it lives it has given us up, too,
        and hears of the end when we connect anew.
        """
        if room not in self._ended:
            settings = self._context.settings
            is_lost = room.link is not None and room.link.is_given_up
            keep_s = settings.peer_timeout_s if is_lost else settings.bootstrap_timeout_s
            self._ended[room] = Repetition.begun(now, settings, keep_s=keep_s)
        if room.machine.are_pages_reusable:
            self._unanswered.add(room)

    def _forget(self, room: ReceivingRoom, now: float) -> None:
        """Drops a room that is done, and tells the prefill side if it has waited for its link until then."""
        del self.open[room.room]
        self._timers.set(room, None)
        self._ended.pop(room, None)
        self._unanswered.discard(room)
        if room.link is None:
            return
        self.links.leave(room.link, room)
        if room.waits_for_link and room.machine.error is not None:
            error = room.machine.error
            cause = error.__cause__
            reason = str(error) if cause is None else f"{type(cause).__name__}: {cause}"
            self.refusals.add(room.room, room.link, generation=room.generation, reason=reason, now=now)

    def _post_event(self, room: ReceivingRoom, event: ReceiverEvent) -> None:
        """Queues an event for a room; it is dropped if the room is done by then."""

        def deliver(now: float) -> None:
            if self.open.get(room.room) is room:
                room.apply(event, now)

        self._context.submit(deliver)

    def _refuse(self, room: int, key: LinkKey, reason: str, now: float) -> None:
        """Tells a prefill engine that a room will not be opened."""
        self.expected.forget(room)
        holder = self.open.get(room)
        if holder is not None and holder.link is None:
            holder = None  # our caller has opened it since
        self.refusals.add(
            room,
            self.links.to(key, now + self._context.settings.bootstrap_timeout_s),
            generation=self._context.platform.random_bits(63),
            reason=reason,
            now=now,
            holder=holder.generation if holder is not None else None,
        )

    # ---- messages -----------------------------------------------------------------------------------------------

    def ask_again(self, address: str, now: float) -> None:
        """A connection broke: repeats aborts that may be lost of it, or whose answers may be."""
        links = self.links.connections.through(address)
        for room, again in list(self._ended.items()):
            if room.link in links and again.is_due(now, at_once=True):
                self._ask_to_stop(room, now)

    def received(self, address: str, message: messages.RoomFailed | messages.Drained, now: float) -> None:
        """Takes what the prefill rank at an address says of a room."""
        if isinstance(message, messages.Drained) and self.refusals.take_answer(address, message):
            self.links.close_retired()  # nobody needs them for that any more
        room = self.open.get(message.room)
        if room is None or room.link is None or not room.is_meant(message.generation):
            return
        if isinstance(message, messages.Drained) and not room.is_rank(message.writer, message.endpoint):
            return  # from a later start of the rank, which proves nothing about the earlier one's writes
        if room.link.rank_at(address) != message.writer:
            log.warning("dropped a message: %s is not rank %d, room %d", address, message.writer, message.room)
            return
        match message:
            case messages.RoomFailed():
                room.apply(message, now)
            case messages.Drained():
                drained = SenderDrained(message.writer, message.after_failure, message.error, message.reason)
                room.apply(drained, now)

    # ---- time ---------------------------------------------------------------------------------------------------

    def look_at_deadlines(self, now: float) -> None:
        """Notifies the rooms whose deadlines have passed; those that wait for a link hear why it is not ready."""
        for room in self._timers.due(now):
            if self.open.get(room.room) is not room:
                self._timers.set(room, None)  # whoever opened it was interrupted
            elif room.link is not None and room.waits_for_link:
                room.apply(ConnectFailed(why_not_ready(room.link, self._context.settings)), now)
            else:
                room.apply(Tick(), now)

    def repeat(self, now: float, *, at_once: bool) -> None:
        """Asks again what was not answered: a connection that broke, or was silent, may have lost it or the answer.

        Rooms that hold no pages are forgotten where it was not answered for too long.

        Args:
            at_once: whether all of it is due: connections were made anew.
        """
        self.refusals.repeat(now, at_once=at_once)
        self.links.ask_about_lost_ranks(now)
        for room, again in list(self._ended.items()):
            if now >= again.until and room in self._unanswered:
                room.apply(AnswersOverdue(), now)
            elif again.is_due(now, at_once=at_once):
                self._ask_to_stop(room, now)

    def _ask_to_stop(self, room: ReceivingRoom, now: float) -> None:
        """Repeats a room's aborts to ranks that have not answered."""
        for rank in room.machine.unanswered:
            room.ask_to_stop(rank, now)


class ExpectedRooms:
    """The rooms that will be opened here later: requests of this rank's caller wait until they can have pages.

    With every heartbeat it is said which they are: prefill ranks keep their caches. All of them are said again each
    time: what a prefill rank has heard of late counts, and nothing else. So those of a rank that dies end by
    themselves.

    Attributes:
        rooms: their prefill engines, the oldest first.
    """

    def __init__(self, context: DecodeContext, links: Links) -> None:
        """Begins with none."""
        self._settings = context.settings
        self._links = links
        self.rooms: dict[int, LinkKey] = {}

    def add(self, room: int, key: LinkKey, now: float) -> None:
        """Takes a room that will be opened, or refused."""
        self.rooms[room] = key
        forget_oldest(self.rooms, self._settings.max_rooms)
        self._links.to(key, now + self._settings.bootstrap_timeout_s)

    def forget(self, room: int) -> None:
        """Drops a room that is opened or refused."""
        self.rooms.pop(room, None)

    def say(self, now: float) -> None:
        """Tells the prefill ranks that are connected, and has the others connected."""
        by_engine: dict[LinkKey, list[int]] = {}
        for room, key in self.rooms.items():
            by_engine.setdefault(key, []).append(room)
        for key, rooms in by_engine.items():
            link = self._links.to(key, now + self._settings.bootstrap_timeout_s)
            if link.state is LinkState.READY:
                for start in range(0, len(rooms), MAX_EXPECTED):
                    message = messages.ExpectRooms(rooms=tuple(rooms[start : start + MAX_EXPECTED]))
                    self._links.send_all(link.tell(message))
