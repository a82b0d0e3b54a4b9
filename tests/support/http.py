"""Web applications of tests' own, served on loopback."""

from __future__ import annotations

import socket
import threading
from types import TracebackType

import uvicorn
from starlette.types import ASGIApp
from tests.support.waiting import eventually


class Served:
    """An application behind a port, in a thread.

    Attributes:
        url: where it answers.
        address: the host and port of that.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self.url = f"http://{self.address}"
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()
        eventually("it is served", lambda: self._server.started)

    def close(self) -> None:
        """Ends it; from then on nobody answers there."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def __enter__(self) -> Served:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
