"""The parameters that travel with a request: `kv_transfer_params` in its body, and in the answer of the prefill server.

The names are those that vLLM's own connectors and the gateways in front of it use. A gateway sends the prefill server
`{"do_remote_decode": true}`, and passes what comes back on to the decode server. One that sends to both at once chooses
the room itself and names it to both, with `kvferry_room`: then pages leave while the prompt is still computed.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvferry import check_engine_name
from kvferry.errors import KVFerryError, UsageError

ROOM = "kvferry_room"
LARGEST_ROOM = (1 << 53) - 1
"""Parameters travel as JSON through gateways in languages that know no larger integers."""


@dataclass(frozen=True, slots=True)
class SendParameters:
    """A request whose cache is to be sent.

    Attributes:
        room: its number.
        is_known: whether the other side has the number already, so that pages may leave before the prompt is done.
    """

    room: int
    is_known: bool


@dataclass(frozen=True, slots=True)
class ReceiveParameters:
    """A request whose cache comes from elsewhere.

    Attributes:
        room: its number.
        engine: the prefill engine.
    """

    room: int
    engine: str


def send_parameters(parameters: Mapping[str, Any] | None) -> SendParameters | None:
    """Reads what a prefill server is asked for; None if this request is not to be sent.

    Raises:
        UsageError: if the room's number is invalid.
    """
    if not parameters or not parameters.get("do_remote_decode"):
        return None
    room = parameters.get(ROOM)
    if room is None:
        return SendParameters(1 + secrets.randbelow(LARGEST_ROOM), is_known=False)
    return SendParameters(_room(room), is_known=True)


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
    return ReceiveParameters(_room(parameters.get(ROOM)), engine)


def answer(params: SendParameters, *, engine: str, request: str, tokens: int) -> dict[str, Any]:
    """Makes what a prefill server answers: parameters for the decode server.

    Args:
        engine: this engine.
        request: vLLM's name for the request here.
        tokens: how many tokens can be fetched.
    """
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine,
        "remote_request_id": request,
        "remote_num_tokens": tokens,
        ROOM: params.room,
    }


def _room(room: object) -> int:
    if not isinstance(room, int) or isinstance(room, bool) or not 0 <= room <= LARGEST_ROOM:
        raise UsageError(
            f"kv_transfer_params: {ROOM} is {room!r}: it must be an integer from 0 to {LARGEST_ROOM}, the same on both "
            "sides, and no other request's"
        )
    return room
