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
    ReceiverTrigger,
    SenderTrigger,
    TransferState,
    mermaid,
)

TABLES: list[Any] = [(SENDER_TRANSITIONS, SenderTrigger), (RECEIVER_TRANSITIONS, ReceiverTrigger)]
Table = Mapping[TransferState, Mapping[Any, TransferState]]


@pytest.mark.parametrize(("table", "triggers"), TABLES)
def test_every_state_has_a_row_and_every_trigger_a_use(table: Table, triggers: Any):
    assert set(table) == set(TransferState)
    assert {trigger for moves in table.values() for trigger in moves} == set(triggers)


@pytest.mark.parametrize(("table", "triggers"), TABLES)
def test_final_states_have_no_exits_and_all_others_may_fail(table: Table, triggers: Any):
    for state, moves in table.items():
        assert bool(moves) is not state.is_final
        if not state.is_final:
            assert moves[triggers.FAILURE] is TransferState.FAILED
    assert [state for state in TransferState if state.is_final] == [TransferState.SUCCESS, TransferState.FAILED]


@pytest.mark.parametrize(("table", "triggers"), TABLES)
def test_every_state_can_be_reached(table: Table, triggers: Any):
    reached, grown = {TransferState.BOOTSTRAPPING}, True
    while grown:
        targets = {target for state in reached for target in table[state].values()}
        grown, reached = not targets <= reached, reached | targets
    assert reached == set(TransferState)


@pytest.mark.parametrize(("table", "triggers"), TABLES)
def test_nothing_leads_back_to_an_earlier_state(table: Table, triggers: Any):
    order = list(TransferState)
    for state, moves in table.items():
        for target in moves.values():
            assert order.index(target) >= order.index(state)


@pytest.mark.parametrize(("table", "triggers"), TABLES)
def test_the_tables_cannot_be_changed(table: Any, triggers: Any):
    with pytest.raises(TypeError):
        table[TransferState.SUCCESS] = {}


def test_the_diagram_draws_every_move_once():
    assert mermaid(SENDER_TRANSITIONS).splitlines() == [
        "stateDiagram-v2",
        "    [*] --> BOOTSTRAPPING",
        "    BOOTSTRAPPING --> WAITING_FOR_INPUT: every receiver has opened the room",
        "    BOOTSTRAPPING --> FAILED: abort, deadline or error",
        "    WAITING_FOR_INPUT --> TRANSFERRING: a chunk is written",
        "    WAITING_FOR_INPUT --> SUCCESS: the last chunk is sent and every receiver notified",
        "    WAITING_FOR_INPUT --> FAILED: abort, deadline or error",
        "    TRANSFERRING --> TRANSFERRING: a chunk is written",
        "    TRANSFERRING --> SUCCESS: the last chunk is sent and every receiver notified",
        "    TRANSFERRING --> FAILED: abort, deadline or error",
        "    SUCCESS --> [*]",
        "    FAILED --> [*]",
    ]


@pytest.mark.parametrize(("table", "triggers"), TABLES)
def test_the_diagram_holds_as_many_arrows_as_the_table(table: Any, triggers: Any):
    arrows = [line for line in mermaid(table).splitlines() if "-->" in line]
    assert len(arrows) == 1 + sum(len(moves) for moves in table.values()) + 2


@pytest.mark.parametrize("module", [sender, receiver])
def test_a_machine_sets_its_state_only_when_made_and_in_move(module: Any):
    assigning = set()
    for function in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                targets = node.targets if isinstance(node, ast.Assign) else []
                if any(isinstance(target, ast.Attribute) and target.attr == "state" for target in targets):
                    assigning.add(function.name)
    assert assigning == {"__init__", "_move"}
