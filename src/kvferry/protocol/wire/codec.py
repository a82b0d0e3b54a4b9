"""Encodes messages and notifications, and decodes what strangers send.

Every message is the four bytes of `MAGIC`, the protocol version as two bytes, and a MessagePack body whose type is
tagged.

Peers of one version may be of different releases, one newer than the other, during an upgrade. So within a version a
message may only gain fields, each with a default: those that do not know one skip it, and those that miss one take the
default. Whatever else changes takes a new version.
"""

from __future__ import annotations

import struct
from typing import TypeVar

import msgspec

from kvferry.errors import ConfigurationError, MessageError, VersionError, quoted
from kvferry.protocol.wire.field_types import Message
from kvferry.protocol.wire.messages import NumberedToDecode, NumberedToPrefill, ToDecode, ToPrefill
from kvferry.protocol.wire.notifications import Notification

PROTOCOL_VERSION = 12
MAGIC = b"kvfy"
MAX_MESSAGE_BYTES = 32 * 1024 * 1024

_HEADER = struct.Struct("<4sH")
_ENVELOPE_BYTES = 64
"""What a `Numbered` takes beside its body, at most."""

_Body = TypeVar("_Body")

_encoder = msgspec.msgpack.Encoder()
_to_prefill: msgspec.msgpack.Decoder[ToPrefill] = msgspec.msgpack.Decoder(ToPrefill)
_to_decode: msgspec.msgpack.Decoder[ToDecode] = msgspec.msgpack.Decoder(ToDecode)
_numbered_to_prefill: msgspec.msgpack.Decoder[NumberedToPrefill] = msgspec.msgpack.Decoder(NumberedToPrefill)
_numbered_to_decode: msgspec.msgpack.Decoder[NumberedToDecode] = msgspec.msgpack.Decoder(NumberedToDecode)
_notification: msgspec.msgpack.Decoder[Notification] = msgspec.msgpack.Decoder(Notification)


def encode(message: Message) -> bytes:
    """Encodes a message.

    Raises:
        MessageError: if it is larger than the peer would accept, or holds what cannot be encoded.
    """
    return _HEADER.pack(MAGIC, PROTOCOL_VERSION) + _encoded(message, MAX_MESSAGE_BYTES)


def encode_body(message: NumberedToPrefill | NumberedToDecode) -> msgspec.Raw:
    """Encodes a message as the body of a `Numbered`; errors as in `encode`."""
    return msgspec.Raw(_encoded(message, MAX_MESSAGE_BYTES - _ENVELOPE_BYTES))


def _encoded(message: Message, most_bytes: int) -> bytes:
    try:
        body = _encoder.encode(message)
    except (UnicodeEncodeError, OverflowError) as error:
        raise MessageError(f"{type(message).__name__} cannot travel: {error}") from error
    if len(body) > most_bytes:
        raise MessageError(f"{type(message).__name__} of {len(body)} bytes exceeds the limit of {most_bytes}")
    return body


def _body(data: bytes) -> memoryview:
    if len(data) < _HEADER.size or data[:4] != MAGIC:
        raise MessageError(f"{len(data)} bytes that are no message of kvferry: {bytes(data[:16])!r}")
    if len(data) > MAX_MESSAGE_BYTES + _HEADER.size:
        raise MessageError(f"a message of {len(data)} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
    version = _HEADER.unpack_from(data)[1]
    if version != PROTOCOL_VERSION:
        raise VersionError(
            f"the peer speaks protocol version {version}, this side {PROTOCOL_VERSION}: run the same kvferry on both"
        )
    return memoryview(data)[_HEADER.size :]


def _decoded(decoder: msgspec.msgpack.Decoder[_Body], body: memoryview | msgspec.Raw, what: str) -> _Body:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ConfigurationError) as error:
        raise MessageError(f"a malformed {what}: {quoted(error)}") from error


def decode_to_prefill(data: bytes) -> ToPrefill:
    """Decodes a message from a decode rank.

    Raises:
        MessageError: if the bytes are no such message, or describe an impossible layout.
        VersionError: if they are of another protocol version.
    """
    return _decoded(_to_prefill, _body(data), "message to a prefill rank")


def decode_to_decode(data: bytes) -> ToDecode:
    """Decodes a message from a prefill rank; errors as in `decode_to_prefill`."""
    return _decoded(_to_decode, _body(data), "message to a decode rank")


def decode_numbered_to_prefill(body: msgspec.Raw) -> NumberedToPrefill:
    """Decodes the body of a `Numbered` from a decode rank; errors as in `decode_to_prefill`."""
    return _decoded(_numbered_to_prefill, body, "numbered message to a prefill rank")


def decode_numbered_to_decode(body: msgspec.Raw) -> NumberedToDecode:
    """Decodes the body of a `Numbered` from a prefill rank; errors as in `decode_to_prefill`."""
    return _decoded(_numbered_to_decode, body, "numbered message to a decode rank")


def decode_notification(data: bytes) -> Notification:
    """Decodes a notification that came with the bytes; errors as in `decode_to_prefill`."""
    return _decoded(_notification, _body(data), "notification")
