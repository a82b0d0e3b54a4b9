"""Gateways learn the names of a prefill server's engines from vLLM's own HTTP server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from kvferry.engines.vllm.engine_names import EngineNames, engine_names


def configured(engine: str | None = "prefill-0", **parallel: Any) -> SimpleNamespace:
    """As much of vLLM's configuration as it takes."""
    alone = {"data_parallel_size": 1, "data_parallel_rank": 0, "data_parallel_size_local": 1}
    return SimpleNamespace(
        kv_transfer_config=None if engine is None else SimpleNamespace(engine_id=engine),
        parallel_config=SimpleNamespace(**{**alone, "local_engines_only": False, **parallel}),
    )


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (configured(), {0: "prefill-0"}),
        (configured(data_parallel_size=3), {0: "prefill-0_dp0", 1: "prefill-0_dp1", 2: "prefill-0_dp2"}),
        (
            configured(data_parallel_size=4, data_parallel_rank=2, data_parallel_size_local=2, local_engines_only=True),
            {2: "prefill-0_dp2", 3: "prefill-0_dp3"},
        ),
        (configured(None), {}),
    ],
    ids=["one engine", "ranks that vLLM balances", "ranks of one of several servers", "no connector"],
)
def test_engines_are_called_as_vllm_calls_them(config: Any, names: dict[int, str]):
    assert engine_names(config) == names


@pytest.fixture
def client() -> TestClient:
    async def others(request: Request) -> PlainTextResponse:
        return PlainTextResponse(f"{request.method} by vLLM")

    app = Starlette(
        routes=[Route("/{path:path}", others, methods=["GET", "POST"])], middleware=[Middleware(EngineNames)]
    )
    app.state.vllm_config = configured(data_parallel_size=2)  # known once the engine is up, after the app is made
    return TestClient(app)


def test_they_are_answered_as_the_mooncake_connectors_server_does(client: TestClient):
    answer = client.get("/query")
    assert answer.status_code == 200
    assert answer.json() == {"0": {"engine_id": "prefill-0_dp0"}, "1": {"engine_id": "prefill-0_dp1"}}


def test_everything_else_is_left_to_vllm(client: TestClient):
    assert client.post("/query").text == "POST by vLLM"
    assert client.get("/v1/models").text == "GET by vLLM"
