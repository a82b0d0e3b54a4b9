"""What all parts of a prefill endpoint share."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.endpoint.prefill.admission import Admission
from kvferry.endpoint.prefill.attachment import Attachment
from kvferry.endpoint.prefill.paths import SendingStaging
from kvferry.endpoint.runtime.callers_code import Callbacks
from kvferry.observe.records import Observer
from kvferry.protocol.bounded import remember
from kvferry.protocol.wire import codec, field_types, messages
from kvferry.protocol.wire.field_types import Identity
from kvferry.protocol.wire.versions import SpokenVersions
from kvferry.settings import Settings
from kvferry.transport import Transport

_MOST_BROKEN_OFF = 1 << 12  # names of decode ranks: a thousand times as many as may be frozen at a time


class BrokenOff:
    """The decode ranks to which a write failed of which something had been sent. For any thread.

    Attributes:
        last_failures: by receiver, the latest last.
    """

    def __init__(self) -> None:
        # Guards the numbers of the last failed writes, which workers give.
        self._lock = threading.Lock()
        self.last_failures: OrderedDict[str, int] = OrderedDict()  # the latest stand last
        self._failure_numbers = itertools.count(1)

    def add(self, name: str) -> None:
        """Remembers that such a write failed."""
        with self._lock:
            remember(self.last_failures, name, next(self._failure_numbers), _MOST_BROKEN_OFF)

    def __contains__(self, name: str) -> bool:
        return name in self.last_failures

    def last_failure_to(self, name: str) -> int:
        """Returns the number of the last such write to a decode rank; 0 if there was none."""
        return self.last_failures.get(name, 0)


@dataclass(eq=False, slots=True)
class PrefillContext:
    """What a prefill endpoint was made with, and what its driver has for the rest. All of it is for any thread.

    Attributes:
        identity: who it is, to its peers; its fingerprint may be renewed.
        transport: moves the bytes.
        settings: what it was made with.
        staging: what it has for staged writes.
        admission: says when a direct write may be posted.
        observer: is told what happens.
        callbacks: calls the caller back when transfers change.
        now: the time, in seconds of a steady clock.
        send: sends a control message to a decode rank.
        write_failed: is told of a failed write to a decode rank after which nothing else is to be sent there until it
            has connected anew.
        spoken: the versions of the protocol in which decode ranks are spoken to.
        broken_off: decode ranks that what was sent of a failed write may still reach.
        engine_rank: the rank's number among all of its engine.
    """

    identity: Identity
    transport: Transport
    settings: Settings
    staging: SendingStaging
    admission: Admission
    observer: Observer
    callbacks: Callbacks
    now: Callable[[], float]
    send: Callable[[str, field_types.Message], None]
    write_failed: Callable[[Attachment, Exception], None]
    spoken: SpokenVersions
    broken_off: BrokenOff = field(default_factory=BrokenOff)
    engine_rank: int = field(init=False)

    def __post_init__(self) -> None:
        self.engine_rank = self.identity.coordinates.engine_rank

    def encoded(self, receiver: str, message: field_types.Message) -> bytes:
        """Encodes a message or notification for a decode rank.

        Raises:
            MessageError: if it cannot travel.
        """
        return codec.encode(message, self.spoken.of(receiver))

    def tell_not_attached(self, receiver: str, reason: str, *, attempt: int = 0) -> None:
        """Tells a decode rank that it is not attached, and why it is not where it was before.

        Args:
            attempt: the attempt to attach that is over; 0 where none is meant.
        """
        endpoint = self.identity.endpoint
        self.send(receiver, messages.Pong(endpoint=endpoint, attached=False, reason=reason, epoch=attempt))

    def tell_failed(self, receiver: str, room: int, generation: int, error: Exception) -> None:
        """Tells a decode rank that this rank cannot complete a room."""
        message = messages.RoomFailed(
            room=room, generation=generation, writer=self.engine_rank, error=type(error).__name__, reason=str(error)
        )
        self.send(receiver, message)

    def tell_drained(
        self, receiver: str, room: int, generation: int, *, after_failure: bool, error: Exception | None
    ) -> None:
        """Tells a decode rank that this rank will not write for a room again, and why if that failed here."""
        message = messages.Drained(
            endpoint=self.identity.endpoint,
            room=room,
            generation=generation,
            writer=self.engine_rank,
            after_failure=after_failure,
            error=type(error).__name__ if error is not None else "",
            reason=str(error) if error is not None else "",
        )
        self.send(receiver, message)
