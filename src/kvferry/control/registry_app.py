"""The registry's routes: HTTP requests in, registrations read or changed, JSON out.

All handlers run on one event loop and none awaits between reading and changing the registrations, so these
need no lock.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvferry._version import __version__
from kvferry.control.credentials import bears
from kvferry.control.http_clients import STAYS
from kvferry.control.leases import RENEWALS_PER_S, Leases, Pacer
from kvferry.control.registry_messages import (
    API_VERSION,
    LARGEST_BODY_BYTES,
    LONGEST_PROBLEM,
    LONGEST_RETRY_S,
    UNKNOWN_ENGINE,
    EngineList,
    Health,
    Lease,
    Problem,
    Released,
    Removal,
    ToldToDrain,
)
from kvferry.errors import ConfigurationError, MessageError, RegistrationRefusedError, RegistryAccessError, quoted
from kvferry.protocol.bounded import remember
from kvferry.protocol.wire.registrations import RankRegistration

_REGISTRATION = msgspec.json.Decoder(RankRegistration)


_MOST_DESCRIBED = 256
"""Engines of which the answer is kept: with 64 ranks it takes 25 kB."""


@dataclass(frozen=True, slots=True)
class _Described:
    """The answer about an engine.

    Attributes:
        revision: of what it says.
        is_complete: whether it says that all ranks are there.
    """

    revision: int
    body: bytes
    is_complete: bool


class _BodyTooLargeError(MessageError):
    pass


class _BodyTooSlowError(MessageError):
    pass


# The most telling match along an exception's classes wins.
_STATUS_OF_ERROR: dict[type[Exception], int] = {
    ConfigurationError: 400,
    MessageError: 400,
    _BodyTooSlowError: 408,
    RegistrationRefusedError: 409,
    _BodyTooLargeError: 413,
}


LIVE_PATH = "/livez"
"""Answers everybody, since what runs containers asks it and knows no secret; and says no more than that."""


class _TokenRequired:
    """Refuses every request without the token, on every other route, before anything else of it is read."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if bears(scope.get("headers", ()), self._token) or scope.get("path") == LIVE_PATH:
            await self._app(scope, receive, send)
            return
        # What follows of the request is not read.
        headers = {"www-authenticate": "Bearer", "connection": "close"}
        message = "this registry answers only to those who know its secret (KVFERRY_SECRET_FILE, KVFERRY_SECRET)"
        await _problem(401, RegistryAccessError.__name__, message, headers)(scope, receive, send)


def registry_app(
    registrations: Leases,
    clock: Callable[[], float],
    *,
    token: str | None = None,
    body_timeout_s: float = 5.0,
) -> Starlette:
    """Makes the ASGI application of a registry that keeps its state in `registrations`.

    Args:
        registrations: the state; nothing else may use it while the application runs.
        clock: the present time in seconds; it never goes back.
        token: what every request must carry; None lets everyone in.
        body_timeout_s: how long a client may take to send a request's body.
    """
    answers = _Answers(registrations, clock, body_timeout_s)
    rank_path = "/v1/engines/{engine}/ranks/{rank}"
    return Starlette(
        routes=[
            Route(rank_path, answers.put_rank, methods=["PUT"]),
            Route(rank_path, answers.delete_rank, methods=["DELETE"]),
            Route("/v1/engines/{engine}", answers.get_engine, methods=["GET"]),
            Route("/v1/engines", answers.get_engines, methods=["GET"]),
            Route("/v1/draining/{engine}", answers.put_draining, methods=["PUT"]),
            Route("/v1/released/{endpoint}", answers.put_released, methods=["PUT"]),
            Route("/v1/released", answers.get_released, methods=["GET"]),
            Route("/health", answers.get_health, methods=["GET"]),
            Route(LIVE_PATH, answers.get_live, methods=["GET"]),
        ],
        middleware=[] if token is None else [Middleware(_TokenRequired, token=token)],
        exception_handlers={
            **dict.fromkeys(_STATUS_OF_ERROR, _on_error),
            HTTPException: _on_http_exception,
            Exception: _on_bug,
        },
    )


class _Answers:
    """What a registry answers on each of its routes."""

    def __init__(self, registrations: Leases, clock: Callable[[], float], body_timeout_s: float) -> None:
        self._registrations = registrations
        self._clock = clock
        self._body_timeout_s = body_timeout_s
        self._started_at = clock()
        self._name_of_start = secrets.token_hex(8)
        self._described: OrderedDict[str, _Described] = OrderedDict()
        self._waiting = Pacer(RENEWALS_PER_S)

    async def put_rank(self, request: Request) -> Response:
        body = await _read_body(request, self._body_timeout_s)
        registration = _decode_registration(body)
        engine, rank = request.path_params["engine"], _rank_in_path(request)
        if (registration.engine, registration.engine_rank) != (engine, rank):
            raise MessageError(
                f"the body registers rank {registration.engine_rank} of engine {registration.engine!r} under "
                f"the path of rank {rank} of engine {engine!r}"
            )
        grant = self._registrations.register(registration, self._clock())
        setattr(request.state, STAYS, True)
        told = self._registrations.drains(registration.incarnation)
        return _json(Lease(lease_s=grant.lease_s, renew_s=grant.renew_s, return_s=grant.return_s, draining=told))

    async def delete_rank(self, request: Request) -> Response:
        incarnation = request.query_params.get("incarnation")
        if not incarnation:
            raise MessageError("a removal must say ?incarnation=, the id of the start that registered the rank")
        engine, rank = request.path_params["engine"], _rank_in_path(request)
        return _json(Removal(removed=self._registrations.remove(engine, rank, incarnation)))

    async def get_engine(self, request: Request) -> Response:
        name, now = request.path_params["engine"], self._clock()
        revision = self._registrations.revision(name, now)
        known = self._described.get(name)
        if known is None or known.revision != revision:
            view = self._registrations.engine(name, now)
            if not view.registrations:
                self._described.pop(name, None)
                message = f"no rank of an engine named {name!r} is registered"
                problem = Problem(
                    error=UNKNOWN_ENGINE,
                    message=message[:LONGEST_PROBLEM],
                    others=view.others,
                    num_others=view.num_others,
                )
                return _answered(404, problem, self._retry_after(now))
            known = _Described(revision, msgspec.json.encode(view), is_complete=view.complete)
            remember(self._described, name, known, _MOST_DESCRIBED)
        tag = f'"{self._name_of_start}-{revision}"'
        headers = {"etag": tag, **({} if known.is_complete else self._retry_after(now))}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(known.body, media_type="application/json", headers=headers)

    def _retry_after(self, now: float) -> dict[str, str]:
        """Tells whoever waits for an engine when to ask again, if so many wait that they must take turns."""
        wait_s = math.floor(self._waiting.turn_in_s(now, soonest_s=0, longest_s=LONGEST_RETRY_S))
        return {"retry-after": str(wait_s)} if wait_s else {}

    async def get_engines(self, _: Request) -> Response:
        return _json(EngineList(engines=self._registrations.engines(self._clock())))

    async def put_draining(self, request: Request) -> Response:
        return _json(ToldToDrain(endpoints=self._registrations.drain(request.path_params["engine"], self._clock())))

    async def put_released(self, request: Request) -> Response:
        self._registrations.release(request.path_params["endpoint"], self._clock())
        return _json(Released(endpoints=(request.path_params["endpoint"],)))

    async def get_released(self, _: Request) -> Response:
        return _json(Released(endpoints=self._registrations.released()))

    async def get_health(self, _: Request) -> Response:
        return _json(Health(version=__version__, api_version=API_VERSION, uptime_s=self._clock() - self._started_at))

    async def get_live(self, _: Request) -> Response:
        return Response()


async def _read_body(request: Request, timeout_s: float) -> bytes:
    """Reads the body; refuses it as soon as it is known to be too large, rather than after it was kept."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > LARGEST_BODY_BYTES):
        raise _body_too_large()

    async def collect() -> bytes:
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > LARGEST_BODY_BYTES:
                raise _body_too_large()
        return bytes(body)

    try:
        return await asyncio.wait_for(collect(), timeout_s)
    except asyncio.TimeoutError:
        raise _BodyTooSlowError(f"the request's body did not arrive within {timeout_s:g} s") from None
    except ClientDisconnect:
        raise MessageError("the client left before its request was complete") from None


def _body_too_large() -> MessageError:
    return _BodyTooLargeError(f"the request's body is larger than {LARGEST_BODY_BYTES} bytes")


def _decode_registration(body: bytes) -> RankRegistration:
    try:
        return _REGISTRATION.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"the request's body is no registration: {quoted(error)}") from error


def _rank_in_path(request: Request) -> int:
    text: str = request.path_params["rank"]
    if not (text.isascii() and text.isdecimal() and len(text) <= 9):
        raise MessageError(f"{text[:80]!r} in the path is no engine rank: it must be a number")
    return int(text)


async def _on_error(_request: Request, error: Exception) -> Response:
    status = next(_STATUS_OF_ERROR[kind] for kind in type(error).__mro__ if kind in _STATUS_OF_ERROR)
    # The rest of a body that was not read must not be taken for the next request.
    headers = {"connection": "close"} if isinstance(error, (_BodyTooLargeError, _BodyTooSlowError)) else None
    return _problem(status, type(error).__name__.lstrip("_"), str(error), headers)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = error.headers if isinstance(error, HTTPException) else None
    asked = f"{request.method} {request.url.path}"
    return _problem(status, "HTTPException", f"this registry has nothing at {asked[:200]}", headers)


async def _on_bug(_request: Request, error: Exception) -> Response:
    # The server logs the exception with its traceback; the client receives its type and message.
    return _problem(500, type(error).__name__, f"the registry failed: {error}")


def _json(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")


def _problem(status: int, error: str, message: str, headers: Any = None) -> Response:
    return _answered(status, Problem(error=error, message=message[:LONGEST_PROBLEM]), headers)


def _answered(status: int, problem: Problem, headers: Any = None) -> Response:
    body = msgspec.json.encode(problem)
    return Response(body, status_code=status, media_type="application/json", headers=headers)
