"""What ships for Grafana and Prometheus asks for metrics and labels that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.clones import docs_program

from kvferry.observe.metrics import PHASES
from kvferry.observe.records import Outcome

ROOT = Path(__file__).parents[3]
DASHBOARD = ROOT / "deploy/grafana-dashboard.json"
ALERTS = ROOT / "deploy/prometheus-alerts.yml"


def exported() -> dict[str, set[str]]:
    """The name of every time series, and its labels."""
    found: dict[str, set[str]] = {}
    for family in docs_program("generate").exported():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    each: list[dict[str, Any]] = group["rules"]
    return each


def expressions() -> list[str]:
    shown = [target["expr"] for panel in panels() for target in panel["targets"]]
    return shown + [rule["expr"] for rule in rules()]


@pytest.mark.parametrize("expression", expressions())
def test_every_expression_asks_for_what_is_exported(expression: str):
    series = exported()
    asked = re.findall(r"(kvferry_\w+)(?:\{([^}]*)\})?", expression)
    assert asked
    labels = {"instance", "le"}
    for name, matchers in asked:
        assert name in series, f"{name} is not exported"
        for label in re.findall(r"(\w+)\s*[=!]", matchers):
            assert label in series[name] | {"instance"}, f"{name} has no label {label}"
        labels |= series[name]
    for group in re.findall(r"by \(([^)]*)\)", expression):
        assert {each.strip() for each in group.split(",")} <= labels


@pytest.mark.parametrize("expression", expressions())
def test_brackets_match(expression: str):
    opened = []
    for character in expression:
        if character in "([{":
            opened.append(character)
        elif character in ")]}":
            assert opened.pop() + character in ("()", "[]", "{}")
    assert not opened


def test_every_metric_is_shown_or_watched():
    asked = " ".join(expressions())
    ignored = {"kvferry_endpoint_info", "kvferry_placed_bytes_total", "kvferry_writes_total"}
    families = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in exported()}
    assert {name for name in families if name not in asked} <= ignored


def test_panels_do_not_overlap_and_have_a_unit():
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        columns = range(place["x"], place["x"] + place["w"])
        cells = {(x, y) for x in columns for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
        assert panel["fieldConfig"]["defaults"]["unit"]


def test_alerts_say_what_to_do():
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical"), rule["alert"]
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]


def test_alerts_know_the_outcomes():
    named = [each for rule in rules() for each in re.findall(r'outcome\W+"([^"]*)"', rule["expr"])]
    assert {outcome for each in named for outcome in each.split("|")} <= {outcome.value for outcome in Outcome}


def test_the_page_explains_every_phase():
    page = (ROOT / "docs/observability.md").read_text()
    explained = re.findall(r"^\| `(\w+)` \|", page[page.index("| phase | from") :], flags=re.MULTILINE)
    assert tuple(explained) == PHASES
