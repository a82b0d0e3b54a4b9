"""The table of what holds pages covers everything, and the documentation shows it."""

from __future__ import annotations

import pytest

from kvferry.protocol.transfer.holding import HOLDINGS, Side, Waits, holding
from kvferry.protocol.transfer.states import TransferState

WAITS = Waits(bootstrap_s=1, waiting_s=10, write_s=100, peer_s=1000, heartbeat_s=10_000, quarantine_s=100_000)


@pytest.mark.parametrize("side", Side)
@pytest.mark.parametrize("state", TransferState)
def test_every_state_of_either_side_has_one_row(side: Side, state: TransferState):
    assert [(row.side, row.state) for row in HOLDINGS].count((side, state)) == 1
    assert holding(side, state).until


def test_the_terms_add_up():
    assert holding(Side.DECODE, TransferState.BOOTSTRAPPING).longest_s(WAITS) == 1
    assert holding(Side.PREFILL, TransferState.TRANSFERRING).longest_s(WAITS) == 110
    assert holding(Side.DECODE, TransferState.FAILED).longest_s(WAITS) == 100 + 1000 + 20_000 + 2 * 100_000
    assert holding(Side.DECODE, TransferState.SUCCESS).longest_s(WAITS) == 0
