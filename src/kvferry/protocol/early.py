"""Rooms that decode ranks opened before the prefill side's caller did.

Either side may be first. What arrives early is kept, in order, until the caller opens the room or the bootstrap
deadline passes; a newer generation from the same decode rank replaces the older one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from kvferry.protocol.messages import AbortRoom, OpenRoom

EarlyMessage: TypeAlias = OpenRoom | AbortRoom


@dataclass(slots=True)
class _EarlyRoom:
    since: float
    messages: dict[str, list[EarlyMessage]] = field(default_factory=dict)  # by receiver


class EarlyRooms:
    """Messages for rooms that are not open yet."""

    def __init__(self, *, limit: int, keep_s: float) -> None:
        """Args:
        limit: how many rooms are kept at most.
        keep_s: how long, in seconds.
        """
        self._limit = limit
        self._keep_s = keep_s
        self._rooms: dict[int, _EarlyRoom] = {}

    def __len__(self) -> int:
        return len(self._rooms)

    def keep(self, receiver: str, message: EarlyMessage, now: float) -> bool:
        """Keeps a message; False if there are too many rooms already.

        An abort is kept behind the open that it belongs to, so that the room fails before its first write; without one
        there is nothing to stop, and it takes no place. Either way nothing was written: `Drained` may be sent at once.
        """
        room = self._rooms.get(message.room)
        if isinstance(message, AbortRoom):
            kept = room.messages.get(receiver, []) if room is not None else []
            if kept and kept[-1].generation == message.generation:
                kept[1:] = [message]
            return True
        if room is None:
            if len(self._rooms) >= self._limit:
                return False
            room = self._rooms[message.room] = _EarlyRoom(now)
        known = room.messages.get(receiver)
        if known is None or known[0].generation != message.generation:
            room.messages[receiver] = [message]
            if known is not None:
                room.since = now
        return True

    def take(self, room: int) -> list[tuple[str, EarlyMessage]]:
        """Everything kept for a room that is now open."""
        early = self._rooms.pop(room, None)
        if early is None:
            return []
        return [(receiver, message) for receiver, messages in early.messages.items() for message in messages]

    def forget(self, receiver: str) -> None:
        """Drops everything from a decode rank that is gone."""
        for number, room in list(self._rooms.items()):
            room.messages.pop(receiver, None)
            if not room.messages:
                del self._rooms[number]

    def expired(self, now: float) -> Iterator[tuple[str, OpenRoom]]:
        """Drops rooms that nobody opened in time and yields whom to tell."""
        for number, room in list(self._rooms.items()):
            if now - room.since < self._keep_s:
                continue
            del self._rooms[number]
            for receiver, messages in room.messages.items():
                if isinstance(messages[-1], OpenRoom):
                    yield receiver, messages[-1]
