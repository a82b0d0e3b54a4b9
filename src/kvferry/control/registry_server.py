"""The registry's HTTP server."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvferry.control.credentials import ServerCertificate
from kvferry.control.http_server import HttpServer
from kvferry.control.leases import Leases
from kvferry.control.registry_messages import LONGEST_LEASE_S
from kvferry.errors import RegistryError, SettingsError
from kvferry.hosts import is_loopback
from kvferry.loggers import logger_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp


class RegistryServer(HttpServer):
    """The registry's HTTP server.

    One object serves once: `start` and `close`, or `serve_forever`.

    Args:
        host: address or name to listen on; IPv6 without brackets.
        port: TCP port; 0 takes any that is free.
        lease_s: how long a registration lasts without being renewed, in seconds.
        token: what every request must carry; None lets everyone in. See `credentials`.
        certificate: with one, the registry speaks TLS.

    Raises:
        SettingsError: if a value is impossible.
    """

    title = "the registry"
    thread_name = "kvferry-registry"
    port_setting = "KVFERRY_REGISTRY_PORT"
    when_taken = ", or set host_registry=False if the registry that is already there should be used"
    failed = RegistryError
    most_connections = 32768  # 16,384 ranks, and as many that look engines up
    share = 3  # of an engine's process

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 8998,
        lease_s: float = 10.0,
        *,
        token: str | None = None,
        certificate: ServerCertificate | None = None,
    ) -> None:
        super().__init__(host, port, tls=None if certificate is None else certificate.context(), token=token)
        if lease_s > LONGEST_LEASE_S:
            raise SettingsError(f"lease_s is {lease_s}: a lease lasts at most {LONGEST_LEASE_S:g} s")
        self._registrations = Leases(lease_s)
        if token is not None and certificate is None and not is_loopback(host):
            logger_of(__name__).warning(
                "the registry listens on %s without TLS: whoever listens on that network can register there as well; "
                "see docs/security.md",
                host,
            )

    def serve_forever(self, on_started: Callable[[str], None] | None = None) -> None:
        """Serves from the calling thread, see `HttpServer`.

        The process may have as many files open from then on as the system lets it: every rank keeps a connection.
        """
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:  # a system that has another limit beside it
            logger_of(__name__).debug("at most %d files stay open: %s", soft, error)
        self.share = 14
        super().serve_forever(on_started)

    def app(self) -> ASGIApp:
        """The registry's routes."""
        # Imported late: processes that only use a registry need not load a web server.
        from kvferry.control.registry_app import registry_app

        return registry_app(self._registrations, time.monotonic, token=self._token)
