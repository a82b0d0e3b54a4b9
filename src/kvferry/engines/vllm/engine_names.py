"""What gateways ask a prefill server before they name a transfer to both sides: the names of its engines.

A gateway that asks both servers at once tells the decode server the prefill engine's name, which it cannot have from an
answer yet. Those that know vLLM's Mooncake connector ask the server beside it, once: `GET /query` returns
`{"0": {"engine_id": "prefill-0"}}`, an entry for every data-parallel rank. vLLM's own server answers that with

    vllm serve ... --middleware kvferry.engines.vllm.engine_names.EngineNames

and the gateway is given its port as that of the bootstrap server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

QUERY = "/query"


class EngineNames:
    """Answers `GET /query` of vLLM's HTTP server, and leaves all other requests to it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers, or hands on, as ASGI has it."""
        if scope["type"] != "http" or scope["method"] != "GET" or scope["path"] != QUERY:
            await self._app(scope, receive, send)
            return
        names = engine_names(scope["app"].state.vllm_config)
        answer = JSONResponse({str(rank): {"engine_id": name} for rank, name in names.items()})
        await answer(scope, receive, send)


def engine_names(vllm_config: Any) -> dict[int, str]:
    """Returns the names by which decode servers find the engines behind a server of vLLM's, by data-parallel rank.

    vLLM calls each of several data-parallel engines "<engine_id>_dp<rank>".

    Args:
        vllm_config: the server's `VllmConfig`; without a connector, there are no engines to find.
    """
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    if transfer is None:
        return {}
    if parallel.data_parallel_size == 1:
        return {0: transfer.engine_id}
    first, count = 0, parallel.data_parallel_size
    if parallel.local_engines_only:  # another balancer chooses among the servers, each of which has some of the ranks
        first, count = parallel.data_parallel_rank, parallel.data_parallel_size_local
    return {rank: f"{transfer.engine_id}_dp{rank}" for rank in range(first, first + count)}
