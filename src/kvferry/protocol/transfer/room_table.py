"""The rooms of a prefill rank, by number: to which of them a decode rank's message goes, or how it is answered.

A number stands for one transfer at a time. Decode ranks may open it before our caller does, and after it failed without
them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar

from kvferry.errors import EndpointClosedError, KVFerryError, TransferAbortedError, TransferFailedError
from kvferry.protocol.bounded import ForAWhile, remember
from kvferry.protocol.transfer.pending_messages import PendingMessages, PendingOpens
from kvferry.protocol.wire.field_types import DecodeRank
from kvferry.protocol.wire.messages import AbortRoom, OpenRoom, RefuseRoom

REMEMBERED = 1 << 12
"""Of how many finished rooms the uses of their numbers are remembered at most, one for each decode rank of a room; and
of how many refusals it is remembered that they came."""

RoomMessage: TypeAlias = OpenRoom | AbortRoom | RefuseRoom
"""What a decode rank may say of a room before our caller opens it."""


class TableEntry(Protocol):
    """What the table needs of a room."""

    @property
    def room(self) -> int:
        """Its number."""

    @property
    def failed_alone(self) -> bool:
        """Whether it failed before every receiver had opened it."""

    @property
    def error(self) -> KVFerryError | None:
        """Why it failed, once it has."""

    @property
    def generations(self) -> Mapping[str, int]:
        """The decode ranks that have opened it, and the generation of each."""


RoomT = TypeVar("RoomT", bound=TableEntry)


@dataclass(slots=True)
class _FailedAlone:
    """A room that failed before every decode rank had opened it: the others are refused when they do.

    Attributes:
        receivers: those that were notified already; a later open request of theirs is for the next transfer.
    """

    error: KVFerryError
    receivers: set[str]


@dataclass(frozen=True, slots=True)
class _Sent:
    """A use of a number that ended well: when, and to whom it was sent."""

    ended_at: float
    receivers: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Over:
    """A finished use of a number, and why it failed if it did."""

    generation: int
    error: KVFerryError | None


class RoomTable(Generic[RoomT]):
    """Rooms by number. Several threads use it, one at a time: its owner has a lock.

    Attributes:
        rooms: those that are open, or still have writes on their way.
        pending: open requests for rooms that our caller has not opened.
        refusals: of rooms that our caller has not opened.
        failed_alone: why rooms failed of which not all decode ranks know.
        over: uses of numbers that have ended.
    """

    def __init__(self, *, max_rooms: int, max_pending: int, most_page_bytes: int, keep_s: float) -> None:
        """Starts with no rooms.

        Args:
            max_rooms: how many may be open at once: of as many that failed alone the errors are kept.
            max_pending: how many rooms decode ranks may open before our caller does.
            most_page_bytes: how many bytes of page numbers these may have.
            keep_s: how long these are kept, in seconds, and the errors of rooms that failed alone.
        """
        self.rooms: dict[int, RoomT] = {}
        self._max_rooms = max_rooms
        self._max_pending = max_pending
        self.pending = PendingOpens(limit=max_pending, most_page_bytes=most_page_bytes, keep_s=keep_s)
        # Whoever names a number before anybody has opened it is taken for the one that it is for, as with an open
        # request: only its callers know the number.
        self.refusals: PendingMessages[RefuseRoom] = PendingMessages(limit=max_pending, keep_s=keep_s)
        # By receiver, number and generation.
        self._refusals_received: OrderedDict[tuple[str, int, int], None] = OrderedDict()
        self.failed_alone: ForAWhile[int, _FailedAlone] = ForAWhile(keep_s)
        # Generations of open requests that our caller had not matched, dropped since their decode rank was lost. A rank
        # that lives will abort these rooms, or connect anew; the successor of one that died may open them.
        self._dropped: ForAWhile[tuple[str, int], int] = ForAWhile(keep_s)  # by receiver and number
        self._refused_next: dict[int, KVFerryError] = {}  # what our caller refused while the number was in use
        # Finished uses of numbers, by receiver and number: an abort may overtake the open request that a room which
        # is done passes on, and a refusal says which use of the number came before the one that it is for.
        self.over: OrderedDict[tuple[str, int], _Over] = OrderedDict()  # the latest stand last
        self._most_receivers = 1  # that any room had
        self._sent: ForAWhile[int, _Sent] = ForAWhile(keep_s)
        self._given: dict[int, set[str]] = {}  # whose open requests each open room was given
        self._is_closed = False
        self._refusal: Callable[[int], KVFerryError] | None = None

    def holds(self, room: int) -> bool:
        """Whether the number of a room that is over still means that room: it may not be used for another."""
        is_dropped = any(number == room for _, number in self._dropped)
        return is_dropped or room in self.failed_alone or bool(self.refusals.of(room))

    def expected(self, room: int, now: float) -> RoomT | None:
        """Returns the open room that a decode rank will open later; one that failed keeps its error until then."""
        failed = self.failed_alone.get(room)
        if failed is not None:
            self.failed_alone.put(room, failed, now, limit=self._max_rooms)
        return self.rooms.get(room)

    def sent_elsewhere(self, room: int, receiver: str) -> _Sent | None:
        """Returns the use of a number that others got a moment ago, so that it is refused to this receiver."""
        sent = self._sent.get(room)
        return sent if sent is not None and receiver not in sent.receivers else None

    def is_asked_for(self, room: int) -> bool:
        """Whether a decode rank waits for a room that our caller has not opened."""
        return any(opened.abort is None for opened in self.pending.of(room).values())

    def takes_no_more(self, refusal: Callable[[int], KVFerryError]) -> None:
        """Refuses open requests for rooms of which nothing is known here, from now on.

        Args:
            refusal: returns why, by a room's number.
        """
        self._refusal = refusal

    @property
    def num_pending(self) -> int:
        """How many rooms decode ranks have opened, and our caller has not."""
        return len(self.pending)

    @property
    def is_quiet(self) -> bool:
        """Whether there are no rooms, and no pending opens."""
        return not self.rooms and not len(self.pending)

    def add(self, room: RoomT) -> list[tuple[str, RoomMessage]]:
        """Adds a room that our caller opens. Returns the messages that decode ranks sent for it before.

        They are kept until they are `handled`: our caller may be interrupted anywhere.
        """
        self.rooms[room.room] = room
        self.failed_alone.pop(room.room)
        self._sent.pop(room.room)
        pending = self.pending.of(room.room)
        self._given[room.room] = set(pending)
        before: list[tuple[str, RoomMessage]] = []
        for receiver, opened in pending.items():
            before.append((receiver, opened.request))
            if opened.abort is not None:
                before.append((receiver, opened.abort))
        return [*before, *self.refusals.of(room.room).items()]

    def handled(self, room: int) -> None:
        """Forgets what was kept for a number that was added or refused since."""
        self.pending.take(room)
        self.refusals.take(room)

    def attached(self, receiver: str) -> list[tuple[int, int]]:
        """Records that a decode rank connects anew.

        Returns:
            Number and generation of rooms that it had opened and our caller has not: it has given them up.
        """
        pending = [each.request for each in self.pending.forget(receiver)]
        given_up = [(request.room, request.generation) for request in pending]
        for name, room in [key for key in self._dropped if key[0] == receiver]:
            generation = self._dropped.pop((name, room))
            assert generation is not None
            given_up.append((room, generation))
        return given_up

    def is_dropped(self, receiver: str, message: AbortRoom) -> bool:
        """Whether the open request that an abort takes back was dropped when its decode rank was lost."""
        return self._dropped.get((receiver, message.room)) == message.generation

    def is_new_refusal(self, receiver: str, message: RefuseRoom) -> bool:
        """Records a decode rank's refusal. Returns whether it has to be handled: a retransmission need not."""
        key = receiver, message.room, message.generation
        is_new = key not in self._refusals_received
        if is_new:
            remember(self._refusals_received, key, None, REMEMBERED)
        return is_new

    def open_request(
        self, receiver: str, message: OpenRoom, now: float, *, rank: DecodeRank | None = None
    ) -> RoomT | None:
        """Handles a decode rank's open request. Returns the room that it is for.

        Returns None if there is nothing to do: the request is kept until our caller opens the room, or belongs to a use
        that ended well.

        Args:
            rank: which decode rank it is: a room that another one of its group has refused cannot succeed.

        Raises:
            KVFerryError: if it must be refused, saying why.
        """
        room = self.rooms.get(message.room)
        over = self.over.get((receiver, message.room))
        is_known = room is not None and room.generations.get(receiver) == message.generation
        if over is not None and over.generation == message.generation and not is_known:
            if over.error is not None:
                raise over.error
            return None
        if room is not None:
            self._given.setdefault(room.room, set()).add(receiver)
            return room
        if self._is_closed:
            raise EndpointClosedError("the prefill endpoint was closed")
        failed = self.failed_alone.get(message.room)
        if failed is not None and receiver not in failed.receivers:
            failed.receivers.add(receiver)
            self.ended(receiver, message.room, message.generation, failed.error)
            raise failed.error
        if (sent := self.sent_elsewhere(message.room, receiver)) is not None:
            raise TransferFailedError(
                f"room {message.room} was sent to {', '.join(sorted(sent.receivers))} {now - sent.ended_at:.1f} s ago, "
                "and a request's cache is sent once: send the request to the prefill side again"
            )
        if self._refusal is not None and not self.pending.of(message.room):
            raise self._refusal(message.room)
        self.refusals.pop(receiver, message.room)  # it opens the room after all
        for refusal in self.refusals.of(message.room).values():
            if rank is not None and rank.can_be_beside([DecodeRank(refusal.engine, refusal.coordinates)]):
                raise TransferFailedError(
                    f"decode rank {refusal.coordinates.engine_rank} of {refusal.engine!r} refused it: {refusal.reason}"
                )
        self.pending.keep(receiver, message, now)
        return None

    def refuse(self, room: int, error: KVFerryError, now: float) -> list[tuple[str, OpenRoom]]:
        """Refuses a number, for our caller: decode ranks that open it within the bootstrap deadline are refused.

        Where a room of that number is open, the use of the number that follows is refused.

        Returns:
            Pending open requests, to be refused at once. They are kept until they are `handled`.
        """
        if room in self.rooms:
            self._refused_next[room] = error
            return []
        pending = self.pending.of(room)
        for receiver, opened in pending.items():
            self.ended(receiver, room, opened.request.generation, error)
        self._fail_alone(room, error, set(pending), now)
        return [(receiver, opened.request) for receiver, opened in pending.items()]

    def refused_by(self, receiver: str, message: RefuseRoom, now: float) -> RoomT | None:
        """Takes a decode rank's refusal of a number. Returns the open room that it is for.

        Returns None if there is nothing to do: the refusal is kept until our caller opens the room, or belongs to a use
        that has ended.
        """
        over = self.over.get((receiver, message.room))
        if message.holder is not None and (over is None or over.generation != message.holder):
            return None  # another transfer of the decode rank has the number still
        room = self.rooms.get(message.room)
        if room is not None:
            return room
        failed = self.failed_alone.get(message.room)
        if failed is not None and receiver not in failed.receivers:
            failed.receivers.add(receiver)
        elif self.refusals.has_place(receiver, message.room):  # else the room ends by its deadline
            self.refusals.put(receiver, message.room, message, now)
        return None

    def abort(self, receiver: str, message: AbortRoom, now: float, *, is_unopened: bool = False) -> RoomT | None:
        """Takes an open request back. Returns the room that has to stop, None if nothing was written for it.

        Args:
            is_unopened: whether that request has not come, and will not count: else the abort may be a late one, of an
                earlier use of the number.
        """
        if self.is_dropped(receiver, message):
            self._dropped.pop((receiver, message.room))
        over = self.over.get((receiver, message.room))
        is_repeated = over is not None and over.generation == message.generation
        gave_up = TransferAbortedError(f"room {message.room} was aborted by {receiver}: {message.reason}")
        self.ended(receiver, message.room, message.generation, gave_up)
        failed = self.failed_alone.get(message.room)
        if failed is not None and is_unopened and not is_repeated:
            failed.receivers.add(receiver)  # it need not be refused, as it must be in a use that came after this one
        room = self.rooms.get(message.room)
        if room is None:
            self.pending.abort(receiver, message)
        return room

    def remove(self, room: RoomT, now: float) -> list[tuple[str, OpenRoom]]:
        """Forgets a room that is done.

        Returns:
            Open requests that it was not given, to be refused: whoever added it was interrupted.
        """
        if self.rooms.get(room.room) is not room:
            return []
        del self.rooms[room.room]
        given = self._given.pop(room.room, set())
        undelivered = self.pending.take(room.room)
        for receiver, opened in undelivered.items():
            self.ended(receiver, room.room, opened.request.generation, room.error)
        self._most_receivers = max(self._most_receivers, len(room.generations))
        for receiver, generation in room.generations.items():
            self.ended(receiver, room.room, generation, room.error)
        refused = self._refused_next.pop(room.room, None)
        if refused is not None:
            self._fail_alone(room.room, refused, set(), now)
        elif room.failed_alone and room.error is not None:
            # What the room was given it answers, even if it has ended before it looks at that.
            self._fail_alone(room.room, room.error, room.generations.keys() | given | undelivered.keys(), now)
        elif room.error is None:
            self._sent.put(room.room, _Sent(now, frozenset(room.generations)), now, limit=REMEMBERED)
        return [(receiver, opened.request) for receiver, opened in undelivered.items() if opened.abort is None]

    def _fail_alone(self, room: int, error: KVFerryError, receivers: set[str], now: float) -> None:
        self.failed_alone.put(room, _FailedAlone(error, receivers), now, limit=self._max_rooms)

    def ended(self, receiver: str, room: int, generation: int, error: KVFerryError | None) -> None:
        """Records that a use of a number is over for a decode rank: it ended well, or by an error."""
        remember(self.over, (receiver, room), _Over(generation, error), REMEMBERED * self._most_receivers)

    def forget_receiver(self, receiver: str, now: float) -> tuple[list[RoomT], list[AbortRoom]]:
        """Drops the pending opens of a decode rank that is gone. Others may open these rooms: its successor, for one.

        Returns:
            The open rooms that it had opened, and its aborts of others.
        """
        aborts = []
        for opened in self.pending.forget(receiver):
            request = opened.request
            if opened.abort is not None:
                aborts.append(opened.abort)
            else:
                self._dropped.put((receiver, request.room), request.generation, now, limit=self._max_pending)
        return self.given_to(receiver), aborts

    def given_to(self, receiver: str) -> list[RoomT]:
        """Returns the open rooms that a decode rank has opened."""
        return [self.rooms[room] for room, receivers in self._given.items() if receiver in receivers]

    def expired(self, now: float) -> list[tuple[str, OpenRoom]]:
        """Drops the pending opens that our caller did not match in time. Returns them, to be refused."""
        self.failed_alone.forget_old(now)
        self._dropped.forget_old(now)
        self._sent.forget_old(now)
        self.refusals.expired(now)  # nobody waits for an answer
        return self._expired_opens(now)

    def give_up_pending(self) -> list[tuple[str, OpenRoom]]:
        """Drops the pending opens. Returns them, to be refused."""
        return self._expired_opens(float("inf"))

    def close(self) -> list[tuple[str, OpenRoom]]:
        """Refuses open requests from now on. Returns the pending ones, to be refused too."""
        self._is_closed = True
        return self.give_up_pending()

    def _expired_opens(self, now: float) -> list[tuple[str, OpenRoom]]:
        """Drops pending opens that are too old. Returns those that were not taken back."""
        return [(receiver, opened.request) for receiver, opened in self.pending.expired(now) if opened.abort is None]
