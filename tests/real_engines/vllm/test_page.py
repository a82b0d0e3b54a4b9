"""The section of docs/vllm.md for newcomers, followed word for word."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from tests.support.clones import ROOT, blocks, make_clone

pytestmark = [pytest.mark.servers, pytest.mark.long, pytest.mark.timeout(600)]

SECTION = "## Try it without a GPU"


def terminals() -> list[str]:
    """What is typed into the first terminal, and into the second."""
    page = (ROOT / "docs/vllm.md").read_text()
    return blocks(page[page.index(SECTION) :].split("\n## ", 1)[0], "bash")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    return make_clone(tmp_path, ".venv-vllm")


def test_the_page_works_as_it_is(clone: Path):
    first, second = terminals()
    environment = {"PATH": os.environ["PATH"], "HOME": str(clone)}
    terminal = subprocess.Popen(
        ["bash", "-e"],
        cwd=clone,
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert terminal.stdin is not None
    assert terminal.stdout is not None
    terminal.stdin.write(first)
    terminal.stdin.close()
    said = []
    for line in terminal.stdout:
        said.append(line)
        if line.startswith("Ready: http://127.0.0.1:8000/"):
            break
    assert said[-1].startswith("Ready"), "".join(said)
    everybody = psutil.Process(terminal.pid).children(recursive=True)
    try:
        answers = subprocess.run(
            ["bash", "-e"], input=second, cwd=clone, env=environment, capture_output=True, text=True, timeout=120
        )
    finally:
        os.killpg(terminal.pid, signal.SIGINT)
    assert answers.returncode == 0, answers.stderr
    events = [line.removeprefix("data: ") for line in answers.stdout.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]", answers.stdout
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]).strip()
    health = json.loads(answers.stdout.splitlines()[-1])
    assert [each["is_healthy"] for each in (*health["prefill"], *health["decode"])] == [True, True, True]
    assert terminal.wait(120) == 0
    _, alive = psutil.wait_procs(everybody, timeout=10)
    assert not alive
