"""The recipe for a transport in CONTRIBUTING.md and the toy that followed it: neither says what the other does not."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from tests.support import toy_transport
from tests.support.clones import ROOT
from tests.support.toy_transport import ToyTransport
from tests.support.transports import KINDS

from kvferry import transport
from kvferry.transport import Diagnosis, RangeTransport, Transport
from kvferry.transport.chosen import transport_class
from kvferry.transport.mooncake import transport as mooncake

FILE = Path(toy_transport.__file__)
IF_THERE_IS_A_LIBRARY = {"check_available", "register", "memory_kinds", "variables", "read_by", "says_more"}
FOR_A_LIBRARY_THAT_LACKS_IT = {"MessageChannel", "confine", "cut_at"}
OF_PYTHON = {"__cause__", "super()", "raise ... from"}


@cache
def recipe() -> str:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    return re.findall(r"^\*\*A transport\.\*\*.*?(?=^\*\*)", text, flags=re.DOTALL | re.MULTILINE)[0]  # type: ignore[no-any-return]


@cache
def named() -> frozenset[str]:
    """What the recipe names, in backticks."""
    return frozenset(re.findall(r"`([^`]+)`", recipe()))


@cache
def tree() -> ast.Module:
    return ast.parse(FILE.read_text())


def test_the_toy_imports_of_ours_what_the_recipe_allows():
    allowed = {name for name in named() if re.fullmatch(r"kvferry(\.\w+)?", name)}
    assert "kvferry.transport" in allowed
    modules = {node.module for node in ast.walk(tree()) if isinstance(node, ast.ImportFrom) and node.module}
    modules |= {alias.name for node in ast.walk(tree()) if isinstance(node, ast.Import) for alias in node.names}
    assert {module for module in modules if module.startswith(("kvferry", "tests"))} == allowed


def test_what_the_recipe_names_is_in_the_toy():
    """Classes, methods and attributes; what only a library makes necessary is in the contract."""
    words = {
        getattr(node, field)
        for node in ast.walk(tree())
        for field in ("id", "attr", "name", "arg")
        if hasattr(node, field)
    }
    wanted = {name for name in named() if re.fullmatch(r"\w+", name)} - OF_PYTHON
    elsewhere = {"kvferry", "Transport", "TransportUnavailableError", "TRANSPORTS", "KINDS", "WAYS"}
    elsewhere |= FOR_A_LIBRARY_THAT_LACKS_IT
    assert wanted - words - elsewhere == IF_THERE_IS_A_LIBRARY
    for name in IF_THERE_IS_A_LIBRARY:
        assert hasattr(RangeTransport, name) or hasattr(Diagnosis, name)


def test_what_helps_a_library_is_offered_and_used_by_mooncakes_file():
    text = Path(mooncake.__file__).read_text()
    for name in FOR_A_LIBRARY_THAT_LACKS_IT:
        assert name in transport.__all__ or hasattr(transport.Copies, name)
        assert f"{name}(" in text


@pytest.mark.parametrize("base", [RangeTransport, Diagnosis])
def test_what_the_toy_says_of_itself_the_recipe_names(base: type):
    """Nothing that the contract asks for, or offers, was needed and left out."""
    (own,) = [kind for kind in vars(toy_transport).values() if isinstance(kind, type) and base in kind.__mro__[1:]]
    of_contract = {name for kind in base.__mro__[:-1] for name in vars(kind) if not name.startswith("_")}
    assert {name for name in vars(own) if name in of_contract} <= named()


def test_all_that_a_transport_must_have_is_named_or_kept_by_the_base():
    must = Transport.__abstractmethods__ | RangeTransport.__abstractmethods__
    kept = {name for name in must if name in vars(RangeTransport)} - RangeTransport.__abstractmethods__
    assert kept == {"register", "metadata", "connect", "disconnect", "prepare", "release_list", "post", "write"} | {
        "release",
        "close",
    }
    assert must - kept <= named()


def test_what_the_recipe_takes_from_the_package_is_offered_there():
    (imported,) = [
        node for node in ast.walk(tree()) if isinstance(node, ast.ImportFrom) and node.module == "kvferry.transport"
    ]
    assert {alias.name for alias in imported.names} <= set(transport.__all__)


def test_the_files_that_the_recipe_names_are_there_and_hold_what_it_says():
    for name in named():
        if "/" in name and not name.endswith("/"):
            assert (ROOT / name).exists() or (ROOT / "src/kvferry" / name).exists(), name
    assert ToyTransport in {kind.of for kind in KINDS.values()}
    assert "TRANSPORTS = {" in (ROOT / "src/kvferry/transport/chosen.py").read_text()


def test_the_toy_is_chosen_as_the_recipe_says():
    assert "KVFERRY_TRANSPORT=package.module:ClassName" in named()
    assert transport_class("tests.support.toy_transport:ToyTransport") is ToyTransport
