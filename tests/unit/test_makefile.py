"""Every test belongs to a run that `make` knows."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.support.clones import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")

LONG = sorted(
    file.relative_to(ROOT)
    for file in (ROOT / "tests").rglob("test_*.py")
    if re.search(r"pytest\.mark\.long", file.read_text())
)


@pytest.mark.parametrize("target", ["test-gpu", "bench-gpu", "gpu-contact"])
def test_what_runs_on_a_machine_with_a_gpu_keeps_its_path(target: str):
    run = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=False)
    (command,) = [line for line in run.stdout.splitlines() if "PYTHONPATH=" in line]
    path = command.partition("PYTHONPATH=")[2].partition(" ")[0]
    for given, expected in (("", [f"{ROOT}/src"]), ("/unpacked", [f"{ROOT}/src", "/unpacked"])):
        said = subprocess.run(
            ["sh", "-c", f"echo {path}"], env={"PYTHONPATH": given}, capture_output=True, text=True, check=True
        )
        assert said.stdout.strip().split(":") == expected


def runs_of_pytest(target: str) -> list[list[str]]:
    """The arguments of every run of pytest that a target of the Makefile is made of, parts of parts included."""
    run = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return [shlex.split(line.partition(" -m pytest ")[2]) for line in run.stdout.splitlines() if " -m pytest " in line]


def covers(arguments: list[str], file: Path) -> bool:
    """Whether a run with these arguments runs the long tests of a file."""
    return "--tier long" in " ".join(arguments) and any(
        file.is_relative_to(each) for each in arguments if each.startswith("tests/")
    )


@pytest.mark.parametrize("file", LONG, ids=str)
def test_long_tests_are_part_of_make_test_long(file: Path):
    assert any(covers(arguments, file) for arguments in runs_of_pytest("test-long"))


def test_long_tests_of_engines_are_part_of_make_test_engines():
    files = [file for file in LONG if "real_engines" in file.parts]
    assert len(files) >= 3
    runs = runs_of_pytest("test-engines")
    assert [file for file in files if not any(covers(arguments, file) for arguments in runs)] == []
