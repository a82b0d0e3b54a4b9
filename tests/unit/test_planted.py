"""The catalogue of planted faults fits the code: each still has its place."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from proof.planted.catalogue import CATALOGUE, PlantedFault

import kvferry

PACKAGE = Path(kvferry.__file__).parent


@pytest.mark.parametrize("fault", CATALOGUE, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault: PlantedFault):
    text = (PACKAGE / fault.file).read_text()
    assert text.count(fault.right) == 1
    if fault.file.endswith(".py"):
        ast.parse(text.replace(fault.right, fault.wrong))
    assert all((PACKAGE.parents[1] / tests).exists() for tests in fault.nearest.split())


def test_every_layer_that_engines_stand_on_has_some():
    assert {fault.layer for fault in CATALOGUE} >= {"layout", "plan", "staging", "endpoint", "engines"}
    assert len({fault.name for fault in CATALOGUE}) == len(CATALOGUE)
