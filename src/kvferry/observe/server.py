"""What one endpoint shows over HTTP: metrics, its status, whether it is well. Read-only."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from kvferry.control.http_server import HttpServer
from kvferry.errors import ObserveError
from kvferry.observe.metrics import Metrics
from kvferry.observe.status import EndpointStatus

if TYPE_CHECKING:
    from starlette.types import ASGIApp

TEXT = "text/plain; version=0.0.4; charset=utf-8"


class ObserveServer(HttpServer):
    """Serves `/metrics`, `/status` and `/health`."""

    title = "the metrics' server"
    thread_name = "kvferry-observe"
    port_setting = "KVFERRY_OBSERVE_PORT"
    when_taken = ": every rank of a machine takes the one that is its number higher"
    failed = ObserveError

    def __init__(self, host: str, port: int, metrics: Metrics, status: Callable[[], EndpointStatus]) -> None:
        """Args:
            metrics, status: of the endpoint.

        Raises:
            SettingsError: if a value is impossible.
        """
        super().__init__(host, port)
        self._metrics = metrics
        self._status = status

    def app(self) -> ASGIApp:
        """The routes."""
        # Imported late: most processes need no web server.
        from starlette.applications import Starlette
        from starlette.requests import Request
        from starlette.responses import Response
        from starlette.routing import Route

        # Plain functions: they run on a thread aside, since they may wait for a lock of the endpoint's.
        def metrics(_: Request) -> Response:
            return Response(self._metrics.exposition(), media_type=TEXT)

        def status(_: Request) -> Response:
            return Response(msgspec.json.encode(self._status()), media_type="application/json")

        def health(_: Request) -> Response:
            found = self._status()
            is_well = found.is_healthy and not found.problem
            body = {"is_well": is_well, "problem": found.problem}
            return Response(msgspec.json.encode(body), 200 if is_well else 503, media_type="application/json")

        return Starlette(routes=[Route("/metrics", metrics), Route("/status", status), Route("/health", health)])
