"""Messages of decode ranks about rooms that the prefill side's caller has not opened yet.

They are kept until it does or the bootstrap deadline passes, one of each decode rank for a room. How many is bounded:
rooms in all and for every decode rank, so that one of them that speaks of very many leaves space for the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

MessageT = TypeVar("MessageT")


@dataclass(slots=True)
class _PendingRoom(Generic[MessageT]):
    since: float
    messages: dict[str, MessageT] = field(default_factory=dict)  # by receiver


class PendingMessages(Generic[MessageT]):
    """Messages for rooms that are not open yet."""

    def __init__(self, *, limit: int, keep_s: float) -> None:
        """Starts empty.

        Args:
            limit: how many rooms are kept at most; no decode rank has more than half of them, rounded up.
            keep_s: how long a room is kept, in seconds.
        """
        self._limit = limit
        self._limit_of_one = -(-limit // 2)
        self._keep_s = keep_s
        self._rooms: dict[int, _PendingRoom[MessageT]] = {}  # the one that has waited for longest comes first
        self._rooms_of: Counter[str] = Counter()  # by receiver

    def __len__(self) -> int:
        return len(self._rooms)

    def __contains__(self, room: int) -> bool:
        return room in self._rooms

    def of(self, room: int) -> Mapping[str, MessageT]:
        """Returns what is kept for a room, by receiver."""
        return self._rooms[room].messages if room in self._rooms else {}

    def has_place(self, receiver: str, room: int) -> bool:
        """Whether a message of a decode rank for a room can be kept."""
        if receiver in self.of(room):
            return True
        is_full = room not in self._rooms and len(self._rooms) >= self._limit
        return not is_full and self._rooms_of[receiver] < self._limit_of_one

    def put(self, receiver: str, room: int, message: MessageT, now: float) -> None:
        """Keeps a message. One that replaces the same decode rank's earlier one is kept for the whole time again."""
        if receiver in self.of(room):
            self.pop(receiver, room)
            if room in self._rooms:
                self._rooms[room].since = now
                self._rooms[room] = self._rooms.pop(room)
        self._rooms.setdefault(room, _PendingRoom(now)).messages[receiver] = message
        self._rooms_of[receiver] += 1

    def pop(self, receiver: str, room: int) -> MessageT | None:
        """Returns and forgets a decode rank's message for a room; None if there is none."""
        if receiver not in self.of(room):
            return None
        pending = self._rooms[room]
        message = pending.messages.pop(receiver)
        self._count_out(receiver, message)
        if not pending.messages:
            del self._rooms[room]
        return message

    def take(self, room: int) -> dict[str, MessageT]:
        """Returns and forgets everything that is kept for a room, by receiver."""
        pending = self._rooms.pop(room, None)
        if pending is None:
            return {}
        for receiver, message in pending.messages.items():
            self._count_out(receiver, message)
        return pending.messages

    def forget(self, receiver: str) -> list[MessageT]:
        """Drops everything of a decode rank that is gone, and returns it."""
        kept = [self.pop(receiver, room) for room in list(self._rooms)]
        return [message for message in kept if message is not None]

    def expired(self, now: float) -> Iterator[tuple[str, MessageT]]:
        """Drops the rooms that our caller did not open in time, and yields what was kept for them."""
        while self._rooms:
            number, room = next(iter(self._rooms.items()))
            if now - room.since < self._keep_s:
                break
            yield from self.take(number).items()

    def _count_out(self, receiver: str, message: MessageT) -> None:
        """Subtracts a message that is no longer kept from the totals."""
        self._rooms_of[receiver] -= 1
        if not self._rooms_of[receiver]:
            del self._rooms_of[receiver]
