"""`python -m proof.simulation`: one schedule to look at, many to search, and what it says of one that breaks a law."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from proof.planted.guards import PLANTED
from proof.simulation.__main__ import app
from proof.simulation.reports import replay
from rich.console import Console
from tests.simulation.pins import pinned
from typer.testing import CliRunner


def test_one_schedule_step_by_step(tmp_path: Path):
    file = tmp_path / "trace.txt"
    result = CliRunner().invoke(app, ["--seed", "7", "--steps", "--trace", str(file)])
    assert result.exit_code == 0
    assert "prefill0.0 starts on machine 0" in result.stdout
    assert "no more trouble" in result.stdout
    assert "Seed 7 keeps every law" in result.stdout
    assert file.read_text().strip() in result.stdout


def test_a_schedule_without_steps_is_one_line():
    result = CliRunner().invoke(app, ["--seed", "7"])
    assert result.exit_code == 0
    assert "starts on" not in result.stdout


def test_without_a_seed_a_fresh_one_is_drawn():
    said = {CliRunner().invoke(app, []).stdout.split("keeps")[0] for _ in range(3)}
    assert len(said) == 3


@pytest.mark.full  # test_schedules.py searches as many
def test_many_schedules():
    result = CliRunner().invoke(app, ["--seed", "0", "--count", "60", "--processes", "2"])
    assert result.exit_code == 0
    assert "60 schedules from seed 0 on" in result.stdout
    assert "received: success" in result.stdout


@pytest.mark.parametrize("arguments", [["--count", "0"], ["--processes", "0"], ["--seed", "x"]])
def test_impossible_arguments_are_refused(arguments: list[str]):
    assert CliRunner().invoke(app, arguments).exit_code == 2


def test_a_broken_law_is_shown_with_a_trace_and_the_way_to_replay_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    fault = "acknowledgement before the last handle"
    PLANTED[fault](monkeypatch)
    seed = pinned()[fault].seed
    assert not replay(seed, shows_steps=False, trace=None, console=Console(width=200))
    shown = capsys.readouterr().out
    broken = re.search(rf"Seed {seed} breaks a law: ([^:]+)", shown)
    assert broken is not None
    assert "Shrunken to" in shown
    assert f"BROKEN: {broken[1]}" in shown
    assert f"python -m proof.simulation --seed {seed} --steps" in shown
