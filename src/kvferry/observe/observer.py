"""The events that an endpoint reports to its observers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from types import MethodType
from typing import Any

from kvferry.loggers import logger_of
from kvferry.observe.records import ReceiverStats, SenderStats, WriteRecord

log = logger_of(__name__)


class Retry(Enum):
    """What is retried."""

    LOOK_UP = "look-up"
    CONNECT = "connect"


class Observer:
    """Receives an endpoint's events, each on the thread where it happens; returns at once. This one ignores them."""

    def begin_receiving(self, room: int) -> str:
        """A caller opens a room on a decode rank. Returns the trace context to send with its open request, if any."""
        return ""

    def begin_sending(self, room: int) -> None:
        """A caller opens a room on a prefill rank."""

    def requested(self, room: int, trace_context: str) -> None:
        """A decode rank's open request for a room that is open here, with the trace context that came with it."""

    def submitted(self, seconds: Sequence[float]) -> None:
        """A caller has handed chunks in, which took so long each. May be called on the caller's thread."""

    def wrote(self, room: int, writes: Sequence[WriteRecord]) -> None:
        """Writes are complete: all since the last call. Called when the room ends at the latest, and then for each."""

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
        """Something is retried."""

    def peer_lost(self, peer: str, error: Exception) -> None:
        """A peer is given up."""


class Several(Observer):
    """Passes events on to several observers. One that raises is logged, and neither the others nor transfers suffer."""

    def __init__(self, *observers: Observer) -> None:
        self._begin_receiving = _methods(observers, Observer.begin_receiving)
        self._begin_sending = _methods(observers, Observer.begin_sending)
        self.told_of_requests = _methods(observers, Observer.requested)
        self._submitted = _methods(observers, Observer.submitted)
        self._wrote = _methods(observers, Observer.wrote)
        self._write_failed = _methods(observers, Observer.write_failed)
        self._deferred = _methods(observers, Observer.deferred)
        self._sent = _methods(observers, Observer.sent)
        self._received = _methods(observers, Observer.received)
        self._refused = _methods(observers, Observer.refused)
        self._retried = _methods(observers, Observer.retried)
        self._peer_lost = _methods(observers, Observer.peer_lost)

    def begin_receiving(self, room: int) -> str:
        return max(_notify(self._begin_receiving, room), default="")  # at most one of them traces

    def begin_sending(self, room: int) -> None:
        _notify(self._begin_sending, room)

    def requested(self, room: int, trace_context: str) -> None:
        _notify(self.told_of_requests, room, trace_context)

    def submitted(self, seconds: Sequence[float]) -> None:
        _notify(self._submitted, seconds)

    def wrote(self, room: int, writes: Sequence[WriteRecord]) -> None:
        _notify(self._wrote, room, writes)

    def write_failed(self, room: int, receiver: str, error: Exception) -> None:
        _notify(self._write_failed, room, receiver, error)

    def deferred(self, receiver: str) -> None:
        _notify(self._deferred, receiver)

    def sent(self, room: int, stats: SenderStats, error: Exception | None) -> None:
        _notify(self._sent, room, stats, error)

    def received(self, room: int, stats: ReceiverStats, error: Exception | None) -> None:
        _notify(self._received, room, stats, error)

    def refused(self, error: Exception) -> None:
        _notify(self._refused, error)

    def retried(self, what: Retry) -> None:
        _notify(self._retried, what)

    def peer_lost(self, peer: str, error: Exception) -> None:
        _notify(self._peer_lost, peer, error)


def _methods(observers: Sequence[Observer], about: Callable[..., object]) -> tuple[MethodType, ...]:
    """Returns the methods of observers for an event, without those that ignore it: most do, and writes are many."""
    name = about.__name__
    return tuple(getattr(each, name) for each in observers if getattr(type(each), name) is not about)


def _notify(methods: Sequence[MethodType], *arguments: object) -> list[Any]:
    answers = []
    for each in methods:
        try:
            answers.append(each(*arguments))
        except BaseException:
            log.exception("%s met an error; what it shows may be wrong", type(each.__self__).__name__)
    return answers
