"""Encodes messages and notifications, and decodes what strangers send.

Every message is the four bytes of `MAGIC`, the protocol version as two bytes, and a MessagePack body whose type is
tagged.

Peers may be of different releases during an upgrade. So a message may only gain fields, each with a default, and there
may be new types of messages: those that do not know one skip it, and those that miss a field take the default. Whatever
else changes takes a new version; see `versions`.
"""

from __future__ import annotations

import struct
from typing import Any, TypeVar, get_args

import msgspec

from kvferry._version import __version__
from kvferry.errors import ConfigurationError, MessageError, UnknownMessageError, quoted
from kvferry.protocol.wire.field_types import Message
from kvferry.protocol.wire.messages import Notification, NumberedToDecode, NumberedToPrefill, ToDecode, ToPrefill
from kvferry.protocol.wire.versions import SPOKEN, Versions, check_spoken

MAGIC = b"kvfy"
MAX_MESSAGE_BYTES = 32 * 1024 * 1024

_HEADER = struct.Struct("<4sH")
_ENVELOPE_BYTES = 64
"""What a `Numbered` takes beside its body, at most."""

_LONGEST_TYPE = 64
"""Characters of the name of an unknown type that an error quotes."""

_Body = TypeVar("_Body")

_encoder = msgspec.msgpack.Encoder()
_to_prefill: msgspec.msgpack.Decoder[ToPrefill] = msgspec.msgpack.Decoder(ToPrefill)
_to_decode: msgspec.msgpack.Decoder[ToDecode] = msgspec.msgpack.Decoder(ToDecode)
_numbered_to_prefill: msgspec.msgpack.Decoder[NumberedToPrefill] = msgspec.msgpack.Decoder(NumberedToPrefill)
_numbered_to_decode: msgspec.msgpack.Decoder[NumberedToDecode] = msgspec.msgpack.Decoder(NumberedToDecode)
_notification: msgspec.msgpack.Decoder[Notification] = msgspec.msgpack.Decoder(Notification)


class _Tagged(msgspec.Struct):
    """What any message has, whatever else it holds."""

    type: str


_tagged = msgspec.msgpack.Decoder(_Tagged)


def encode(message: Message, version: int = SPOKEN.oldest) -> bytes:
    """Encodes a message.

    Args:
        version: in which the peer is spoken to; the oldest, which every peer reads, where none was agreed upon.

    Raises:
        MessageError: if it is larger than the peer would accept, or holds what cannot be encoded.
    """
    return _HEADER.pack(MAGIC, version) + _encoded(message, MAX_MESSAGE_BYTES)


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


def version_of(data: bytes) -> int:
    """Returns the version of a message that was decoded."""
    return int(_HEADER.unpack_from(data)[1])


def _body(data: bytes, spoken: Versions) -> memoryview:
    if len(data) < _HEADER.size or data[:4] != MAGIC:
        raise MessageError(f"{len(data)} bytes that are no message of kvferry: {bytes(data[:16])!r}")
    if len(data) > MAX_MESSAGE_BYTES + _HEADER.size:
        raise MessageError(f"a message of {len(data)} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
    check_spoken(version_of(data), spoken)
    return memoryview(data)[_HEADER.size :]


def _decoded(decoder: msgspec.msgpack.Decoder[_Body], body: memoryview | msgspec.Raw, what: str) -> _Body:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ConfigurationError) as error:
        unknown = _unknown_type(decoder, body)
        if unknown is not None:
            raise UnknownMessageError(
                f"a {what} of type {unknown!r}, which kvferry {__version__} does not know"
            ) from error
        raise MessageError(f"a malformed {what}: {quoted(error)}") from error


def _unknown_type(decoder: msgspec.msgpack.Decoder[Any], body: memoryview | msgspec.Raw) -> str | None:
    """Returns the type that a message says it is of, if the decoder has none of that name."""
    try:
        name = _tagged.decode(body).type
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    known = {each.__struct_config__.tag for each in get_args(decoder.type)}
    return name[:_LONGEST_TYPE] if name not in known else None


def decode_to_prefill(data: bytes, spoken: Versions = SPOKEN) -> ToPrefill:
    """Decodes a message from a decode rank.

    Args:
        spoken: the versions that this side speaks.

    Raises:
        MessageError: if the bytes are no such message, or describe an impossible layout.
        UnknownMessageError: if they are a message of a type that this side does not know, and may ignore.
        VersionError: if they are of a protocol version that this side does not speak.
    """
    return _decoded(_to_prefill, _body(data, spoken), "message to a prefill rank")


def decode_to_decode(data: bytes, spoken: Versions = SPOKEN) -> ToDecode:
    """Decodes a message from a prefill rank; as `decode_to_prefill`."""
    return _decoded(_to_decode, _body(data, spoken), "message to a decode rank")


def decode_numbered_to_prefill(body: msgspec.Raw) -> NumberedToPrefill:
    """Decodes the body of a `Numbered` from a decode rank; errors as in `decode_to_prefill`."""
    return _decoded(_numbered_to_prefill, body, "numbered message to a prefill rank")


def decode_numbered_to_decode(body: msgspec.Raw) -> NumberedToDecode:
    """Decodes the body of a `Numbered` from a prefill rank; errors as in `decode_to_prefill`."""
    return _decoded(_numbered_to_decode, body, "numbered message to a decode rank")


def decode_notification(data: bytes, spoken: Versions = SPOKEN) -> Notification:
    """Decodes a notification that came with the bytes; as `decode_to_prefill`."""
    return _decoded(_notification, _body(data, spoken), "notification")
