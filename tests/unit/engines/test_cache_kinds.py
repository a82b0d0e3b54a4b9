"""The tables of what plug-ins transfer: a test behind every row, and no kind twice."""

from __future__ import annotations

import ast

import pytest
from tests.support.clones import ROOT
from tests.support.collecting import CollectedTest, shown_in, unshown

from kvferry.engines.cache_kinds import CacheKind, CacheKinds, names_missing
from kvferry.engines.sglang.cache_kinds import KINDS as SGLANG
from kvferry.engines.vllm.cache_kinds import KINDS as VLLM
from kvferry.errors import LayoutError

TABLES = {"vllm": VLLM, "sglang": SGLANG}
EVERY_ROW = [(table.engine, kind) for table in TABLES.values() for kind in table.kinds]


def names_of_tests(file: str) -> set[str]:
    """The names of a file's tests; none if there is no such file."""
    path = ROOT / file
    tree = ast.parse(path.read_text() if path.is_file() else "")
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize(("engine", "kind"), EVERY_ROW, ids=lambda each: getattr(each, "name", each))
def test_the_test_of_every_row_is_there(engine: str, kind: CacheKind):
    file, _, test = kind.test.partition("::")
    assert test in names_of_tests(file), f"{engine}: {kind.name} names {kind.test}, which does not exist"


@pytest.mark.full
@pytest.mark.parametrize("engine", TABLES)
def test_every_row_is_shown_by_a_test_that_says_so(engine: str, pytestconfig: pytest.Config):
    """Rows that real engines show are looked at in their environments, by `test_cache_kinds.py` there."""
    rows = TABLES[engine].kinds
    elsewhere = [row for row in rows if not row.test.startswith(("tests/unit/", f"tests/real_engines/{engine}/"))]
    assert elsewhere == []
    assert [*unshown(engine, rows, "tests/unit", shown_in("tests/unit", rows, pytestconfig))] == []


def test_a_row_whose_test_does_not_say_so_or_takes_too_long_is_found():
    rows = [CacheKind(name, "keys", f"tests/unit/test_{name}.py::test", transfer="all") for name in "abcde"]
    tests = [
        CollectedTest("tests/unit/test_a.py::test", False, (("vllm", "a"),)),
        CollectedTest("tests/unit/test_b.py::test", True, (("vllm", "b"),)),
        CollectedTest("tests/unit/test_c.py::test", False, (("sglang", "c"),)),
        CollectedTest("tests/unit/test_d.py::another", False, (("vllm", "d"),)),
        CollectedTest("tests/unit/test_e.py::test[0]", False, (("vllm", "e", "f"),)),
        CollectedTest("tests/unit/test_e.py::test[1]", True, (("vllm", "e"),)),
    ]
    assert [*unshown("vllm", rows, "tests/unit", tests)] == [
        "b: tests/unit/test_b.py::test runs in the long tier alone",
        "c: tests/unit/test_c.py::test does not say that it tries it",
        "d: tests/unit/test_d.py::test does not say that it tries it",
        "tests/unit/test_e.py::test tries ['f'], which no row names",
    ]


def test_a_kind_is_either_transferred_or_refused():
    with pytest.raises(LayoutError, match="'FullAttention' is either transferred or refused"):
        CacheKind("FullAttention", "keys", "a::b")
    with pytest.raises(LayoutError, match="twice: \\['FullAttention'\\]"):
        CacheKinds("an engine", (CacheKind("FullAttention", "keys", "a::b", transfer="all"),) * 2)


def test_what_a_table_lacks_and_what_an_engine_has_no_more_is_found():
    known = CacheKinds(
        "an engine", tuple(CacheKind(name, "it", "a::b", transfer="all") for name in ("A", "B", "B with C"))
    )
    assert names_missing(known, ["B", "C"]) == ["A", "C"]
    assert names_missing(known, ["A", "B"]) == []


def test_a_row_says_what_becomes_of_a_kind():
    kinds = (CacheKind("A", "keys", "a::b", transfer="all"), CacheKind("B", "state", "a::c", refusal="not yet"))
    assert CacheKinds("an engine", kinds).markdown().splitlines()[2:] == [
        "| `A` | keys | all | `a::b` |",
        "| `B` | state | refused: not yet | `a::c` |",
    ]


def test_neighbours_share_a_row_only_if_their_fate_and_their_test_are_the_same():
    kinds = (
        CacheKind("A", "keys", "a::b", refusal="not yet"),
        CacheKind("B", "state", "a::b", refusal="not yet"),
        CacheKind("C", "state", "a::b", refusal="never"),
        CacheKind("D", "state", "a::c", refusal="never"),
    )
    assert CacheKinds("an engine", kinds).markdown().splitlines()[2:] == [
        "| `A`, `B` | keys; state | refused: not yet | `a::b` |",
        "| `C` | state | refused: never | `a::b` |",
        "| `D` | state | refused: never | `a::c` |",
    ]
