"""The table of what holds pages covers everything, and the documentation shows it."""

from __future__ import annotations

import pytest

from kvferry.protocol.transfer.states import HOLDINGS, ReceiverState, SenderState, TransferState, Waits, longest_s

WAITS = Waits(bootstrap_s=1, waiting_s=10, write_s=100, peer_s=1000, heartbeat_s=10_000, quarantine_s=100_000)


@pytest.mark.parametrize("state", [*SenderState, *ReceiverState])
def test_every_state_of_either_side_has_one_row(state: SenderState | ReceiverState):
    (row,) = [row for row in HOLDINGS if row.state is state]
    assert row.until
    assert bool(row.terms) is state.holds_pages


def test_the_terms_add_up():
    assert longest_s(ReceiverState, TransferState.BOOTSTRAPPING, WAITS) == 1
    assert longest_s(SenderState, TransferState.TRANSFERRING, WAITS) == 110
    assert longest_s(ReceiverState, TransferState.FAILED, WAITS) == 100 + 1000 + 20_000 + 2 * 100_000
    assert longest_s(ReceiverState, TransferState.SUCCESS, WAITS) == 0
