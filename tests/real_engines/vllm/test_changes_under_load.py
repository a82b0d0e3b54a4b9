"""`kvferry up` under load while servers are killed, weights and adapters replaced: no answer is wrong.

A server that comes back has the first weights and whatever lies in the adapters' folders; an operator, here, gives it
what the others have. So for a while servers differ, and every answer must be that of one state throughout: of the
weights and the adapter that any server may have had meanwhile, never of two at once.

Under load every request names an adapter. Of a batch that has requests with an adapter and without, vLLM on CPUs
answers the latter with the adapter in its last slot, alone as well (0.32: torch_ops takes "none", -1, for an index).
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
import pytest
from examples.tiny_model import write
from tests.real_engines.deployment import Deployment, deployed
from tests.real_engines.prompts import prompts
from tests.real_engines.vllm.adapters import write_adapter
from tests.real_engines.vllm.engine import ENVIRONMENT, EngineProcess, Shape
from tests.real_engines.vllm.test_changes import load, replace

pytestmark = [pytest.mark.servers, pytest.mark.long, pytest.mark.timeout(4000)]

KILLS, KILL_EVERY_S, LONGEST_S, CLIENTS, COUNT = 11, 8.0, 2400.0, 6, 8
SERVERS = ("prefill-0", "decode-0", "decode-1")
ADAPTERS = ("", "a", "b")  # what requests name; none first
UNDER_LOAD = ADAPTERS[1:]
WEIGHTS, SEEDS = 2, 2  # versions of each

HONEST = re.compile(
    r"no (prefill|decode) server is well|"
    r"tried \d+ times; last, (prefill|decode)-\d+: "
    # its connection broke, or its engine died, or a cache did not come: its log has why
    r"(\w+(Error|Timeout) |HTTP 50[03]: .*(Internal server error|EngineCore encountered an issue))"
)
"""What a client may be told instead of an answer: who is away, or who failed it and how."""

Answers = Mapping[tuple[str, int], Sequence[str]]  # by adapter and number of the prompt, those of every state


@dataclass
class Found:
    """What the clients saw."""

    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    refused: Counter[tuple[int, str]] = field(default_factory=Counter)  # by status and body


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("checkpoints")
    return write("qwen3", directory / "first"), write("qwen3", directory / "second", seed=12)


@pytest.fixture(scope="module")
def adapters(checkpoints: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(directory / name, checkpoints[0], seed=0) for name in ADAPTERS if name}


def seed_of(adapter: str, version: int) -> int:
    return 100 * version + ADAPTERS.index(adapter)


@pytest.fixture(scope="module")
def asked() -> list[list[int]]:
    return prompts(77, 12, shortest=40, longest=400)


@pytest.fixture(scope="module")
def right(checkpoints: tuple[Path, Path], adapters: dict[str, Path], asked: list[list[int]]) -> Answers:
    """What an engine that works alone answers with every pair of versions; the folders have the first ones after it."""
    answers: dict[tuple[str, int], list[str]] = {}
    alone = EngineProcess(Shape(checkpoints[0], connector="", adapters=adapters))
    try:
        for version in reversed(range(SEEDS)):
            for name, path in adapters.items():
                replace(path, str(checkpoints[0]), seed_of(name, version))
                alone.ask("load_adapter", name)
            for weights in checkpoints:
                load(alone, str(weights))
                for adapter in ADAPTERS:
                    for number, prompt in enumerate(asked):
                        alone.submit("alone", prompt, COUNT, adapter=adapter)
                        words = " ".join(f"w{token}" for token in alone.output("alone").tokens)
                        answers.setdefault((adapter, number), []).append(words)
    finally:
        alone.begin_to_close()
        alone.close()
    return answers


@pytest.fixture
def deployment(
    checkpoints: tuple[Path, Path], adapters: dict[str, Path], right: Answers, tmp_path: Path
) -> Iterator[Deployment]:
    options = (
        *("--dtype", "float32", "--max-model-len", "1024", "--block-size", "32", "--enforce-eager"),
        *("--kv-cache-memory-bytes", str(64 << 20), "--shutdown-timeout", "20"),
        *("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules"),
        *(f"{name}={path}" for name, path in adapters.items()),
    )
    environment = {**ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with deployed(checkpoints[0], tmp_path, ("--prefill", "1", "--decode", "2"), options, environment) as started:
        yield started


class Operator:
    """Gives every server the weights and adapters that all should have; those that are away get them later."""

    def __init__(self, deployment: Deployment, checkpoints: Sequence[Path], adapters: Mapping[str, Path]) -> None:
        self._deployment, self._checkpoints, self._adapters = deployment, checkpoints, adapters
        self._urls = {name: deployment.server(name)["url"] for name in SERVERS}
        self._has: dict[str, tuple[int, int, int]] = {}  # process, weights, version of adapters
        self.weights = self.version = 0

    def replace_adapters(self, version: int) -> None:
        for name, path in self._adapters.items():
            replace(path, str(self._checkpoints[0]), seed_of(name, version))
        self.version = version

    def bring(self, name: str) -> bool:
        """Brings a server to that state; whether it is in it now.

        It is paused meanwhile, as vLLM wants it: a request that runs is computed on with whatever weights come, and
        its own prefix cache keeps what the old ones computed.
        """
        try:
            state, url = (self._deployment.pid_of(name), self.weights, self.version), self._urls[name]
            if self._has.get(name) == state:
                return True
            call = {"method": "reload_weights", "kwargs": {"weights_path": str(self._checkpoints[self.weights])}}
            self._post(f"{url}/pause?mode=wait", None)
            self._post(f"{url}/collective_rpc", call)
            for adapter, path in self._adapters.items():
                body = {"lora_name": adapter, "lora_path": str(path), "load_inplace": True}
                self._post(f"{url}/v1/load_lora_adapter", body)
            self._post(f"{url}/resume", None)
        except (httpx.HTTPError, AssertionError):
            return False
        self._has[name] = state
        return True

    @staticmethod
    def _post(url: str, body: Mapping[str, object] | None) -> None:
        httpx.post(url, json=body, timeout=60).raise_for_status()


def test_no_answer_is_wrong_while_servers_die_and_weights_and_adapters_change(
    deployment: Deployment,
    checkpoints: tuple[Path, Path],
    adapters: dict[str, Path],
    right: Answers,
    asked: list[list[int]],
    capsys: pytest.CaptureFixture[str],
):
    operator = Operator(deployment, checkpoints, adapters)
    found, is_over = Found(), threading.Event()

    def client(first: int) -> None:
        number = first
        while not is_over.is_set():
            adapter, which = UNDER_LOAD[number % len(UNDER_LOAD)], number // len(UNDER_LOAD) % len(asked)
            number += CLIENTS
            try:
                body = {"model": adapter, "prompt": asked[which], "max_tokens": COUNT}
                body |= {"temperature": 0, "ignore_eos": True}
                answer = httpx.post(f"{deployment.url}/v1/completions", json=body, timeout=120)
            except httpx.HTTPError as error:
                found.kinds[type(error).__name__] += 1
                continue
            if answer.status_code != 200:
                found.kinds[str(answer.status_code)] += 1
                found.refused[answer.status_code, answer.text] += 1
                time.sleep(0.1)
                continue
            text = answer.json()["choices"][0]["text"].strip()
            found.kinds["right" if text in right[adapter, which] else "wrong"] += 1
            if text not in right[adapter, which]:
                found.wrong.append(f"prompt {which}, adapter {adapter!r}: {text}")

    began, kills = time.monotonic(), 0
    may_kill_at = began + KILL_EVERY_S
    last_killed = dict.fromkeys(SERVERS, 0)
    changes = {2: (1, 0), 5: (1, 1), 8: (0, 1)}  # after so many kills: weights, adapters

    def operate(name: str) -> None:
        while not is_over.is_set():
            operator.bring(name)
            time.sleep(0.2)

    with ThreadPoolExecutor(CLIENTS + len(SERVERS)) as threads:
        for number in range(CLIENTS):
            threads.submit(client, number)
        for name in SERVERS:
            threads.submit(operate, name)
        try:
            while kills < KILLS and time.monotonic() - began < LONGEST_S:
                time.sleep(0.2)
                # As long as a side is away nothing is at stake: on a slow machine servers start for longer than that.
                serving = [name for name in SERVERS if deployment.server(name)["is_healthy"]]
                if len({name.partition("-")[0] for name in serving}) < 2:
                    may_kill_at = time.monotonic() + KILL_EVERY_S
                elif time.monotonic() > may_kill_at:
                    victim = min(serving, key=last_killed.__getitem__)
                    try:
                        os.kill(deployment.pid_of(victim), signal.SIGKILL)
                    except (AssertionError, ProcessLookupError):
                        continue  # it has died, and is not missed yet
                    kills, may_kill_at = kills + 1, time.monotonic() + KILL_EVERY_S
                    last_killed[victim] = kills
                    if kills in changes:
                        operator.weights, version = changes[kills]
                        if version != operator.version:
                            operator.replace_adapters(version)
        finally:
            is_over.set()
    with capsys.disabled():
        sys.stdout.write(f"\n    {kills} kills in {time.monotonic() - began:.0f} s: {dict(found.kinds)} ")
    assert not found.wrong, found.wrong
    dishonest = {each: count for each, count in found.refused.items() if not HONEST.search(each[1])}
    assert not dishonest, dishonest
    assert found.kinds["right"] > 0
    assert kills == KILLS
    until("all are back", 400, lambda: all(deployment.server(name)["is_healthy"] for name in SERVERS))
    until("all have the same", 120, lambda: all(operator.bring(name) for name in SERVERS))
    state = (SEEDS - 1 - operator.version) * WEIGHTS + operator.weights
    for (adapter, number), answers in right.items():
        body = {"model": adapter or deployment.model, "prompt": asked[number], "max_tokens": COUNT, "temperature": 0}
        answer = httpx.post(f"{deployment.url}/v1/completions", json={**body, "ignore_eos": True}, timeout=120)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"].strip() == answers[state]
    for name in SERVERS:
        until(f"{name} has its blocks back", 60, partial(has_all_blocks, deployment.server(name)["url"]))


def until(what: str, seconds: float, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.2)


def has_all_blocks(url: str) -> bool:
    """Whether no request holds any of a server's blocks."""
    lines = httpx.get(f"{url}/metrics", timeout=10).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:kv_cache_usage_perc")) == 0
