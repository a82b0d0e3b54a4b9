"""What the first contact has found, as JSON and as a page: pure, so that a test can read it.

The page has what was expected first, then every section with its command, its figures as a table and how it ended.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu_contact.running import Answer, Outcome
from benchmarks.gpu_contact.sections import STEPS, Section
from benchmarks.standard_page import number

_SAID = {True: "yes", False: "**no**", None: "not said"}
_MOST_ROWS = 60


@dataclass(frozen=True, slots=True)
class Found:
    """A section, and what came of it."""

    section: Section
    answer: Answer


def as_data(machine: Mapping[str, str], found: Sequence[Found]) -> dict[str, Any]:
    """Returns all of it for JSON."""
    return {
        "machine": dict(machine),
        "sections": [
            {
                "name": each.section.name,
                "step": each.section.step,
                "command": command_line(each.section),
                "limit_s": each.section.limit_s,
                "outcome": each.answer.outcome.name.lower(),
                "seconds": each.answer.seconds,
                "why": each.answer.why,
                "verdicts": [
                    [verdict.expected, verdict.is_so] for verdict in each.section.verdicts(each.answer.result)
                ],
                "result": each.answer.result,
            }
            for each in found
        ],
    }


def command_line(section: Section) -> str:
    """Returns the command as one would type it, with python for the interpreter."""
    words = ["python" if word == sys.executable else word for word in section.command]
    return " ".join([*(f"{variable}={value}" for variable, value in section.environment.items()), *words])


def markdown(machine: Mapping[str, str], found: Sequence[Found]) -> str:
    """Returns the page."""
    lines = ["# First contact", "", *(f"* {name}: {value}" for name, value in machine.items()), ""]
    lines += ["## What was expected", "", "| section | expected | is it so? |", "|---|---|---|"]
    for each in found:
        verdicts = each.section.verdicts(each.answer.result)
        lines += [f"| {each.section.name} | {verdict.expected} | {_SAID[verdict.is_so]} |" for verdict in verdicts]
        if each.answer.outcome is not Outcome.DONE:
            lines.append(
                f"| {each.section.name} | it ends | **{each.answer.outcome.value}**: {_cell(each.answer.why)} |"
            )
    for step, title in STEPS.items():
        of_step = [each for each in found if each.section.step == step]
        if of_step:
            lines += ["", f"## {step}. {title}"]
        for each in of_step:
            lines += ["", *_section(each)]
    return "\n".join(lines) + "\n"


def _section(found: Found) -> list[str]:
    section, answer = found.section, found.answer
    lines = [
        f"### {section.name}: {section.question}",
        "",
        f"    {command_line(section)}",
        "",
        f"{answer.outcome.value}, {number(answer.seconds)} s of {section.limit_s:g}"
        + (f": {answer.why}" if answer.why else ""),
    ]
    if answer.result is not None:
        lines += ["", *tables(answer.result)]
    elif answer.tail:
        lines += ["", *(f"    {line}" for line in answer.tail)]
    return lines


def tables(result: Mapping[str, Any]) -> list[str]:
    """Returns a result's single values as a list, and each list of objects, or object of objects, as a table."""
    lines, below = [], []
    for name, value in result.items():
        if isinstance(value, Mapping) and value and all(isinstance(each, Mapping) for each in value.values()):
            below += ["", *_table([{name: key, **_flat(each)} for key, each in value.items()])]
        elif isinstance(value, Mapping):
            lines += [f"* {name}, {key}: {_shown(each)}" for key, each in _flat(value).items()]
        elif isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
            below += ["", *_table([_flat(each) for each in value[:_MOST_ROWS]])]
        elif value != []:
            lines.append(f"* {name}: {_shown(value)}")
    return [*lines, *below]


def _flat(value: Mapping[str, Any]) -> dict[str, Any]:
    """Returns objects within objects by both names."""
    flat: dict[str, Any] = {}
    for name, each in value.items():
        if isinstance(each, Mapping):
            flat |= {f"{name} {inner}": deep for inner, deep in _flat(each).items()}
        else:
            flat[name] = each
    return flat


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    return [*head, *(f"| {' | '.join(_shown(row.get(name)) for name in names)} |" for row in rows)]


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    return "" if value is None else _cell(str(value))


def _cell(text: str) -> str:
    """Returns text for a cell: on one line, without the mark between cells."""
    return " ".join(text.split()).replace("|", "\\|")
