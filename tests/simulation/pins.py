"""The schedules that find the planted faults: one seed for each, so that every run of the tests can replay it.

    python -m tests.simulation.pins              # searches anew for all faults, from seed 0 on, and writes the pins
    python -m tests.simulation.pins 'no dead'    # only for those whose names hold this

A change of the simulation, or of what it runs, makes other schedules of the same seeds; then pins are to be renewed,
and `make docs` writes docs/reliability.md's table of them.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from proof.planted.guards import PLANTED, SEEN_WITH
from proof.simulation.circumstances import Limits, drawn, drawn_apart
from proof.simulation.laws import Law
from proof.simulation.memory import Arena
from proof.simulation.search import Violation, run_one
from tests.simulation.enumerated import Nearest

PINS = Path(__file__).parent / "pins.json"
MOST_SEEDS = 20_000
RENEW = "python -m tests.simulation.pins"


@dataclass(frozen=True, slots=True)
class Pin:
    """What finds a fault: the seed of a schedule, and the law that breaks there."""

    seed: int
    law: Law


def pinned() -> dict[str, Pin]:
    """What finds each fault."""
    pins: dict[str, tuple[int, str]] = json.loads(PINS.read_text())
    return {fault: Pin(seed, Law[law]) for fault, (seed, law) in pins.items()}


def write(pins: Mapping[str, Pin]) -> None:
    """Writes the pins, one a line."""
    lines = [f"  {json.dumps(fault)}: {json.dumps([pin.seed, pin.law.name])}" for fault, pin in pins.items()]
    PINS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def markdown(pins: Mapping[str, Pin], nearest: Mapping[str, Nearest]) -> str:
    """Renders how many planted faults break each law: in a schedule, and on a shortest way through every state."""
    lines = ["| law that broke | faults, found in schedules | faults, found in every state, and the longest way |"]
    lines.append("|---|---|---|")
    for law in Law:
        schedules = sum(pin.law is law for pin in pins.values())
        moves = [each.moves for each in nearest.values() if each.law is law]
        way = f"{len(moves)}, {max(moves)} moves" if moves else "-"
        if schedules or moves:
            lines.append(f"| {law.value} | {schedules or '-'} | {way} |")
    return "\n".join(lines)


def candidates(fault: str) -> Iterator[int]:
    """Seeds, from 0 on, of schedules in which a fault may come to light."""
    needed = SEEN_WITH.get(fault, frozenset())
    return (seed for seed in range(MOST_SEEDS) if needed <= _troubles(seed))


def _troubles(seed: int) -> set[str]:
    return {*drawn(random.Random(seed), Limits()).odds, *drawn_apart(seed, Limits())}


def search(fault: str, arena: Arena) -> Violation | None:
    """Plants a fault and runs schedules until one breaks a law; None if none of `MOST_SEEDS` does."""
    with pytest.MonkeyPatch.context() as patch:
        PLANTED[fault](patch)
        found = (run_one(seed, arena)[1] for seed in candidates(fault))
        return next((violation for violation in found if violation is not None), None)


def _search_alone(fault: str) -> tuple[str, Violation | None]:
    return fault, search(fault, Arena())


def renew(faults: list[str]) -> bool:
    """Searches for some faults on all cores and writes their pins; whether all were found."""
    found = pinned() if PINS.exists() else {}
    is_complete = True
    with multiprocessing.get_context("spawn").Pool() as pool:
        for fault, violation in pool.imap_unordered(_search_alone, faults):
            if violation is None:
                is_complete = False
                sys.stdout.write(f"{fault}: not found in {MOST_SEEDS} schedules\n")
                continue
            found[fault] = Pin(violation.seed, violation.law)
            sys.stdout.write(f"{fault}: found by schedule {violation.seed + 1}, {violation.law.name}\n")
            write({name: found[name] for name in PLANTED if name in found})
    return is_complete


if __name__ == "__main__":
    named = [fault for fault in PLANTED if not sys.argv[1:] or any(each in fault for each in sys.argv[1:])]
    sys.exit(0 if named and renew(named) else 1)
