"""The simulation finds every guard that is missing, and says after how many schedules."""

from __future__ import annotations

import sys

import pytest
from tests.simulation.planted import PLANTED

from kvferry.simulation.memory import Arena
from kvferry.simulation.search import run_one

MOST_SEEDS = 16000


@pytest.fixture(scope="module")
def arena() -> Arena:
    return Arena()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", PLANTED)
def test_a_missing_guard_is_found(
    fault: str, arena: Arena, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    PLANTED[fault](monkeypatch)
    for seed in range(MOST_SEEDS):
        _, violation = run_one(seed, arena)
        if violation is not None:
            with capsys.disabled():
                sys.stdout.write(f"\n    {fault}: found by schedule {seed + 1}, {violation.law.name} ")
            return
    pytest.fail(f"{fault}: not found in {MOST_SEEDS} schedules")
