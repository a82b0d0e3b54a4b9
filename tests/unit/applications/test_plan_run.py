"""`kvferry plan` where something is missing or wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvferry.applications import command_line
from kvferry.cli.app import app
from kvferry.errors import ConfigurationError, SettingsError
from kvferry.plan import SourceGroup

CONFIG = Path(__file__).parents[2] / "data" / "configs" / "qwen3-32b.json"


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_plan_that_is_wrong_fails_the_command(options: list[str], monkeypatch: pytest.MonkeyPatch):
    whole = SourceGroup.pieces_for
    monkeypatch.setattr(SourceGroup, "pieces_for", lambda group, receiver: whole(group, receiver)[1:])
    result = CliRunner().invoke(app, ["plan", "--config", str(CONFIG), *options])
    assert result.exit_code == 1
    assert ('"proved": false' if options else "NOT PROVED: decode rank 0: 'k'") in result.output


def test_drawing_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(command_line, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["plan", "--config", str(CONFIG), "--draw", str(tmp_path / "plan.svg")])
    assert isinstance(result.exception, ConfigurationError)
    assert "pip install matplotlib" in str(result.exception)
    assert result.output == ""


def test_a_picture_in_a_directory_that_does_not_exist_is_refused_at_once(tmp_path: Path):
    result = CliRunner().invoke(app, ["plan", "--config", str(CONFIG), "--draw", str(tmp_path / "no" / "plan.svg")])
    assert isinstance(result.exception, SettingsError)
    assert "no directory" in str(result.exception)
