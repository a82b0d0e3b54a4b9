"""What docs/stability.md promises is what the code has: no name is gone or unsaid."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import typer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from tests.support.clones import ROOT

import kvferry
import kvferry.errors
import kvferry.testing
from kvferry.cli.app import app
from kvferry.engines.sglang import plugin
from kvferry.engines.sglang.contract import TRIED
from kvferry.engines.vllm import parameters
from kvferry.engines.vllm.contract import CONTRACTS
from kvferry.protocol.wire.versions import PROTOCOL_VERSION, SPOKEN
from kvferry.settings import NO_SETTINGS
from kvferry.testing import pytest_plugin

PAGE = (ROOT / "docs/stability.md").read_text()
SUPPORTED = PAGE[PAGE.index("## What it runs with") :]
PROJECT = (ROOT / "pyproject.toml").read_text()


def row(begins: str, column: int = 1) -> list[str]:
    """What stands in code in a column of the row that begins so."""
    (found,) = [line for line in PAGE.splitlines() if line.startswith(f"| {begins}")]
    return re.findall(r"`([^`]+)`", found.strip("| ").split(" | ")[column])


def errors() -> Iterator[str]:
    for name, each in vars(kvferry.errors).items():
        if isinstance(each, type) and issubclass(each, Exception):
            yield name


def fixtures() -> list[str]:
    return [name for name in vars(pytest_plugin) if name.startswith("kvferry_")]


STABLE = {
    "`kvferry`,": kvferry.__all__,
    "`kvferry.errors`": list(errors()),
    "`kvferry.testing` ": kvferry.testing.__all__,
    "`kvferry.testing.pytest_plugin`": fixtures(),
    "vLLM: connector": [
        "KVFerryConnector",
        "kvferry.engines.vllm",
        parameters.ROOM,
        parameters.INSTANCE,
        parameters.TRANSFER,
    ],
    "SGLang: backend": [plugin.NAME, "sglang.srt.plugins", *NO_SETTINGS],
}


@pytest.mark.parametrize("begins", STABLE)
def test_the_stable_names_are_those_of_the_code(begins: str):
    assert sorted(row(begins)) == sorted(STABLE[begins])


def test_where_the_plug_ins_are_found_is_as_it_is_said():
    assert import_module("kvferry.engines.vllm").__all__ == ["KVFerryConnector"]
    assert '[project.entry-points."sglang.srt.plugins"]\nkvferry = ' in PROJECT


TRIALS = {"demo", "bench"}
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def test_every_command_is_listed_or_named_as_one_for_trying():
    table = PAGE[PAGE.index("## The command line") : PAGE.index("Exit codes")]
    assert {*re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)} | TRIALS == set(COMMANDS)
    assert f"`{'` and `'.join(sorted(TRIALS, reverse=True))}` are for trying" in PAGE


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - TRIALS))
def test_a_commands_options_are_those_that_it_has(command: str):
    has = [
        option
        for each in COMMANDS[command].params
        for option in (each.opts if each.param_type_name == "option" else [each.name.upper()])
    ]
    assert sorted(row(f"`{command}` |")) == sorted(has)


def test_a_release_speaks_the_version_before():
    assert SPOKEN.newest == PROTOCOL_VERSION
    assert SPOKEN.oldest <= max(1, PROTOCOL_VERSION - 1), "docs/stability.md promises N-1"


def test_what_is_supported_is_what_the_package_asks_for_and_what_was_tried():
    def supported(what: str) -> str:
        (found,) = re.findall(rf"^\| {what}[^|]*\| ([^|]+) \|", SUPPORTED, flags=re.MULTILINE)
        return str(found)

    def asked(package: str) -> SpecifierSet:
        found = {Requirement(text).specifier for text in re.findall(rf'"({package}\b[^";]*)', PROJECT)}
        assert len(found) == 1, f"extras disagree on {package}: {found}"
        return found.pop()

    assert f'requires-python = ">={supported("Python").split()[0]}"' in PROJECT
    assert asked("torch") == SpecifierSet(f">={supported('torch').split()[0]}")
    lowest, below = re.findall(r"[\d.]+", supported("NIXL"))
    assert asked("nixl-cu1[23]") == SpecifierSet(f">={lowest},<{below}")
    assert asked("mooncake-transfer-engine(?:-[a-z0-9-]+)?") == SpecifierSet(f">={supported('Mooncake').split()[0]}")
    assert supported("vLLM").split(", ") == [version for each in CONTRACTS for version in each.tried]
    assert supported("SGLang").split(", ") == list(TRIED)


def test_nothing_is_deprecated_unless_the_page_says_so():
    says = "Nothing is deprecated today" in PAGE
    warned = [file for file in Path(kvferry.__file__).parent.rglob("*.py") if "DeprecationWarning" in file.read_text()]
    assert says is not bool(warned), warned
