"""Rooms that decode ranks refuse, kept until the prefill side's caller opens them or the bootstrap deadline passes.

Whoever names a room's number before anybody has opened it is taken for the one that it is for, as with an open request:
only its callers know the number. Once a decode rank has opened the room, it can be refused only by ranks of the same
group that have not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvferry.protocol.bounded import forget_oldest
from kvferry.protocol.wire.messages import RefuseRoom

_REMEMBERED = 1 << 12
"""Of how many refusals it is remembered that they came."""


@dataclass(slots=True)
class _Refused:
    since: float
    messages: dict[str, RefuseRoom] = field(default_factory=dict)  # by receiver


class PendingRefusals:
    """Refusals of rooms that are not open yet."""

    def __init__(self, *, limit: int, keep_s: float) -> None:
        """Starts empty.

        Args:
            limit: how many rooms are kept at most; no decode rank has more than half of them, rounded up.
            keep_s: how long a room is kept, in seconds.
        """
        self._limit = limit
        self._limit_of_one = -(-limit // 2)
        self._keep_s = keep_s
        self._rooms: dict[int, _Refused] = {}  # the one that was refused first comes first
        self._rooms_of: Counter[str] = Counter()  # by receiver
        self._received: dict[tuple[str, int, int], None] = {}  # by receiver, room and generation; the latest stand last

    def __len__(self) -> int:
        return len(self._rooms)

    def is_new(self, receiver: str, message: RefuseRoom) -> bool:
        """Records a refusal. Returns whether it has to be handled: a retransmission need only be answered."""
        key = receiver, message.room, message.generation
        if key in self._received:
            return False
        self._received[key] = None
        forget_oldest(self._received, _REMEMBERED)
        return True

    def keep(self, receiver: str, message: RefuseRoom, now: float) -> bool:
        """Keeps a refusal. Returns False where too much is kept already: the room ends by its deadline then."""
        room = self._rooms.get(message.room)
        if room is None or receiver not in room.messages:
            is_full = room is None and len(self._rooms) >= self._limit
            if is_full or self._rooms_of[receiver] >= self._limit_of_one:
                return False
            self._rooms_of[receiver] += 1
        if room is None:
            room = self._rooms[message.room] = _Refused(now)
        room.messages[receiver] = message
        return True

    def of(self, room: int) -> tuple[RefuseRoom, ...]:
        """Returns the refusals of a room that are kept."""
        return tuple(self._rooms[room].messages.values()) if room in self._rooms else ()

    def forget(self, receiver: str, room: int) -> None:
        """Drops the refusal of a decode rank that opens the room after all."""
        refused = self._rooms.get(room)
        if refused is None or refused.messages.pop(receiver, None) is None:
            return
        self._subtract([receiver])
        if not refused.messages:
            del self._rooms[room]

    def take(self, room: int) -> list[tuple[str, RefuseRoom]]:
        """Returns and forgets the refusals of a room that is now open, each with the receiver's name."""
        refused = self._rooms.pop(room, None)
        if refused is None:
            return []
        self._subtract(refused.messages)
        return list(refused.messages.items())

    def _subtract(self, receivers: Iterable[str]) -> None:
        for receiver in receivers:
            self._rooms_of[receiver] -= 1
            if not self._rooms_of[receiver]:
                del self._rooms_of[receiver]

    def forget_old(self, now: float) -> None:
        """Drops the refusals of rooms that our caller did not open in time."""
        while self._rooms:
            number, room = next(iter(self._rooms.items()))
            if now - room.since < self._keep_s:
                break
            self.take(number)
