"""Connections to a service, as all our HTTP clients have them: made with the first request, and closed for good."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from kvferry.answers import Answer, request
from kvferry.control.process_identity import OwningProcess
from kvferry.errors import KVFerryError, UsageError

if TYPE_CHECKING:
    import httpx


class HttpConnections:
    """Connections that may be used from several threads at once, and past all proxies.

    Args:
        what: whose they are, for errors, such as "the client of the Kubernetes API".
        timeout_s: how long each step of a request may take: to connect, to send, to wait for the answer, to read it.
        verify: returns what checks certificates, as httpx has it; asked with the first request.
        idle_s: how long a connection is kept that nobody uses.
        closed: raised once they are closed.

    Attributes:
        is_closed: whether they are.
    """

    def __init__(
        self,
        what: str,
        timeout_s: float,
        verify: Callable[[], ssl.SSLContext | bool],
        *,
        idle_s: float = 5.0,
        closed: type[KVFerryError] = UsageError,
    ) -> None:
        self._process = OwningProcess()
        self._what = what
        self._timeout_s = timeout_s
        self._verify = verify
        self._idle_s = idle_s
        self._closed = closed
        self._lock = threading.Lock()
        self._http: httpx.Client | None = None
        self._streamed: set[socket.socket] = set()
        self.is_closed = False

    def client(self) -> httpx.Client:
        """Returns what makes requests.

        Raises:
            KVFerryError: if it is closed, of the kind that was given.
            UsageError: in a process that was forked from its own.
        """
        # Imported at the first request: it would take most of the time that `import kvferry` takes.
        import httpx

        self._process.check(self._what)
        made = None
        if self._http is None:
            limits = httpx.Limits(keepalive_expiry=self._idle_s)
            made = httpx.Client(timeout=self._timeout_s, trust_env=False, verify=self._verify(), limits=limits)
        with self._lock:  # for a moment: whoever closes this must not wait until a client is made
            if self._http is None and not self.is_closed:
                self._http, made = made, None
            http, is_closed = self._http, self.is_closed
        if made is not None:
            made.close()
        if http is None or is_closed:
            raise self._closed(f"{self._what} was closed")
        return http

    def ask(self, url: str, *, most_bytes: int, **arguments: Any) -> Answer:
        """Makes a request and reads the answer, as `answers.request` does.

        Once more where a connection breaks, which may be one that was kept and ends in this moment: what is asked must
        bear to be asked twice.

        Raises:
            KVFerryError: as `client`; also if they are closed meanwhile.
            httpx.HTTPError: if nothing answers in time, or something else than HTTP.
        """
        ask = partial(request, self.client(), url, most_bytes=most_bytes, timeout_s=self._timeout_s, **arguments)
        import httpx

        try:
            try:
                return ask()
            except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
                return ask()
        except RuntimeError as error:
            if self.is_closed:
                raise self._closed(f"{self._what} was closed") from error
            raise

    @contextmanager
    def stream(self, url: str, **arguments: Any) -> Iterator[httpx.Response]:
        """Makes a request whose answer is read as it comes, in the block; `close` ends it at once.

        Raises:
            KVFerryError: as `client`.
            httpx.HTTPError: if nothing answers in time.
        """
        headers = {"accept-encoding": "identity", **arguments.pop("headers", {})}
        with self.client().stream(url=url, headers=headers, **arguments) as answer:
            wire: socket.socket = answer.extensions["network_stream"].get_extra_info("socket")
            with self._lock:
                if self.is_closed:
                    raise self._closed(f"{self._what} was closed")
                self._streamed.add(wire)
            try:
                yield answer
            finally:
                with self._lock:
                    self._streamed.discard(wire)

    def close(self) -> None:
        """Closes them: what is being asked fails. May be called again. Does nothing in a process that was forked."""
        if not self._process.is_this:
            return
        with self._lock:
            self.is_closed = True
            http = self._http
            for wire in self._streamed:  # whoever reads it would wait for more; TLS's own way is not for two threads
                with suppress(OSError):
                    socket.socket.shutdown(wire, socket.SHUT_RDWR)
        if http is not None:
            http.close()  # may be closed again: the call before may have been interrupted here
