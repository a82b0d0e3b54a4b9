"""What the drafts for the engines claim of what there is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import prototypes
from prototypes import transport_interface
from prototypes.self_describing_pools import CacheView
from prototypes.sglang_transport import KVFerryTransport
from tests.support import wrong_transports
from tests.support.clones import ROOT

import kvferry

DRAFTS = ROOT / "docs/upstream"
PLUG_INS = Path(kvferry.__file__).parent / "engines"


def rows(draft: str, columns: int) -> Iterator[list[str]]:
    """The rows of a draft's tables of so many columns, without their heads."""
    for line in (DRAFTS / draft).read_text().splitlines():
        cells = [each.strip() for each in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == columns:
            yield cells


def code(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)[^`]*`", text))


def test_what_decisions_need_is_in_the_interface():
    text = (DRAFTS / "sglang-transport.md").read_text()
    decisions = re.findall(r"^\| (?:completion|abort|a room).*\|(.*)\|$", text, flags=re.MULTILINE)
    assert len(decisions) == 3
    there = {*vars(transport_interface), *vars(transport_interface.BaseTransport)}
    assert {name for each in decisions for name in code(each)} <= there
    planted = [each for each in vars(wrong_transports).values() if isinstance(each, type)]
    count = sum(issubclass(each, KVFerryTransport) and each is not KVFerryTransport for each in planted)
    assert count == 12
    assert "Twelve transports with one thing wrong" in text


def test_hooks_for_sleep_are_the_connectors():
    connector = (PLUG_INS / "vllm/connector.py").read_text()
    hooks = [code(asked).pop() for asked, _ in rows("sglang-transport.md", 2)]
    assert hooks == ["supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches"]
    assert all(f"def {hook}(" in connector for hook in hooks)


def test_what_a_view_says_is_in_it():
    said = set().union(*(code(cells[0]) for cells in rows("sglang-pools.md", 2)))
    assert {"name", "entry", "packing", "layers", "axes", "group", "addresses"} == said
    assert said <= {each.name for each in fields(CacheView)}


def test_what_is_deleted_is_there_and_adds_up():
    named = {name for file, *_ in rows("sglang-pools.md", 3) for name in re.findall(r"`(\w+\.py)`", file)}
    assert len(named) == 11
    assert [name for name in named if not (PLUG_INS / "sglang" / name).exists()] == []
    page = (DRAFTS / "sglang-pools.md").read_text()
    counts = re.findall(r"^\| .* \| ([\d,]+) \| ([\d,]+).*\|$", page, flags=re.MULTILINE)
    *parts, whole = [[int(number.replace(",", "")) for number in row] for row in counts]
    before, after = (sum(each) for each in zip(*parts, strict=True))
    # What imports of other files have lost or gained beside: two lines.
    assert abs((before - after) - (whole[0] - whole[1])) <= 2


def test_prototypes_are_in_no_wheel():
    assert Path(prototypes.__file__).parent == ROOT / "prototypes"
    wheel = re.search(r"targets.wheel\]\n[^\[]*packages = (.*)", (ROOT / "pyproject.toml").read_text())
    assert wheel is not None
    assert wheel[1] == '["src/kvferry"]'
