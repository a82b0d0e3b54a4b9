"""Messages of decode ranks about rooms that the prefill side's caller has not opened yet: either side may be first.

They are kept until it does or the bootstrap deadline passes, one of each decode rank for a room. How many is bounded:
rooms in all and for every decode rank, so that one of them that speaks of very many leaves space for the others; and,
of open requests, the bytes of their page numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvferry.errors import QueueFullError
from kvferry.protocol.bounded import ForAWhile
from kvferry.protocol.wire.messages import AbortRoom, OpenRoom

MessageT = TypeVar("MessageT")


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
        self._rooms: ForAWhile[int, dict[str, MessageT]] = ForAWhile(keep_s)  # messages by receiver
        self._rooms_of: Counter[str] = Counter()  # by receiver

    def __len__(self) -> int:
        return len(self._rooms)

    def __contains__(self, room: int) -> bool:
        return room in self._rooms

    def of(self, room: int) -> Mapping[str, MessageT]:
        """Returns what is kept for a room, by receiver."""
        return self._rooms.get(room) or {}

    def has_place(self, receiver: str, room: int) -> bool:
        """Whether a message of a decode rank for a room can be kept."""
        if receiver in self.of(room):
            return True
        is_full = room not in self._rooms and len(self._rooms) >= self._limit
        return not is_full and self._rooms_of[receiver] < self._limit_of_one

    def put(self, receiver: str, room: int, message: MessageT, now: float) -> None:
        """Keeps a message. One that replaces the same decode rank's earlier one is kept for the whole time again."""
        messages = self._rooms.get(room) or {}
        if not messages or self.pop(receiver, room) is not None:
            self._rooms.put(room, messages, now, limit=self._limit)
        messages[receiver] = message
        self._rooms_of[receiver] += 1

    def pop(self, receiver: str, room: int) -> MessageT | None:
        """Returns and forgets a decode rank's message for a room; None if there is none."""
        messages = self._rooms.get(room) or {}
        message = messages.pop(receiver, None)
        if message is not None:
            self._count_out({receiver: message})
            if not messages:
                self._rooms.pop(room)
        return message

    def take(self, room: int) -> dict[str, MessageT]:
        """Returns and forgets everything that is kept for a room, by receiver."""
        messages = self._rooms.pop(room) or {}
        self._count_out(messages)
        return messages

    def forget(self, receiver: str) -> list[MessageT]:
        """Drops everything of a decode rank that is gone, and returns it."""
        kept = [self.pop(receiver, room) for room in list(self._rooms)]
        return [message for message in kept if message is not None]

    def expired(self, now: float) -> list[tuple[str, MessageT]]:
        """Drops the rooms that our caller did not open in time. Returns what was kept for them, with its receivers."""
        expired: list[tuple[str, MessageT]] = []
        for messages in self._rooms.forget_old(now):
            self._count_out(messages)
            expired += messages.items()
        return expired

    def _count_out(self, messages: Mapping[str, MessageT]) -> None:
        """Subtracts what is no longer kept of a room from the totals."""
        for receiver in messages:
            self._rooms_of[receiver] -= 1
            if not self._rooms_of[receiver]:
                del self._rooms_of[receiver]


@dataclass(slots=True)
class PendingOpen:
    """A decode rank's open request.

    Attributes:
        abort: what takes it back; None as long as nothing does.
    """

    request: OpenRoom
    abort: AbortRoom | None = None

    @property
    def page_bytes(self) -> int:
        """Bytes of its page numbers."""
        return sum(len(group.pages.data) for group in self.request.groups)


class PendingOpens(PendingMessages[PendingOpen]):
    """Open requests. A newer generation from the same decode rank replaces the older one."""

    def __init__(self, *, limit: int, most_page_bytes: int, keep_s: float) -> None:
        """Starts empty.

        Args:
            limit: as in `PendingMessages`; likewise `keep_s`.
            most_page_bytes: how many bytes of page numbers are kept at most, over all rooms.
        """
        super().__init__(limit=limit, keep_s=keep_s)
        self._most_page_bytes = most_page_bytes
        self._page_bytes = 0

    def keep(self, receiver: str, message: OpenRoom, now: float) -> None:
        """Keeps an open request.

        Raises:
            QueueFullError: if too much is kept already.
        """
        known = self.of(message.room).get(receiver)
        if known is not None and known.request.generation == message.generation:
            return
        if not self.has_place(receiver, message.room):
            raise QueueFullError(
                f"{len(self)} rooms wait for the prefill side already, as many as may or too many of this "
                "decode rank's (KVFERRY_MAX_ROOMS of the prefill side for each, and twice as many for all)"
            )
        pending = PendingOpen(message)
        if self._page_bytes + pending.page_bytes > self._most_page_bytes:
            raise QueueFullError(
                f"rooms that wait for the prefill side have {self._page_bytes:,} bytes of page numbers already, and "
                f"this one's {pending.page_bytes:,} would be more than {self._most_page_bytes:,}: "
                "try again when some have been opened there"
            )
        self.put(receiver, message.room, pending, now)
        self._page_bytes += pending.page_bytes

    def abort(self, receiver: str, message: AbortRoom) -> None:
        """Keeps an abort behind the open request that it belongs to, so that the room fails before its first write.

        Without one there is nothing to stop. Either way nothing was written: `Drained` may be sent at once.
        """
        known = self.of(message.room).get(receiver)
        if known is not None and known.request.generation == message.generation:
            known.abort = message

    def _count_out(self, messages: Mapping[str, PendingOpen]) -> None:
        super()._count_out(messages)
        self._page_bytes -= sum(pending.page_bytes for pending in messages.values())
