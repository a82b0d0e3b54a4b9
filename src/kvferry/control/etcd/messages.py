"""What etcd's JSON gateway answers, as much of it as a registry reads; and what it is asked.

The gateway leaves out what is zero, empty or false, and writes integers of 64 bits as strings, keys and values in
base64.
"""

from __future__ import annotations

import base64
from typing import Any, TypeVar

import msgspec

Answer = TypeVar("Answer")


class KeyValue(msgspec.Struct, frozen=True):
    """A key as it stands at a revision.

    Attributes:
        key: its name.
        mod_revision: the revision at which it was written last; 0 if there is no such key.
        lease: what it is attached to; 0 if to nothing.
        value: empty if it was not asked for.
    """

    key: bytes = b""
    mod_revision: int = 0
    lease: int = 0
    value: bytes = b""


class Range(msgspec.Struct, frozen=True):
    """The keys of a range."""

    kvs: tuple[KeyValue, ...] = ()


class Response(msgspec.Struct, frozen=True):
    """What one operation of a transaction gave."""

    response_range: Range = Range()


class Transaction(msgspec.Struct, frozen=True):
    """Whether all that was compared was so, and what was done then."""

    succeeded: bool = False
    responses: tuple[Response, ...] = ()


class Lease(msgspec.Struct, frozen=True):
    """A lease, or how long it lasts.

    Attributes:
        id: its number; 0 is none.
        ttl: how long it lasts, in seconds; below 0 if there is no such lease.
        granted_ttl: how long it lasts when it is renewed.
    """

    id: int = msgspec.field(default=0, name="ID")
    ttl: int = msgspec.field(default=0, name="TTL")
    granted_ttl: int = msgspec.field(default=0, name="grantedTTL")


class KeptAlive(msgspec.Struct, frozen=True):
    """The answer to a renewal."""

    result: Lease = Lease()


class Event(msgspec.Struct, frozen=True):
    """A key was written or deleted."""

    kv: KeyValue = KeyValue()


class Watched(msgspec.Struct, frozen=True):
    """What a watch tells: that it has begun, or has ended, or what has happened. One that is refused does both."""

    created: bool = False
    canceled: bool = False
    cancel_reason: str = ""
    events: tuple[Event, ...] = ()


class News(msgspec.Struct, frozen=True):
    """A line of a watch; without a result something has gone wrong."""

    result: Watched | None = None


class Header(msgspec.Struct, frozen=True):
    """Who answers."""

    member_id: int = 0


class Status(msgspec.Struct, frozen=True):
    """How a member is."""

    header: Header = Header()
    version: str = ""
    leader: int = 0
    database_bytes: int = msgspec.field(default=0, name="dbSize")
    errors: tuple[str, ...] = ()


class Token(msgspec.Struct, frozen=True):
    """What a user shows from now on."""

    token: str = ""


class Done(msgspec.Struct, frozen=True):
    """It was done."""


# Here, in one thread: msgspec 0.22 crashes the process where two threads are the first to decode a type.
_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind, strict=False)
    for kind in (Range, Transaction, Lease, KeptAlive, News, Status, Token, Done)
}

NOT_DECODED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What `decoded` raises where a member answers something else."""


def decoded(answer: bytes, kind: type[Answer]) -> Answer:
    """Returns what a member answers."""
    found: Answer = _DECODERS[kind].decode(answer)
    return found


def encoded(text: str | bytes) -> str:
    """Returns a key or a value as the gateway takes it."""
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def span(folder: str) -> dict[str, Any]:
    """Selects all keys that begin so."""
    return {"key": encoded(folder), "range_end": encoded(after(folder))}


def after(folder: str) -> str:
    """Returns what follows all keys that begin so."""
    return folder[:-1] + chr(ord(folder[-1]) + 1)


def unchanged(key: str, entry: KeyValue) -> dict[str, Any]:
    """Holds as long as a key is as it was read."""
    return {"key": encoded(key), "target": "MOD", "result": "EQUAL", "mod_revision": entry.mod_revision}


def has_value(key: str, value: bytes) -> dict[str, Any]:
    """Holds while a key has this value."""
    return {"key": encoded(key), "target": "VALUE", "result": "EQUAL", "value": encoded(value)}


def none_but(key: str, folder: str) -> list[dict[str, Any]]:
    """Hold as long as no key but one stands in a folder."""
    spans = ((folder, key), (key + "\0", after(folder)))
    absent = {"target": "CREATE", "result": "EQUAL", "create_revision": 0}
    return [{"key": encoded(first), "range_end": encoded(end), **absent} for first, end in spans]


def put(key: str, value: bytes, lease: int) -> dict[str, Any]:
    """Writes a key, attached to a lease."""
    return {"request_put": {"key": encoded(key), "value": encoded(value), "lease": lease}}
