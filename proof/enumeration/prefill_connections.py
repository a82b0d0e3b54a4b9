"""The decode ranks that a prefill rank of an enumeration has attached, as its endpoint keeps them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvferry.protocol.links.reliable_channel import DecodeChannels
from kvferry.protocol.wire import messages
from kvferry.protocol.wire.field_types import DecodeRank, Message
from kvferry.staging.rings import WritingRing
from proof.enumeration.ranks import SPAN_BYTES, RingSpan, decode_rank, number_of


@dataclass(eq=False, slots=True)
class Connection:
    """A connection to a decode rank, made by one of its attempts to attach.

    Attributes:
        request: what it asked for.
        number: distinguishes it from all others.
        ring: where staged writes go; None until no write uses an earlier connection any more.
    """

    request: messages.Attach
    number: int
    ring: WritingRing | None = None

    @property
    def ring_epoch(self) -> int:
        """The epoch of the ring that it was offered."""
        offer = self.request.staging.ring
        assert offer is not None
        return offer.epoch


class Connections:
    """Connections by decode rank: a later one is ready once no write uses an earlier one any more.

    Attributes:
        channels: to the decode ranks.
        last_failures: numbers of the last failed writes.
    """

    def __init__(self, endpoint: str, decodes: int) -> None:
        """Begins with none.

        Args:
            endpoint: the prefill rank's name.
            decodes: how many decode ranks there are.
        """
        self.channels = DecodeChannels(endpoint)
        self.last_failures: dict[str, int] = {}
        self._endpoint = endpoint
        self._decodes = decodes
        self._current: dict[str, Connection] = {}
        self._used: dict[str, Connection] = {}  # by writes that have not ended, though it may not be the current one
        self._writes: Counter[str] = Counter()  # how many these are
        self._made = 0  # connections, ever
        self._failures = 0
        self._given_up: set[str] = set()

    def ready(self, name: str) -> Connection | None:
        """The connection to a decode rank; None if there is none, or it is not ready."""
        connection = self._current.get(name)
        return connection if connection is not None and connection.ring is not None else None

    def rank(self, name: str) -> DecodeRank | None:
        """Which decode rank has that name; None where that is not known."""
        is_known = self.ready(name) is not None or name in self._given_up
        return decode_rank(number_of(name), self._decodes) if is_known else None

    def has_attached(self, name: str) -> bool:
        """Whether a decode rank is attached, or about to be."""
        return name in self._current and self.channels.is_open(name)

    def attach(self, message: messages.Attach) -> bool:
        """Takes an attempt to attach, which may come again. Returns whether it is a new one."""
        name = message.endpoint
        self._given_up.discard(name)
        is_new = self.channels.attached(name, message.attempt)
        known = self._current.get(name)
        if known is None or known.request.attempt < message.attempt:
            self._made += 1
            self._current[name] = Connection(message, self._made)
        return is_new

    def is_latest(self, message: messages.Attach) -> bool:
        """Whether a decode rank has not attached anew since an attempt."""
        return self._current[message.endpoint].request.attempt == message.attempt

    def confirmation(self, name: str) -> list[messages.Attached]:
        """Makes a connection ready, if nothing of an earlier one is used any more. Returns what to tell of it."""
        connection = self._current.get(name)
        if connection is None or self._used.get(name) not in (None, connection):
            return []
        if connection.ring is None:
            connection.ring = WritingRing(SPAN_BYTES)
        return [
            messages.Attached(
                endpoint=self._endpoint,
                attempt=connection.request.attempt,
                only_staged=False,
                last_failure=self.last_failures.get(name, 0),
            )
        ]

    def answer(self, name: str, message: messages.Ping) -> list[Message]:
        """Returns the answer to a heartbeat."""
        if self.ready(name) is None or not self.channels.is_open(name):
            return [self.not_attached()]
        return self.channels.answer(name, message)

    def not_attached(self) -> messages.Pong:
        """Returns the answer for a decode rank that is not attached."""
        return messages.Pong(endpoint=self._endpoint, attached=False)

    def begin_write(self, name: str, number: int) -> bool:
        """Holds a connection for one write. Returns False if it is not the current one any more."""
        connection = self.ready(name)
        if connection is None or connection.number != number:
            return False
        self._used[name] = connection
        self._writes[name] += 1
        return True

    def end_write(self, name: str) -> list[messages.Attached]:
        """Ends a write's hold. Returns what to tell of the next connection, if that waited."""
        self._writes[name] -= 1
        if self._writes[name]:
            return []
        del self._writes[name]
        return self.confirmation(name) if self._used.pop(name) is not self._current.get(name) else []

    def broke_off(self, name: str) -> None:
        """Remembers a write of which something had been sent."""
        self._failures += 1
        self.last_failures[name] = self._failures

    def reserve(self, name: str) -> RingSpan | None:
        """Returns the next span of the ring that writes use; None while there is none."""
        connection = self._used[name]
        span = connection.ring.reserve(SPAN_BYTES) if connection.ring is not None else None
        return None if span is None else RingSpan(connection.ring_epoch, span.start, span.begin, span.stop)

    def credited(self, name: str, message: messages.Credit) -> None:
        """Takes a credit, if it is for the present ring."""
        connection = self.ready(name)
        if connection is not None and connection.ring is not None and connection.ring_epoch == message.epoch:
            connection.ring.read_until(message.position)

    def lose(self, name: str) -> None:
        """Gives a decode rank up that may live."""
        self._given_up.add(name)
        self.channels.close(name)
        del self._current[name]
