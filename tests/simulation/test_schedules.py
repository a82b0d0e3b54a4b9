"""Many schedules of whole systems: all laws hold in each. A part of them is new in every run."""

from __future__ import annotations

import os
import random
import secrets
import subprocess
import sys
from collections.abc import Sequence

import pytest
from proof.planted.guards import PLANTED
from proof.simulation import Limits, ViolationError, World
from proof.simulation.circumstances import RARE, TROUBLES, drawn
from proof.simulation.machines import SimulatedRuns
from proof.simulation.memory import Arena
from proof.simulation.search import Findings, run_one, search, shrink
from tests.simulation.pins import pinned
from tests.support.tiers import Tier

from kvferry.settings import Settings
from kvferry.staging.runs import Comings, Step


def searched(first: int, count: int, tier: Tier) -> Findings:
    # Few take less time than it takes to start processes.
    *_, found = search(range(first, first + count), processes=1 if tier is Tier.QUICK else None)
    sys.stdout.write(f"{found.schedules} schedules from seed {first} on took {found.seconds:.0f} s\n")
    assert not found.violations, [str(each) for each in found.violations]
    assert found.schedules == count
    return found


@pytest.mark.timeout(3600)
def test_known_schedules_keep_all_laws(tier: Tier):
    count = tier.amount(quick=120, full=500, long=15_000)
    found = searched(0, count, tier)
    for kind in TROUBLES:
        is_counted = kind not in ("absent", "miscount")  # these befall requests, and are not counted one by one
        if is_counted and not (tier is Tier.QUICK and kind in RARE):
            assert found.outcomes[f"trouble: {kind}"] > count // 500, kind
    for what in ("sent", "received"):
        assert found.outcomes[f"{what}: success"] > count / 2
        assert found.outcomes[f"{what}: failed"] > count / 2


@pytest.mark.timeout(7200)
def test_fresh_schedules_keep_all_laws(tier: Tier):
    searched(secrets.randbelow(2**40), tier.amount(quick=20, full=1_000, long=100_000), tier)


def test_runs_of_several_sub_chunks_end_with_any_of_them(monkeypatch: pytest.MonkeyPatch):
    run, seen = SimulatedRuns.run, set[tuple[int, int]]()

    def runs(self: SimulatedRuns, steps: Sequence[Step], receiver: str, comings: Comings) -> int:
        begun = run(self, steps, receiver, comings)
        if steps[begun - 1].error is None:
            seen.add((len(steps), begun))
        return begun

    monkeypatch.setattr(SimulatedRuns, "run", runs)
    arena, sought = Arena(), {(1, 1), (2, 1), (2, 2)}
    for seed in range(300):
        run_one(seed, arena)
        if seen >= sought:
            return
    assert seen >= sought


def trace_of(seed: int) -> str:
    world = World(seed, traces=True)
    world.run()
    return "\n".join(world.trace)


def test_a_seed_is_a_schedule(tier: Tier):
    """Whatever else the process did, and however it hashes."""
    arena = Arena()
    for seed in range(5):
        run_one(seed, arena)
    here = trace_of(3)
    program = (
        "from proof.simulation import World; world = World(3, traces=True); world.run(); print('\\n'.join(world.trace))"
    )
    for hash_seed in tier.amount(quick=("1",), full=("1", "2"), long=("1", "2")):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        there = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        assert there.stdout.strip() == here.strip()


def test_engines_have_settings_that_a_user_could_give():
    for seed in range(10):
        for engine in drawn(random.Random(seed), Limits()).engines.values():
            assert Settings(**engine.settings.model_dump()) == engine.settings


def test_worlds_differ():
    assert len({trace_of(seed) for seed in range(10)}) == 10


@pytest.mark.parametrize("fault", ["pages written in the wrong order", "drained while writes fly"])
def test_what_breaks_a_law_is_shrunken_to_what_it_takes(fault: str, monkeypatch: pytest.MonkeyPatch):
    """The first fault needs no trouble to break a law, the second some."""
    PLANTED[fault](monkeypatch)
    arena = Arena()
    _, violation = run_one(pinned()[fault].seed, arena)
    assert violation is not None
    whole = World(violation.seed, traces=True)
    with pytest.raises(ViolationError):
        whole.run()
    limits, shrunken = shrink(violation)
    assert shrunken.troubles <= whole.troubles
    assert bool(shrunken.troubles) == (fault == "drained while writes fly")
    assert "BROKEN" in shrunken.trace[-1]
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


def test_without_trouble_everything_succeeds(tier: Tier):
    calm = Limits(without_troubles=frozenset(TROUBLES))
    arena = Arena()
    for seed in range(tier.amount(quick=20, full=200, long=200)):
        outcomes, violation = run_one(seed, arena, calm)
        assert violation is None
        assert not [what for what in outcomes if "failed" in what], seed
