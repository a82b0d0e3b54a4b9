"""docs/tutorial.md, pasted block by block."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nixl_cu13")
pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with all that a clone has, and this environment as the one that `make demo` has made."""
    for each in ROOT.iterdir():
        if not each.name.startswith("."):
            (tmp_path / each.name).symlink_to(each)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


def test_the_tutorial_works_as_it_is(clone: Path):
    blocks = re.findall(
        r"^```bash\n(.*?)^```$", (ROOT / "docs/tutorial.md").read_text(), flags=re.MULTILINE | re.DOTALL
    )
    assert len(blocks) == 5
    script = "".join(f"echo '== {number}'\n{block}" for number, block in enumerate(blocks))
    environment = {"PATH": os.environ["PATH"], "HOME": str(clone), "COLUMNS": "100"}
    run = subprocess.run(
        ["bash", "-e"],
        input=script,
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
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
