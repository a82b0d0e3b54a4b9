"""The simulation finds every guard that is missing: at a pinned seed in every run, by search where there is time."""

from __future__ import annotations

import sys

import pytest
from proof.planted.guards import PLANTED
from proof.simulation.memory import Arena
from proof.simulation.search import run_one
from tests.simulation.pins import MOST_SEEDS, RENEW, pinned, search


@pytest.fixture(scope="module")
def arena() -> Arena:
    return Arena()


def test_every_fault_has_a_pinned_seed():
    assert list(pinned()) == list(PLANTED), f"renew the pins: {RENEW}"


@pytest.mark.parametrize("fault", PLANTED)
def test_a_missing_guard_is_found_at_its_pinned_seed(fault: str, arena: Arena, monkeypatch: pytest.MonkeyPatch):
    seed = pinned()[fault].seed
    _, violation = run_one(seed, arena)
    assert violation is None, f"nothing is missing, but schedule {seed} breaks a law: {violation}"
    PLANTED[fault](monkeypatch)
    _, violation = run_one(seed, arena)
    assert violation is not None, (
        f"schedule {seed} does not find {fault!r} any more. If the schedules have changed, renew the pins: {RENEW} "
        f"(from seed 0 on, up to {MOST_SEEDS} schedules). A fault that it does not find either is one that the "
        "simulation has become blind to."
    )


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("fault", PLANTED)
def test_a_missing_guard_is_found_by_search(fault: str, arena: Arena, capsys: pytest.CaptureFixture[str]):
    violation = search(fault, arena)
    assert violation is not None, f"{fault}: not found in {MOST_SEEDS} schedules"
    with capsys.disabled():
        sys.stdout.write(f"\n    {fault}: found by schedule {violation.seed + 1}, {violation.law.name} ")
