"""Every state that the protocol's machines can reach keeps every law; a missing guard is found on the shortest way."""

from __future__ import annotations

import sys

import pytest

from kvferry.testing.enumeration.breadth_first import enumerate_states, sequence_diagram
from kvferry.testing.enumeration.reachable_states import Shape, World

SMALL = Shape(prefills=1, decodes=1, chunks=2, faults=1)
QUICK = {SMALL: 50_000}
FULL = {
    Shape(prefills=1, decodes=2, chunks=1, faults=1): 1_800_000,
    Shape(prefills=2, decodes=2, chunks=1, faults=0): 700_000,
}
LONG = {
    Shape(prefills=1, decodes=1, chunks=2, faults=2): 1_500_000,
    Shape(prefills=2, decodes=1, chunks=1, faults=1): 500_000,
    Shape(prefills=1, decodes=1, chunks=1, faults=3): 500_000,
    Shape(prefills=2, decodes=2, chunks=2, faults=0): 5_000_000,
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
def test_every_state_of_several_ranks_keeps_every_law(shape: Shape, capsys: pytest.CaptureFixture[str]):
    check(shape, FULL[shape], capsys)


@pytest.mark.long
@pytest.mark.timeout(14400)
@pytest.mark.parametrize("shape", LONG, ids=str)
def test_every_state_with_more_that_goes_wrong_keeps_every_law(shape: Shape, capsys: pytest.CaptureFixture[str]):
    check(shape, LONG[shape], capsys)
