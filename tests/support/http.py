"""Servers of tests' own on loopback: web applications, and whatever a test wants answered, HTTP or not."""

from __future__ import annotations

import gzip
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

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

    def __exit__(self, *error: object) -> None:
        self.close()


@cache
def nested_gzip() -> bytes:
    """Returns less than two kilobytes, of 128 MiB. To make them takes a second."""
    return gzip.compress(gzip.compress(bytes(128 << 20)))


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """A server that gives every connection the same bytes and closes it; yields where it answers."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def http_answer(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body
