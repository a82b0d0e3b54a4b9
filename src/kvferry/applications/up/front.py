"""One address in front of prefill and decode servers that speak OpenAI's HTTP interface.

Every request goes to a prefill and a decode server at once, under a room number that both are told: the decode server
asks for the cache, and pages leave the prefill server while it still computes. If one of the two fails before the first
token has gone to the client, the request is tried once more with another pair.

It is made for one machine: it keeps no state but who is well, and balances by turns. In a cluster its place is a
gateway's, which the same parameters work with.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvferry.engines.vllm.parameters import LARGEST_ROOM, ROOM

log = logging.getLogger(__name__)

HEALTH_INTERVAL_S = 0.5
_CONNECT_S = 5.0
_AFTERMATH_S = 0.5
_CLIENT_LEFT = 499  # as nginx has it; nobody reads it
_PASSED_ON = ("authorization", "x-request-id")
_DECODE_ONLY = ("n", "min_tokens", "stream_options")
"""What a prefill server is not asked for. All choices of an answer (`n`) have the cache of one prompt."""


@dataclass(slots=True, eq=False)
class Server:
    """One server.

    Attributes:
        url: where it answers.
        engine: what its engine is called.
        is_healthy: whether it answered when last asked.
    """

    url: str
    engine: str
    is_healthy: bool = False


@dataclass(slots=True)
class Pool:
    """Servers of one kind, taken by turns."""

    servers: Sequence[Server]
    _turn: itertools.count[int] = field(default_factory=itertools.count)

    def choose(self, avoided: set[Server]) -> Server | None:
        """One that is well, and was not tried for this request if there is such a one; None if none is well."""
        well = [server for server in self.servers if server.is_healthy]
        fresh = [server for server in well if server not in avoided] or well
        return fresh[next(self._turn) % len(fresh)] if fresh else None


class TryAnotherError(Exception):
    """A server failed before anything had gone to the client.

    Attributes:
        server: which.
        is_lost: whether it did not even say so.
    """

    def __init__(self, server: Server, problem: str, *, is_lost: bool = False) -> None:
        super().__init__(f"{server.engine}: {problem}")
        self.server = server
        self.is_lost = is_lost


class Front:
    """Hands requests on. Lives in one event loop."""

    def __init__(self, prefill: Sequence[Server], decode: Sequence[Server], *, attempts: int = 3) -> None:
        """Takes the servers that share the requests.

        Args:
            attempts: how many pairs a request is tried with at most.
        """
        self._prefill, self._decode = Pool(prefill), Pool(decode)
        self._attempts = attempts
        # Answers take as long as they take; only connecting has a limit.
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=_CONNECT_S), limits=httpx.Limits())
        self.retries = 0

    def app(self) -> Starlette:
        """The web application."""

        @contextlib.asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            # One each: a server that answers late keeps nobody from hearing of the others.
            watching = [asyncio.create_task(self._watch(server)) for server in self._servers()]
            yield
            for each in watching:
                each.cancel()
            await self._client.aclose()

        return Starlette(
            routes=[
                Route("/v1/completions", self._generate, methods=["POST"]),
                Route("/v1/chat/completions", self._generate, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/health", self._health),
                Route("/ready", self._ready),
            ],
            lifespan=lifespan,
        )

    # ---- who is well ----------------------------------------------------------------------------------------------

    def _servers(self) -> tuple[Server, ...]:
        return (*self._prefill.servers, *self._decode.servers)

    async def _watch(self, server: Server) -> None:
        while True:
            await self._look(server)
            await asyncio.sleep(HEALTH_INTERVAL_S)

    async def _look(self, server: Server) -> None:
        try:
            answer = await self._client.get(f"{server.url}/health", timeout=_CONNECT_S)
            is_healthy = answer.is_success
        except httpx.HTTPError:
            is_healthy = False
        if is_healthy != server.is_healthy:
            log.warning("%s at %s is %s", server.engine, server.url, "well" if is_healthy else "not well")
        server.is_healthy = is_healthy

    async def _health(self, _: Request) -> Response:
        pools = {"prefill": self._prefill, "decode": self._decode}
        can_serve = all(any(server.is_healthy for server in pool.servers) for pool in pools.values())
        state = {
            name: [
                {"engine": server.engine, "url": server.url, "is_healthy": server.is_healthy} for server in pool.servers
            ]
            for name, pool in pools.items()
        }
        return JSONResponse({**state, "retries": self.retries}, status_code=200 if can_serve else 503)

    async def _ready(self, _: Request) -> Response:
        """Success when all servers are well, where `/health` asks for one of either kind."""
        return Response(status_code=200 if all(server.is_healthy for server in self._servers()) else 503)

    async def _models(self, request: Request) -> Response:
        server = self._decode.choose(set())
        if server is None:
            return _nobody("decode")
        answer = await self._client.get(f"{server.url}/v1/models", headers=_headers(request))
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))

    # ---- requests -------------------------------------------------------------------------------------------------

    async def _generate(self, request: Request) -> Response:
        try:
            body = json.loads(await request.body())
        except ValueError:
            body = None
        if not isinstance(body, dict):
            return _problem(400, "the body must be a JSON object")
        if problem := _not_one_room(body):
            return _problem(400, problem)
        avoided: set[Server] = set()
        last_problem = ""
        for _ in range(self._attempts):
            prefill, decode = self._prefill.choose(avoided), self._decode.choose(avoided)
            if prefill is None or decode is None:
                return _nobody("prefill" if prefill is None else "decode")
            try:
                return await self._try(request, body, prefill, decode)
            except TryAnotherError as error:
                self.retries += 1
                last_problem = str(error)
                avoided.add(error.server)
                if error.is_lost:  # others need not find out for themselves
                    error.server.is_healthy = False
                log.warning("request is tried again: %s", error)
        return _problem(502, f"tried {self._attempts} times; last, {last_problem}")

    async def _try(self, request: Request, body: Mapping[str, Any], prefill: Server, decode: Server) -> Response:
        """Asks both servers at once and answers with what the decode server says.

        Raises:
            TryAnotherError: if either fails before anything has gone to the client.
        """
        room = 1 + secrets.randbelow(LARGEST_ROOM)
        asking = asyncio.create_task(self._ask_prefill(request, body, prefill, room))
        opening = asyncio.create_task(self._open_decode(request, body, prefill, decode, room))
        leaving = asyncio.create_task(_client_left(request))
        tasks: set[asyncio.Task[Any]] = {asking, opening, leaving}
        waiting = set(tasks)
        try:
            while not opening.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if leaving in done:
                    return Response(status_code=_CLIENT_LEFT)
                if asking in done:
                    asking.result()
            if opening.exception() is not None:
                # If the prefill server has just died, either connection may have been the first to say so.
                await asyncio.wait({asking}, timeout=_AFTERMATH_S)
                if asking.done():
                    asking.result()
            return opening.result()
        finally:
            for task in tasks:
                task.cancel()

    async def _ask_prefill(self, request: Request, body: Mapping[str, Any], server: Server, room: int) -> None:
        parameters = {"do_remote_decode": True, ROOM: room}
        asked = {name: value for name, value in body.items() if name not in _DECODE_ONLY}
        asked |= {"stream": False, "max_tokens": 1, "kv_transfer_params": parameters}
        if "max_completion_tokens" in asked:
            asked["max_completion_tokens"] = 1
        try:
            answer = await self._client.post(f"{server.url}{request.url.path}", json=asked, headers=_headers(request))
        except httpx.HTTPError as error:
            raise TryAnotherError(server, f"{type(error).__name__} {error}", is_lost=True) from error
        if answer.is_server_error:
            raise TryAnotherError(server, f"HTTP {answer.status_code}: {answer.text[:200]}")

    async def _open_decode(
        self, request: Request, body: Mapping[str, Any], prefill: Server, server: Server, room: int
    ) -> Response:
        """Waits for the first token, or for the whole answer where it is not a stream."""
        parameters = {"do_remote_prefill": True, "remote_engine_id": prefill.engine, ROOM: room}
        asked = {**body, "kv_transfer_params": parameters}
        exits = contextlib.AsyncExitStack()
        try:
            answer = await exits.enter_async_context(
                self._client.stream("POST", f"{server.url}{request.url.path}", json=asked, headers=_headers(request))
            )
            if answer.is_server_error:
                text = (await answer.aread()).decode(errors="replace")
                raise TryAnotherError(server, f"HTTP {answer.status_code}: {text[:200]}")
            if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                content = await answer.aread()
                await exits.aclose()
                return Response(content, answer.status_code, media_type=answer.headers.get("content-type"))
            pieces = answer.aiter_bytes()
            begun = await _first_event(pieces, server)
        except httpx.HTTPError as error:
            await exits.aclose()
            raise TryAnotherError(server, f"{type(error).__name__} {error}", is_lost=True) from error
        except BaseException:
            await exits.aclose()
            raise

        async def passed_on() -> AsyncIterator[bytes]:
            async with exits:
                yield begun
                try:
                    async for piece in pieces:
                        yield piece
                except httpx.HTTPError as error:
                    # Tokens have gone out: the client alone can decide whether to ask again.
                    problem = {"error": {"message": f"the decode server was lost: {error}", "code": 502}}
                    yield f"data: {json.dumps(problem)}\n\n".encode()

        return StreamingResponse(passed_on(), answer.status_code, media_type="text/event-stream")


async def _client_left(request: Request) -> None:
    """Returns when the client has gone. Its body has been read: nothing else comes from it."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _first_event(pieces: AsyncIterator[bytes], server: Server) -> bytes:
    """What comes up to the end of the first event that says anything.

    Raises:
        TryAnotherError: if it says that the request failed, or nothing comes.
    """
    begun = b""
    async for piece in pieces:
        begun += piece
        for line in begun.replace(b"\r\n", b"\n").split(b"\n\n")[:-1]:
            if not line.startswith(b"data:"):
                continue
            with contextlib.suppress(ValueError):
                event = json.loads(line.removeprefix(b"data:"))
                if "error" in event or any(each.get("finish_reason") == "error" for each in event.get("choices", ())):
                    raise TryAnotherError(server, line.decode(errors="replace")[:200])
                return begun
    raise TryAnotherError(server, "the stream ended before the first token")


def _not_one_room(body: Mapping[str, Any]) -> str:
    """Returns why a request cannot be one room: servers make several requests of it, under the same number."""
    if body.get("best_of") not in (None, 1):
        return "best_of: ask for several choices with n instead"
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not all(isinstance(token, int) for token in prompt):
        return f"prompt: {len(prompt)} prompts in one request; send one request for each"
    return ""


def _headers(request: Request) -> dict[str, str]:
    return {name: request.headers[name] for name in _PASSED_ON if name in request.headers}


def _nobody(kind: str) -> Response:
    return _problem(503, f"no {kind} server is well")


def _problem(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "kvferry", "code": status}}, status_code=status)
