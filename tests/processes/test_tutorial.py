"""docs/tutorial.md, pasted block by block."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from tests.support.clones import ROOT, blocks, make_clone
from tests.support.ports import free_ports_in_a_row
from tests.support.real_transport import skip_unless_installed

skip_unless_installed()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    return make_clone(tmp_path, ".venv")


@pytest.mark.full
def test_the_tutorial_works_as_it_is(clone: Path):
    typed = blocks((ROOT / "docs/tutorial.md").read_text(), "bash")
    assert len(typed) == 5
    port = free_ports_in_a_row(2)  # somebody else may follow the tutorial at the same time
    typed = [block.replace("9470", str(port)).replace("9471", str(port + 1)) for block in typed]
    script = "".join(f"echo '== {number}'\n{block}" for number, block in enumerate(typed))
    environment = {"PATH": os.environ["PATH"], "HOME": str(clone), "COLUMNS": "100"}
    run = subprocess.run(
        ["bash", "-e"],
        input=script,
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    demo, example, plan, watching, doctor = re.split(r"^== \d$", run.stdout, flags=re.MULTILINE)[1:]
    assert re.search(r"checked, 0 (mismatched|wrong)", demo), demo
    assert "tensors that arrived: 8" in example, example
    assert "proved" in plan.lower(), plan
    assert re.search(r"^prefill .*well", watching, flags=re.MULTILINE), watching
    assert re.search(r"^decode .*well", watching, flags=re.MULTILINE), watching
    phases = {event.get("cat") for event in json.loads((clone / "trace.json").read_text())["traceEvents"]}
    assert {"gather", "wire", "scatter"} <= phases
    assert re.search(r"^0 wrong", doctor, flags=re.MULTILINE), doctor
