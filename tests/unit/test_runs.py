"""Every test belongs to a part of the proof that `make` or `python -m tests.runs` runs."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.runs import ON_GPU, PARTS, Run
from tests.support.clones import ROOT

TESTS = sorted(file.relative_to(ROOT) for file in (ROOT / "tests").rglob("test_*.py"))


def marked(mark: str) -> list[Path]:
    """Returns the files in which tests have a mark."""
    return [file for file in TESTS if re.search(rf"mark\.{mark}\b", (ROOT / file).read_text())]


def covers(run: Run, file: Path) -> bool:
    """Whether a run of the longest tier has the tests of a file."""
    arguments = shlex.split(run.arguments)
    return "--tier long" in run.arguments and any(file.is_relative_to(each) for each in arguments)


@pytest.mark.parametrize("file", marked("long"), ids=str)
def test_long_tests_are_part_of_what_has_no_end(file: Path):
    assert any(covers(run, file) for run in PARTS["long"].runs)


def test_parts_name_tests_that_are_there():
    for part in PARTS.values():
        for run in part.runs:
            named = [each for each in shlex.split(run.arguments) if each.startswith("tests")]
            assert [each for each in named if not (ROOT / each).exists()] == []


def test_what_needs_a_gpu_is_part_of_the_gpus():
    assert sorted(ON_GPU.split()) == [str(file) for file in marked("gpu")]


def test_nobody_takes_tests_for_run_that_need_a_gpu_and_have_none():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    run = subprocess.run(
        [sys.executable, "-m", "tests.runs", "gpu"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    assert "gpu: there is nothing here that it could run on" in run.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
def test_a_person_types_eight_targets_and_those_of_a_release_and_make_names_them():
    targets = re.search(r"^\.PHONY: help (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets is not None
    said = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert sorted(re.findall(r"^make (\S+)", said, re.MULTILINE)) == sorted(targets[1].split())
    assert len({*targets[1].split()} - {"engines-contract", "release-check"}) == 8


def test_make_test_all_is_made_of_all_parts_but_those_that_have_no_end_or_need_more():
    (parts,) = re.findall(r"tests\.runs (full .*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(PARTS) - set(parts.split()) == {"quick", "engines", "older", "lowest", "newest", "long", "gpu"}
