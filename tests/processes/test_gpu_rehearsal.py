"""`benchmarks.gpu_contact` on a CPU: its very probes, with sizes whose figures mean nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.clones import ROOT

pytest.importorskip("torch")


@pytest.mark.full
def test_a_rehearsal_on_the_cpu_asks_and_writes(tmp_path: Path):
    command = [sys.executable, "-m", "benchmarks.gpu_contact", "--rehearse", "--out", str(tmp_path), "--wheels", "none"]
    run = subprocess.run([*command, "--sections", "bulk"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    (bulk,) = json.loads((tmp_path / "contact.json").read_text())["sections"]
    assert (bulk["outcome"], bulk["result"]["exact"]) == ("done", True)
    assert [way["emulated"] for way in bulk["result"]["ways"]] == [False]
    assert "What was expected" in (tmp_path / "contact.md").read_text()


@pytest.mark.long
def test_every_section_that_a_cpu_can_run_is_rehearsed(tmp_path: Path):
    command = [sys.executable, "-m", "benchmarks.gpu_contact", "--rehearse", "--out", str(tmp_path), "--wheels", "none"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    written = json.loads((tmp_path / "contact.json").read_text())["sections"]
    assert {each["name"]: each["why"] for each in written if each["outcome"] != "done"} == {}, run.stdout
    assert all(each["result"].get("exact", True) for each in written)
