"""Each gateway's protocol, and what the plug-in makes of it: both sides have one room, whoever is asked first."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from tests.support.gateways import GATEWAYS, Gateway, as_go_reads

from kvferry.engines.vllm.parameters import (
    LARGEST_ROOM,
    ReceiveParameters,
    SendParameters,
    answer,
    receive_parameters,
    send_parameters,
)

CHAT = {
    "model": "m",
    "max_tokens": 40,
    "max_completion_tokens": 40,
    "stream": True,
    "stream_options": {"include_usage": True},
}


class Servers:
    """A prefill and a decode server that read the parameters as the plug-in does.

    Attributes:
        sends: what the prefill server was asked for, in order.
        receives: what the decode server was asked for.
        bodies: all that both were asked, by server.
    """

    def __init__(self, *, at_once: bool) -> None:
        self.sends: list[SendParameters] = []
        self.receives: list[ReceiveParameters] = []
        self.bodies: dict[str, Mapping[str, Any]] = {}
        self._both = threading.Barrier(2) if at_once else None

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/query":
            return httpx.Response(200, json={"0": {"engine_id": "prefill-0"}})
        body = json.loads(request.content)
        self.bodies[request.url.host] = body
        if self._both is not None:
            self._both.wait(5)  # neither answers before the other is asked
        parameters = body["kv_transfer_params"]
        if request.url.host == "decode":
            params = receive_parameters(parameters)
            assert params is not None
            self.receives.append(params)
            return httpx.Response(200, json={"choices": []})
        params_sent = send_parameters(parameters)
        assert params_sent is not None
        self.sends.append(params_sent)
        answered = answer(params_sent, engine="prefill-0", request="cmpl-1", tokens=13)
        return httpx.Response(200, json={"choices": [], "kv_transfer_params": answered})


@pytest.mark.parametrize("kind", GATEWAYS)
def test_both_servers_have_one_room(kind: type[Gateway]):
    servers = Servers(at_once=kind.asks_at_once)
    gateway = kind("http://prefill", "http://decode", httpx.Client(transport=httpx.MockTransport(servers)))
    for _ in range(3):
        assert gateway.ask(CHAT).status_code == 200
    assert [params.room for params in servers.receives] == [params.room for params in servers.sends]
    assert {params.engine for params in servers.receives} == {"prefill-0"}
    assert len({params.room for params in servers.sends}) == 3
    assert {params.is_known for params in servers.sends} == {kind.asks_at_once}, "pages leave early where they may"


@pytest.mark.parametrize("kind", GATEWAYS)
def test_the_prefill_server_is_asked_for_one_token_and_the_decode_server_for_what_the_client_wants(kind: type[Gateway]):
    servers = Servers(at_once=kind.asks_at_once)
    kind("http://prefill", "http://decode", httpx.Client(transport=httpx.MockTransport(servers))).ask(CHAT)
    of_prefill, of_decode = servers.bodies["prefill"], servers.bodies["decode"]
    assert (of_prefill["max_tokens"], of_prefill["max_completion_tokens"], of_prefill["stream"]) == (1, 1, False)
    assert "stream_options" not in of_prefill
    assert {name: of_decode[name] for name in CHAT} == CHAT


def test_a_gateway_in_go_hands_rooms_on_as_they_are():
    rooms = [1, LARGEST_ROOM - 1, LARGEST_ROOM]
    assert as_go_reads({"rooms": rooms}) == {"rooms": rooms}
    assert as_go_reads(LARGEST_ROOM + 2) != LARGEST_ROOM + 2, "or the test would show nothing"
