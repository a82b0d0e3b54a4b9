"""Whole systems over what SGLang plans to ask of a transport: all laws hold, whatever goes wrong.

Rooms, generations, aborts and completions are the endpoints' own here, over kvferry's prototype over a wire as bad as a
real one may be. So its interface is enough to decide them; and what a transport must not get wrong breaks a law.
"""

from __future__ import annotations

from collections import Counter

import pytest
from proof.simulated_transport import SimulatedTransport
from proof.simulation import Limits, ViolationError, World
from proof.simulation.laws import Law
from proof.simulation.memory import Arena
from prototypes.sglang_transport import KVFerryTransport
from tests.support import wrong_transports as wrong
from tests.support.over_interface import OverInterface
from tests.support.tiers import Tier

from kvferry.transport import Transport

# What calibrates a path is told of writes of the simulated wire's own, which an interface above it cannot show.
CALM = Limits(without_troubles=frozenset({"measuring write"}))


def run(seed: int, arena: Arena, kind: type[KVFerryTransport] = KVFerryTransport) -> tuple[Counter[str], Law | None]:
    """Runs one schedule of a world whose endpoints move bytes by the planned interface."""

    class PlannedWorld(World):
        def moves_by(self, transport: SimulatedTransport) -> Transport:
            return OverInterface(kind(lambda life: transport))

    world = PlannedWorld(seed, limits=CALM, arena=arena)
    try:
        return world.run(), None
    except ViolationError as error:
        return world.outcomes, error.law


def test_all_laws_hold_over_the_planned_interface(tier: Tier):
    count, arena, outcomes = tier.amount(quick=15, full=300, long=5_000), Arena(), Counter[str]()
    for seed in range(count):
        came, law = run(seed, arena)
        assert law is None, seed
        outcomes += came
    for what in ("sent", "received"):
        assert outcomes[f"{what}: success"] > count / 2
        assert outcomes[f"{what}: failed"] > count / 2


@pytest.mark.parametrize(
    ("kind", "law"),
    [
        (wrong.DoneOnceBegun, Law.NO_REUSE_UNDER_A_READ),
        (wrong.EventBeforeBytes, Law.EXACT),
        (wrong.NothingLate, Law.NO_WRITE_AFTER_RELEASE),
        pytest.param(wrong.FailedWhileItGoesOn, Law.NO_WRITE_AFTER_RELEASE, marks=pytest.mark.full),
        pytest.param(wrong.WholeSubmits, Law.NO_WRITE_AFTER_RELEASE, marks=pytest.mark.full),
        pytest.param(wrong.EventsOfNoLife, Law.ISOLATED, marks=pytest.mark.full),
    ],
)
def test_what_a_transport_gets_wrong_breaks_a_law(kind: type[KVFerryTransport], law: Law):
    arena = Arena()
    broken = (run(seed, arena, kind)[1] for seed in range(200))
    assert next(filter(None, broken), None) is law
