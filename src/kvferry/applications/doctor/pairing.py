"""Two doctors on two machines: one listens with memory to write into, the other writes there and asks what came."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

import msgspec

from kvferry._version import __version__
from kvferry.applications.bench.pool import Storage, allocate
from kvferry.applications.partner import Listener, Message, listening
from kvferry.endpoint.construction import create_transport
from kvferry.errors import PeerDisconnectedError
from kvferry.layout import Device
from kvferry.settings import Settings
from kvferry.transport import Transport

MEMORY_BYTES = 64 << 20
ANSWER_S = 20.0
_SILENCE_S = 60.0
"""After which another may come."""


class Hello(Message, frozen=True):
    """Who writes to who listens: I should like to."""

    version: str


class Ready(Message, frozen=True):
    """The answer: where.

    Attributes:
        metadata: the transport's.
        value: that the memory is to be filled with.
        transport: its name.
    """

    version: str
    metadata: bytes
    address: int
    value: int
    transport: str


class Busy(Message, frozen=True):
    """Or: somebody else is writing."""


class Written(Message, frozen=True):
    """Who writes to who listens: look.

    Attributes:
        num_bytes: how many there should be.
    """

    num_bytes: int = MEMORY_BYTES


class Seen(Message, frozen=True):
    """The answer: whether every byte is right."""

    is_right: bool


ToListener: TypeAlias = Hello | Written
ToWriter: TypeAlias = Ready | Busy | Seen

TO_LISTENER: msgspec.msgpack.Decoder[ToListener] = msgspec.msgpack.Decoder(ToListener)
TO_WRITER: msgspec.msgpack.Decoder[ToWriter] = msgspec.msgpack.Decoder(ToWriter)


def listen(settings: Settings, port: int, tell: Callable[[str], None], device: Device) -> None:
    """Lets one after the other write here, until it is interrupted.

    Args:
        port: to listen on; 0 takes any that is free.
        tell: is told what happens; first the port, as the last word.
        device: of the memory that is written to.

    Raises:
        KVFerryError: if the port cannot be listened on, or the transport is missing.
    """
    memory = allocate(MEMORY_BYTES, device)
    transport = create_transport(settings, f"kvferry-doctor-{secrets.token_hex(4)}", writes=False)
    try:
        transport.register([memory.region], device)
        with listening(
            settings, port, TO_LISTENER, opens=lambda said: isinstance(said, Hello), busy=Busy(), silence_s=_SILENCE_S
        ) as listener:
            tell(f"listening on {settings.host} port {listener.port}")
            _serve(listener, memory, transport, tell)
    finally:
        transport.close()


def _serve(
    listener: Listener[ToListener],
    memory: Storage,
    transport: Transport,
    tell: Callable[[str], None],
) -> None:
    value = 0
    while True:
        listener.wait()
        for message in listener.receive():
            answer: ToWriter
            if isinstance(message, Hello):
                value = value % 255 + 1
                memory.fill(0, MEMORY_BYTES)
                answer = Ready(__version__, transport.metadata(), memory.address, value, transport.name)
                tell("a doctor writes")
            else:
                memory.fetch(message.num_bytes)
                answer = Seen(bool((memory.host[: message.num_bytes] == value).all()))
                tell("every byte is right" if answer.is_right else "not every byte is right")
            with suppress(PeerDisconnectedError):
                listener.send(answer)
            if isinstance(answer, Seen):
                listener.dismiss()
