"""The tables are whole, and the machines have no other way to move."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from typing import Any

import pytest

from kvferry.protocol.transfer import receiver, sender
from kvferry.protocol.transfer.states import (
    RECEIVER_TRANSITIONS,
    SENDER_TRANSITIONS,
    ReceiverState,
    ReceiverTrigger,
    SenderState,
    SenderTrigger,
    TransferState,
)

TABLES: list[Any] = [
    (SENDER_TRANSITIONS, SenderState, SenderTrigger),
    (RECEIVER_TRANSITIONS, ReceiverState, ReceiverTrigger),
]
Table = Mapping[Any, Mapping[Any, Any]]


@pytest.mark.parametrize(("table", "states", "triggers"), TABLES)
def test_every_state_has_a_row_and_every_trigger_a_use(table: Table, states: Any, triggers: Any):
    assert set(table) == set(states)
    assert {trigger for moves in table.values() for trigger in moves} == set(triggers)


@pytest.mark.parametrize(("table", "states", "triggers"), TABLES)
def test_states_without_an_exit_hold_no_pages_and_all_that_callers_wait_for_may_fail(
    table: Table, states: Any, triggers: Any
):
    for state, moves in table.items():
        assert bool(moves) is state.holds_pages
        if not state.shown.is_final:
            assert moves[triggers.FAILURE].shown is TransferState.FAILED
    assert {state.shown for state in states} == set(TransferState)
    assert [state for state in TransferState if state.is_final] == [TransferState.SUCCESS, TransferState.FAILED]


@pytest.mark.parametrize(("table", "states", "triggers"), TABLES)
def test_every_state_can_be_reached(table: Table, states: Any, triggers: Any):
    reached, grown = {states.BOOTSTRAPPING}, True
    while grown:
        targets = {target for state in reached for target in table[state].values()}
        grown, reached = not targets <= reached, reached | targets
    assert reached == set(states)


@pytest.mark.parametrize(("table", "states", "triggers"), TABLES)
def test_nothing_leads_back_to_an_earlier_state(table: Table, states: Any, triggers: Any):
    order = list(states)
    for state, moves in table.items():
        for target in moves.values():
            assert order.index(target) >= order.index(state)


@pytest.mark.parametrize(("table", "states", "triggers"), TABLES)
def test_the_tables_cannot_be_changed(table: Any, states: Any, triggers: Any):
    with pytest.raises(TypeError):
        table[states.SUCCEEDED] = {}


@pytest.mark.parametrize("module", [sender, receiver])
def test_a_machine_sets_its_state_only_when_made_and_in_move(module: Any):
    assigning = set()
    for function in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                targets = node.targets if isinstance(node, ast.Assign) else []
                if any(
                    isinstance(target, ast.Attribute) and target.attr in ("state", "detailed_state")
                    for target in targets
                ):
                    assigning.add(function.name)
    assert assigning == {"__init__", "_move"}
