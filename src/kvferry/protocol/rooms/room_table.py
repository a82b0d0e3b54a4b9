"""The rooms of a prefill rank, by number: to which of them a decode rank's message goes, or how it is answered.

A number stands for one transfer at a time. Decode ranks may open it before our caller does, and after it failed without
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvferry.errors import EndpointClosedError, KVFerryError, TransferAbortedError, TransferFailedError
from kvferry.protocol.bounded import forget_oldest
from kvferry.protocol.rooms.pending_opens import PendingMessage, PendingOpens
from kvferry.protocol.rooms.pending_refusals import PendingRefusals
from kvferry.protocol.wire.messages import AbortRoom, OpenRoom, RefuseRoom
from kvferry.protocol.wire.rank_identity import DecodeRank

REMEMBERED = 1 << 12
"""Of how many finished rooms the uses of their numbers are remembered at most, one for each decode rank of a room."""


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
        error: why it failed.
        receivers: those that were notified already; a later open request of theirs is for the next transfer.
        until: when to forget it.
    """

    error: KVFerryError
    receivers: set[str]
    until: float


@dataclass(frozen=True, slots=True)
class _Over:
    """A finished use of a number.

    Attributes:
        error: why it failed, if it did.
        until: when to forget it.
    """

    generation: int
    error: KVFerryError | None
    until: float


@dataclass(frozen=True, slots=True)
class _Dropped:
    """An open request for a room that our caller had not opened, dropped since its decode rank was lost.

    Attributes:
        until: when to forget it.
    """

    generation: int
    until: float


class RoomTable(Generic[RoomT]):
    """Rooms by number. Several threads use it, one at a time: its owner has a lock.

    Attributes:
        rooms: those that are open, or still have writes on their way.
    """

    def __init__(self, *, max_pending: int, most_page_bytes: int, keep_s: float) -> None:
        """Starts with no rooms.

        Args:
            max_pending: how many rooms decode ranks may open before our caller does.
            most_page_bytes: how many bytes of page numbers these may have.
            keep_s: how long these are kept, in seconds, and the errors of rooms that failed alone.
        """
        self.rooms: dict[int, RoomT] = {}
        self._max_pending = max_pending
        self._keep_s = keep_s
        self._pending = PendingOpens(limit=max_pending, most_page_bytes=most_page_bytes, keep_s=keep_s)
        self._refusals = PendingRefusals(limit=max_pending, keep_s=keep_s)
        self._failed_alone: dict[int, _FailedAlone] = {}
        # A rank that lives will abort these rooms, or connect anew; the successor of one that died may open them.
        self._dropped: dict[tuple[str, int], _Dropped] = {}  # by receiver and number
        self._refused_next: dict[int, KVFerryError] = {}  # what our caller refused while the number was in use
        # Finished uses of numbers, by receiver and number: an abort may overtake the open request that a room which
        # is done passes on, and a refusal says which use of the number came before the one that it is for.
        self._over: dict[tuple[str, int], _Over] = {}
        self._most_receivers = 1  # that any room had
        self._given: dict[int, dict[str, int]] = {}  # generations of the open requests that each open room was given
        self._rooms_given: dict[str, dict[int, None]] = {}  # the same rooms, by receiver
        self._is_closed = False

    def holds(self, room: int) -> bool:
        """Whether the number of a room that is over still means that room: it may not be used for another."""
        is_dropped = any(number == room for _, number in self._dropped)
        return is_dropped or room in self._failed_alone or bool(self._refusals.of(room))

    @property
    def is_quiet(self) -> bool:
        """Whether there are no rooms, and no pending opens."""
        return not self.rooms and not len(self._pending)

    def add(self, room: RoomT) -> list[tuple[str, PendingMessage | RefuseRoom]]:
        """Adds a room that our caller opens. Returns the messages that decode ranks sent for it before."""
        self.rooms[room.room] = room
        self._failed_alone.pop(room.room, None)
        pending = self._pending.take(room.room)
        self._given[room.room] = {}
        for receiver, message in pending:
            if isinstance(message, OpenRoom):
                self._give(room.room, receiver, message.generation)
        return [*pending, *self._refusals.take(room.room)]

    def _give(self, room: int, receiver: str, generation: int) -> None:
        self._given[room][receiver] = generation
        self._rooms_given.setdefault(receiver, {})[room] = None

    def attached(self, receiver: str) -> list[tuple[int, int]]:
        """Records that a decode rank connects anew.

        Returns:
            Number and generation of rooms that it had opened and our caller has not: it has given them up.
        """
        given_up = [(message.room, message.generation) for message in self._pending.forget(receiver)]
        dropped = [key for key in self._dropped if key[0] == receiver]
        return [*given_up, *((key[1], self._dropped.pop(key).generation) for key in dropped)]

    def is_dropped(self, receiver: str, message: AbortRoom) -> bool:
        """Whether the open request that an abort takes back was dropped when its decode rank was lost."""
        dropped = self._dropped.get((receiver, message.room))
        return dropped is not None and dropped.generation == message.generation

    def is_new_refusal(self, receiver: str, message: RefuseRoom) -> bool:
        """Records a decode rank's refusal. Returns whether it has to be handled."""
        return self._refusals.is_new(receiver, message)

    def refused(self, receiver: str, message: OpenRoom, error: KVFerryError, now: float) -> None:
        """Records that an open request was refused."""
        self._is_over(receiver, message.room, message.generation, error, now)

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
        over = self._over.get((receiver, message.room))
        is_known = room is not None and room.generations.get(receiver) == message.generation
        if over is not None and over.generation == message.generation and not is_known:
            if over.error is not None:
                raise over.error
            return None
        if room is not None:
            self._give(room.room, receiver, message.generation)
            return room
        if self._is_closed:
            raise EndpointClosedError("the prefill endpoint was closed")
        failed = self._failed_alone.get(message.room)
        if failed is not None and receiver not in failed.receivers:
            failed.receivers.add(receiver)
            self._is_over(receiver, message.room, message.generation, failed.error, now)
            raise failed.error
        self._refusals.forget(receiver, message.room)
        for refusal in self._refusals.of(message.room):
            if rank is not None and rank.can_be_beside([DecodeRank(refusal.engine, refusal.coordinates)]):
                raise _refused_by(refusal)
        self._pending.keep(receiver, message, now)
        return None

    def refuse(self, room: int, error: KVFerryError, now: float) -> list[tuple[str, OpenRoom]]:
        """Refuses a number, for our caller: decode ranks that open it within the bootstrap deadline are refused.

        Where a room of that number is open, the use of the number that follows is refused.

        Returns:
            Pending open requests, to be refused at once.
        """
        if room in self.rooms:
            self._refused_next[room] = error
            return []
        pending = [(each, message) for each, message in self._pending.take(room) if isinstance(message, OpenRoom)]
        self._refusals.take(room)
        for receiver, message in pending:
            self._is_over(receiver, room, message.generation, error, now)
        self._fail_alone(room, error, {receiver for receiver, _ in pending}, now)
        return pending

    def refused_by(self, receiver: str, message: RefuseRoom, now: float) -> RoomT | None:
        """Takes a decode rank's refusal of a number. Returns the open room that it is for.

        Returns None if there is nothing to do: the refusal is kept until our caller opens the room, or belongs to a use
        that has ended.
        """
        over = self._over.get((receiver, message.room))
        if message.holder is not None and (over is None or over.generation != message.holder):
            return None  # another transfer of the decode rank has the number still
        room = self.rooms.get(message.room)
        if room is not None:
            return room
        failed = self._failed_alone.get(message.room)
        if failed is not None and receiver not in failed.receivers:
            failed.receivers.add(receiver)
        else:
            self._refusals.keep(receiver, message, now)
        return None

    def abort(self, receiver: str, message: AbortRoom, now: float, *, is_unopened: bool = False) -> RoomT | None:
        """Takes an open request back. Returns the room that has to stop, None if nothing was written for it.

        Args:
            is_unopened: whether that request has not come, and will not count: else the abort may be a late one, of an
                earlier use of the number.
        """
        if self.is_dropped(receiver, message):
            del self._dropped[receiver, message.room]
        gave_up = TransferAbortedError(f"room {message.room} was aborted by {receiver}: {message.reason}")
        self._is_over(receiver, message.room, message.generation, gave_up, now)
        failed = self._failed_alone.get(message.room)
        if failed is not None and is_unopened:
            failed.receivers.add(receiver)  # it need not be refused
        room = self.rooms.get(message.room)
        if room is None:
            self._pending.keep(receiver, message, now)
        return room

    def remove(self, room: RoomT, now: float) -> None:
        """Forgets a room that is done."""
        if self.rooms.get(room.room) is not room:
            return
        del self.rooms[room.room]
        given = self._given.pop(room.room)
        for receiver in given:
            rooms = self._rooms_given[receiver]
            del rooms[room.room]
            if not rooms:
                del self._rooms_given[receiver]
        self._most_receivers = max(self._most_receivers, len(room.generations))
        for receiver, generation in room.generations.items():
            self._is_over(receiver, room.room, generation, room.error, now)
        refused = self._refused_next.pop(room.room, None)
        if refused is not None:
            self._fail_alone(room.room, refused, set(), now)
        elif room.failed_alone and room.error is not None:
            # What the room was given it answers, even if it has ended before it looks at that.
            self._fail_alone(room.room, room.error, room.generations.keys() | given.keys(), now)

    def _fail_alone(self, room: int, error: KVFerryError, receivers: set[str], now: float) -> None:
        self._failed_alone.pop(room, None)  # so that it is the youngest
        self._failed_alone[room] = _FailedAlone(error, receivers, now + self._keep_s)
        forget_oldest(self._failed_alone, self._max_pending)

    def _is_over(self, receiver: str, room: int, generation: int, error: KVFerryError | None, now: float) -> None:
        self._over.pop((receiver, room), None)  # so that it is the youngest
        self._over[receiver, room] = _Over(generation, error, now + self._keep_s)
        forget_oldest(self._over, REMEMBERED * self._most_receivers)

    def forget_receiver(self, receiver: str, now: float) -> tuple[list[RoomT], list[AbortRoom]]:
        """Drops the pending opens of a decode rank that is gone. Others may open these rooms: its successor, for one.

        Returns:
            The open rooms that it had opened, and its aborts of others.
        """
        aborts = []
        for message in self._pending.forget(receiver):
            if isinstance(message, AbortRoom):
                aborts.append(message)
            else:
                self._dropped.pop((receiver, message.room), None)  # so that it is the youngest
                self._dropped[receiver, message.room] = _Dropped(message.generation, now + self._keep_s)
        forget_oldest(self._dropped, self._max_pending)
        return [self.rooms[room] for room in self._rooms_given.get(receiver, ())], aborts

    def expired(self, now: float) -> list[tuple[str, OpenRoom]]:
        """Drops the pending opens that our caller did not match in time. Returns them, to be refused."""
        while self._failed_alone and now >= next(iter(self._failed_alone.values())).until:  # the oldest stand first
            del self._failed_alone[next(iter(self._failed_alone))]
        while self._over and now >= next(iter(self._over.values())).until:
            del self._over[next(iter(self._over))]
        while self._dropped and now >= next(iter(self._dropped.values())).until:
            del self._dropped[next(iter(self._dropped))]
        self._refusals.forget_old(now)
        return list(self._pending.expired(now))

    def close(self) -> list[tuple[str, OpenRoom]]:
        """Refuses open requests from now on. Returns the pending ones, to be refused too."""
        self._is_closed = True
        return list(self._pending.expired(float("inf")))


def _refused_by(refusal: RefuseRoom) -> KVFerryError:
    return TransferFailedError(
        f"decode rank {refusal.coordinates.engine_rank} of {refusal.engine!r} refused it: {refusal.reason}"
    )
