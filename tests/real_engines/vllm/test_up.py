"""`kvferry up` with real servers: a stream comes, a server that is killed costs a retry, and nothing is left over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from examples.tiny_model import write
from tests.real_engines.vllm.engine import ENVIRONMENT

from kvferry.applications.up.supervision import free_ports

pytestmark = pytest.mark.timeout(900)

READY_S = 400.0

OPTIONS = (
    *("--dtype", "float32", "--max-model-len", "1024", "--block-size", "32", "--enforce-eager"),
    *("--kv-cache-memory-bytes", str(64 << 20)),
)


class Deployment:
    """The command."""

    def __init__(self, model: Path, logs: Path) -> None:
        (self.port,) = free_ports(1)
        command = [sys.executable, "-m", "kvferry", "up", "--model", str(model), "--prefill", "2", "--decode", "1"]
        command += ["--port", str(self.port), "--logs", str(logs), "--timeout-s", str(READY_S), "--", *OPTIONS]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **ENVIRONMENT}
        )
        self.model, self.logs = str(model), logs
        assert self.process.stdout is not None
        self.said: list[str] = []
        for line in self.process.stdout:
            self.said.append(line)
            if line.startswith("Ready"):
                return
        raise AssertionError("".join(self.said))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, prompt: str) -> httpx.Response:
        body = {"model": self.model, "prompt": prompt, "max_tokens": 4, "temperature": 0}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)

    def health(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/health", timeout=10).json()
        return found

    def received(self) -> int:
        """How many caches the decode server has received."""
        metrics = httpx.get(f"{self.health()['decode'][0]['url']}/metrics", timeout=10).text
        lines = [line for line in metrics.splitlines() if line.startswith("vllm:kvferry_receive_seconds_count")]
        return round(sum(float(line.split()[-1]) for line in lines))

    def pid_of(self, name: str) -> int:
        """Of a server, by the name of its engine on its command line."""
        for each in psutil.Process(self.process.pid).children(recursive=True):
            line = " ".join(each.cmdline())
            if "together" not in line and "vllm.entrypoints" in line and f'"engine_id": "{name}"' in line:
                return each.pid
        raise AssertionError(f"{name} does not run")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    started = Deployment(write("qwen3", tmp_path_factory.mktemp("model")), tmp_path_factory.mktemp("logs"))
    yield started
    if started.process.poll() is None:
        started.process.send_signal(signal.SIGTERM)
        started.process.wait(120)


def test_curl_streams_a_completion(deployment: Deployment):
    body = {"model": deployment.model, "prompt": "w1 w2 w3 " * 40, "max_tokens": 5, "stream": True, "ignore_eos": True}
    command = ["curl", "--silent", "--no-buffer", f"{deployment.url}/v1/completions", "-H"]
    command += ["Content-Type: application/json", "-d", json.dumps(body)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    events = [line.removeprefix("data: ") for line in said.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert len(events) == 6
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]).strip()


def test_three_choices_of_one_request_are_those_of_a_server_that_works_alone(deployment: Deployment):
    body = {"model": deployment.model, "prompt": "w7 w8 w9 " * 50, "max_tokens": 8, "ignore_eos": True}
    body |= {"n": 3, "temperature": 1.0, "seed": 11}

    def choices(url: str) -> list[str]:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return [choice["text"] for choice in sorted(answer.json()["choices"], key=lambda choice: choice["index"])]

    before = deployment.received()
    crossed = choices(deployment.url)
    assert len(set(crossed)) == 3
    assert crossed == choices(deployment.health()["prefill"][0]["url"])
    assert deployment.received() - before == 1, "one fetch for all of them"


def test_a_prefill_server_that_is_killed_costs_a_retry_and_comes_back(deployment: Deployment):
    prompt = "w5 w6 w7 w8 " * 30
    expected = deployment.ask(prompt).json()["choices"][0]["text"]
    before = deployment.health()["retries"]
    os.kill(deployment.pid_of("prefill-0"), signal.SIGKILL)
    for _ in range(6):
        answer = deployment.ask(prompt)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == expected
    assert deployment.health()["retries"] - before <= 1
    deadline = time.monotonic() + READY_S
    while not all(each["is_healthy"] for each in deployment.health()["prefill"]):
        assert time.monotonic() < deadline, "it did not come back"
        time.sleep(0.5)
    for _ in range(4):
        assert deployment.ask(prompt).json()["choices"][0]["text"] == expected
    assert {log.stem for log in deployment.logs.glob("*.log")} >= {
        "registry",
        "prefill-0",
        "prefill-1",
        "decode-0",
        "front",
    }


def test_it_stops_in_order_and_leaves_nothing(deployment: Deployment):
    everybody = psutil.Process(deployment.process.pid).children(recursive=True)
    assert len(everybody) >= 6
    deployment.process.send_signal(signal.SIGINT)
    assert deployment.process.wait(120) == 0
    _, alive = psutil.wait_procs(everybody, timeout=10)
    assert not alive
