"""What an endpoint tells whoever watches it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import Enum

from kvferry.observe.records import ReceiverStats, SenderStats, WriteRecord

log = logging.getLogger(__name__)


class Retry(Enum):
    """What is done again."""

    LOOK_UP = "look-up"
    CONNECT = "connect"


class Observer:
    """Is told what happens, in whatever thread it happens, and returns at once. This one does not care."""

    def begin_receiving(self, room: int) -> str:
        """A caller opens a room on a decode rank. Returns the trace context that is to travel with it, if any."""
        return ""

    def begin_sending(self, room: int) -> None:
        """A caller opens a room on a prefill rank."""

    def asked(self, room: int, trace_context: str) -> None:
        """A decode rank has asked for a room that is open here, with the trace context that came with it."""

    def submitted(self, seconds: float) -> None:
        """A caller has handed a chunk in, which took so long."""

    def wire_began(self, now: float) -> None:
        """The transport was given a write."""

    def wire_ended(self, now: float) -> None:
        """The transport is through with one, well or not."""

    def write_ended(self, room: int, record: WriteRecord) -> None:
        """A write is through."""

    def write_failed(self, room: int, receiver: str, error: Exception) -> None:
        """A write failed."""

    def deferred(self, receiver: str) -> None:
        """A sub-chunk has to wait for staging memory, on this side or the receiver's."""

    def sent(self, room: int, stats: SenderStats, error: Exception | None) -> None:
        """A room that this rank sends has ended."""

    def received(self, room: int, stats: ReceiverStats, error: Exception | None) -> None:
        """A room that this rank receives has ended."""

    def refused(self, error: Exception) -> None:
        """Something was refused: a caller's request, a peer, or a peer's room."""

    def retried(self, what: Retry) -> None:
        """Something is done again."""

    def peer_lost(self, peer: str, error: Exception) -> None:
        """A peer is given up."""


class Several(Observer):
    """Tells several. One that raises is logged, and the others are told all the same: no transfer suffers from it."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def _each(self, tell: Callable[[Observer], object]) -> None:
        for each in self._observers:
            try:
                tell(each)
            except Exception:
                log.exception("%s met an error; what it shows may be wrong", type(each).__name__)

    def begin_receiving(self, room: int) -> str:
        said: list[str] = []
        self._each(lambda each: said.append(each.begin_receiving(room)))
        return max(said, default="")  # one of them traces, at most

    def begin_sending(self, room: int) -> None:
        self._each(lambda each: each.begin_sending(room))

    def asked(self, room: int, trace_context: str) -> None:
        self._each(lambda each: each.asked(room, trace_context))

    def submitted(self, seconds: float) -> None:
        self._each(lambda each: each.submitted(seconds))

    def wire_began(self, now: float) -> None:
        self._each(lambda each: each.wire_began(now))

    def wire_ended(self, now: float) -> None:
        self._each(lambda each: each.wire_ended(now))

    def write_ended(self, room: int, record: WriteRecord) -> None:
        self._each(lambda each: each.write_ended(room, record))

    def write_failed(self, room: int, receiver: str, error: Exception) -> None:
        self._each(lambda each: each.write_failed(room, receiver, error))

    def deferred(self, receiver: str) -> None:
        self._each(lambda each: each.deferred(receiver))

    def sent(self, room: int, stats: SenderStats, error: Exception | None) -> None:
        self._each(lambda each: each.sent(room, stats, error))

    def received(self, room: int, stats: ReceiverStats, error: Exception | None) -> None:
        self._each(lambda each: each.received(room, stats, error))

    def refused(self, error: Exception) -> None:
        self._each(lambda each: each.refused(error))

    def retried(self, what: Retry) -> None:
        self._each(lambda each: each.retried(what))

    def peer_lost(self, peer: str, error: Exception) -> None:
        self._each(lambda each: each.peer_lost(peer, error))
