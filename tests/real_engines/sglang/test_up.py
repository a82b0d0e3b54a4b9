"""`kvferry up --engine sglang` with real servers: tokens are equal, who is killed comes back, nothing is left over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from examples.tiny_model import write
from tests.real_engines.deployment import READY_S, Deployment, deployed
from tests.real_engines.prompts import prompts
from tests.real_engines.sglang import overlapping
from tests.real_engines.sglang.engine import ENVIRONMENT, OPTIONS, ROOT, STUBS, EngineProcess, Shape, flags
from tests.support.waiting import eventually

from kvferry.applications.up.dialects import SglangDialect
from kvferry.applications.up.plan import LOOPBACK
from kvferry.applications.up.servers import Server
from kvferry.applications.up.supervision import free_ports
from kvferry.protocol.wire.registrations import RankRegistration

pytestmark = [pytest.mark.servers, pytest.mark.timeout(900)]

TOKENS = 8
GIVEN = prompts(60, 4, shortest=20, longest=300)
PROMPT = "w5 w6 w7 w8 " * 30

ENGINE_OPTIONS = flags(
    {
        **{name: value for name, value in OPTIONS.items() if name != "skip_tokenizer_init"},
        "disaggregation_decode_retraction_backup": "cpu_tensor",
        "enable_cache_report": True,
    }
)
SIDES = (
    *("--prefill-options", "--chunked-prefill-size 128"),
    *("--decode-options", "--disaggregation-decode-enable-radix-cache"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[str]:
    """What an engine that is not divided generates."""
    engine = EngineProcess(Shape(model)).started()
    try:
        return [" ".join(f"w{token}" for token in tokens) for tokens in engine.generate(GIVEN, TOKENS)]
    finally:
        engine.close()


def started(model: Path, logs: Path, *options: str) -> AbstractContextManager[Deployment]:
    plugin = str(overlapping.install(logs / "overlapping"))
    path = os.pathsep.join((plugin, str(STUBS), str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))
    environment = {**ENVIRONMENT, "PYTHONPATH": path}
    return deployed(model, logs, ("--engine", "sglang", *SIDES, *options), ENGINE_OPTIONS, environment)


@pytest.fixture(scope="module")
def deployment(model: Path, expected: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with started(model, tmp_path_factory.mktemp("logs"), "--front", "kvferry") as made:
        yield made


def answered(deployment: Deployment, prompt: Sequence[int], **more: Any) -> Any:
    text = " ".join(f"w{token}" for token in prompt)  # the router takes no tokens
    answer = deployment.post(prompt=text, max_tokens=TOKENS, temperature=0, ignore_eos=True, **more)
    assert answer.status_code == 200, answer.text
    return answer.json()


def texts(answer: Any) -> list[str]:
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    return [" ".join(choice["text"].split()) for choice in choices]


def test_tokens_are_those_of_a_server_that_works_alone(deployment: Deployment, expected: list[str]):
    assert [texts(answered(deployment, prompt)) for prompt in GIVEN] == [[each] for each in expected]
    assert deployment.health()["retries"] == 0


def bootstrap_port_of(url: str) -> int:
    port: int = httpx.get(f"{url}/server_info").json()["disaggregation_bootstrap_port"]
    return port


def test_another_prompt_on_the_prefill_side_never_becomes_an_answer(deployment: Deployment):
    port = bootstrap_port_of(deployment.server("prefill-0")["url"])
    deployment.refuse_another_prompt(SglangDialect(), port)


def test_options_for_one_side_reach_that_side_alone(deployment: Deployment):
    health = deployment.health()
    prefill, decode = (httpx.get(f"{health[side][0]['url']}/server_info").json() for side in ("prefill", "decode"))
    assert prefill["chunked_prefill_size"] == 128 != decode["chunked_prefill_size"]
    assert decode["disaggregation_decode_enable_radix_cache"]
    assert not prefill["disaggregation_decode_enable_radix_cache"]


def test_each_of_several_choices_has_the_tokens_of_a_server_that_works_alone(
    deployment: Deployment, expected: list[str]
):
    answer = answered(deployment, GIVEN[3], n=3)
    assert texts(answer) == [expected[3]] * 3
    assert answer["usage"]["prompt_tokens"] == len(GIVEN[3])
    assert answer["usage"]["completion_tokens"] == 3 * TOKENS
    warm = deployment.post(prompt=GIVEN[3], max_tokens=TOKENS, temperature=1, n=3, ignore_eos=True).json()
    assert len(set(texts(warm))) == 3, "choices of their own"
    chat: dict[str, Any] = {
        "messages": [{"role": "user", "content": PROMPT}],
        "temperature": 0,
        "max_tokens": TOKENS,
        "n": 2,
    }
    said = deployment.post(path="/v1/chat/completions", **chat)
    if said.status_code != 400:  # a model without a template of chats has none
        assert len({choice["message"]["content"] for choice in said.json()["choices"]}) == 1
    assert deployment.health()["retries"] == 0


def test_curl_streams_several_choices(deployment: Deployment, expected: list[str]):
    body = {"prompt": GIVEN[2], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "n": 2}
    *events, used = deployment.events(**body, stream_options={"include_usage": True})
    for index in range(2):
        said = [choice["text"] for event in events for choice in event["choices"] if choice["index"] == index]
        assert " ".join("".join(said).split()) == expected[2]
    assert used["usage"]["completion_tokens"] == 2 * TOKENS


def test_a_prefill_server_that_is_told_to_end_first_hands_over_what_it_keeps(
    deployment: Deployment, expected: list[str]
):
    """A decode server comes for a cache after the SIGTERM. Meanwhile everyone sees that the engine drains."""
    prefill, decode = deployment.server("prefill-0"), deployment.server("decode-0")
    body: dict[str, Any] = {"prompt": " ".join(f"w{token}" for token in GIVEN[1]), "max_tokens": TOKENS}
    body |= {"temperature": 0, "ignore_eos": True, "model": deployment.model}
    port = bootstrap_port_of(prefill["url"])
    asked, kept = SglangDialect().asked(body, Server(prefill["url"], "prefill-0", port))
    with ThreadPoolExecutor(1) as caller:
        computed = caller.submit(deployment.post, prefill["url"], **asked)
        with deployment.registry_of("prefill-0") as registry:

            def ranks() -> list[RankRegistration]:
                return [each for view in registry.engines() for each in view.registrations]

            (first,) = ranks()
            with deployment.terminated("prefill-0"):
                eventually("the registry says so", lambda: ranks()[0].draining)
                eventually("the front has seen it", lambda: deployment.server("prefill-0")["is_draining"])
                eventually("its rank waits for somebody", lambda: ranks()[0].open_rooms == 1)
                told = deployment.post(decode["url"], **kept)
                assert told.status_code == 200, told.text
                assert texts(told.json()) == [expected[1]]
                assert computed.result().status_code == 200
            eventually("its successor is there", lambda: [each.incarnation for each in ranks()] != [first.incarnation])
            assert not any(each.draining for each in ranks())
    assert texts(answered(deployment, GIVEN[1])) == [expected[1]]


@pytest.fixture
def router(deployment: Deployment, tmp_path: Path) -> Iterator[str]:
    """The address of SGLang's own router, from the package index, in front of the same servers."""
    pytest.importorskip("sglang_router", reason="SGLang's router is not installed: pip install sglang-router")
    port, metrics_port = free_ports(2)
    prefill, decode = (deployment.health()[side][0]["url"] for side in ("prefill", "decode"))
    bootstrap_port = bootstrap_port_of(prefill)
    command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)]
    command += ["--prefill", prefill, str(bootstrap_port), "--decode", decode, "--worker-startup-check-interval", "1"]
    command += ["--health-check-interval-secs", "1", "--health-success-threshold", "1"]
    with (tmp_path / "router.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        try:
            return httpx.get(f"{url}/readiness", timeout=1).is_success
        except httpx.HTTPError:
            return False

    try:
        deadline = time.monotonic() + READY_S
        while not is_ready():
            is_lost = process.poll() is not None or time.monotonic() > deadline
            assert not is_lost, (tmp_path / "router.log").read_text()
            time.sleep(0.1)
        yield url
    finally:
        process.kill()  # in order it waits for what is idle; it keeps nothing
        process.wait()


def test_behind_sglangs_router_tokens_are_those_of_a_server_that_works_alone(
    deployment: Deployment, router: str, expected: list[str]
):
    likeliest: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    prompts_as_text = [" ".join(f"w{token}" for token in prompt) for prompt in GIVEN]
    answers = [deployment.post(router, prompt=prompt, **likeliest) for prompt in prompts_as_text]
    assert [answer.status_code for answer in answers] == [200] * len(GIVEN)
    assert [texts(answer.json()) for answer in answers] == [[each] for each in expected]
    stream = deployment.post(router, prompt=prompts_as_text[2], stream=True, **likeliest).text
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    said = [choice["text"] for event in events for choice in json.loads(event)["choices"]]
    assert " ".join("".join(said).split()) == expected[2]


def test_it_stops_in_order_and_leaves_nothing(deployment: Deployment):
    deployment.interrupt()


@pytest.mark.long
def test_who_is_killed_costs_a_retry_at_most_and_comes_back(model: Path, tmp_path: Path):
    with started(model, tmp_path, "--front", "kvferry", "--prefill", "2") as two:
        expected = two.ask(PROMPT).json()["choices"][0]["text"]
        two.kill_and_compare("prefill-0", PROMPT, expected)
        two.refuse_another_prompt(SglangDialect(), bootstrap_port_of(two.server("prefill-0")["url"]))


def urls_behind_a_router(deployment: Deployment) -> tuple[str, str]:
    """Of the prefill and of the decode server: the router itself hides its command line."""
    lines = [each.cmdline() for each in psutil.Process(deployment.process.pid).children(recursive=True)]

    def url(side: str) -> str:
        line = next(each for each in lines if ("--disaggregation-mode", side) in pairwise(each))
        return f"http://{LOOPBACK}:{line[line.index('--port') + 1]}"

    return url("prefill"), url("decode")


@pytest.mark.long
def test_sglangs_router_stands_in_front_where_it_is_installed(model: Path, expected: list[str], tmp_path: Path):
    with started(model, tmp_path) as routed:
        assert "  router serves\n" in routed.said
        urls = urls_behind_a_router(routed)
        routed.refuse_another_prompt(SglangDialect(), bootstrap_port_of(urls[0]), urls)
        assert [texts(answered(routed, prompt)) for prompt in GIVEN] == [[each] for each in expected]
        refused = routed.post(prompt=PROMPT, max_tokens=TOKENS, n=2)
        assert refused.status_code == 500
        assert "is in use here by another request" in refused.text, "SGLang asked for all choices under one room"
        assert texts(answered(routed, GIVEN[1])) == [expected[1]]
