"""Many schedules of whole systems: all laws hold in each. A part of them is new in every run."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys

import pytest
from tests.simulation.planted import PLANTED

from kvferry.simulation import Limits, ViolationError, World
from kvferry.simulation.circumstances import TROUBLES
from kvferry.simulation.memory import Arena
from kvferry.simulation.search import Findings, run_one, search, shrink

KNOWN, FRESH = 15_000, 5_000


def searched(first: int, count: int) -> Findings:
    *_, found = search(range(first, first + count))
    sys.stdout.write(f"{found.schedules} schedules from seed {first} on took {found.seconds:.0f} s\n")
    assert not found.violations, [str(each) for each in found.violations]
    assert found.schedules == count
    return found


@pytest.mark.timeout(900)
def test_known_schedules_keep_all_laws():
    found = searched(0, KNOWN)
    for kind in TROUBLES:
        if kind not in ("absent", "miscount"):  # these befall requests, and are not counted one by one
            assert found.outcomes[f"trouble: {kind}"] > KNOWN // 500, kind
    for what in ("sent", "received"):
        assert found.outcomes[f"{what}: success"] > KNOWN / 2
        assert found.outcomes[f"{what}: failed"] > KNOWN / 2


@pytest.mark.timeout(600)
def test_fresh_schedules_keep_all_laws():
    searched(secrets.randbelow(2**40), FRESH)


def trace_of(seed: int) -> str:
    world = World(seed, traces=True)
    world.run()
    return "\n".join(world.trace)


def test_a_seed_is_a_schedule():
    """Whatever else the process did, and however it hashes."""
    arena = Arena()
    for seed in range(5):
        run_one(seed, arena)
    here = trace_of(3)
    program = "from tests.simulation.test_schedules import trace_of; print(trace_of(3))"
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        there = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        assert there.stdout.strip() == here.strip()


def test_worlds_differ():
    assert len({trace_of(seed) for seed in range(10)}) == 10


def test_what_breaks_a_law_is_shrunken_to_what_it_takes(monkeypatch: pytest.MonkeyPatch):
    PLANTED["pages released on abort without drain"](monkeypatch)
    arena = Arena()
    violation = next(found for found in (run_one(seed, arena)[1] for seed in range(200)) if found is not None)
    whole = World(violation.seed, traces=True)
    with pytest.raises(ViolationError):
        whole.run()
    limits, shrunken = shrink(violation)
    assert len(shrunken.trace) <= len(whole.trace)
    assert shrunken.trace[-1].endswith(violation.what) or "BROKEN" in shrunken.trace[-1]
    again = World(violation.seed, limits=limits)
    with pytest.raises(ViolationError) as broken:
        again.run()
    assert broken.value.law is violation.law
    for kind in shrunken.troubles:  # each that is left is needed
        without = run_one(
            violation.seed, arena, Limits(limits.steps, limits.without_troubles | {kind}, limits.without_requests)
        )[1]
        assert without is None or without.law is not violation.law


def test_an_empty_world_is_well():
    nothing = Limits(without_troubles=frozenset(TROUBLES), without_requests=frozenset(range(10)))
    for seed in range(5):
        assert not [what for what in World(seed, limits=nothing).run() if not what.startswith("trouble")]


def test_without_trouble_everything_succeeds():
    calm = Limits(without_troubles=frozenset(TROUBLES))
    arena = Arena()
    for seed in range(200):
        outcomes, violation = run_one(seed, arena, calm)
        assert violation is None
        assert not [what for what in outcomes if "failed" in what], seed
