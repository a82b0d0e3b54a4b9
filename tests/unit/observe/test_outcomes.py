"""How transfers end, in few words."""

from __future__ import annotations

import pytest

from kvferry import errors
from kvferry.errors import caused
from kvferry.observe.records import Outcome, outcome_of


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, Outcome.SUCCESS),
        (errors.TransferAbortedError("a"), Outcome.ABORTED),
        (errors.TransferTimeoutError("a"), Outcome.TIMED_OUT),
        (errors.ChecksumError("a"), Outcome.WRONG_BYTES),
        (caused("a write failed", errors.PeerDisconnectedError("gone")), Outcome.PEER_LOST),
        (caused("connecting failed", errors.IncompatiblePeerError("no")), Outcome.INCOMPATIBLE),
        (caused("it broke", ValueError("x")), Outcome.FAILED),
    ],
)
def test_the_cause_counts(error: Exception | None, outcome: Outcome):
    assert outcome_of(error) is outcome
