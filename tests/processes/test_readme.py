"""Every command that the README shows: run here, or in a test that is named."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from tests.support.clones import ROOT, blocks, make_clone
from tests.support.commands import CommandProcess
from tests.support.real_transport import skip_unless_installed

skip_unless_installed()

CONFIG = '{"model_type": "qwen3", "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, \
"hidden_size": 512, "head_dim": 64, "torch_dtype": "bfloat16"}'

ELSEWHERE = {
    "make demo": "tests/processes/test_tutorial.py",
    "make test": "make test, in .ci/run",
    "python -m proof.simulation --count 20000": "tests/simulation",
    "pip install '/path/to/kvferry[nixl,up]'": "tests/processes/test_package_builds.py",
    "kvferry up --model ./Qwen3-8B": "tests/real_engines/vllm",
    "kvferry up --engine sglang --model ./Qwen3-8B": "tests/real_engines/sglang",
    "python -m sglang.launch_server": "tests/real_engines/sglang",
    ".venv/bin/kvferry demo --model DIR": "tests/processes/test_demo.py",
    "kubectl apply --kustomize": "tests/processes/test_kubernetes_pods.py",
    "kvferry top 9470-9477 10.0.0.6:9470": "tests/processes/test_stuck_peer.py",
    "kvferry drain prefill-0": "tests/unit/applications/test_drain_command.py",
    "kvferry release prefill-0-71-5f0c9a6be1d2": "tests/unit/endpoint/test_ends.py",
    "kvferry trace 9470 10.0.0.6:9470": "tests/processes/test_trace_command.py",
}
"""Commands that take another machine, a real engine or a checkpoint: where the like of them is run."""


def shown_commands() -> list[str]:
    """Those of all blocks that are not Python, without what stands beside them."""
    text = "".join(blocks((ROOT / "README.md").read_text(), ""))
    return [line.partition("  #")[0].rstrip() for line in text.replace("\\\n", " ").splitlines()]


def elsewhere(command: str) -> str | None:
    """Where the like of a command is run, if not here."""
    return next((where for prefix, where in ELSEWHERE.items() if command.startswith(prefix)), None)


HERE = [command for command in shown_commands() if elsewhere(command) is None]


def test_there_are_commands():
    assert len(HERE) > 12
    assert all(any(command.startswith(prefix) for command in shown_commands()) for prefix in ELSEWHERE), (
        "one is not shown"
    )


@pytest.mark.parametrize("where", sorted(set(ELSEWHERE.values())))
def test_what_is_run_elsewhere_is_run(where: str):
    if where.startswith("make"):
        assert f"\n{where.partition(',')[0]}\n" in (ROOT / ".ci/run").read_text()
    else:
        assert (ROOT / where).exists()


def cases() -> Iterator[ParameterSet]:
    """Yields every command. The quick tier takes the first of each sort, if no other test does what it does there."""
    # tests/processes/test_demo.py, tests/processes/test_bench_command.py, tests/unit/applications/test_doctor.py
    shown = {"demo", "bench", "doctor"}
    for command in HERE:
        found = re.search(r"kvferry (\w+)", command)
        sort = command if found is None else found[1]
        yield pytest.param(command, marks=pytest.mark.full if sort in shown else ())
        shown.add(sort)


CASES = list(cases())
DEMO = ".venv/bin/kvferry demo "
DEMOS = [case for case in CASES if str(case.values[0]).startswith(DEMO)]


@pytest.mark.sampled(one_in=2, full=2)
@pytest.mark.parametrize("command", DEMOS)
def test_a_demo_of_the_readme_works(commands: CommandProcess, command: str):
    """In one process, one after the other: that the installed command starts is seen by the others."""
    run = commands.kvferry(*shlex.split(command)[1:])
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("command", [case for case in CASES if case not in DEMOS])
def test_a_command_of_the_readme_works(command: str, tmp_path: Path):
    clone = make_clone(tmp_path, ".venv")
    (clone / "config.json").write_text(CONFIG)
    path = os.pathsep.join((str(clone / ".venv/bin"), os.environ["PATH"]))
    run = subprocess.run(
        ["bash", "-ec", command],
        cwd=clone,
        env={"PATH": path, "HOME": str(clone)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
