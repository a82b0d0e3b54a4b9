"""What commands hear that listen on the peer channel: anybody may send anything there."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TypeVar

import msgspec

Kind = TypeVar("Kind")


def messages_among(received: Iterable[bytes], decoder: msgspec.msgpack.Decoder[Kind]) -> list[Kind]:
    """The messages among what came; a stray's bytes are none."""
    messages = []
    for data in received:
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            messages.append(decoder.decode(data))
    return messages
