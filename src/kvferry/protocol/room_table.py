"""The rooms of a prefill rank, by number: to which of them a decode rank's message goes, or what it is told instead.

A number stands for one transfer at a time. Decode ranks may ask for it before our caller opens it, and after it failed
without them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvferry.errors import EndpointClosedError, KVFerryError, PageError, TransferAbortedError
from kvferry.protocol.early import EarlyMessage, EarlyRooms
from kvferry.protocol.messages import AbortRoom, OpenRoom


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
    def receivers(self) -> Collection[str]:
        """The decode ranks that have opened it."""


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
        # An abort may overtake the wish that it takes back, where a connection broke in between.
        self._taken_back: dict[tuple[str, int], tuple[int, float]] = {}  # generation, and until when to remember it
        self._is_closed = False

    @property
    def is_quiet(self) -> bool:
        """Whether there are no rooms, and none that decode ranks opened first."""
        return not self.rooms and not len(self._early)

    def add(self, room: RoomT) -> list[tuple[str, EarlyMessage]]:
        """Our caller opens a room; returns what decode ranks said of it before."""
        self.rooms[room.room] = room
        self._failed_alone.pop(room.room, None)
        return self._early.take(room.room)

    def wish(self, receiver: str, message: OpenRoom, now: float) -> RoomT | None:
        """Takes a decode rank's wish; returns the room that it is for, None if it is kept until our caller opens one.

        Raises:
            KVFerryError: if it must be refused, saying why.
        """
        generation, _ = self._taken_back.get((receiver, message.room), (None, 0.0))
        if generation == message.generation:
            raise TransferAbortedError(f"room {message.room} was aborted by {receiver} before it was opened")
        room = self.rooms.get(message.room)
        if room is not None:
            return room
        if self._is_closed:
            raise EndpointClosedError("the prefill endpoint was closed")
        failed = self._failed_alone.get(message.room)
        if failed is not None and receiver not in failed.receivers:
            failed.receivers.add(receiver)
            raise failed.error
        if not self._early.keep(receiver, message, now):
            raise PageError(f"{len(self._early)} rooms wait for the prefill side already (KVFERRY_MAX_EARLY_ROOMS)")
        return None

    def abort(self, receiver: str, message: AbortRoom, now: float) -> RoomT | None:
        """Takes a wish back; returns the room that has to stop, None if nothing was written for it."""
        self._taken_back.pop((receiver, message.room), None)  # so that it is the youngest
        self._taken_back[receiver, message.room] = message.generation, now + self._keep_s
        while len(self._taken_back) > self._max_early:
            del self._taken_back[next(iter(self._taken_back))]
        room = self.rooms.get(message.room)
        if room is None:
            self._early.keep(receiver, message, now)
        return room

    def remove(self, room: RoomT, now: float) -> None:
        """Forgets a room that is done."""
        if self.rooms.get(room.room) is not room:
            return
        del self.rooms[room.room]
        if room.failed_alone and room.error is not None:
            self._failed_alone[room.room] = _FailedAlone(room.error, set(room.receivers), now + self._keep_s)
            while len(self._failed_alone) > self._max_early:
                del self._failed_alone[next(iter(self._failed_alone))]

    def forget_receiver(self, receiver: str) -> None:
        """Drops what a decode rank that is gone had opened first."""
        self._early.forget(receiver)

    def expired(self, now: float) -> list[tuple[str, OpenRoom]]:
        """Drops what our caller did not open in time; returns whom to tell."""
        for number in [number for number, failed in self._failed_alone.items() if now >= failed.until]:
            del self._failed_alone[number]
        for key in [key for key, (_, until) in self._taken_back.items() if now >= until]:
            del self._taken_back[key]
        return list(self._early.expired(now))

    def close(self) -> list[tuple[str, OpenRoom]]:
        """Takes no more wishes; returns whom to tell that theirs will not be fulfilled."""
        self._is_closed = True
        return list(self._early.expired(float("inf")))
