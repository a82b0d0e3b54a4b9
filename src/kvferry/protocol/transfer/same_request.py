"""Whether both sides mean the same request: what is compared before anything of a room is sent."""

from __future__ import annotations

from collections.abc import Mapping

from kvferry.errors import IncompatiblePeerError, KVFerryError, PageError
from kvferry.plan.requests.conditions import why_different
from kvferry.plan.requests.moves import ReceiverRequest


def why_another(
    tokens: int | None, depends_on: Mapping[str, bytes], theirs: ReceiverRequest, *, room: int, rank: int, receiver: str
) -> KVFerryError | None:
    """Returns the error of a room whose sides mean different requests; None if they mean the same.

    Args:
        tokens: how many the request has here; None if our caller gave no number.
        depends_on: digests of what its cache depends on here.
        theirs: what the decode rank requests.
        room: the room's number.
        rank: this rank's.
        receiver: the decode rank's name.
    """
    difference = why_different(depends_on, theirs.depends_on)
    if difference:
        return IncompatiblePeerError(
            f"room {room}: {difference} (prefill rank {rank}, {receiver}): send both sides the same request"
        )
    if tokens is not None and theirs.tokens is not None and tokens != theirs.tokens:
        return PageError(
            f"room {room}: the request has {tokens} tokens on prefill rank {rank}, {theirs.tokens} on {receiver}: "
            "both sides must count the same tokens"
        )
    return None
