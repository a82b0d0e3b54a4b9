"""The address in front of prefill and decode servers: who is asked, what is told, and what happens when one fails."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from tests.support.caches import Model, Shape
from tests.support.engines import DecodeEngine, Engines
from tests.support.fronts import NAMES, FrontDeployment
from tests.support.registries import rank
from tests.support.waiting import PATIENCE_S, eventually

from kvferry.applications.top.asking import addresses
from kvferry.applications.up import servers
from kvferry.applications.up.dialects import DIALECTS
from kvferry.applications.up.servers import DrainWatch, Server
from kvferry.control.registry import Registry
from kvferry.control.registry_client import RegistryClient
from kvferry.control.registry_server import RegistryServer
from kvferry.engines.vllm.parameters import ROOM

FAILED_EVENT = 'data: {"choices": [{"text": "", "finish_reason": "error"}]}\n\n'


@dataclass
class FakeServer:
    """What speaks OpenAI's interface.

    Attributes:
        rooms: of prompts that prefill servers have computed; decode servers wait for them.
        asked: the bodies of all requests.
        status: of its answers.
        is_healthy: what it says when asked.
        hangs: whether it answers nothing when asked for its health.
        looks: how often it was asked for that.
        first_event: of a stream, instead of a token.
        breaks: whether it breaks a stream off after the first token.
        waits: whether it never comes to an end.
        left: how many requests have ended.
    """

    rooms: set[int]
    asked: list[dict[str, Any]] = field(default_factory=list)
    status: int = 200
    is_healthy: bool = True
    hangs: bool = False
    looks: int = 0
    first_event: str = ""
    breaks: bool = False
    waits: bool = False
    left: int = 0

    def app(self) -> Starlette:
        routes = [
            Route("/v1/completions", self.answer, methods=["POST"]),
            Route("/v1/chat/completions", self.answer, methods=["POST"]),
            Route("/v1/models", lambda _: JSONResponse({"data": [{"id": "tiny"}]})),
            Route("/health", self.health),
        ]
        return Starlette(routes=routes)

    async def health(self, _: Request) -> Response:
        self.looks += 1
        while self.hangs:
            await asyncio.sleep(0.01)
        return PlainTextResponse("", 200 if self.is_healthy else 503)

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append(body)
        if self.status != 200:
            return JSONResponse({"error": "no"}, self.status)
        parameters = body.get("kv_transfer_params", {})
        if parameters.get("do_remote_decode"):
            self.rooms.add(parameters[ROOM])
        while parameters.get("do_remote_prefill") and parameters[ROOM] not in self.rooms:
            await asyncio.sleep(0.001)
        if not body.get("stream"):
            try:
                while self.waits:
                    await asyncio.sleep(0.01)
                    if await request.is_disconnected():
                        break
            finally:
                self.left += 1
            return JSONResponse({"choices": [{"text": "whole"}]})
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[str]:
        yield ": a comment\n\n"
        yield self.first_event or 'data: {"choices": [{"text": "first", "finish_reason": null}]}\n\n'
        if self.breaks:
            raise RuntimeError("broken off")
        try:
            while self.waits:
                yield ": waiting\n\n"
                await asyncio.sleep(0.01)
        finally:
            self.left += 1
        yield 'data: {"choices": [{"text": "second", "finish_reason": "stop"}]}\n\n'
        yield "data: [DONE]\n\n"


class Deployment(FrontDeployment[FakeServer]):
    """Two servers of vLLM of either kind and the front before them."""

    def __init__(self, registries: Sequence[Registry] = (), decode_ranks: Sequence[Sequence[str]] = ()) -> None:
        rooms: set[int] = set()
        super().__init__(DIALECTS["vllm"], {name: FakeServer(rooms) for name in NAMES}, registries, decode_ranks)

    def shown(self, name: str) -> dict[str, Any]:
        health = httpx.get(f"{self.url}/health").json()
        return next(each for each in health[name.partition("-")[0]] if each["engine"] == name)


@pytest.fixture
def deployment() -> Iterator[Deployment]:
    made = Deployment()
    yield made
    made.close()


@pytest.fixture
def registry() -> Iterator[RegistryServer]:
    with RegistryServer(port=0, lease_s=3600.0) as started:
        yield started


@pytest.fixture
def registered(registry: RegistryServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Deployment]:
    """Servers whose ranks are registered, behind a front that asks often."""
    monkeypatch.setattr(servers, "INTERVAL_S", 0.02)
    with RegistryClient(registry.url) as client:
        for name in ("prefill-0", "prefill-1"):
            client.register(rank(engine=name, tp_size=1, incarnation=f"{name}/first"))
        made = Deployment([client, client])
        yield made
        made.close()


def texts(stream: str) -> list[str]:
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: {")]
    return [json.loads(event)["choices"][0]["text"] for event in events]


def test_both_servers_are_asked_under_one_room(deployment: Deployment):
    answer = deployment.ask(max_tokens=7)
    assert answer.json() == {"choices": [{"text": "whole"}]}
    (prefill,), (decode,) = deployment.asked("prefill"), deployment.asked("decode")
    assert prefill["max_tokens"] == 1
    assert decode["max_tokens"] == 7
    room = prefill["kv_transfer_params"][ROOM]
    assert prefill["kv_transfer_params"] == {"do_remote_decode": True, ROOM: room}
    engine = decode["kv_transfer_params"]["remote_engine_id"]
    assert deployment.fakes[engine].asked == [prefill]
    assert decode["kv_transfer_params"] == {"do_remote_prefill": True, "remote_engine_id": engine, ROOM: room}


def test_no_proxy_comes_between_the_front_and_its_servers(monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setenv("http_proxy", "http://127.0.0.1:9")
        for name in ("no_proxy", "NO_PROXY"):
            patch.delenv(name, raising=False)
        behind = Deployment()
    assert behind.ask().json() == {"choices": [{"text": "whole"}]}
    behind.close()


def test_rooms_differ_and_servers_take_turns(deployment: Deployment):
    for _ in range(4):
        deployment.ask()
    assert {len(fake.asked) for fake in deployment.fakes.values()} == {2}
    assert len({body["kv_transfer_params"][ROOM] for body in deployment.asked("prefill")}) == 4


def test_a_stream_is_passed_on_but_not_asked_of_the_prefill_server(deployment: Deployment):
    answer = deployment.ask(stream=True, stream_options={"include_usage": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert texts(answer.text) == ["first", "second"]
    assert answer.text.endswith("data: [DONE]\n\n")
    (prefill,) = deployment.asked("prefill")
    assert prefill["stream"] is False
    assert "stream_options" not in prefill


def test_a_chat_is_asked_for_one_token_of_the_prefill_server(deployment: Deployment):
    body = {"messages": [], "max_completion_tokens": 9, "min_tokens": 4}
    httpx.post(f"{deployment.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    (prefill,), (decode,) = deployment.asked("prefill"), deployment.asked("decode")
    assert (prefill["max_completion_tokens"], "min_tokens" in prefill) == (1, False)
    assert (decode["max_completion_tokens"], decode["min_tokens"]) == (9, 4)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_a_server_that_has_died_costs_one_retry(deployment: Deployment, name: str, stream: bool):
    deployment.served[name].close()
    answer = deployment.ask(stream=stream)
    assert answer.status_code == 200
    assert "second" in answer.text or "whole" in answer.text
    assert deployment.front.retries <= 1


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_a_server_that_fails_costs_one_retry(deployment: Deployment, name: str):
    deployment.fakes[name].status = 500
    assert deployment.ask().status_code == 200
    assert deployment.front.retries == 1


def test_a_stream_that_fails_before_its_first_token_is_tried_again(deployment: Deployment):
    deployment.fakes["decode-0"].first_event = FAILED_EVENT
    assert texts(deployment.ask(stream=True).text) == ["first", "second"]
    assert deployment.front.retries == 1


def test_a_stream_that_breaks_off_later_says_so(deployment: Deployment):
    for name in ("decode-0", "decode-1"):
        deployment.fakes[name].breaks = True
    answer = deployment.ask(stream=True)
    assert texts(answer.text.split('data: {"error"')[0]) == ["first"]
    assert "the decode server was lost" in answer.text
    assert deployment.front.retries == 0


def test_what_the_client_did_wrong_is_not_tried_again(deployment: Deployment):
    for fake in deployment.fakes.values():
        fake.status = 400
    assert deployment.ask().status_code == 400
    assert deployment.front.retries == 0


def test_nobody_who_is_well_is_a_clear_answer(deployment: Deployment):
    for name in ("prefill-0", "prefill-1"):
        deployment.fakes[name].is_healthy = False
    eventually("it is known", lambda: httpx.get(f"{deployment.url}/health").status_code == 503)
    answer = deployment.ask()
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "no prefill server is well"


def test_all_failing_ends_with_the_last_problem(deployment: Deployment):
    for fake in deployment.fakes.values():
        fake.status = 500
    answer = deployment.ask()
    assert answer.status_code == 502
    assert "tried 3 times" in answer.json()["error"]["message"]


@pytest.mark.parametrize("body", ["", "[]", "{"])
def test_what_is_no_request_is_refused(deployment: Deployment, body: str):
    answer = httpx.post(f"{deployment.url}/v1/completions", content=body, timeout=PATIENCE_S)
    assert answer.status_code == 400


def test_several_choices_are_asked_of_the_decode_server_alone(deployment: Deployment):
    """They share the cache of one prompt, which the prefill server computes once."""
    assert deployment.ask(n=3).status_code == 200
    (prefill,), (decode,) = deployment.asked("prefill"), deployment.asked("decode")
    assert "n" not in prefill
    assert decode["n"] == 3


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"best_of": 2}, "best_of: ask for several choices with n instead"),
        (
            {"use_beam_search": True},
            "use_beam_search: vLLM makes requests of its own for every token then, and none of them fetches the cache; "
            "leave it away",
        ),
        ({"prompt": ["one", "two"]}, "prompt: 2 prompts in one request; send one request for each"),
        ({"prompt": [[1, 2], [3, 4]]}, "prompt: 2 prompts in one request; send one request for each"),
    ],
)
def test_what_would_be_several_requests_is_refused(deployment: Deployment, body: dict[str, Any], said: str):
    answer = deployment.ask(**body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == said
    assert deployment.asked("prefill") == []


@pytest.mark.parametrize("prompt", ["one", ["one"], [1, 2, 3], [[1, 2, 3]]])
def test_a_prompt_in_any_form_is_passed_on(deployment: Deployment, prompt: object):
    assert deployment.ask(prompt=prompt).status_code == 200
    assert [body["prompt"] for body in deployment.asked("prefill")] == [prompt]


def test_a_client_that_goes_lets_the_decode_server_know(deployment: Deployment):
    decodes = [deployment.fakes[name] for name in ("decode-0", "decode-1")]
    for fake in decodes:
        fake.waits = True
    with httpx.stream("POST", f"{deployment.url}/v1/completions", json={"stream": True}, timeout=PATIENCE_S) as answer:
        chunks = answer.iter_bytes()  # kept: a generator that nobody holds closes the connection
        next(chunks)
        assert sum(fake.left for fake in decodes) == 0
    eventually("it knows", lambda: sum(fake.left for fake in decodes) == 1)


def test_a_client_that_does_not_wait_for_the_whole_answer_lets_both_servers_know(deployment: Deployment):
    for fake in deployment.fakes.values():
        fake.waits = True
    host, _, port = deployment.front_served.address.partition(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        eventually("both were asked", lambda: sum(len(fake.asked) for fake in deployment.fakes.values()) == 2)
    eventually("they know", lambda: sum(fake.left for fake in deployment.fakes.values()) == 2)


def test_it_is_ready_when_all_are_well_and_healthy_while_requests_can_be_served(deployment: Deployment):
    assert httpx.get(f"{deployment.url}/ready").status_code == 200
    deployment.fakes["decode-1"].is_healthy = False
    eventually("one is known to be missing", lambda: httpx.get(f"{deployment.url}/ready").status_code == 503)
    assert httpx.get(f"{deployment.url}/livez").status_code == 200
    assert httpx.get(f"{deployment.url}/health").status_code == 200


def test_a_server_that_does_not_answer_keeps_nobody_from_hearing_of_the_others(deployment: Deployment):
    silent, other = deployment.fakes["prefill-0"], deployment.fakes["decode-1"]
    silent.hangs = True
    asked = silent.looks
    eventually("it is asked, in vain", lambda: silent.looks > asked)
    looks = other.looks
    eventually("the other is asked again and again", lambda: other.looks > looks + 2)
    assert deployment.front.prefill.servers[0].is_healthy, "the answer was waited for, or its deadline"


# ---- servers that drain ---------------------------------------------------------------------------------------------


def test_a_prefill_server_that_drains_gets_no_requests(registered: Deployment, registry: RegistryServer):
    """Although its own health is as good as ever, and although what it would be asked for fails."""
    with RegistryClient(registry.url) as operator:
        operator.drain("prefill-0")
    eventually("the front has seen it", lambda: registered.shown("prefill-0")["is_draining"])
    assert registered.shown("prefill-0")["is_healthy"]
    registered.fakes["prefill-0"].status = 500
    assert {registered.ask().status_code for _ in range(6)} == {200}
    assert (len(registered.fakes["prefill-0"].asked), len(registered.fakes["prefill-1"].asked)) == (0, 6)
    assert registered.front.retries == 0
    assert httpx.get(f"{registered.url}/health").status_code == 200


def test_its_successor_gets_requests(registered: Deployment, registry: RegistryServer):
    with RegistryClient(registry.url) as client:
        client.drain("prefill-0")
        eventually("the front has seen it", lambda: registered.shown("prefill-0")["is_draining"])
        client.register(rank(engine="prefill-0", tp_size=1, incarnation="second"))
    eventually("the front has seen it", lambda: not registered.shown("prefill-0")["is_draining"])
    for _ in range(4):
        registered.ask()
    assert {len(registered.fakes[name].asked) for name in ("prefill-0", "prefill-1")} == {2}


def test_one_that_has_drained_and_left_gets_none_until_its_successor_has_come(registry: RegistryServer):
    """Its ranks leave the registry before its HTTP server ends."""
    server = Server("http://127.0.0.1:9", "prefill-0")
    with RegistryClient(registry.url) as client:
        seen = []
        for change in (
            lambda: client.register(rank(engine="prefill-0", tp_size=1)),
            lambda: client.drain("prefill-0"),
            lambda: client.remove("prefill-0", 0, "first"),
            lambda: client.register(rank(engine="prefill-0", tp_size=1, incarnation="second")),
        ):
            change()
            asyncio.run(DrainWatch(server, partial(servers.registered, client, lambda: "prefill-0")).look())
            seen.append(server.is_draining)
    assert seen == [False, True, True, False]


@pytest.mark.full
def test_where_all_drain_that_is_the_answer(registered: Deployment, registry: RegistryServer):
    with RegistryClient(registry.url) as operator:
        operator.drain("prefill-0")
        operator.drain("prefill-1")
    eventually("the front has seen it", lambda: httpx.get(f"{registered.url}/health").status_code == 503)
    answer = registered.ask()
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == (
        "every prefill server that is well drains: start another one, or ask again when its successor serves"
    )
    assert registered.asked("prefill") == registered.asked("decode") == []


@pytest.mark.full
def test_a_registry_that_is_gone_leaves_what_was_known(
    registered: Deployment, registry: RegistryServer, caplog: pytest.LogCaptureFixture
):
    with RegistryClient(registry.url) as operator:
        operator.drain("prefill-0")
    eventually("the front has seen it", lambda: registered.shown("prefill-0")["is_draining"])
    registry.close()
    eventually("the front has said so", lambda: "nobody says whether prefill-0 drains: " in caplog.text)
    for _ in range(4):
        assert registered.ask().status_code == 200
    assert len(registered.fakes["prefill-1"].asked) == 4


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, registry: RegistryServer) -> Iterator[dict[str, DecodeEngine]]:
    """Two ranks for each decode server, which say where they stand."""
    monkeypatch.setattr(servers, "INTERVAL_S", 0.02)
    with Engines(registry.url, observe_port=0) as engines:
        yield {name: engines.decode(Model(), Shape(tp=2)) for name in ("decode-0", "decode-1")}


@pytest.fixture
def watched(ranks: dict[str, DecodeEngine]) -> Iterator[Deployment]:
    """Servers before which stands a front that asks decode ranks."""
    made = Deployment(
        decode_ranks=[addresses([str(endpoint.observe_url) for endpoint in each.endpoints]) for each in ranks.values()]
    )
    yield made
    made.close()


@pytest.mark.parametrize("which", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_decode_server_of_which_a_rank_drains_gets_no_requests(
    watched: Deployment, ranks: dict[str, DecodeEngine], which: int
):
    ranks["decode-0"].endpoints[which].drain()
    eventually("the front has seen it", lambda: watched.shown("decode-0")["is_draining"])
    assert not watched.shown("decode-1")["is_draining"]
    watched.fakes["decode-0"].status = 500
    assert {watched.ask().status_code for _ in range(6)} == {200}
    assert (len(watched.fakes["decode-0"].asked), len(watched.fakes["decode-1"].asked)) == (0, 6)
    assert watched.front.retries == 0


@pytest.mark.full
def test_a_decode_server_that_has_drained_and_left_gets_none(
    watched: Deployment, ranks: dict[str, DecodeEngine], caplog: pytest.LogCaptureFixture
):
    for endpoint in ranks["decode-0"].endpoints:
        endpoint.drain()
    eventually("the front has seen it", lambda: watched.shown("decode-0")["is_draining"])
    for endpoint in ranks["decode-0"].endpoints:
        endpoint.close()
    eventually("nobody answers any more", lambda: "nobody says whether decode-0 drains: " in caplog.text)
    assert watched.shown("decode-0")["is_draining"]
    for endpoint in ranks["decode-1"].endpoints:
        endpoint.drain()
    eventually("the front has seen it", lambda: httpx.get(f"{watched.url}/health").status_code == 503)
    answer = watched.ask()
    assert answer.status_code == 503
    assert answer.json()["error"]["message"].startswith("every decode server that is well drains: ")


def test_models_and_health(deployment: Deployment):
    assert httpx.get(f"{deployment.url}/v1/models").json() == {"data": [{"id": "tiny"}]}
    health = httpx.get(f"{deployment.url}/health").json()
    assert [each["engine"] for each in health["prefill"]] == ["prefill-0", "prefill-1"]
    assert health["retries"] == 0
