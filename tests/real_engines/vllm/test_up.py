"""`kvferry up` with real servers: a stream comes, a server that is killed costs a retry, and nothing is left over.

Gateways of others, as they are, ask the same servers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from examples.tiny_model import write
from tests.real_engines.deployment import Deployment, deployed
from tests.real_engines.vllm.engine import ENVIRONMENT
from tests.support.gateways import GATEWAYS, Gateway
from tests.support.waiting import eventually

from kvferry.applications.up.dialects import VllmDialect

pytestmark = [pytest.mark.servers, pytest.mark.timeout(900)]

OPTIONS = (
    *("--dtype", "float32", "--max-model-len", "1024", "--block-size", "32", "--enforce-eager"),
    *("--kv-cache-memory-bytes", str(64 << 20), "--shutdown-timeout", "60"),
)
UP_OPTIONS = (
    *("--prefill", "2", "--decode", "1", "--decode-options", "--served-model-name '{model}' tiny"),
    *("--prefill-options", "--middleware kvferry.engines.vllm.engine_names.EngineNames"),
)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    model = write("qwen3", tmp_path_factory.mktemp("model"))
    options = [each.format(model=model) for each in UP_OPTIONS]
    with deployed(model, tmp_path_factory.mktemp("logs"), options, OPTIONS, ENVIRONMENT) as started:
        yield started


def received(deployment: Deployment) -> int:
    """How many caches the decode server has received."""
    metrics = httpx.get(f"{deployment.server('decode-0')['url']}/metrics", timeout=10).text
    lines = [line for line in metrics.splitlines() if line.startswith("vllm:kvferry_receive_seconds_count")]
    return round(sum(float(line.split()[-1]) for line in lines))


def test_curl_streams_a_completion(deployment: Deployment):
    events = deployment.events(prompt="w1 w2 w3 " * 40, max_tokens=5, ignore_eos=True)
    assert len(events) == 5
    assert "".join(event["choices"][0]["text"] for event in events).strip()


def test_another_prompt_on_the_prefill_side_never_becomes_an_answer(deployment: Deployment):
    deployment.refuse_another_prompt(VllmDialect())


def test_options_for_one_side_reach_that_side_alone(deployment: Deployment):
    named = {
        name: [each["id"] for each in httpx.get(f"{deployment.server(name)['url']}/v1/models").json()["data"]]
        for name in ("prefill-0", "decode-0")
    }
    assert named == {"prefill-0": [deployment.model], "decode-0": [deployment.model, "tiny"]}


def test_three_choices_of_one_request_are_those_of_a_server_that_works_alone(deployment: Deployment):
    body: dict[str, Any] = {
        "prompt": "w7 w8 w9 " * 50,
        "max_tokens": 8,
        "ignore_eos": True,
        "n": 3,
        "temperature": 1.0,
        "seed": 11,
    }

    def choices(url: str) -> list[str]:
        answer = deployment.post(url, **body)
        assert answer.status_code == 200, answer.text
        return [choice["text"] for choice in sorted(answer.json()["choices"], key=lambda choice: choice["index"])]

    before = received(deployment)
    crossed = choices(deployment.url)
    assert len(set(crossed)) == 3
    assert crossed == choices(deployment.server("prefill-0")["url"])
    assert received(deployment) - before == 1, "one fetch for all of them"


@pytest.mark.parametrize("kind", GATEWAYS)
def test_behind_a_gateway_tokens_are_those_of_a_server_that_works_alone(deployment: Deployment, kind: type[Gateway]):
    alone = deployment.server("prefill-0")["url"]
    gateway = kind(alone, deployment.server("decode-0")["url"])
    words = f"w{GATEWAYS.index(kind)} w1 w2 w3 w4 w5 w6 "
    body: dict[str, Any] = {"model": deployment.model, "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    before = received(deployment)
    for length in (5, 60):
        asked = {**body, "prompt": words * length}
        crossed, right = gateway.ask(asked), deployment.post(alone, **asked)
        assert crossed.status_code == right.status_code == 200, crossed.text
        assert crossed.json()["choices"][0]["text"] == right.json()["choices"][0]["text"]
    assert received(deployment) - before == 2, "prompts were computed on the decode side"
    stream = gateway.ask({**body, "prompt": words * 7, "stream": True, "stream_options": {"include_usage": True}})
    assert stream.text.splitlines()[-2:] == ["data: [DONE]", ""], stream.text
    choices = {**body, "prompt": words * 9, "n": 2, "temperature": 1.0, "seed": 3}
    texts = [
        sorted(choice["text"] for choice in answer.json()["choices"])
        for answer in (gateway.ask(choices), deployment.post(alone, **choices))
    ]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 2
    assert received(deployment) - before == 4, "choices of one request are fetched once"


def test_a_prefill_server_that_is_killed_costs_a_retry_and_comes_back(deployment: Deployment):
    prompt = "w5 w6 w7 w8 " * 30
    deployment.kill_and_compare("prefill-0", prompt, deployment.ask(prompt).json()["choices"][0]["text"])
    logs = {log.stem for log in deployment.logs.glob("*.log")}
    assert logs >= {"registry", "prefill-0", "prefill-1", "decode-0", "front"}


def test_a_prefill_server_that_is_told_to_end_first_hands_over_what_it_keeps(deployment: Deployment):
    """A decode server comes for a cache after the SIGTERM. Meanwhile everyone sees that the engine drains."""
    prompt = "w9 w8 w7 w6 " * 30
    expected = deployment.ask(prompt).json()["choices"][0]["text"]
    prefill, decode = deployment.server("prefill-1")["url"], deployment.server("decode-0")["url"]
    asked = deployment.post(prefill, prompt=prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    answer = asked.json()["kv_transfer_params"]
    before = received(deployment)
    with deployment.registry_of("prefill-1") as registry, deployment.terminated("prefill-1") as process:
        eventually("the registry says so", lambda: registry.engine("prefill-1").draining)
        eventually("the front has seen it", lambda: deployment.server("prefill-1")["is_draining"])
        assert not registry.engine("prefill-1").registrations[0].drained
        assert process.is_running()
        told = deployment.post(decode, prompt=prompt, max_tokens=4, temperature=0, kv_transfer_params=answer)
        assert told.status_code == 200, told.text
        assert told.json()["choices"][0]["text"] == expected
        assert received(deployment) - before == 1
    assert deployment.ask(prompt).json()["choices"][0]["text"] == expected


def test_it_stops_in_order_and_leaves_nothing(deployment: Deployment):
    deployment.interrupt()
