"""Servers that answer whatever a test wants, HTTP or not."""

from __future__ import annotations

import gzip
import socket
import threading
from functools import cache
from typing import Any


@cache
def nested_gzip() -> bytes:
    """Returns less than two kilobytes, of 128 MiB. To make them takes a second."""
    return gzip.compress(gzip.compress(bytes(128 << 20)))


def answering(answer: bytes) -> Any:
    """A server that gives every connection the same bytes and closes it."""

    class Answering:
        def __enter__(self) -> str:
            self.listener = socket.create_server(("127.0.0.1", 0))
            self.thread = threading.Thread(target=self.serve, daemon=True)
            self.thread.start()
            return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

        def serve(self) -> None:
            while True:
                try:
                    connection, _ = self.listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

        def __exit__(self, *_: object) -> None:
            self.listener.shutdown(socket.SHUT_RDWR)
            self.listener.close()
            self.thread.join()

    return Answering()


def http_answer(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body
