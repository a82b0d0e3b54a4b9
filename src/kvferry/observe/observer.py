"""The events that an endpoint reports to its observers."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import partial
from types import MethodType

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
    """Passes events on to several observers. One that raises is logged, and neither the others nor transfers suffer.

    Attributes:
        observers: all of them. Those that ignore an event are not told of it: most do, and writes are many.
    """

    def __init__(self, *observers: Observer) -> None:
        self.observers = observers
        for event, ignores in vars(Observer).items():
            if not event.startswith("_"):
                told = [getattr(each, event) for each in observers if getattr(type(each), event) is not ignores]
                setattr(self, event, partial(_notify, told))


def _notify(told: Sequence[MethodType], *arguments: object) -> str:
    """Tells all; returns what the one says that traces, if any does."""
    said = ""
    for each in told:
        try:
            said = each(*arguments) or said
        except BaseException:
            log.exception("%s met an error; what it shows may be wrong", type(each.__self__).__name__)
    return said
