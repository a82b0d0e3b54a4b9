"""uvicorn as it serves here: it logs no requests, waits only so long for each, and leaves signals to its host.

Imported late, by who serves: processes that only use a registry need not load a web server.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvferry.control.http_clients import BACKLOG, STAYS, Clients, Listener
from kvferry.loggers import logger_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp

_CONNECTIONS_OF_ONE_THAT_WAITS = 6  # `http_clients.BACKLOG`
# How long a client may take to send a request's head, its TLS handshake included, and how many may at once: connections
# take file descriptors of the whole process.
_LONGEST_HEAD_S = 10
_MOST_SILENT = 512
# Between two requests: for who asks now and then, such as Prometheus every 15 s, and for a rank, whose connection lives
# as long as the rank, longer than the time between renewals.
_KEEP_ALIVE_S = 20
_RANKS_KEEP_ALIVE_S = 180
_GRACEFUL_SHUTDOWN_S = 1


class _QuietProtocol(H11Protocol):
    """Writes no logs of requests, and waits only so long for the head of one.

    uvicorn's own switch for the access log would silence the host process's servers too, and so would the level of its
    logger, which reports every client that speaks no HTTP.
    """

    def __init__(self, *args: Any, clients: Clients, logger: logging.Logger, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.access_log = False
        self.logger = logger
        self._clients = clients

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._number = self._clients.connected(transport.get_extra_info("socket").fileno(), transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._clients.was_heard(self._number)
        if self.conn.their_state is not h11.IDLE:
            self._clients.has_asked(self._number)
        elif self.timeout_keep_alive_task is None:
            self._clients.expect(self._number)  # it began another request on a connection it kept

    def on_response_complete(self) -> None:
        if self.scope["state"].get(STAYS):
            self.timeout_keep_alive = _RANKS_KEEP_ALIVE_S
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clients.forget(self._number)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        # What follows a good head may be no HTTP. Then the answer to the head comes too late, or has begun already.
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:
            self.transport.abort()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_up: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_up = on_up

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_up()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn would raise the signal again after the shutdown, and the command would end as if killed.
        self.force_exit = self.should_exit
        self.should_exit = True


def quiet_server(
    app: ASGIApp, listener: Listener, on_up: Callable[[], None], *, tls: ssl.SSLContext | None, most: int
) -> uvicorn.Server:
    """Makes a server.

    Args:
        app: what is served.
        listener: accepts the connections.
        on_up: called once it serves.
        tls: with it, the server speaks TLS.
        most: connections at a time; then those go on which nothing has come for longest.
    """
    logger = logger_of(f"{__name__}.requests")
    logger.setLevel(logging.ERROR)
    clients = Clients(most=most, most_silent=min(_MOST_SILENT, most * 2 // 3), longest_s=_LONGEST_HEAD_S)
    listener.on_accept = clients.accepted
    config = uvicorn.Config(
        app,
        http=partial(_QuietProtocol, clients=clients, logger=logger),  # type: ignore[arg-type]
        loop="asyncio",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        backlog=min(BACKLOG, most // _CONNECTIONS_OF_ONE_THAT_WAITS),
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACEFUL_SHUTDOWN_S,
    )
    config.load()
    config.ssl = tls  # made by us: uvicorn would ask for the password of an encrypted key on the terminal
    return _Server(config, on_up)
