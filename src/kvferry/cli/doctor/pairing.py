"""Two doctors on two machines: one listens with memory to write into, the other writes there and asks what came.

They speak over the peer channel, as ranks do: with a shared secret, only those who have it come in.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeAlias

import msgspec
import numpy as np
import zmq

from kvferry._version import __version__
from kvferry.cli.strays import messages_among
from kvferry.control.channel import ConnectedChannel, ListeningChannel
from kvferry.control.construction import credentials_of
from kvferry.control.credentials import secret_hint
from kvferry.endpoint.construction import create_transport
from kvferry.errors import PeerDisconnectedError
from kvferry.layout import Device, Region
from kvferry.settings import Settings, bracketed

MEMORY_BYTES = 64 << 20
ANSWER_S = 20.0
_LOOK_MS = 200
_SILENCE_S = 60.0
"""After which another may come."""


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


class Hello(_Message, frozen=True):
    """Who writes to who listens: I should like to."""

    version: str


class Ready(_Message, frozen=True):
    """The answer: where.

    Attributes:
        metadata: NIXL's.
        value: that the memory is to be filled with.
    """

    version: str
    metadata: bytes
    address: int
    value: int


class Busy(_Message, frozen=True):
    """Or: somebody else is writing."""


class Written(_Message, frozen=True):
    """Who writes to who listens: look."""


class Seen(_Message, frozen=True):
    """The answer: whether every byte is right."""

    is_right: bool


ToListener: TypeAlias = Hello | Written
ToWriter: TypeAlias = Ready | Busy | Seen

_TO_LISTENER: msgspec.msgpack.Decoder[ToListener] = msgspec.msgpack.Decoder(ToListener)
_TO_WRITER: msgspec.msgpack.Decoder[ToWriter] = msgspec.msgpack.Decoder(ToWriter)


def listen(settings: Settings, port: int, tell: Callable[[str], None]) -> None:
    """Lets one after the other write here, until it is interrupted.

    Args:
        port: to listen on; 0 takes any that is free.
        tell: is told what happens.

    Raises:
        KVFerryError: if the port cannot be listened on, or there is no NIXL.
    """
    memory = np.zeros(MEMORY_BYTES, np.uint8)
    transport = create_transport(settings, f"kvferry-doctor-{secrets.token_hex(4)}", writes=False)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        transport.register([Region(memory.ctypes.data, memory.nbytes)], Device())
        channel = ListeningChannel(
            context, host=bracketed(settings.host), port=port, credentials=credentials_of(settings)
        )
        try:
            tell(f"listening on {settings.host} port {channel.port}")
            _serve(channel, memory, transport.metadata(), tell)
        finally:
            channel.close()
    finally:
        context.term()
        transport.close()


def _serve(
    channel: ListeningChannel,
    memory: np.ndarray[tuple[int], np.dtype[np.uint8]],
    metadata: bytes,
    tell: Callable[[str], None],
) -> None:
    writer, heard_at, value = "", float("-inf"), 0
    while True:
        channel.wait(_LOOK_MS)
        for identity, data in channel.receive():
            for message in messages_among([data], _TO_LISTENER):
                now = time.monotonic()
                answer: ToWriter
                if identity != writer and isinstance(message, Written):
                    continue
                if writer not in ("", identity) and now - heard_at < _SILENCE_S:
                    answer = Busy()
                elif isinstance(message, Hello):
                    writer, heard_at, value = identity, now, value % 255 + 1
                    memory[:] = 0
                    answer = Ready(__version__, metadata, memory.ctypes.data, value)
                    tell("a doctor writes")
                else:
                    is_right = bool((memory == value).all())
                    answer, writer = Seen(is_right), ""
                    tell("every byte is right" if is_right else "not every byte is right")
                with suppress(PeerDisconnectedError):
                    channel.send(identity, msgspec.msgpack.encode(answer))


class Partner:
    """A doctor that listens, as the one that writes sees it."""

    def __init__(self, channel: ConnectedChannel, *, has_secret: bool) -> None:
        self._channel = channel
        self._has_secret = has_secret

    def ask(self, message: ToListener) -> ToWriter:
        """Says something and waits for the answer.

        Raises:
            PeerDisconnectedError: if there is none.
        """
        self._channel.send(msgspec.msgpack.encode(message))
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            self._channel.socket.poll(_LOOK_MS)
            for answer in messages_among(self._channel.receive(), _TO_WRITER):
                return answer
        raise PeerDisconnectedError(
            f"no doctor answers at {self._channel.address} within {ANSWER_S:g} s: run `kvferry doctor --listen PORT` "
            f"there, with KVFERRY_HOST set to an address of that machine; {secret_hint(has_secret=self._has_secret)}"
        )


@contextmanager
def partner(settings: Settings, address: str) -> Iterator[Partner]:
    """The doctor that listens at a host and port.

    Raises:
        PeerDisconnectedError: if the address makes no sense.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        credentials = credentials_of(settings)
        identity = f"kvferry-doctor-{secrets.token_hex(8)}"
        channel = ConnectedChannel(context, identity=identity, address=f"tcp://{address}", credentials=credentials)
        try:
            yield Partner(channel, has_secret=credentials is not None)
        finally:
            channel.close()
    finally:
        context.term()
