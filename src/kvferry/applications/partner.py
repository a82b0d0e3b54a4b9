"""Two commands on two machines: one listens, the other calls it and asks.

They speak over the peer channel, as ranks do: with a shared secret, only those who have it come in. Messages are typed
MessagePack. Anybody may send anything there: what is no message is dropped, and whoever listens talks with one partner
at a time.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

import msgspec
import zmq

from kvferry.control.construction import credentials_of
from kvferry.control.credentials import secret_hint
from kvferry.control.ends import ZmqConnection, ZmqListeningEnd
from kvferry.errors import PeerDisconnectedError
from kvferry.hosts import bracketed
from kvferry.settings import Settings

Incoming = TypeVar("Incoming")
Decoder: TypeAlias = msgspec.msgpack.Decoder[Incoming]

_LOOK_MS = 200


class Message(msgspec.Struct, frozen=True, tag=True):
    """What partners say to each other; subclasses are told apart by their names."""


@dataclass(eq=False)
class Listener(Generic[Incoming]):
    """The end that listens. What `listening` has for arguments, and who the partner is."""

    _channel: ZmqListeningEnd
    _decoder: Decoder[Incoming]
    _opens: Callable[[Incoming], bool]
    _busy: Message
    _silence_s: float
    _partner: str | None = None
    _last_message_at: float = 0.0

    @property
    def port(self) -> int:
        """That it listens on."""
        return self._channel.port

    @property
    def sockets(self) -> Collection[zmq.Socket[bytes]]:
        """What to poll for input."""
        return self._channel.sockets

    @property
    def silent_s(self) -> float:
        """For how long the partner has said nothing."""
        return time.monotonic() - self._last_message_at

    def wait(self) -> None:
        """Waits until there may be something to receive, or a moment."""
        self._channel.wait(_LOOK_MS)

    def receive(self) -> Iterator[Incoming]:
        """Yields what the partner has said. Whoever opens a conversation while there is none is the partner."""
        for identity, data in self._channel.receive():
            for message in _messages_among([data], self._decoder):
                if identity != self._partner:
                    if not self._opens(message):
                        continue
                    if self._partner is not None and self.silent_s < self._silence_s:
                        with suppress(PeerDisconnectedError):
                            self._channel.send(identity, msgspec.msgpack.encode(self._busy))
                        continue
                    self._partner = identity
                self._last_message_at = time.monotonic()
                yield message

    def send(self, message: Message) -> None:
        """Says something to the partner.

        Raises:
            PeerDisconnectedError: if it is gone.
        """
        assert self._partner is not None
        self._channel.send(self._partner, msgspec.msgpack.encode(message))

    def dismiss(self) -> None:
        """Ends the conversation: another may open one."""
        self._partner = None


@contextmanager
def listening(
    settings: Settings,
    port: int,
    decoder: Decoder[Incoming],
    *,
    opens: Callable[[Incoming], bool],
    busy: Message,
    silence_s: float = math.inf,
) -> Iterator[Listener[Incoming]]:
    """Listens for a partner for as long as the context lasts.

    Args:
        port: 0 takes any free one.
        opens: whether a message opens a conversation.
        busy: what others are told who would open one.
        silence_s: how long a partner may say nothing before another may take its place.

    Raises:
        SettingsError: if the address cannot be listened on.
    """
    with _context() as context:
        host, credentials = bracketed(settings.host), credentials_of(settings)
        with closing(ZmqListeningEnd(host=host, port=port, credentials=credentials, context=context)) as channel:
            yield Listener(channel, decoder, opens, busy, silence_s)


@dataclass(eq=False)
class Caller(Generic[Incoming]):
    """The end that calls, with a hint for who gets no answer."""

    _channel: ZmqConnection
    _decoder: Decoder[Incoming]
    _hint: str
    _last_message_at: float = field(default_factory=time.monotonic)

    @property
    def sockets(self) -> Collection[zmq.Socket[bytes]]:
        """What to poll for input."""
        return [self._channel.socket]

    @property
    def silent_s(self) -> float:
        """For how long the partner has said nothing."""
        return time.monotonic() - self._last_message_at

    def wait(self) -> None:
        """Waits until there is something to receive, or a moment."""
        self._channel.socket.poll(_LOOK_MS)

    def receive(self) -> list[Incoming]:
        """Returns what the partner has said."""
        received = _messages_among(self._channel.receive(), self._decoder)
        if received:
            self._last_message_at = time.monotonic()
        return received

    def send(self, message: Message) -> None:
        """Says something to the partner, as soon as it is there.

        Raises:
            PeerDisconnectedError: if so much waits for it already that it must be gone.
        """
        self._channel.send(msgspec.msgpack.encode(message))

    def ask(self, message: Message, timeout_s: float) -> Incoming:
        """Says something and waits for the answer.

        Raises:
            PeerDisconnectedError: if there is none in time.
        """
        self.send(message)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.wait()
            for answer in self.receive():
                return answer
        raise PeerDisconnectedError(f"nobody answers at {self._channel.address} within {timeout_s:g} s: {self._hint}")


@contextmanager
def calling(settings: Settings, address: str, decoder: Decoder[Incoming], *, name: str) -> Iterator[Caller[Incoming]]:
    """Calls a partner that listens, for as long as the context lasts.

    Args:
        address: such as tcp://127.0.0.1:40000.
        name: what this end is called, with a number that nobody else has.

    Raises:
        PeerDisconnectedError: if the address makes no sense.
    """
    with _context() as context:
        identity, credentials = f"{name}-{secrets.token_hex(8)}", credentials_of(settings)
        channel = ZmqConnection(context, identity=identity, address=address, credentials=credentials)
        with closing(channel):
            yield Caller(channel, decoder, secret_hint(has_secret=credentials is not None))


@contextmanager
def _context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        yield context
    finally:
        context.term()


def _messages_among(received: Iterable[bytes], decoder: Decoder[Incoming]) -> list[Incoming]:
    messages = []
    for data in received:
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            messages.append(decoder.decode(data))
    return messages
