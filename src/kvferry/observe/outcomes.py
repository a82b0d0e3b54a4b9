"""The outcomes of transfers, and which error means which."""

from __future__ import annotations

from enum import Enum

from kvferry.errors import (
    ChecksumError,
    IncompatiblePeerError,
    PeerDisconnectedError,
    TransferAbortedError,
    TransferTimeoutError,
)


class Outcome(Enum):
    """How a transfer has ended."""

    SUCCESS = "success"
    ABORTED = "aborted"
    TIMED_OUT = "timed_out"
    PEER_LOST = "peer_lost"
    INCOMPATIBLE = "incompatible"
    WRONG_BYTES = "wrong_bytes"
    FAILED = "failed"


_OUTCOMES: tuple[tuple[type[Exception], Outcome], ...] = (
    (TransferAbortedError, Outcome.ABORTED),
    (TransferTimeoutError, Outcome.TIMED_OUT),
    (ChecksumError, Outcome.WRONG_BYTES),
    (PeerDisconnectedError, Outcome.PEER_LOST),
    (IncompatiblePeerError, Outcome.INCOMPATIBLE),
)


def outcome_of(error: BaseException | None) -> Outcome:
    """Returns the outcome of a transfer that failed with an error; None stands for success."""
    if error is None:
        return Outcome.SUCCESS
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        for kind, outcome in _OUTCOMES:
            if isinstance(error, kind):
                return outcome
        error = error.__cause__
    return Outcome.FAILED
