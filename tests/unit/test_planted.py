"""The catalogue of planted faults fits the code: each still has its place."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from proof.planted.catalogue import CATALOGUE, PlantedFault
from proof.planted.places import place_of

import kvferry

PACKAGE = Path(kvferry.__file__).parent


@pytest.mark.parametrize("fault", CATALOGUE, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault: PlantedFault):
    place = place_of(fault, PACKAGE)
    assert place.wrong != place.text
    if place.file.suffix == ".py":
        ast.parse(place.wrong)
    assert all((PACKAGE.parents[1] / tests).exists() for tests in fault.nearest.split())


def test_every_layer_that_engines_stand_on_has_some():
    assert {fault.layer for fault in CATALOGUE} >= {"layout", "plan", "staging", "endpoint", "engines"}
    assert len({fault.name for fault in CATALOGUE}) == len(CATALOGUE)


RIGHT, WRONG = "if late:\n        stop(1)\n", "if late:\n        stop(2)\n"
FAULT = PlantedFault("one too many", "old.py", RIGHT, WRONG, "tests/unit")
BEFORE = "def f(late):\n    if late:\n        stop(1)\n"
OUT_OF_IT = "if late:\n    stop(1)\n"
INTO_A_CLASS = "class A:\n    def f(self, late):\n        if late:\n            stop(1)\n"


@pytest.mark.parametrize("moved", [BEFORE, INTO_A_CLASS, OUT_OF_IT], ids=["alone", "into a class", "out of a function"])
@pytest.mark.parametrize("file", ["old.py", "new.py"])
def test_a_function_that_moves_keeps_its_fault(file: str, moved: str, tmp_path: Path):
    (tmp_path / "old.py").write_text("def g():\n    stop(1)\n")
    (tmp_path / file).write_text(moved)
    place = place_of(FAULT, tmp_path)
    assert (place.file.name, place.text) == (file, moved)
    assert place.wrong == moved.replace("1", "2")


def test_a_fault_whose_line_has_gone_or_has_two_places_names_it(tmp_path: Path):
    with pytest.raises(LookupError, match=r"one too many: .* is nowhere"):
        place_of(FAULT, tmp_path)
    for name in ("new.py", "newer.py"):
        (tmp_path / name).write_text(BEFORE)
    with pytest.raises(LookupError, match=r"several places of .*new\.py.*newer\.py"):
        place_of(FAULT, tmp_path)
