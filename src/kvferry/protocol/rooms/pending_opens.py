"""Rooms that decode ranks opened before the prefill side's caller did.

Either side may be first. What arrives early is kept, in order, until the caller opens the room or the bootstrap
deadline passes; a newer generation from the same decode rank replaces the older one. How much is kept is bounded: rooms
in all and for every decode rank, so that one of them that opens very many leaves space for the others, and the bytes of
their page numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvferry.errors import QueueFullError
from kvferry.protocol.wire.messages import AbortRoom, OpenRoom

PendingMessage: TypeAlias = OpenRoom | AbortRoom


@dataclass(slots=True)
class _PendingRoom:
    since: float
    messages: dict[str, list[PendingMessage]] = field(default_factory=dict)  # by receiver


def _page_bytes(message: PendingMessage) -> int:
    return sum(len(group.pages.data) for group in message.groups) if isinstance(message, OpenRoom) else 0


class PendingOpens:
    """Messages for rooms that are not open yet."""

    def __init__(self, *, limit: int, most_page_bytes: int, keep_s: float) -> None:
        """Starts empty.

        Args:
            limit: how many rooms are kept at most; no decode rank has more than half of them, rounded up.
            most_page_bytes: how many bytes of page numbers are kept at most, over all rooms.
            keep_s: how long a room is kept, in seconds.
        """
        self._limit = limit
        self._most_page_bytes = most_page_bytes
        self._limit_of_one = -(-limit // 2)
        self._page_bytes = 0
        self._rooms_of: Counter[str] = Counter()  # by receiver
        self._keep_s = keep_s
        self._rooms: dict[int, _PendingRoom] = {}  # the one that has waited for longest comes first

    def __len__(self) -> int:
        return len(self._rooms)

    def __contains__(self, room: int) -> bool:
        return room in self._rooms

    def keep(self, receiver: str, message: PendingMessage, now: float) -> None:
        """Keeps a message.

        An abort is kept behind the open that it belongs to, so that the room fails before its first write; without one
        there is nothing to stop, and it takes no place. Either way nothing was written: `Drained` may be sent at once.

        Raises:
            QueueFullError: if too much is kept already, naming the setting.
        """
        room = self._rooms.get(message.room)
        known = room.messages.get(receiver, []) if room is not None else []
        if isinstance(message, AbortRoom):
            if known and known[-1].generation == message.generation:
                known[1:] = [message]
            return
        if known and known[0].generation == message.generation:
            return
        self._check_place(receiver, message, is_new_room=room is None, known=known)
        if room is None:
            room = self._rooms[message.room] = _PendingRoom(now)
        if known:
            self._dropped(receiver, known)
            room.since = now
            self._rooms[message.room] = self._rooms.pop(message.room)
        room.messages[receiver] = [message]
        self._rooms_of[receiver] += 1
        self._page_bytes += _page_bytes(message)

    def generation(self, receiver: str, room: int) -> int | None:
        """Returns the generation under which a decode rank opened a room that is not open yet; None if it did not."""
        kept = self._rooms[room].messages.get(receiver) if room in self._rooms else None
        return kept[0].generation if kept else None

    def _check_place(
        self, receiver: str, message: OpenRoom, *, is_new_room: bool, known: Sequence[PendingMessage]
    ) -> None:
        is_full = is_new_room and len(self._rooms) >= self._limit
        if is_full or (not known and self._rooms_of[receiver] >= self._limit_of_one):
            raise QueueFullError(
                f"{len(self._rooms)} rooms wait for the prefill side already, as many as may or too many of this "
                "decode rank's (KVFERRY_MAX_PENDING_OPENS)"
            )
        more = _page_bytes(message)
        if self._page_bytes + more > self._most_page_bytes:
            raise QueueFullError(
                f"rooms that wait for the prefill side have {self._page_bytes:,} bytes of page numbers already, and "
                f"this one's {more:,} would be more than {self._most_page_bytes:,} (KVFERRY_MAX_PENDING_OPENS_MIB)"
            )

    def _dropped(self, receiver: str, messages: Sequence[PendingMessage]) -> None:
        """Subtracts messages that are no longer kept from the totals."""
        self._page_bytes -= sum(map(_page_bytes, messages))
        self._rooms_of[receiver] -= 1
        if not self._rooms_of[receiver]:
            del self._rooms_of[receiver]

    def take(self, room: int) -> list[tuple[str, PendingMessage]]:
        """Returns and forgets everything kept for a room that is now open."""
        pending = self._rooms.pop(room, None)
        if pending is None:
            return []
        for receiver, messages in pending.messages.items():
            self._dropped(receiver, messages)
        return [(receiver, message) for receiver, messages in pending.messages.items() for message in messages]

    def forget(self, receiver: str) -> list[PendingMessage]:
        """Drops everything from a decode rank that is gone. Returns its last message for every room."""
        last = []
        for number, room in list(self._rooms.items()):
            messages = room.messages.pop(receiver, None)
            if messages is not None:
                self._dropped(receiver, messages)
                last.append(messages[-1])
            if not room.messages:
                del self._rooms[number]
        return last

    def expired(self, now: float) -> Iterator[tuple[str, OpenRoom]]:
        """Drops rooms that our caller did not open in time, and yields their open requests, to be refused."""
        while self._rooms:
            number, room = next(iter(self._rooms.items()))
            if now - room.since < self._keep_s:
                break
            del self._rooms[number]
            for receiver, messages in room.messages.items():
                self._dropped(receiver, messages)
                if isinstance(messages[-1], OpenRoom):
                    yield receiver, messages[-1]
