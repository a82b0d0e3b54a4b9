"""Every state that the protocol's machines can reach keeps every law; a missing guard is found on the shortest way."""

from __future__ import annotations

import sys

import pytest
from proof.enumeration.breadth_first import enumerate_states, sequence_diagram
from proof.enumeration.reachable_states import World
from proof.enumeration.world_states import Shape
from proof.planted.guards import ONLY_ENUMERATED, PLANTED
from tests.simulation.enumerated import CLOSED, ONE_CHUNK, SMALL, SOON, Nearest

QUICK = {ONE_CHUNK: 12_000}
FULL = {
    SMALL: 94_000,
    Shape(prefills=1, decodes=1, chunks=1, faults=2): 550_000,
    Shape(prefills=2, decodes=2, chunks=1, faults=0): 720_000,
}
LONG = {
    Shape(prefills=2, decodes=1, chunks=1, faults=1): 15_000_000,
    Shape(prefills=1, decodes=2, chunks=1, faults=1): 2_900_000,
    Shape(prefills=1, decodes=1, chunks=2, faults=2): 7_200_000,
    Shape(prefills=1, decodes=1, chunks=1, faults=3): 18_300_000,
}


def check(shape: Shape, at_least: int, capsys: pytest.CaptureFixture[str]) -> None:
    world = World(shape)
    found = enumerate_states(world)
    assert found.violation is None, sequence_diagram(world, found)
    assert found.is_closed
    assert found.states >= at_least
    with capsys.disabled():
        sys.stdout.write(f"\n    {shape}: {found.states:,} states, {found.moves:,} moves ")


@pytest.mark.parametrize("shape", QUICK, ids=str)
def test_every_state_of_two_ranks_keeps_every_law(shape: Shape, capsys: pytest.CaptureFixture[str]):
    check(shape, QUICK[shape], capsys)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("shape", FULL, ids=str)
def test_every_state_of_more_ranks_or_faults_keeps_every_law(shape: Shape, capsys: pytest.CaptureFixture[str]):
    check(shape, FULL[shape], capsys)


@pytest.mark.long
@pytest.mark.timeout(14400)
@pytest.mark.parametrize("shape", LONG, ids=str)
def test_every_state_with_more_that_goes_wrong_keeps_every_law(shape: Shape, capsys: pytest.CaptureFixture[str]):
    check(shape, LONG[shape], capsys)


def check_found(fault: str, nearest: Nearest, monkeypatch: pytest.MonkeyPatch) -> None:
    {**PLANTED, **ONLY_ENUMERATED}[fault](monkeypatch)
    world = World(nearest.shape)
    found = enumerate_states(world)
    assert found.violation is not None
    assert (found.violation.law, len(found.trace)) == (nearest.law, nearest.moves), sequence_diagram(world, found)


@pytest.mark.parametrize(
    "fault",
    # tests/simulation/test_planted_faults.py finds the others in every tier
    [pytest.param(each, marks=() if each in ONLY_ENUMERATED else pytest.mark.full) for each in SOON],
)
def test_a_missing_guard_is_found_on_the_shortest_way(fault: str, monkeypatch: pytest.MonkeyPatch):
    check_found(fault, SOON[fault], monkeypatch)


@pytest.mark.full
@pytest.mark.sampled(one_in=2, full=2)
@pytest.mark.parametrize("fault", CLOSED)
def test_what_takes_longer_is_found_too(fault: str, monkeypatch: pytest.MonkeyPatch):
    check_found(fault, CLOSED[fault], monkeypatch)


def test_the_way_is_drawn_message_by_message(monkeypatch: pytest.MonkeyPatch):
    PLANTED["drained while writes fly"](monkeypatch)
    world = World(SMALL)
    assert sequence_diagram(world, enumerate_states(world)).splitlines() == [
        "sequenceDiagram",
        "    participant d0",
        "    participant p0",
        "    Note over p0: its caller opens the room",
        "    Note over p0: its caller hands in the chunks",
        "    Note over d0: its caller opens the room",
        "    Note over d0: its caller aborts the room",
        "    d0->>p0: OpenRoom (1)",
        "    d0->>p0: AbortRoom",
        "    p0->>d0: Drained",
        "    Note over d0,p0: no byte of a page or of a span changes after it was given back: d0: chunk 0 of "
        "generation 10 is on its way to pages that were given back",
    ]


def test_an_enumeration_ends_where_it_is_told_to():
    found = enumerate_states(World(SMALL), most=1_000)
    assert (found.states >= 1_000, found.is_closed, found.violation) == (True, False, None)
