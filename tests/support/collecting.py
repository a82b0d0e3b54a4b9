"""Which tests `make test-all` runs of some files, by collecting them in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path

import pytest
from tests.support.clones import ROOT
from tests.support.family_cells import Cell

FILE = "KVFERRY_COLLECTED"
"""The environment variable with the name of the file that is written."""


def collected_tests(files: Collection[str]) -> set[str]:
    """The names of all tests in some files, as pytest has them; no test runs."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "--tier", "full", "-p", __name__, *sorted(files)]
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "collected.json"
        environment = {**os.environ, FILE: str(written)}
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stdout + run.stderr
        return set(json.loads(written.read_text()))


def missing_tests(cells: Iterable[Cell], folder: str) -> list[str]:
    """The tests in a folder that cells name and `make test-all` does not run.

    Args:
        folder: relative to the repository, such as "tests/unit".
    """
    named = {cell.test for cell in cells if cell.test.startswith(f"{folder}/")}
    found = collected_tests({test.partition("::")[0] for test in named})
    found |= {each.partition("[")[0] for each in found}
    return sorted(named - found)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Writes down what was collected."""
    Path(os.environ[FILE]).write_text(json.dumps([item.nodeid for item in session.items]))
