"""`benchmarks.gpu_contact` on a CPU: its very probes, with sizes whose figures mean nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from benchmarks.gpu_contact.sections import sections
from tests.support.clones import ROOT

pytest.importorskip("torch")


def rehearsed(folder: Path, *flags: str) -> dict[str, str]:
    """The files of the one archive that a rehearsal leaves."""
    command = [sys.executable, "-m", "benchmarks.gpu_contact", "--rehearse", "--out", str(folder), "--wheels", "none"]
    run = subprocess.run([*command, *flags], cwd=ROOT, capture_output=True, text=True, check=False)
    (archive,) = folder.iterdir()
    with tarfile.open(archive) as packed:
        files = {Path(each.name).name: packed.extractfile(each) for each in packed}
        contents = {name: file.read().decode() for name, file in files.items() if file is not None}
    assert run.returncode == 0, run.stdout + run.stderr + contents["contact.md"]
    return contents


@pytest.mark.full
def test_a_rehearsal_on_the_cpu_asks_and_brings_one_archive_back(tmp_path: Path):
    files = rehearsed(tmp_path, "--sections", "bulk")
    (bulk,) = json.loads(files["contact.json"])["sections"]
    assert (bulk["outcome"], bulk["result"]["exact"]) == ("done", True)
    assert [way["emulated"] for way in bulk["result"]["ways"]] == [False]
    assert "What was expected" in files["contact.md"]
    assert set(files) == {"contact.json", "contact.md", "bulk.log"}


@pytest.mark.long
def test_every_section_is_rehearsed(tmp_path: Path):
    files = rehearsed(tmp_path)
    written = json.loads(files["contact.json"])["sections"]
    assert [each["name"] for each in written] == [each.name for each in sections("cpu")]
    assert {each["name"]: each["why"] for each in written if each["outcome"] != "done"} == {}
    assert all(each["result"].get("exact", True) for each in written if each["result"] is not None)
    assert {event["cat"] for event in json.loads(files["trace.json"])["traceEvents"] if "cat" in event} >= {
        "gather",
        "wire",
    }
