"""One address in front of prefill and decode servers that speak OpenAI's HTTP interface.

Every request goes to a prefill and a decode server at once, under a room number that both are told: the decode server
asks for the cache, and pages leave the prefill server while it still computes. If one of the two fails before the first
token has gone to the client, the request is tried once more with another pair.

A server that drains gets no new requests: a prefill server's registry says so, and a decode server's ranks.

It is made for one machine: it keeps no state but who is well, and balances by turns. In a cluster its place is a
gateway's, which the same parameters work with. What the parameters are, and how a request for several choices is
divided, is an engine's `Dialect`.

The supervisor starts it as a process of its own: `python -m kvferry.applications.up.app`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import repeat
from typing import Annotated, Any

import httpx
import typer
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvferry.applications.top.asking import addresses
from kvferry.applications.up.answers import Answer, Streamed, Whole, events_of, one_of
from kvferry.applications.up.dialects import DIALECTS, Dialect
from kvferry.applications.up.servers import DrainWatch, Pool, Server, TryAnotherError, any_drains, registered
from kvferry.control.construction import create_registry_client
from kvferry.control.registry import Registry
from kvferry.errors import ConfigurationError, UsageError
from kvferry.loggers import logger_of
from kvferry.settings import Settings

log = logger_of("kvferry.applications.up.app")  # also where it is the process's main module

HEALTH_INTERVAL_S = 0.5
_CONNECT_S = 5.0
_AFTERMATH_S = 0.5
_ATTEMPTS = 3  # with as many pairs a request is tried at most
_CLIENT_LEFT = 499  # as nginx has it; nobody reads it
_PASSED_ON = ("authorization", "x-request-id")


class Front:
    """Hands requests on. Lives in one event loop.

    Attributes:
        prefill: the servers that prefill.
    """

    def __init__(self, dialect: Dialect, prefill: Sequence[Server], decode: Sequence[Server]) -> None:
        """Takes the servers that share the requests, and how they are told of one another."""
        self._dialect = dialect
        self.prefill = Pool(prefill)
        self._decode = Pool(decode)
        # Answers take as long as they take; only connecting has a limit.
        timeout = httpx.Timeout(None, connect=_CONNECT_S)
        self._client = httpx.AsyncClient(timeout=timeout, limits=httpx.Limits(), trust_env=False)
        self._ending: set[asyncio.Task[None]] = set()
        self.retries = 0

    def app(self) -> Starlette:
        """The web application."""

        @contextlib.asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            # One each: a server that answers late keeps nobody from hearing of the others.
            watching = [asyncio.create_task(self._watch(server)) for server in self._servers()]
            watching += [asyncio.create_task(watch.run()) for watch in self._drain_watches()]
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
                Route("/livez", self._live),
            ],
            lifespan=lifespan,
        )

    # ---- who is well ----------------------------------------------------------------------------------------------

    def _servers(self) -> tuple[Server, ...]:
        return (*self.prefill.servers, *self._decode.servers)

    def _drain_watches(self) -> Iterator[DrainWatch]:
        for server in self._servers():
            if server.registry is not None:
                name = partial(self._dialect.registered_name, server)
                yield DrainWatch(server, partial(registered, server.registry, name))
            if server.ranks:
                yield DrainWatch(server, partial(any_drains, self._client, server.ranks))

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
        pools = {"prefill": self.prefill, "decode": self._decode}
        can_serve = all(any(server.takes_requests for server in pool.servers) for pool in pools.values())
        state = {name: [_shown(server) for server in pool.servers] for name, pool in pools.items()}
        return JSONResponse({**state, "retries": self.retries}, status_code=200 if can_serve else 503)

    async def _ready(self, _: Request) -> Response:
        """Success when all servers are well, where `/health` asks for one of either kind."""
        return Response(status_code=200 if all(server.is_healthy for server in self._servers()) else 503)

    async def _live(self, _: Request) -> Response:
        """Success while this process answers, whoever is well."""
        return Response()

    async def _models(self, request: Request) -> Response:
        server = self._decode.choose(set())
        if server is None:
            return _failed(503, self._decode.shortage("decode")).response()
        answer = await self._client.get(f"{server.url}/v1/models", headers=_headers(request))
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))

    # ---- requests -------------------------------------------------------------------------------------------------

    async def _generate(self, request: Request) -> Response:
        try:
            body = json.loads(await request.body())
        except ValueError:
            body = None
        if not isinstance(body, dict):
            return _failed(400, "the body must be a JSON object").response()
        try:
            bodies = self._dialect.requests(body)
        except UsageError as error:
            return _failed(400, str(error)).response()
        answering = asyncio.create_task(self._answer(request, bodies))
        leaving = asyncio.create_task(_client_left(request))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return answering.result() if answering.done() else Response(status_code=_CLIENT_LEFT)
        finally:
            answering.cancel()
            leaving.cancel()

    async def _answer(self, request: Request, bodies: Sequence[Mapping[str, Any]]) -> Response:
        """Asks for all choices of a prompt: for the first, and once a prefill server has the prompt, for the others."""
        is_computed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        pair = self._pair(set())
        asking = [asyncio.create_task(self._attempt(request, bodies[0], pair, is_computed))]
        try:
            if len(bodies) > 1:
                either: set[asyncio.Future[Any]] = {asking[0], is_computed}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if asking[0].done() and not asking[0].result().is_success:
                    return asking[0].result().response()
                asking += [asyncio.create_task(self._attempt(request, each, pair)) for each in bodies[1:]]
            answers = await asyncio.gather(*asking)
        except BaseException:
            await _give_up(asking)
            raise
        return await one_of(answers, self._ending)

    def _pair(self, avoided: set[Server]) -> tuple[Server | None, Server | None]:
        return self.prefill.choose(avoided), self._decode.choose(avoided)

    async def _attempt(
        self,
        request: Request,
        body: Mapping[str, Any],
        pair: tuple[Server | None, Server | None],
        is_computed: asyncio.Future[None] | None = None,
    ) -> Answer:
        """Tries a pair, and others if it fails.

        Args:
            pair: which is tried first.
            is_computed: done as soon as a prefill server has computed the prompt.
        """
        avoided: set[Server] = set()
        last_problem = ""
        for attempt in range(_ATTEMPTS):
            prefill, decode = self._pair(avoided) if attempt else pair
            if prefill is None:
                return _failed(503, self.prefill.shortage("prefill"))
            if decode is None:
                return _failed(503, self._decode.shortage("decode"))
            try:
                return await self._try(request, body, prefill, decode, is_computed)
            except TryAnotherError as error:
                self.retries += 1
                last_problem = str(error)
                avoided.add(error.server)
                if error.is_lost:  # others need not find out for themselves
                    error.server.is_healthy = False
                log.warning("request is tried again: %s", error)
        return _failed(502, f"tried {_ATTEMPTS} times; last, {last_problem}")

    async def _try(
        self,
        request: Request,
        body: Mapping[str, Any],
        prefill: Server,
        decode: Server,
        is_computed: asyncio.Future[None] | None,
    ) -> Answer:
        """Asks both servers at once and answers with what the decode server says.

        Raises:
            TryAnotherError: if either fails before anything has gone to the client.
        """
        of_prefill, of_decode = self._dialect.asked(body, prefill)
        asking = asyncio.create_task(self._ask_prefill(request, of_prefill, prefill))
        opening = asyncio.create_task(self._open_decode(request, of_decode, decode))
        tasks: set[asyncio.Task[Any]] = {asking, opening}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                refusal = asking.result()
                if refusal is not None:
                    # It is the client's mistake, and the decode server says so too, unless its options differ.
                    await asyncio.wait({opening}, timeout=_AFTERMATH_S)
                    return opening.result() if opening.done() else refusal
                if is_computed is not None and not is_computed.done():
                    is_computed.set_result(None)
                await asyncio.wait({opening})
            if opening.exception() is not None:
                # If the prefill server has just died, either connection may have been the first to say so.
                await asyncio.wait({asking}, timeout=_AFTERMATH_S)
                if asking.done():
                    asking.result()
            return opening.result()
        except asyncio.CancelledError:
            await _give_up([opening])
            raise
        finally:
            for task in tasks:
                task.cancel()

    async def _ask_prefill(self, request: Request, asked: Mapping[str, Any], server: Server) -> Whole | None:
        """Waits for the end of a prefill server's request. Returns what it refused the client."""
        try:
            answer = await self._client.post(f"{server.url}{request.url.path}", json=asked, headers=_headers(request))
        except httpx.HTTPError as error:
            raise TryAnotherError(server, f"{type(error).__name__} {error}", is_lost=True) from error
        if answer.is_server_error:
            raise TryAnotherError(server, f"HTTP {answer.status_code}: {answer.text[:200]}")
        return None if answer.is_success else _whole(answer, answer.content)

    async def _open_decode(self, request: Request, asked: Mapping[str, Any], server: Server) -> Answer:
        """Waits for the first token, or for the whole answer where it is not a stream."""
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
                return _whole(answer, content)
            events = events_of(answer.aiter_bytes())
            begun = await _first_events(events, server)
        except httpx.HTTPError as error:
            await exits.aclose()
            raise TryAnotherError(server, f"{type(error).__name__} {error}", is_lost=True) from error
        except BaseException:
            await exits.aclose()
            raise
        return Streamed(_until_lost(begun, events), exits)


def _shown(server: Server) -> dict[str, Any]:
    return {
        "engine": server.engine,
        "url": server.url,
        "is_healthy": server.is_healthy,
        "is_draining": server.is_draining,
    }


def _whole(answer: httpx.Response, content: bytes) -> Whole:
    return Whole(content, answer.status_code, answer.headers.get("content-type"))


async def _until_lost(begun: Sequence[bytes], events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yields what a decode server says, and last, if it does not come to its end, an event that says so."""
    for event in begun:
        yield event
    try:
        async for event in events:
            yield event
    except httpx.HTTPError as error:
        # Tokens have gone out: the client alone can decide whether to ask again.
        problem = {"error": {"message": f"the decode server was lost: {error}", "code": 502}}
        yield f"data: {json.dumps(problem)}".encode()


async def _give_up(asking: Sequence[asyncio.Task[Answer]]) -> None:
    """Ends requests that nobody waits for any more, with the connections of those that were answered."""
    for task in asking:
        task.cancel()
    for found in await asyncio.gather(*asking, return_exceptions=True):
        if isinstance(found, Streamed):
            await found.close()


async def _client_left(request: Request) -> None:
    """Returns when the client has gone. Its body has been read: nothing else comes from it."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _first_events(events: AsyncIterator[bytes], server: Server) -> list[bytes]:
    """The events up to the first that says anything.

    Raises:
        TryAnotherError: if it says that the request failed, or nothing comes.
    """
    begun = []
    async for event in events:
        begun.append(event)
        if not event.startswith(b"data:"):
            continue
        with contextlib.suppress(ValueError):
            said = json.loads(event.removeprefix(b"data:"))
            if "error" in said or any(each.get("finish_reason") == "error" for each in said.get("choices", ())):
                raise TryAnotherError(server, event.decode(errors="replace")[:200])
            return begun
    raise TryAnotherError(server, "the stream ended before the first token")


def _headers(request: Request) -> dict[str, str]:
    return {name: request.headers[name] for name in _PASSED_ON if name in request.headers}


def _failed(status: int, message: str) -> Whole:
    error = {"error": {"message": message, "type": "kvferry", "code": status}}
    return Whole(json.dumps(error).encode(), status, "application/json")


def serve(
    engine: Annotated[str, typer.Option(help="Whose servers they are: vllm or sglang.")],
    host: Annotated[str, typer.Option()],
    port: Annotated[int, typer.Option()],
    prefill: Annotated[list[str], typer.Option(help="A prefill server, as name=url.")],
    decode: Annotated[list[str], typer.Option(help="A decode server, as name=url.")],
    bootstrap_port: Annotated[
        list[int] | None, typer.Option(help="SGLang's, one for each prefill server, in their order.")
    ] = None,
    registry: Annotated[
        list[str] | None,
        typer.Option(
            help="Which says whether prefill servers drain: one for all, or one for each in their order. "
            "KVFERRY_REGISTRY_URL if not given; without either nobody is asked."
        ),
    ] = None,
    decode_observe: Annotated[
        list[str] | None,
        typer.Option(
            help="Where a decode server's ranks say whether they drain, as host:9470 or host:9470-9477 "
            "(KVFERRY_OBSERVE_PORT): one for each decode server in their order; without, nobody is asked."
        ),
    ] = None,
) -> None:
    """Serve OpenAI's interface in front of prefill and decode servers."""
    with ExitStack() as opened:
        prefills = servers(prefill, bootstrap_port, clients(registry, len(prefill), opened))
        front = Front(DIALECTS[engine], prefills, servers(decode, ranks=ranks_of(decode_observe or [], len(decode))))
        uvicorn.run(front.app(), host=host, port=port, log_level="warning")


def servers(
    given: Sequence[str],
    bootstrap_ports: Sequence[int] | None = None,
    registries: Sequence[Registry] = (),
    ranks: Sequence[Sequence[str]] = (),
) -> list[Server]:
    """Reads name=url, and takes for each what there is: a port, a registry, addresses of its ranks."""
    count = len(given)
    pairs = (each.partition("=") for each in given)
    rest = zip(
        bootstrap_ports or repeat(0, count), registries or repeat(None, count), ranks or repeat((), count), strict=True
    )
    return [Server(url, name, *each) for (name, _, url), each in zip(pairs, rest, strict=True)]


def ranks_of(given: Sequence[str], count: int) -> list[list[str]]:
    """Reads the addresses of each decode server's ranks; nothing if none is given.

    Raises:
        ConfigurationError: if an address makes no sense, or there is not one for each server.
    """
    if len(given) not in (0, count):
        raise ConfigurationError(f"--decode-observe: {len(given)} for {count} decode servers; name one for each")
    return [addresses([each]) for each in given]


def clients(given: Sequence[str] | None, count: int, opened: ExitStack) -> list[Registry]:
    """Makes the clients of registries, one for each prefill server, or none if no registry is known.

    Args:
        given: addresses; the settings' one if there are none.
        count: of prefill servers.
        opened: closes the clients.

    Raises:
        ConfigurationError: if there are several registries, and not one for each.
    """
    settings = Settings()
    urls = [*(given or ([settings.registry_url] if settings.registry_url is not None else []))]
    if len(urls) not in (0, 1, count):
        raise ConfigurationError(f"--registry: {len(urls)} for {count} prefill servers; name one, or one for each")
    made = [opened.enter_context(create_registry_client(settings, url)) for url in urls]
    return made * count if len(made) == 1 else made


if __name__ == "__main__":
    typer.run(serve)
