"""Two processes on one GPU: which way bytes take, memory that cannot be shared, captures and decode steps beside.

These are the probes of `benchmarks.gpu_contact`. Their twins on a CPU are in test_gpu_rehearsal.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from tests.support.clones import ROOT

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device; test_gpu_rehearsal.py is the twin"),
]

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}

ATTACHES = """
import logging, torch
logging.basicConfig()
import kvferry as kf
(component, _) = kf.attention_components(num_layers=1, num_kv_heads=2, head_dim=64, dtype="bfloat16")
tensor = torch.zeros((64, 16, 2, 64), dtype=torch.bfloat16, device="cuda")
layout = kf.RankLayout(shards=(kf.shard_from_tensors(component, [tensor], dims=("page", "token", "head", "dim")),))
registry = kf.create_registry(kf.Settings(registry_port=0))
registry.start()
settings = kf.Settings.model_validate({"registry_url": registry.url})
kf.PrefillEndpoint(layout, engine="warned", settings=settings).close()
registry.close()
"""


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))}
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def probe(name: str, *flags: str, **variables: str) -> dict[str, Any]:
    done = run("-m", f"benchmarks.gpu_contact.probes.{name}", "--device", "cuda", *flags, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def test_writes_between_two_processes_are_the_drivers_copies():
    found = probe("bulk")
    assert found["exact"] is True
    assert found["legacy_ipc_capable"] is True
    assert any("cuda_ipc" in way["config"] for way in found["ways"]), found["ways"]
    assert not any(way["emulated"] for way in found["ways"])


def test_bytes_arrive_from_memory_that_cannot_be_shared():
    found = probe("bulk", **EXPANDABLE)
    assert found["exact"] is True
    assert found["legacy_ipc_capable"] is False


def test_whoever_attaches_memory_that_cannot_be_shared_is_warned():
    done = run("-c", ATTACHES, **EXPANDABLE)
    assert done.returncode == 0, done.stderr
    assert "expandable_segments" in done.stderr
    assert "expandable_segments" not in run("-c", ATTACHES, PYTORCH_CUDA_ALLOC_CONF="").stderr


def test_captures_go_on_beside_every_step_of_an_endpoint_but_that_which_loads_nixl():
    found = probe("capture", "--mode", "global")
    said = {row["beside"]: (row["capture"], row["step"]) for row in found["rows"]}
    assert said.pop("load NIXL")[0], "UCX does not end captures any more: docs/gpu.md says that it does"
    assert len(said) > 6
    assert {step: problem for step, problem in said.items() if problem != ("", "")} == {}


@pytest.mark.parametrize("path", ["direct", "staged"])
def test_decode_steps_compute_the_same_beside_transfers_and_what_they_lose_is_told(path: str):
    found = probe("beside", "--path", path, "--seconds", "8")
    assert found["exact"] is True
    assert found["requests"] > 0
    assert set(found["lost_beside_against"]) == {"alone", "apart"}
    assert found["lost_beside_against"]["apart"]["step p50"] < 0.5, "a step takes twice as long beside transfers"


def test_one_kernel_copies_from_pages_into_another_processs_pages():
    found = probe("fused", "--tiny")
    assert found["exact"] is True
    assert [row["bytes"] for row in found["rows"]] == [256, 1024, 32768]
