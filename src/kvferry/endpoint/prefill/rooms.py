"""A prefill rank's rooms, and decode ranks' messages about them: each goes to its room, waits, or is answered.

Our caller and decode ranks may come first. What is kept until then, and which message is late or a duplicate, the table
knows (`protocol.transfer.room_table`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from math import inf

from kvferry.endpoint.construction import Draining, check_may_open, deadlines
from kvferry.endpoint.early_warnings import UnaskedRooms
from kvferry.endpoint.prefill.context import PrefillContext
from kvferry.endpoint.prefill.decode_ranks import DecodeRanks
from kvferry.endpoint.prefill.room_actor import OpenReceived, RoomActor
from kvferry.endpoint.runtime.run_queue import Timers
from kvferry.endpoint.runtime.workers import WorkerPool
from kvferry.endpoint.transfer import Sender
from kvferry.errors import (
    EndpointClosedError,
    EndpointDrainingError,
    KVFerryError,
    PeerDisconnectedError,
    RankReplacedError,
    TransferAbortedError,
    TransferRefusedError,
    UnknownRoomError,
    UsageError,
)
from kvferry.loggers import logger_of
from kvferry.plan import check_share_tokens
from kvferry.plan.fingerprint import checked_conditions
from kvferry.protocol.transfer.events import AbortRequested, ReceiverLost, ReceiverMessage, RoomExpected, Tick
from kvferry.protocol.transfer.room_table import RoomMessage, RoomTable
from kvferry.protocol.transfer.sender import SenderMachine
from kvferry.protocol.wire import messages
from kvferry.protocol.wire.field_types import DecodeRank

log = logger_of(__name__)

MOST_EARLY_PAGE_BYTES = 2**30
"""Page numbers of rooms that decode ranks open early, in all: 16 bytes a run of neighbouring pages, or 8 a page. 1,000
rooms of eight decode ranks, each of 128k pages in eight runs, have a megabyte."""


class SendingRooms:
    """All rooms of a prefill rank.

    Attributes:
        table: those that are open, and what waits for others.
        draining: whether new ones are taken.
        timers: when rooms must be looked at.
        replaced: that another start of this rank has its place at the registry: none are taken then; None if not.
    """

    def __init__(self, context: PrefillContext, ranks: DecodeRanks, workers: WorkerPool, unasked: UnaskedRooms) -> None:
        """Begins with none.

        Args:
            ranks: what is known of decode ranks.
            workers: run the rooms.
            unasked: warns of rooms that nobody asks for.
        """
        settings = context.settings
        self._context = context
        self._identity = context.identity
        self._settings = settings
        self._deadlines = deadlines(settings)
        self._ranks = ranks
        self._unasked = unasked
        self._now = context.now
        self._began_at = context.now()
        # Guards the table: a message for a room goes either to it, or is kept until the room is opened.
        self._lock = threading.Lock()
        self._is_closed = False
        self._last_ended_at = -inf
        self.replaced: RankReplacedError | None = None
        self.draining = Draining(f"prefill engine {context.identity.engine!r}", context.now)
        self._workers = workers
        self.timers: Timers[RoomActor] = Timers()
        self._expected: dict[int, float] = {}  # open rooms that requests of decode ranks wait for, and who said so when
        self.table: RoomTable[RoomActor] = RoomTable(
            max_rooms=settings.max_rooms,
            max_pending=2 * settings.max_rooms,
            most_page_bytes=MOST_EARLY_PAGE_BYTES,
            keep_s=settings.bootstrap_timeout_s,
        )

    # ---- for callers --------------------------------------------------------------------------------------------

    @property
    def num_known(self) -> int:
        """Number of those, and of rooms that decode ranks have opened and our caller has not."""
        with self._lock:
            return len(self.table.rooms) + self.table.num_pending

    def __len__(self) -> int:
        """Number of rooms that have not ended, or still have writes in flight."""
        with self._lock:
            return len(self.table.rooms)

    def all(self) -> list[RoomActor]:
        """Returns those rooms."""
        with self._lock:
            return list(self.table.rooms.values())

    def made(
        self, room: int, tokens: int | None, share_tokens: int | None, depends_on: Mapping[str, bytes] | None
    ) -> RoomActor:
        """Makes a room, which is not open yet; arguments and errors are those of `PrefillEndpoint.open`."""
        share = self._identity.layout.tokens
        if tokens is None and share.partition.depends_on_length:
            raise UsageError(
                f"room {room}: this rank's share of a request depends on its length ({share.partition}): "
                "say how many tokens it has (tokens=...)"
            )
        check_share_tokens(share, tokens, share_tokens, where=f"room {room}")
        machine = SenderMachine(
            room,
            rank=self._context.engine_rank,
            deadlines=self._deadlines,
            now=self._now(),
            tokens=tokens,
            depends_on=checked_conditions(depends_on, where=f"room {room}"),
            joined_pages=self._context.staging.joined_pages,
        )
        return RoomActor(machine, self._workers, self._context, self)

    def add(self, room: RoomActor) -> None:
        """Opens a room; errors are those of `PrefillEndpoint.open`."""
        with self._lock:
            check_may_open(
                room.room,
                self.table.rooms,
                most=self._settings.max_rooms,
                who=f"prefill rank {self._context.engine_rank}",
                is_closed=self._is_closed,
                refusal=self._refusal(room.room),
            )
            self.timers.set(room, room.machine.deadline)  # before it is open: it ends, whatever interrupts the rest
            self._unasked.opened(room.room, self._now())
            self._context.observer.begin_sending(room.room)
            for receiver, message in self.table.add(room):
                self._deliver(room, receiver, message)
            self.table.handled(room.room)

    def sender(self, room: int) -> Sender:
        """Returns the open transfer of that number.

        Raises:
            UnknownRoomError: if there is none, or it has ended.
        """
        with self._lock:
            found = self.table.rooms.get(room)
        if found is None:
            raise UnknownRoomError(f"room {room} is not open on prefill rank {self._context.engine_rank}")
        return found.sender

    def refuse(self, room: int, reason: str) -> None:
        """Refuses the next use of a number by our caller; see `PrefillEndpoint.refuse`."""
        error = TransferRefusedError(f"room {room} was refused by the prefill side: {reason}")
        requests: list[tuple[str, messages.OpenRoom]] = []
        try:
            self._refuse(room, error, requests)
        except BaseException:  # Ctrl-C: whoever's request was taken out must hear of it all the same
            self._refuse(room, error, requests)
            raise

    def _refuse(self, room: int, error: TransferRefusedError, requests: list[tuple[str, messages.OpenRoom]]) -> None:
        """Refuses a number, and those that wait for it: the given ones, or all if none are given."""
        with self._lock:
            if self._is_closed:
                return
            if not requests:
                requests += self.table.refuse(room, error, self._now())
            self.table.handled(room)
        for receiver, message in requests:
            self._fail(receiver, message, error)

    def _refusal(self, room: int) -> EndpointDrainingError | None:
        """Returns why a room is not taken while the endpoint drains, or is replaced; None if it is.

        One that a decode rank has opened here is taken by one that drains: the request was routed before. Must be
        called with the lock.
        """
        if self.replaced is not None:
            return EndpointDrainingError(f"room {room}: {self.replaced}")
        if self.draining.takes_rooms or self.table.is_asked_for(room):
            return None
        return self.draining.refusal(room)

    def drain(self) -> None:
        """Refuses new rooms if the drain is so far, and ends those that have had their time. May be called again."""
        with self._lock:
            if not self.draining.takes_rooms:
                self.table.takes_no_more(self.draining.refusal)
        if self.draining.is_overdue:
            self.end_all(self.draining.overdue)

    def end_all(self, reason: str) -> None:
        """Aborts the rooms that are open, and refuses those that decode ranks have opened and our caller has not."""
        with self._lock:
            rooms, pending = list(self.table.rooms.values()), self.table.give_up_pending()
        for room in rooms:
            if not room.state.is_final:
                room.post(AbortRequested(reason))
        for receiver, message in pending:
            self._fail(receiver, message, TransferAbortedError(reason))

    @property
    def is_drained(self) -> bool:
        """Whether the endpoint drains, takes no new rooms, and nothing is open that decode ranks or our caller know.

        Nor was anything just now: what was sent of the last room must have arrived before the close message may.
        """
        with self._lock:
            has_arrived = self._now() - self._last_ended_at >= self._settings.quarantine_s
            return self.draining.awaits_none and self.table.is_quiet and has_arrived

    def close(self) -> None:
        """Aborts all rooms and refuses new ones. May be called again."""
        with self._lock:
            self._is_closed = True
            rooms = list(self.table.rooms.values())
            pending = self.table.close()
        for room in rooms:
            room.post(AbortRequested("the prefill endpoint was closed"))
        for receiver, message in pending:
            self._fail(receiver, message, EndpointClosedError("the prefill endpoint was closed"))

    # ---- for rooms and the control thread -----------------------------------------------------------------------

    def take_open(self, receiver: str, message: messages.OpenRoom) -> None:
        """Takes a decode rank's open request: for the room, or until it is opened here."""
        attachment = self._ranks.attachment(receiver)
        try:
            if attachment is None:
                given_up = self._ranks.given_up(receiver)
                why = "" if given_up is None else f", since it was given up: {given_up.error}"
                raise PeerDisconnectedError(f"{receiver} must attach before it opens rooms{why}")
            elected = attachment.elected(message.room, self._identity.coordinates.group_rank)
            request = attachment.checked(message, elected)
        except KVFerryError as error:
            self._refuse_request(receiver, message, error)
            # The room fails there, and nobody will open it here.
            self._not_opened(receiver, self._ranks.rank(receiver), message.room, message.generation, str(error))
            return
        try:
            with self._lock:
                room = self.table.open_request(receiver, message, self._now(), rank=attachment.rank)
                if room is not None:
                    room.post(OpenReceived(attachment, message, request))
        except KVFerryError as error:
            log.warning("refused room %d of %s: %s", message.room, receiver, error)
            self._refuse_request(receiver, message, error)

    def take_abort(self, receiver: str, message: messages.AbortRoom, *, is_unopened: bool = False) -> None:
        """Takes back an open request, and answers when nothing can be written for it any more. It may come again.

        Args:
            is_unopened: whether the open request has not come, and will not count.
        """
        with self._lock:
            is_unopened |= self.table.is_dropped(receiver, message)
            room = self.table.abort(receiver, message, self._now(), is_unopened=is_unopened)
            if room is not None:
                self._deliver(room, receiver, message)
        if room is None:
            self._drained(receiver, message.room, message.generation)
        if is_unopened:
            rank = self._ranks.rank(receiver)
            self._not_opened(receiver, rank, message.room, message.generation, message.reason)

    def _take_refusal(self, receiver: str, message: messages.RefuseRoom) -> None:
        """Takes a decode rank's refusal: for the room, or until it is opened here."""
        with self._lock:
            room = self.table.refused_by(receiver, message, self._now())
            if room is not None:
                room.post(ReceiverMessage(receiver, message))

    def pass_on(self, receiver: str, message: RoomMessage) -> None:
        """Takes what came to a room while it ended: for whoever has the number now, or will have it."""
        match message:
            case messages.OpenRoom():
                self.take_open(receiver, message)
            case messages.AbortRoom():
                self.take_abort(receiver, message)
            case messages.RefuseRoom():
                self._take_refusal(receiver, message)

    def forget(self, room: RoomActor) -> None:
        """Drops a room that is done."""
        with self._lock:
            self._last_ended_at = self._now()
            self._expected.pop(room.room, None)
            undelivered = self.table.remove(room, self._now())
        for receiver, message in undelivered:
            self._fail(receiver, message, room.error or UnknownRoomError(f"room {room.room} was not sent"))

    # ---- for the control thread ---------------------------------------------------------------------------------

    def refused(self, receiver: str, message: messages.RefuseRoom) -> None:
        """Takes a decode rank's refusal, which may come again."""
        if message.endpoint == self._identity.endpoint:  # else it was for an earlier start, which has ended
            self._refused(receiver, message)
        self._drained(receiver, message.room, message.generation)

    def expected(self, rooms: Iterable[int], now: float) -> None:
        """Takes a decode rank's word that it will open these rooms: until it is silent of one, that waits for it."""
        with self._lock:
            for number in rooms:
                if self.table.expected(number, now) is not None:
                    self._expected[number] = now

    def verified(self, receiver: str, message: messages.RoomVerified) -> None:
        """Takes a decode rank's word that the digests of a room are right."""
        with self._lock:
            room = self.table.rooms.get(message.room)
            if room is not None:  # else the room has ended
                room.post(ReceiverMessage(receiver, message))

    def _refused(self, receiver: str, message: messages.RefuseRoom) -> None:
        with self._lock:
            is_new = self.table.is_new_refusal(receiver, message)
        if is_new:  # the same one may come again
            self._take_refusal(receiver, message)

    def _not_opened(self, receiver: str, rank: DecodeRank | None, room: int, generation: int, reason: str) -> None:
        """Ends a room that a decode rank will not open, as if it had refused it.

        Args:
            rank: which it is; None if it has not attached, and belongs to no room.
        """
        if rank is None:
            return
        self._refused(
            receiver,
            messages.RefuseRoom(
                endpoint=self._identity.endpoint,
                engine=rank.engine,
                coordinates=rank.coordinates,
                room=room,
                generation=generation,
                reason=reason,
            ),
        )

    def attached(self, receiver: str, rank: DecodeRank) -> None:
        """A decode rank connects, perhaps anew: then it has given up what it had opened, whether or not it says so."""
        reason = "it connects anew, and has given up what it had opened"
        with self._lock:
            rooms, dropped = self.table.given_to(receiver), self.table.attached(receiver)
        for room in rooms:
            room.post(ReceiverLost(receiver, PeerDisconnectedError(reason)))
        for number, generation in dropped:
            self._not_opened(receiver, rank, number, generation, reason)

    def lost(self, receiver: str, rank: DecodeRank | None, error: KVFerryError) -> None:
        """Fails the rooms of a decode rank that is not connected any more.

        Args:
            rank: which it was; None if it had not attached.
        """
        with self._lock:
            rooms, aborts = self.table.forget_receiver(receiver, self._now())
        for room in rooms:
            room.post(ReceiverLost(receiver, error))
        for message in aborts:
            self._not_opened(receiver, rank, message.room, message.generation, message.reason)

    def look(self, now: float) -> None:
        """Lets rooms look that are due, warns of those that nobody asks for, and refuses what was opened there too long
        ago to be opened here.
        """
        for room in self.timers.due(now):
            if room.is_told_to_look:
                continue  # its worker is held up, and it has not looked yet
            room.is_told_to_look = True
            if (said_at := self._expected.get(room.room)) is not None:
                room.post(RoomExpected(said_at))
            room.post(Tick())
        self._unasked.look(now, is_unasked=self._is_unasked, connected=self._ranks.connected)
        with self._lock:
            expired = self.table.expired(now)
        for receiver, message in expired:
            reason = (
                f"prefill rank {self._context.engine_rank} was not asked to send room {message.room} within "
                f"{self._settings.bootstrap_timeout_s:g} s (KVFERRY_BOOTSTRAP_TIMEOUT_S): {self._identity.endpoint}, "
                f"which has run for {now - self._began_at:.0f} s"
            )
            self._fail(receiver, message, UnknownRoomError(reason))

    def _is_unasked(self, room: int) -> bool:
        """Whether a room is open, no decode rank has opened it, and none has said that it will."""
        with self._lock:
            opened = self.table.rooms.get(room)
        return opened is not None and not opened.generations and room not in self._expected

    # ---- answers ------------------------------------------------------------------------------------------------

    def _deliver(self, room: RoomActor, receiver: str, message: RoomMessage) -> None:
        """Hands a message to its room."""
        match message:
            case messages.RefuseRoom() | messages.AbortRoom():
                room.post(ReceiverMessage(receiver, message))
            case messages.OpenRoom():
                attachment = self._ranks.attachment(receiver)
                if attachment is not None:  # else it was lost meanwhile, and waits for no answer
                    room.post(OpenReceived(attachment, message))

    def _refuse_request(self, receiver: str, message: messages.OpenRoom, error: KVFerryError) -> None:
        with self._lock:
            self.table.ended(receiver, message.room, message.generation, error)
        self._fail(receiver, message, error)

    def _fail(self, receiver: str, message: messages.OpenRoom, error: KVFerryError) -> None:
        """Answers an open request that nothing will be sent for."""
        self._context.observer.refused(error)
        self._context.tell_failed(receiver, message.room, message.generation, error)
        self._drained(receiver, message.room, message.generation, error)

    def _drained(self, receiver: str, room: int, generation: int, error: KVFerryError | None = None) -> None:
        after_failure = receiver in self._context.broken_off  # in a room of which nothing is known any more
        self._context.tell_drained(receiver, room, generation, after_failure=after_failure, error=error)
