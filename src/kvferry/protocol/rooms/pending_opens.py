"""Rooms that decode ranks opened before the prefill side's caller did.

Either side may be first. A newer generation from the same decode rank replaces the older one. Beside the rooms, the
bytes of their page numbers are bounded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvferry.errors import QueueFullError
from kvferry.protocol.rooms.pending_messages import PendingMessages
from kvferry.protocol.wire.messages import AbortRoom, OpenRoom


@dataclass(frozen=True, slots=True)
class PendingOpen:
    """A decode rank's open request.

    Attributes:
        request: the request.
        abort: what takes it back; None as long as nothing does.
    """

    request: OpenRoom
    abort: AbortRoom | None = None

    @property
    def page_bytes(self) -> int:
        """Bytes of its page numbers."""
        return sum(len(group.pages.data) for group in self.request.groups)


class PendingOpens(PendingMessages[PendingOpen]):
    """Open requests for rooms that are not open yet."""

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
            QueueFullError: if too much is kept already, naming the setting.
        """
        known = self.of(message.room).get(receiver)
        if known is not None and known.request.generation == message.generation:
            return
        if not self.has_place(receiver, message.room):
            raise QueueFullError(
                f"{len(self)} rooms wait for the prefill side already, as many as may or too many of this "
                "decode rank's (KVFERRY_MAX_PENDING_OPENS)"
            )
        pending = PendingOpen(message)
        if self._page_bytes + pending.page_bytes > self._most_page_bytes:
            raise QueueFullError(
                f"rooms that wait for the prefill side have {self._page_bytes:,} bytes of page numbers already, and "
                f"this one's {pending.page_bytes:,} would be more than {self._most_page_bytes:,} "
                "(KVFERRY_MAX_PENDING_OPENS_MIB)"
            )
        self.put(receiver, message.room, pending, now)
        self._page_bytes += pending.page_bytes

    def abort(self, receiver: str, message: AbortRoom) -> None:
        """Keeps an abort behind the open request that it belongs to, so that the room fails before its first write.

        Without one there is nothing to stop. Either way nothing was written: `Drained` may be sent at once.
        """
        known = self.of(message.room).get(receiver)
        if known is not None and known.request.generation == message.generation:
            self._rooms[message.room].messages[receiver] = replace(known, abort=message)

    def _count_out(self, receiver: str, message: PendingOpen) -> None:
        super()._count_out(receiver, message)
        self._page_bytes -= message.page_bytes
