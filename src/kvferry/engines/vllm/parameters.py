"""The parameters that travel with a request: `kv_transfer_params` in its body, and in the answer of the prefill server.

The names are those that vLLM's own connectors and the gateways in front of it use. A gateway sends the prefill server
`{"do_remote_decode": true}`, and passes what comes back on to the decode server. One that sends to both at once names
the transfer to both, and pages leave while the prompt is still computed: by a room that it chooses, `kvferry_room`, or
by a text, `transfer_id`, as gateways do that know vLLM's Mooncake connector. What else they send is for others.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from kvferry import check_engine_name
from kvferry.errors import KVFerryError, UsageError

ROOM = "kvferry_room"
INSTANCE = "kvferry_instance"
"""The start of the prefill engine that has the request: a decode server need not wait for one that has gone."""

LARGEST_ROOM = (1 << 53) - 1
"""Parameters travel as JSON through gateways in languages that know no larger integers."""

TRANSFER = "transfer_id"
LONGEST_TRANSFER = 256
"""Characters of a transfer's name. Gateways take "xfer-" and a UUID."""


@dataclass(frozen=True, slots=True)
class SendParameters:
    """A request whose cache is to be sent.

    Attributes:
        is_known: whether the other side has the number already, so that pages may leave before the prompt is done.
    """

    room: int
    is_known: bool


@dataclass(frozen=True, slots=True)
class ReceiveParameters:
    """A request whose cache comes from elsewhere.

    Attributes:
        instance: the start of it that has the request; None where nobody says.
    """

    room: int
    engine: str
    instance: str | None = None


def send_parameters(parameters: Mapping[str, Any] | None) -> SendParameters | None:
    """Reads what a prefill server is asked for; None if this request is not to be sent.

    Raises:
        UsageError: if the room's number or the transfer's name is invalid.
    """
    if not parameters or not parameters.get("do_remote_decode"):
        return None
    room = _named_room(parameters)
    if room is None:
        return SendParameters(1 + secrets.randbelow(LARGEST_ROOM), is_known=False)
    return SendParameters(room, is_known=True)


def receive_parameters(parameters: Mapping[str, Any] | None) -> ReceiveParameters | None:
    """Reads what a decode server is asked for; None if this request is its own.

    Raises:
        UsageError: if something is missing or impossible.
    """
    if not parameters or not parameters.get("do_remote_prefill"):
        return None
    engine = parameters.get("remote_engine_id")
    if not isinstance(engine, str):
        raise UsageError(
            f"kv_transfer_params: remote_engine_id is {engine!r}: name the prefill engine, as its answer does"
        )
    try:
        check_engine_name(engine)
    except KVFerryError as error:
        raise UsageError(f"kv_transfer_params: remote_engine_id: {error}") from error
    room = _named_room(parameters)
    if room is None:
        raise UsageError(
            f"kv_transfer_params: neither {ROOM} nor {TRANSFER} is there: hand on what the prefill server has "
            "answered, or name the transfer to both sides"
        )
    instance = parameters.get(INSTANCE)
    if instance is not None and not isinstance(instance, str):
        raise UsageError(
            f"kv_transfer_params: {INSTANCE} is {instance!r}: hand on what the prefill server has answered"
        )
    return ReceiveParameters(room, engine, instance)


def answer(params: SendParameters, *, engine: str, request: str, tokens: int, instance: str = "") -> dict[str, Any]:
    """Makes what a prefill server answers: parameters for the decode server.

    Args:
        request: vLLM's name for the request here.
        tokens: how many tokens can be fetched.
        instance: this start of the engine; empty if it has no name.
    """
    started = {INSTANCE: instance} if instance else {}
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine,
        "remote_request_id": request,
        "remote_num_tokens": tokens,
        ROOM: params.room,
        **started,
    }


def room_of(transfer: str) -> int:
    """Returns the room of a transfer that has a name: the same on both sides, and for all that is likely no other's."""
    digest = blake2b(transfer.encode(errors="surrogatepass"), digest_size=8, person=b"kvferry-room").digest()
    return int.from_bytes(digest, "big") & LARGEST_ROOM


def _named_room(parameters: Mapping[str, Any]) -> int | None:
    """Returns the room that a gateway has named to both sides, by its number or by the transfer's name."""
    room, transfer = parameters.get(ROOM), parameters.get(TRANSFER)
    if room is not None:
        if not isinstance(room, int) or isinstance(room, bool) or not 0 <= room <= LARGEST_ROOM:
            raise UsageError(
                f"kv_transfer_params: {ROOM} is {room!r}: it must be an integer from 0 to {LARGEST_ROOM}, the same on "
                "both sides, and no other request's"
            )
        return room
    if transfer is None:
        return None
    if not isinstance(transfer, str) or not 0 < len(transfer) <= LONGEST_TRANSFER:
        raise UsageError(
            f"kv_transfer_params: {TRANSFER} is {_shown(transfer)}: it must be a text of 1 to {LONGEST_TRANSFER} "
            "characters, the same on both sides, and no other request's"
        )
    return room_of(transfer)


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= LONGEST_TRANSFER else f"{shown[:40]}... ({len(shown):,} characters)"
