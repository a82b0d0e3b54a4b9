"""`kvferry up` under load while servers are killed, weights and adapters replaced: no answer is wrong.

A server that comes back has the first weights and whatever lies in the adapters' folders; an operator, here, gives it
what the others have. So for a while servers differ, and every answer must be that of one state throughout: of the
weights and the adapter that any server may have had meanwhile, never of two at once: where all servers that served
were in one state from a request's begin to its end, of that state.

For one change servers are paused in vLLM's mode `keep`, with its prefix cache kept: requests that run are frozen and
then computed on with the new weights, each over what the old ones left of it. So what a decode server was computing
has no right answer, there or on an engine alone, and is not judged; nor is what runs as adapters' files are replaced,
since vLLM reads those that were once loaded in place anew with every step. All else is: what the prefill server was
computing may reach nobody, and what a request of both has left in prefix caches may not be found by those after it.

Under load every request names an adapter. Of a batch that has requests with an adapter and without, vLLM on CPUs
answers the latter with the adapter in its last slot, alone as well (0.32: torch_ops takes "none", -1, for an index).
"""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import TypeAlias

import httpx
import psutil
import pytest
from examples.tiny_model import write
from tests.real_engines.deployment import Deployment, deployed
from tests.real_engines.prompts import prompts
from tests.real_engines.vllm import asynchronous
from tests.real_engines.vllm.adapters import write_adapter
from tests.real_engines.vllm.engine import ENVIRONMENT, EngineProcess, Shape
from tests.real_engines.vllm.test_changes import load, replace

from kvferry.applications.up.dialects import VllmDialect

pytestmark = [pytest.mark.servers, pytest.mark.long, pytest.mark.timeout(4000)]

ROOT = Path(__file__).resolve().parents[3]
KILLS, KILL_EVERY_S, LONGEST_S, CLIENTS, COUNT = 11, 8.0, 2400.0, 6, 8
SERVERS = ("prefill-0", "decode-0", "decode-1")
ADAPTERS = ("", "a", "b")  # what requests name; none first
UNDER_LOAD = ADAPTERS[1:]
WEIGHTS, SEEDS = 2, 2  # versions of each

State: TypeAlias = tuple[int, int]
"""Versions of the weights and of the adapters."""

STATES = frozenset(product(range(WEIGHTS), range(SEEDS)))

HONEST = re.compile(
    r"no (prefill|decode) server is well|"
    r"tried \d+ times; last, (prefill|decode)-\d+: "
    # its connection broke, or its engine died, or a cache did not come: its log has why
    r"(\w+(Error|Timeout) |HTTP 50[03]: .*(Internal server error|EngineCore encountered an issue))"
)
"""What a client may be told instead of an answer: who is away, or who failed it and how."""

Answers: TypeAlias = Mapping[tuple[str, int], Mapping[State, str]]  # by adapter and number of the prompt


@dataclass(frozen=True)
class Answer:
    """What a client was answered, and from when to when it waited."""

    adapter: str
    number: int
    text: str
    begun: float
    ended: float


@dataclass
class Found:
    """What the clients saw."""

    kinds: Counter[str] = field(default_factory=Counter)
    answers: list[Answer] = field(default_factory=list)
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
    answers: dict[tuple[str, int], dict[State, str]] = {}
    alone = EngineProcess(Shape(checkpoints[0], connector="", adapters=adapters))
    try:
        for version in reversed(range(SEEDS)):
            for name, path in adapters.items():
                replace(path, str(checkpoints[0]), seed_of(name, version))
                alone.ask("load_adapter", name)
            for weights, checkpoint in enumerate(checkpoints):
                load(alone, str(checkpoint))
                for adapter in ADAPTERS:
                    for number, prompt in enumerate(asked):
                        alone.submit("alone", prompt, COUNT, adapter=adapter)
                        words = " ".join(f"w{token}" for token in alone.output("alone").tokens)
                        answers.setdefault((adapter, number), {})[weights, version] = words
    finally:
        alone.begin_to_close()
        alone.close()
    assert all(len({*answers[adapter, number].values()}) == len(STATES) for adapter, number in answers if adapter)
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
    path = os.pathsep.join(
        (str(asynchronous.install(tmp_path / "plugin")), str(ROOT), os.environ.get("PYTHONPATH", ""))
    )
    environment = {
        **ENVIRONMENT,
        "PYTHONPATH": path,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    }
    with deployed(checkpoints[0], tmp_path, ("--prefill", "1", "--decode", "2"), options, environment) as started:
        for name in SERVERS:
            told = httpx.get(f"{started.server(name)['url']}/server_info?config_format=json", timeout=120).json()
            assert told["vllm_config"]["scheduler_config"]["async_scheduling"]
            assert told["vllm_config"]["cache_config"]["enable_prefix_caching"]
        started.refuse_another_prompt(VllmDialect())
        yield started


class History:
    """Which states a server may have been in, and when: none while it is away, all while it changes."""

    def __init__(self) -> None:
        self._turns = [(0.0, frozenset({(0, 0)}))]

    def since(self, at: float, states: Iterable[State]) -> None:
        self._turns.append((at, frozenset(states)))

    def between(self, begun: float, ended: float) -> set[State]:
        turns = pairwise((*self._turns, (math.inf, frozenset[State]())))
        found = (states for (since, states), (until, _) in turns if since <= ended and until >= begun)
        return set().union(*found)


class Operator:
    """Gives every server the weights and adapters that all should have; those that are away get them later."""

    def __init__(self, deployment: Deployment, checkpoints: Sequence[Path], adapters: Mapping[str, Path]) -> None:
        self._deployment, self._checkpoints, self._adapters = deployment, checkpoints, adapters
        self._urls = {name: deployment.server(name)["url"] for name in SERVERS}
        self._has: dict[str, tuple[int, State]] = {}  # process and state
        self._seen = dict.fromkeys(SERVERS, 0.0)  # when each was last in a state that is known, or away
        self._histories = {name: History() for name in SERVERS}
        self._mixing: list[tuple[float, float]] = []  # when requests that ran may have become ones of two states
        self._files = {0}  # versions of the adapters of which files may lie in the folders
        self.weights = self.version = 0
        self.mode = "wait"

    @property
    def state(self) -> State:
        return self.weights, self.version

    def replace_adapters(self, version: int) -> None:
        begun, self._files = time.monotonic(), {self.version, version}
        for history in self._histories.values():
            history.since(begun, STATES)
        for name, path in self._adapters.items():
            replace(path, str(self._checkpoints[0]), seed_of(name, version))
        self.version, self._files = version, {version}
        self._mixing.append((begun, time.monotonic()))

    def right(self, answers: Answers, each: Answer) -> set[str] | None:
        """What would be right; None for what nothing can be said of."""
        if any(begun <= each.ended and ended >= each.begun for begun, ended in self._mixing):
            return None
        may = [history.between(each.begun, each.ended) for history in self._histories.values()]
        return {answers[each.adapter, each.number][state] for state in set().union(*may)}

    def bring(self, name: str) -> bool:
        """Brings a server to that state; whether it is in it now.

        It is paused meanwhile, as vLLM wants it: until what runs has ended, or in the mode `keep` with all that it has.
        """
        at, history, url = time.monotonic(), self._histories[name], self._urls[name]
        state, mode, files = self.state, self.mode, self._files
        try:
            pid = self._deployment.pid_of(name)
            httpx.get(f"{url}/version", timeout=10)
        except (httpx.ConnectError, AssertionError):
            self._has.pop(name, None)
            self._seen[name] = at
            history.since(time.monotonic(), ())
            return False
        except (httpx.HTTPError, psutil.Error):
            return False
        had = self._has.get(name)
        if had == (pid, state):
            self._seen[name] = at
            return True
        history.since(at if had is not None and had[0] == pid else self._seen[name], STATES)
        try:
            self._post(f"{url}/pause?mode={mode}&clear_cache={mode != 'keep'}", None)
            call = {"method": "reload_weights", "kwargs": {"weights_path": str(self._checkpoints[state[0]])}}
            self._post(f"{url}/collective_rpc", call)
            for adapter, path in self._adapters.items():
                body = {"lora_name": adapter, "lora_path": str(path), "load_inplace": True}
                self._post(f"{url}/v1/load_lora_adapter", body)
            self._post(f"{url}/resume", None)
        except httpx.HTTPError:
            return False
        finally:
            if mode == "keep" and name.startswith("decode"):
                self._mixing.append((at, time.monotonic()))
        self._has[name] = pid, state
        history.since(time.monotonic(), ((state[0], version) for version in files | self._files))
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
            asked_at = time.monotonic()
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
            found.answers.append(Answer(adapter, which, text, asked_at, time.monotonic()))

    began, kills = time.monotonic(), 0
    may_kill_at = began + KILL_EVERY_S
    last_killed = dict.fromkeys(SERVERS, 0)
    # After so many kills: how servers are paused from then on, weights, adapters.
    changes = {2: ("keep", 1, 0), 5: ("wait", 1, 1), 8: ("wait", 0, 1)}
    ends = {*changes, KILLS}  # no state ends before an answer had to be of it alone, however slow the machine is

    def saw(state: State) -> bool:
        return any(operator.right(right, each) == {right[each.adapter, each.number][state]} for each in found.answers)

    def operate(name: str) -> None:
        while not is_over.is_set():
            operator.bring(name)
            time.sleep(0.2)

    with ThreadPoolExecutor(CLIENTS + len(SERVERS)) as threads:
        tasks = [threads.submit(client, number) for number in range(CLIENTS)]
        tasks += [threads.submit(operate, name) for name in SERVERS]
        try:
            while kills < KILLS and time.monotonic() - began < LONGEST_S:
                time.sleep(0.2)
                # As long as a side is away nothing is at stake: on a slow machine servers start for longer than that.
                serving = [name for name in SERVERS if deployment.server(name)["is_healthy"]]
                if len({name.partition("-")[0] for name in serving}) < 2:
                    may_kill_at = time.monotonic() + KILL_EVERY_S
                elif time.monotonic() > may_kill_at and (kills + 1 not in ends or saw(operator.state)):
                    victim = min(serving, key=last_killed.__getitem__)
                    try:
                        os.kill(deployment.pid_of(victim), signal.SIGKILL)
                    except (AssertionError, ProcessLookupError, psutil.Error):
                        continue  # it has died, and is not missed yet
                    kills, may_kill_at = kills + 1, time.monotonic() + KILL_EVERY_S
                    last_killed[victim] = kills
                    if kills in changes:
                        operator.mode, operator.weights, version = changes[kills]
                        if version != operator.version:
                            operator.replace_adapters(version)
        finally:
            is_over.set()
    for task in tasks:
        task.result()
    wrong = []
    for each in found.answers:
        may = operator.right(right, each)
        kind = "not judged" if may is None else f"right, of {len(may)}" if each.text in may else "wrong"
        found.kinds[kind] += 1
        if kind == "wrong":
            wrong.append(f"{each}, and not one of {may}")
    with capsys.disabled():
        sys.stdout.write(f"\n    {kills} kills in {time.monotonic() - began:.0f} s: {dict(found.kinds)} ")
    assert not wrong, wrong
    dishonest = {each: count for each, count in found.refused.items() if not HONEST.search(each[1])}
    assert not dishonest, dishonest
    assert kills == KILLS
    assert all(map(saw, STATES))
    until("all are back", 400, lambda: all(deployment.server(name)["is_healthy"] for name in SERVERS))
    until("all have the same", 120, lambda: all(operator.bring(name) for name in SERVERS))
    for (adapter, number), answers in right.items():
        body = {"model": adapter or deployment.model, "prompt": asked[number], "max_tokens": COUNT, "temperature": 0}
        answer = httpx.post(f"{deployment.url}/v1/completions", json={**body, "ignore_eos": True}, timeout=120)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"].strip() == answers[operator.state]
    deployment.refuse_another_prompt(VllmDialect())
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
