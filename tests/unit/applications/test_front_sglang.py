"""The front before SGLang's servers: the parameters of its router, and several choices of one request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from tests.support.fronts import NAMES, FrontDeployment
from tests.support.http import Served
from tests.support.waiting import PATIENCE_S, eventually

from kvferry.applications.up.dialects import DIALECTS
from kvferry.applications.up.servers import Server
from kvferry.engines.sglang.directory import Announcement

USED = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7, "prompt_tokens_details": None}
REFUSED = {"message": "the prompt is too long"}


@dataclass
class FakeServer:
    """What speaks OpenAI's interface as SGLang's servers do.

    Attributes:
        is_prefill: whether decode servers wait for the rooms that it has computed.
        events: what happened, on all servers, in order.
        rooms: of prompts that prefill servers have computed.
        asked: the bodies of all requests.
        status: of its answers.
        fails_once: whether the next answer is an error.
        waits: whether a stream never comes to its end.
        left: how many streams have ended.
    """

    is_prefill: bool
    events: list[str]
    rooms: set[int]
    asked: list[dict[str, Any]] = field(default_factory=list)
    status: int = 200
    fails_once: bool = False
    waits: bool = False
    left: int = 0

    def app(self) -> Starlette:
        routes = [
            Route("/v1/completions", self.answer, methods=["POST"]),
            Route("/v1/chat/completions", self.answer, methods=["POST"]),
            Route("/health", lambda _: PlainTextResponse("")),
        ]
        return Starlette(routes=routes)

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append(body)
        self.events.append(f"{'prefill' if self.is_prefill else 'decode'} asked")
        room = body["bootstrap_room"]
        if self.status != 200:
            return JSONResponse(REFUSED, self.status)
        if self.fails_once:
            self.fails_once = False
            return JSONResponse(REFUSED, 500)
        if self.is_prefill:
            await asyncio.sleep(0.05)  # so that whoever does not wait for the prompt is seen not to
            self.rooms.add(room)
            self.events.append("computed")
            return JSONResponse({"choices": []})
        while room not in self.rooms:
            await asyncio.sleep(0.001)
        text = f"choice {len(self.rooms)}"
        if body.get("stream"):
            return StreamingResponse(self._stream(body, f"id-{room}"), media_type="text/event-stream")
        choice = {"index": 0, "text": text, "finish_reason": "stop"}
        return JSONResponse({"id": f"id-{room}", "choices": [choice], "usage": USED})

    async def _stream(self, body: dict[str, Any], name: str) -> AsyncIterator[str]:
        def event(**said: Any) -> str:
            return f"data: {json.dumps({'id': name, **said})}\r\n\r\n"

        try:
            for text in ("one", "two"):
                yield event(choices=[{"index": 0, "text": f"{text} of {name}", "finish_reason": None}])
                while self.waits:
                    yield ": waiting\n\n"
                    await asyncio.sleep(0.01)
            if body.get("stream_options"):
                yield event(choices=[], usage=USED)
            yield "data: [DONE]\n\n"
        finally:
            self.left += 1


class Deployment(FrontDeployment[FakeServer]):
    """Two servers of SGLang of either kind and the front before them."""

    def __init__(self) -> None:
        self.events: list[str] = []
        rooms: set[int] = set()
        fakes = {name: FakeServer(name.startswith("prefill"), self.events, rooms) for name in NAMES}
        super().__init__(DIALECTS["sglang"], fakes)


@pytest.fixture
def deployment() -> Iterator[Deployment]:
    made = Deployment()
    yield made
    made.close()


def events(answer: httpx.Response) -> list[Any]:
    found = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [each if each == "[DONE]" else json.loads(each) for each in found]


def test_a_prefill_servers_engine_is_called_what_its_bootstrap_server_announces():
    with Served(Response(msgspec.json.encode(Announcement("sglang-a:8998@5f2c9a1e", 1)))) as bootstrap:
        host, _, port = bootstrap.address.rpartition(":")
        server = Server(f"http://{host}:30000", "prefill-0", bootstrap_port=int(port))
        assert DIALECTS["sglang"].registered_name(server) == "sglang-a:8998@5f2c9a1e"


def test_both_servers_are_asked_the_same_under_one_room(deployment: Deployment):
    answer = deployment.ask(max_tokens=7, min_tokens=3, stream_options=None, temperature=0.5)
    assert answer.json()["choices"][0]["text"] == "choice 1"
    (prefill,), (decode,) = deployment.asked("prefill"), deployment.asked("decode")
    number = next(number for number in range(2) if deployment.fakes[f"prefill-{number}"].asked)
    assert decode["bootstrap_host"] == "127.0.0.1"
    assert decode["bootstrap_port"] == 8998 + number
    assert 0 < decode["bootstrap_room"] < 1 << 63
    assert "kv_transfer_params" not in decode
    # It generates the first token: whatever chooses a token must be the same there.
    assert prefill == {**{name: value for name, value in decode.items() if name != "stream_options"}, "stream": False}


def test_a_stream_is_asked_of_the_decode_server_alone(deployment: Deployment):
    said = events(deployment.ask(stream=True, stream_options={"include_usage": True}))
    assert [each["choices"][0]["text"].partition(" ")[0] for each in said[:2]] == ["one", "two"]
    assert said[2]["usage"] == USED
    assert said[3:] == ["[DONE]"]
    (prefill,), (decode,) = deployment.asked("prefill"), deployment.asked("decode")
    assert (prefill["stream"], "stream_options" in prefill) == (False, False)
    assert (decode["stream"], decode["stream_options"]) == (True, {"include_usage": True})


# ---- several choices ------------------------------------------------------------------------------------------------


def test_each_choice_has_a_room_of_its_own_at_the_same_servers(deployment: Deployment):
    """SGLang's own `n` would put a first request and all choices into one room."""
    answer = deployment.ask(n=3, seed=7).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"] == {**USED, "completion_tokens": 6, "total_tokens": 11}
    for kind in ("prefill", "decode"):
        bodies = deployment.asked(kind)
        assert [(body["n"], body["seed"]) for body in bodies] == [(1, 7)] * 3
        assert len({body["bootstrap_room"] for body in bodies}) == 3
        assert sorted(len(fake.asked) for name, fake in deployment.fakes.items() if name.startswith(kind)) == [0, 3]


def test_the_prompt_is_computed_once_before_the_other_choices_are_asked_for(deployment: Deployment):
    deployment.ask(n=3)
    assert deployment.events[:3].count("computed") == 1
    assert [each for each in deployment.events if each != "decode asked"][:2] == ["prefill asked", "computed"]


def test_a_chat_has_several_choices_too(deployment: Deployment):
    answer = deployment.ask("/v1/chat/completions", n=2)
    assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1]


def test_streams_of_several_choices_are_one_stream(deployment: Deployment):
    said = events(deployment.ask(n=3, stream=True, stream_options={"include_usage": True}))
    *tokens, used, end = said
    assert end == "[DONE]"
    assert "[DONE]" not in tokens
    assert used["usage"] == {**USED, "completion_tokens": 6, "total_tokens": 11}
    assert {each["id"] for each in said[:-1]} == {tokens[0]["id"]}
    for index in range(3):
        own = [choice["text"] for each in tokens for choice in each["choices"] if choice["index"] == index]
        assert [text.partition(" ")[0] for text in own] == ["one", "two"]
        assert len({text.partition(" of ")[2] for text in own}) == 1, "of one server's answer"
    assert len(tokens) == 6


def test_a_choice_that_fails_is_tried_again_alone(deployment: Deployment):
    for name in ("decode-0", "decode-1"):
        deployment.fakes[name].fails_once = True
    answer = deployment.ask(n=3)
    assert answer.status_code == 200
    assert len(answer.json()["choices"]) == 3
    assert deployment.front.retries == 2
    assert len(deployment.asked("decode")) == 5


def test_what_the_client_did_wrong_is_said_once(deployment: Deployment):
    for fake in deployment.fakes.values():
        fake.status = 400
    answer = deployment.ask(n=3)
    assert (answer.status_code, answer.json()) == (400, REFUSED)
    assert len(deployment.asked("decode")) == 1
    assert deployment.front.retries == 0


def test_a_client_that_goes_ends_all_choices(deployment: Deployment):
    fakes = [deployment.fakes[name] for name in ("decode-0", "decode-1")]
    for fake in fakes:
        fake.waits = True
    url, body = f"{deployment.front_served.url}/v1/completions", {"stream": True, "n": 3}
    with httpx.stream("POST", url, json=body, timeout=PATIENCE_S) as answer:
        chunks = answer.iter_bytes()  # kept: a generator that nobody holds closes the connection
        next(chunks)
        assert sum(fake.left for fake in fakes) == 0
    eventually("they know", lambda: sum(fake.left for fake in fakes) == 3)


@pytest.mark.parametrize("choices", [0, -1, 129, "2", True, 1.5])
def test_an_impossible_number_of_choices_is_refused(deployment: Deployment, choices: object):
    answer = deployment.ask(n=choices)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == f"n: {choices!r}: it must be an integer from 1 to 128"
    assert deployment.asked("prefill") == []


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"best_of": 2}, "best_of: ask for several choices with n instead"),
        ({"prompt": ["one", "two"]}, "prompt: 2 prompts in one request; send one request for each"),
        (
            {"echo": True, "logprobs": 1},
            "echo with logprobs: the prompt's are on the prefill server, and SGLang's decode server would answer "
            "without them; leave one of the two away",
        ),
    ],
)
def test_what_the_two_servers_would_not_answer_is_refused(deployment: Deployment, body: dict[str, Any], said: str):
    answer = deployment.ask(**body)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, said)
    assert deployment.asked("prefill") == []


# ---- what one side alone refuses ------------------------------------------------------------------------------------


def test_what_the_prefill_server_alone_refuses_is_the_answer(deployment: Deployment):
    """As with options for one side, such as a shorter context there: the decode server would wait for its timeout."""
    for name in ("prefill-0", "prefill-1"):
        deployment.fakes[name].status = 400
    answer = deployment.ask()
    assert (answer.status_code, answer.json()) == (400, REFUSED)
    assert deployment.front.retries == 0
