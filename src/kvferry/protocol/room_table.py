"""The rooms of a prefill rank, by number: to which of them a decode rank's message goes, or what it is told instead.

A number stands for one transfer at a time. Decode ranks may ask for it before our caller opens it, and after it failed
without them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvferry.errors import EndpointClosedError, KVFerryError, PageError, TransferAbortedError
from kvferry.protocol.bounded import forget_oldest
from kvferry.protocol.early import EarlyMessage, EarlyRooms
from kvferry.protocol.heard import Heard, HeardWishes
from kvferry.protocol.messages import AbortRoom, OpenRoom

REMEMBERED = 1 << 12
"""Uses of numbers that are over."""


class TableEntry(Protocol):
    """What the table has to know of a room."""

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
    """A room that failed before every decode rank had opened it: the others learn when they do.

    Attributes:
        error: why it failed.
        receivers: those that know already; what they ask for under this number is the next transfer.
        until: when to forget it.
    """

    error: KVFerryError
    receivers: set[str]
    until: float


@dataclass(frozen=True, slots=True)
class _Over:
    """A use of a number that is over.

    Attributes:
        error: why it failed, if it did.
        until: when to forget it.
    """

    generation: int
    error: KVFerryError | None
    until: float


class RoomTable(Generic[RoomT]):
    """Rooms by number. Several threads use it, one at a time: its owner has a lock.

    Attributes:
        rooms: those that are open, or still have writes on their way.
    """

    def __init__(self, *, max_early: int, keep_s: float) -> None:
        """Args:
        max_early: how many rooms decode ranks may open before our caller does.
        keep_s: how long these are kept, in seconds, and what is said of rooms that failed alone.
        """
        self.rooms: dict[int, RoomT] = {}
        self._max_early = max_early
        self._keep_s = keep_s
        self._early = EarlyRooms(limit=max_early, keep_s=keep_s)
        self._failed_alone: dict[int, _FailedAlone] = {}
        # Uses of numbers that are over: a wish may come twice, or later than the abort that takes it back, where a
        # connection broke in between. By receiver and number.
        self._over: dict[tuple[str, int], _Over] = {}
        self._wishes = HeardWishes()
        self._given: dict[int, dict[str, int]] = {}  # generations of the wishes that each open room was given
        self._is_closed = False

    @property
    def failed_alone(self) -> Collection[int]:
        """Numbers of rooms that failed before every decode rank had opened them, as long as these are told so."""
        return self._failed_alone.keys()

    @property
    def is_quiet(self) -> bool:
        """Whether there are no rooms, and none that decode ranks opened first."""
        return not self.rooms and not len(self._early)

    def add(self, room: RoomT) -> list[tuple[str, EarlyMessage]]:
        """Our caller opens a room; returns what decode ranks said of it before."""
        self.rooms[room.room] = room
        self._failed_alone.pop(room.room, None)
        early = self._early.take(room.room)
        self._given[room.room] = {
            receiver: message.generation for receiver, message in early if isinstance(message, OpenRoom)
        }
        return early

    def attached(self, receiver: str, attempt: int) -> None:
        """A decode rank connects anew: what it wished for before does not count any more."""
        self._wishes.attached(receiver, attempt)

    def hears(self, receiver: str, message: OpenRoom | AbortRoom) -> bool:
        """Takes note of a wish that has come, or of an abort; whether it is to be considered.

        A wish that was heard before and that nobody remembers is not: its use of the number is over, and whoever wished
        for it has heard of that, or will by its own deadline.
        """
        if isinstance(message, AbortRoom):
            if message.serial:
                self._wishes.hear(receiver, message.attempt, message.serial)
            return True
        heard = self._wishes.hear(receiver, message.attempt, message.serial)
        return heard is Heard.FIRST or (heard is Heard.AGAIN and self._knows(receiver, message))

    def _knows(self, receiver: str, message: OpenRoom) -> bool:
        room, over = self.rooms.get(message.room), self._over.get((receiver, message.room))
        known = {
            self._given.get(message.room, {}).get(receiver),
            room.generations.get(receiver) if room is not None else None,
            over.generation if over is not None else None,
            self._early.generation(receiver, message.room),
        }
        return message.generation in known

    def refused(self, receiver: str, message: OpenRoom, error: KVFerryError, now: float) -> None:
        """A wish was refused: whoever says it again is told the same."""
        self._is_over(receiver, message.room, message.generation, error, now)

    def has_wish(self, receiver: str, message: OpenRoom) -> RoomT | None:
        """The open room that was given this very wish before, and alone can answer it."""
        is_given = self._given.get(message.room, {}).get(receiver) == message.generation
        return self.rooms[message.room] if is_given else None

    def wish(self, receiver: str, message: OpenRoom, now: float) -> RoomT | None:
        """Takes a decode rank's wish; returns the room that it is for.

        None if there is nothing to do: it is kept until our caller opens the room, or belongs to a use that ended well.

        Raises:
            KVFerryError: if it must be refused, saying why.
        """
        room = self.rooms.get(message.room)
        over = self._over.get((receiver, message.room))
        is_known = room is not None and room.generations.get(receiver) == message.generation
        if over is not None and over.generation == message.generation and not is_known:
            if over.error is not None:  # whoever asks may not have heard
                raise over.error
            return None
        if room is not None:
            self._given[room.room][receiver] = message.generation
            return room
        if self._is_closed:
            raise EndpointClosedError("the prefill endpoint was closed")
        failed = self._failed_alone.get(message.room)
        if failed is not None and receiver not in failed.receivers:
            failed.receivers.add(receiver)
            self._is_over(receiver, message.room, message.generation, failed.error, now)
            raise failed.error
        if not self._early.keep(receiver, message, now):
            raise PageError(
                f"{len(self._early)} rooms wait for the prefill side already, as many as may or too many of this "
                "decode rank's (KVFERRY_MAX_EARLY_ROOMS)"
            )
        return None

    def abort(self, receiver: str, message: AbortRoom, now: float) -> RoomT | None:
        """Takes a wish back; returns the room that has to stop, None if nothing was written for it."""
        gave_up = TransferAbortedError(f"room {message.room} was aborted by {receiver}: {message.reason}")
        self._is_over(receiver, message.room, message.generation, gave_up, now)
        failed = self._failed_alone.get(message.room)
        if failed is not None:
            failed.receivers.add(receiver)  # who gives up need not be told
        room = self.rooms.get(message.room)
        if room is None:
            self._early.keep(receiver, message, now)
        return room

    def remove(self, room: RoomT, now: float) -> None:
        """Forgets a room that is done."""
        if self.rooms.get(room.room) is not room:
            return
        del self.rooms[room.room]
        del self._given[room.room]
        for receiver, generation in room.generations.items():
            self._is_over(receiver, room.room, generation, room.error, now)
        if room.failed_alone and room.error is not None:
            self._failed_alone[room.room] = _FailedAlone(room.error, set(room.generations), now + self._keep_s)
            forget_oldest(self._failed_alone, self._max_early)

    def _is_over(self, receiver: str, room: int, generation: int, error: KVFerryError | None, now: float) -> None:
        self._over.pop((receiver, room), None)  # so that it is the youngest
        self._over[receiver, room] = _Over(generation, error, now + self._keep_s)
        forget_oldest(self._over, REMEMBERED)

    def forget_receiver(self, receiver: str) -> None:
        """Drops what a decode rank that is gone had opened first."""
        self._early.forget(receiver)

    def expired(self, now: float) -> list[tuple[str, OpenRoom]]:
        """Drops what our caller did not open in time; returns whom to tell."""
        for number in [number for number, failed in self._failed_alone.items() if now >= failed.until]:
            del self._failed_alone[number]
        while self._over and now >= next(iter(self._over.values())).until:  # the oldest stand first
            del self._over[next(iter(self._over))]
        return list(self._early.expired(now))

    def close(self) -> list[tuple[str, OpenRoom]]:
        """Takes no more wishes; returns whom to tell that theirs will not be fulfilled."""
        self._is_closed = True
        return list(self._early.expired(float("inf")))
