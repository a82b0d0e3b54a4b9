"""The page on families of models: every family has a row, and every cell a test that `make test-all` runs."""

from __future__ import annotations

import pytest
from tests.support.clones import ROOT, docs_program
from tests.support.collecting import missing_tests
from tests.support.families import FAMILIES
from tests.support.family_cells import Cell, Shape, Status, cells

EVERY = list(cells())


def test_the_page_on_families_has_every_cell():
    assert (ROOT / "docs/design/families.md").read_text() == docs_program("generate").families_page(), "run `make docs`"


def test_every_family_has_a_row_for_every_engine_and_a_cell_for_every_shape():
    assert len(FAMILIES) >= 20
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)
    found = [(engine, family.name, shape) for engine, family, shape, _ in EVERY]
    assert found == [(engine, name, shape) for engine in ("vLLM", "SGLang") for name in names for shape in Shape]


@pytest.mark.full
def test_the_tests_that_cells_name_are_run(pytestconfig: pytest.Config):
    """Those with real engines are looked at in their environments, by `test_families.py` there."""
    folders = ("tests/unit/", "tests/real_engines/vllm/", "tests/real_engines/sglang/")
    assert [cell.test for *_, cell in EVERY if not cell.test.startswith(folders)] == []
    assert missing_tests((cell for *_, cell in EVERY), "tests/unit", pytestconfig) == []


def test_a_cell_whose_test_is_not_run_is_found(pytestconfig: pytest.Config):
    known = "tests/unit/test_families.py::test_the_page_on_families_has_every_cell"
    lost = "tests/unit/test_families.py::test_that_nobody_wrote[qwen3]"
    assert missing_tests([Cell(Status.BYTES, known), Cell(Status.BYTES, lost)], "tests/unit", pytestconfig) == [lost]


def test_what_is_refused_says_why_and_nothing_else_does():
    with pytest.raises(AssertionError):
        Cell(Status.ENGINE, "a::b")
    with pytest.raises(AssertionError):
        Cell(Status.BYTES, "a::b", "why")
