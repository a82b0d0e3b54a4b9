"""Serves one endpoint's metrics, status, health, probes and traces over HTTP, and lets whoever may drain it."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from kvferry.control.credentials import bears
from kvferry.control.http_clients import Listener
from kvferry.control.http_server import HttpServer
from kvferry.errors import ObserveError, SettingsError
from kvferry.hosts import is_loopback
from kvferry.observe.metrics import Metrics
from kvferry.observe.status import EndpointStatus
from kvferry.observe.tracing import Recorder, Window

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp

LONGEST_WINDOW_S = 60.0
PORTS = 32
"""How many are tried, one after the other: prefill and decode ranks of one machine may be given the same."""

TEXT = "text/plain; version=0.0.4; charset=utf-8"


class ObserveServer(HttpServer):
    """Serves `/metrics`, `/status`, `/health`, `/trace?seconds=5`, `/livez` and `/readyz`, and takes `POST /drain`.

    It takes the first port that is free, from the given one on.
    All but the last only read. Whoever drains needs the token; without one only this machine may.
    """

    title = "the metrics' server"
    thread_name = "kvferry-observe"
    port_setting = "KVFERRY_OBSERVE_PORT"
    when_taken = f": so are the {PORTS - 1} behind it"
    failed = ObserveError
    most_connections = 256
    share = 1

    def __init__(
        self,
        host: str,
        port: int,
        metrics: Metrics,
        recorder: Recorder,
        status: Callable[[], EndpointStatus],
        drain: Callable[[], None],
        token: str | None,
    ) -> None:
        """Takes what is served and where; `start` binds the port.

        Args:
            metrics: the endpoint's.
            recorder: the endpoint's.
            status: where the endpoint stands now.
            drain: drains the endpoint.
            token: what whoever asks for that must carry; None lets this machine's processes.

        Raises:
            SettingsError: if a value is impossible.
        """
        super().__init__(host, port, token=token)
        self._metrics = metrics
        self._recorder = recorder
        self._status = status
        self._drain = drain

    def listen(self, port: int) -> Listener:
        """Opens a listening socket on the first port that is free, from the given one on; 0 takes any free one."""
        last = min(port + PORTS, 65536) - 1 if port else port
        for each in range(port, last):
            try:
                return super().listen(each)
            except SettingsError as error:
                if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EADDRINUSE:
                    raise
        return super().listen(last)

    def app(self) -> ASGIApp:
        """Returns the routes."""
        # Imported late: most processes need no web server.
        from starlette.applications import Starlette
        from starlette.responses import Response
        from starlette.routing import Route

        # Plain functions: they run on another thread, since they may wait for a lock of the endpoint's.
        def metrics(_: Request) -> Response:
            return Response(self._metrics.exposition(), media_type=TEXT)

        def status(_: Request) -> Response:
            return Response(msgspec.json.encode(self._status()), media_type="application/json")

        def health(_: Request) -> Response:
            found = self._status()
            body = {"is_healthy": found.is_healthy, "problem": found.problem}
            return Response(msgspec.json.encode(body), 200 if found.is_healthy else 503, media_type="application/json")

        def trace(request: Request) -> Response:
            try:
                seconds = float(request.query_params.get("seconds", "1"))
            except ValueError:
                seconds = 0.0
            if not 0 < seconds <= LONGEST_WINDOW_S:
                return Response(f"seconds is a number above 0, and {LONGEST_WINDOW_S:g} at most", 400)
            recorded = self._recorder.record(seconds)
            if recorded is None:
                return Response("somebody else records: try again when that is over", 409)
            found = self._status()
            window = Window(found.side, found.engine, found.rank, found.endpoint, *recorded)
            return Response(msgspec.json.encode(window), media_type="application/json")

        def livez(_: Request) -> Response:
            dead = [thread.name for thread in self._status().threads if not thread.is_alive]
            return _probed(f"threads of this endpoint have ended: {', '.join(dead)}" if dead else "")

        def readyz(_: Request) -> Response:
            return _probed(self._status().not_ready)

        def drain(request: Request) -> Response:
            problem = self._why_not_let_in(request)
            if problem is not None:
                return problem
            self._drain()
            return Response(msgspec.json.encode(self._status()), 202, media_type="application/json")

        routes = {"/metrics": metrics, "/status": status, "/health": health, "/trace": trace}
        probes = {"/livez": livez, "/readyz": readyz}
        reads = [Route(path, endpoint) for path, endpoint in {**routes, **probes}.items()]
        return Starlette(routes=[*reads, Route("/drain", drain, methods=["POST"])])

    def _why_not_let_in(self, request: Request) -> Response | None:
        """Returns the answer for somebody who may not drain the endpoint."""
        from starlette.responses import Response

        if self._token is None:
            if request.client is not None and is_loopback(request.client.host):
                return None
            return Response(
                "this endpoint has no secret (KVFERRY_SECRET_FILE, KVFERRY_SECRET): only processes of its machine may "
                "drain it",
                403,
            )
        if bears(request.headers.raw, self._token):
            return None
        return Response(
            "only those who know this endpoint's secret may drain it (KVFERRY_SECRET_FILE, KVFERRY_SECRET)",
            401,
            {"www-authenticate": "Bearer"},
        )


def _probed(problem: str) -> Response:
    """Returns a probe's answer: 200, or 503 with what is wrong."""
    from starlette.responses import Response

    return Response(f"{problem or 'ok'}\n", 503 if problem else 200)
