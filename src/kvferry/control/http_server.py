"""Serves HTTP from a thread of its own, or as a whole process.

A host process may have a uvicorn and an event loop of its own: nothing here touches loggers, event loop
policies or, when run in a thread, signals.
"""

from __future__ import annotations

import errno
import socket
import ssl
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvferry.control.credentials import bears
from kvferry.control.http_clients import BACKLOG, Listener
from kvferry.errors import KVFerryError, SettingsError, UsageError
from kvferry.hosts import bracketed, is_wildcard
from kvferry.loggers import logger_of
from kvferry.open_files import share_of

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
    from typing_extensions import Self

log = logger_of(__name__)


class HttpServer(ABC):
    """An HTTP server. One object serves once: `start` and `close`, or `serve_forever`.

    Subclasses define what is served, and its name in messages.

    Attributes:
        title: what this is, for messages.
        thread_name: of the thread that serves.
        port_setting: the environment variable that chooses the port.
        when_taken: what else one can do if the port is taken.
        failed: the error that is raised if the server does not start or stop.
        most_connections: how many there may be at a time; then those go on which nothing has come for longest.
        share: how many sixteenths of the files that the process may open they may take at most.
    """

    title: str
    thread_name: str
    port_setting: str
    when_taken = ""
    failed: type[KVFerryError] = KVFerryError
    most_connections: int
    share: int

    def __init__(self, host: str, port: int, *, tls: ssl.SSLContext | None = None, token: str | None = None) -> None:
        """Takes the address; `start` binds it.

        Args:
            host: address or name to listen on; IPv6 without brackets.
            port: TCP port; 0 takes any that is free.
            tls: with it, the server speaks TLS.
            token: whose requests do not have it must connect anew for each.

        Raises:
            SettingsError: if a value is impossible.
        """
        if not host:
            raise SettingsError(
                f"the host of {self.title} is empty: name the address to listen on, such as '127.0.0.1'"
            )
        if not 0 <= port <= 65535:
            raise SettingsError(f"the port of {self.title} is {port}: it must lie in [0, 65535]")
        self._host = host
        self._port = port
        self._tls = tls
        self._token = token
        # Guards the step from new to started, and the one to closed.
        self._lock = threading.Lock()
        self._is_used = False
        self._address: tuple[str, int] | None = None
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @abstractmethod
    def app(self) -> ASGIApp:
        """Returns what is served. Called once, before serving begins."""

    @property
    def address(self) -> tuple[str, int]:
        """The IP address and port that the server listens on.

        Raises:
            UsageError: if the server was not started.
        """
        if self._address is None:
            raise UsageError(f"{self.title} has no address before it is started")
        return self._address

    @property
    def url(self) -> str:
        """Where clients on this machine reach it; for a wildcard address, the loopback address.

        Raises:
            UsageError: if the server was not started.
        """
        host, port = self.address
        if is_wildcard(host):
            host = "::1" if ":" in host else "127.0.0.1"
        return f"{'http' if self._tls is None else 'https'}://{bracketed(host)}:{port}"

    def start(self, timeout_s: float = 10.0) -> None:
        """Serves from a daemon thread; returns once requests are answered.

        Raises:
            SettingsError: if the address cannot be listened on: the port is taken, or the host is not this
                machine's.
            KVFerryError: if the server did not come up within the timeout, in seconds; of the kind `failed`.
            UsageError: if this object was started or closed before.
        """
        with self._lock:
            is_up = threading.Event()
            server, listener = self._prepare(is_up.set)

            def serve() -> None:
                try:
                    server.run(sockets=[listener])
                    if not server.should_exit:
                        raise self.failed("the server ended by itself")
                # uvicorn raises SystemExit where it cannot start; in a thread it would vanish.
                except BaseException as error:
                    self._failure = error
                    log.exception("%s at %s died", self.title, self.url)
                finally:
                    listener.close()
                    is_up.set()

            self._thread = threading.Thread(target=serve, name=self.thread_name, daemon=True)
            self._thread.start()
        was_in_time = is_up.wait(timeout_s)
        if self._failure is not None or not was_in_time:
            self.close()
            reason = repr(self._failure) if self._failure else f"it did not answer within {timeout_s:g} s"
            raise self.failed(f"{self.title} at {self.url} did not start: {reason}") from self._failure

    def serve_forever(self, on_started: Callable[[str], None] | None = None) -> None:
        """Serves from the calling thread until SIGINT, SIGTERM or `close`, then returns.

        Signals are handled if the calling thread is the main thread.

        Args:
            on_started: called with the url once requests are answered.

        Raises:
            SettingsError: if the address cannot be listened on.
            UsageError: if this object was started or closed before.
        """
        with self._lock:
            server, listener = self._prepare(lambda: on_started(self.url) if on_started else None)
        with listener:
            server.run(sockets=[listener])

    def close(self, timeout_s: float = 10.0) -> None:
        """Stops serving, closes every connection and ends the thread. May be called again, and from any thread.

        Raises:
            KVFerryError: if the thread did not end within the timeout, in seconds; of the kind `failed`.
        """
        with self._lock:
            self._is_used = True
            server, thread = self._server, self._thread
        if server is not None:
            server.should_exit = True
        if thread is not None:
            thread.join(timeout_s)
            if thread.is_alive():
                raise self.failed(f"{self.title} at {self.url} did not stop within {timeout_s:g} s")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _prepare(self, on_up: Callable[[], None]) -> tuple[uvicorn.Server, Listener]:
        if self._is_used:
            raise UsageError(f"{self.title} was started or closed before: make a new {type(self).__name__}")
        # The port is taken here, so that a failure is raised in the caller's thread.
        listener = self.listen(self._port)
        try:
            host, port = listener.getsockname()[:2]
            app = self.app() if self._token is None else _ClosesAfterStrangers(self.app(), self._token)
            # Imported late: processes that only use a registry need not load a web server.
            from kvferry.control.quiet_server import quiet_server

            most = share_of(self.share, 16, most=self.most_connections)
            server = quiet_server(app, listener, on_up, tls=self._tls, most=most)
        except BaseException:
            listener.close()
            raise
        self._address = (host, port)
        self._server = server
        self._is_used = True
        return server, listener

    def listen(self, port: int) -> Listener:
        """Opens a listening socket. Binding is not enough: until one of them listens, two servers can share a port.

        Raises:
            SettingsError: if the address cannot be listened on, saying why.
        """
        host = self._host
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, _, _, _, address = found[0]
            is_dual = host == "::" and socket.has_dualstack_ipv6()
            listener = socket.create_server(
                (str(address[0]), port), family=family, backlog=BACKLOG, dualstack_ipv6=is_dual
            )
            # Accepted connections inherit it. asyncio would set it, but not on what such a listener accepts: each
            # answer would wait 40 ms for the acknowledgement of its own headers.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return Listener.of(listener)
        # A name that cannot be encoded raises UnicodeError, one that cannot be resolved an OSError.
        except (OSError, UnicodeError) as error:
            raise SettingsError(
                f"{self.title} cannot listen on host {host!r}, port {port}: {self._remedy(error)}"
            ) from error

    def _remedy(self, error: Exception) -> str:
        number = error.errno if isinstance(error, OSError) else None
        if number == errno.EADDRINUSE:
            return f"the port is taken. Choose another with {self.port_setting}{self.when_taken}"
        if number in (errno.EACCES, errno.EPERM):
            return f"this process may not use that port. Choose one above 1023 with {self.port_setting}"
        if isinstance(error, (socket.gaierror, UnicodeError)) or number == errno.EADDRNOTAVAIL:
            return f"the host is no address of this machine ({error}). Use one that is, or 0.0.0.0 for all"
        return str(error)


class _ClosesAfterStrangers:
    """Closes a connection after the answer to a request that did not bring the token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [each for each in message.get("headers", ()) if each[0].lower() != b"connection"]
                message = {**message, "headers": [*kept, (b"connection", b"close")]}
            await send(message)

        await self._app(scope, receive, send if bears(scope.get("headers", ()), self._token) else closing)
