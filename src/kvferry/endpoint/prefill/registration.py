"""A prefill rank at the registry, where decode ranks find it."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import structs

from kvferry.control.registry_client import LeaseKeeper
from kvferry.endpoint.runtime.platform import Platform
from kvferry.errors import RankReplacedError
from kvferry.loggers import logger_of
from kvferry.protocol.wire.field_types import Identity
from kvferry.protocol.wire.registrations import RankRegistration, check_instance
from kvferry.settings import Settings

log = logger_of(__name__)

_COUNT_S = 0.5
"""How often the registry hears how many rooms are open, while the rank drains."""


class Registration:
    """Keeps a rank registered, and runs the registry where it is asked to.

    Attributes:
        registry_url: where the registry is.
        rank: what is registered.
        client: of the registry.
    """

    def __init__(self, settings: Settings, platform: Platform, instance: str | None, *, hosts_registry: bool) -> None:
        """Starts the registry if it is hosted here. Nothing is registered yet.

        Args:
            instance: this start of the engine; None if it has no name.

        Raises:
            SettingsError: if the registry's port is taken, or a setting or that name is impossible.
        """
        if instance is not None:
            check_instance(instance)
        self._platform = platform
        self._instance = instance or ""
        self._server = platform.serve_registry(settings) if hosts_registry else None
        self._lease: LeaseKeeper | None = None
        self.rank: RankRegistration | None = None  # what is registered
        self._told_at = 0.0  # when it was last changed
        self.registry_url = self._server.url if self._server is not None else settings.registry_address
        try:
            self.client = platform.registry(settings, self.registry_url)
        except BaseException:
            if self._server is not None:
                self._server.close()
            raise

    def announce(self, identity: Identity, control_address: str, on_drain: Callable[[], None]) -> None:
        """Registers the rank, as soon as the registry can be reached, and keeps it registered. For the first call.

        Args:
            identity: who it is.
            control_address: where decode ranks reach it.
            on_drain: called when an operator has told it to drain.
        """
        if self._lease is not None:
            return
        self.rank = rank = RankRegistration(
            engine=identity.engine,
            incarnation=identity.endpoint,
            coordinates=identity.coordinates,
            control_address=control_address,
            layout_digest=identity.layout.digest,
            started_at=self._platform.unix_time(),
            protocol_version=identity.versions.oldest,
            newest_protocol_version=identity.versions.newest,
            instance=self._instance,
        )

        def report(error: Exception) -> None:
            log.error("prefill rank %d of %r is not registered: %s", rank.coordinates.engine_rank, rank.engine, error)

        self._lease = self._platform.keep_registered(self.client, rank, report, on_drain)

    def drain(self, open_rooms: int, *, is_drained: bool) -> None:
        """Has the registry show that the rank drains, and how far it is. May be called often."""
        if self.rank is None or self._lease is None:
            return
        now = self._platform.now()
        changed = structs.replace(self.rank, draining=True, drained=is_drained, open_rooms=open_rooms)
        is_news = (changed.draining, changed.drained) != (self.rank.draining, self.rank.drained)
        if is_news or (changed != self.rank and now >= self._told_at + _COUNT_S):
            self.rank, self._told_at = changed, now
            self._lease.update(changed)

    def wait(self, timeout_s: float) -> bool:
        """Waits until the rank is registered; False if it is not after timeout_s, or was not announced."""
        return self._lease is not None and self._lease.registered.wait(timeout_s)

    @property
    def is_registered(self) -> bool:
        """Whether the registry holds a lease of the rank, as far as is known."""
        return self._lease is not None and self._lease.registered.is_set()

    @property
    def error(self) -> Exception | None:
        """Why the rank could not be registered, or its lease renewed; None if there was no problem."""
        return self._lease.last_error if self._lease is not None else None

    @property
    def replaced(self) -> RankReplacedError | None:
        """That another start of the rank has its place at the registry; None if it has not, as far as is known."""
        return self._lease.replaced if self._lease is not None else None

    def leave(self) -> None:
        """Ends the registration. May be called again."""
        if self._lease is not None:
            self._lease.close()

    def close(self) -> None:
        """Ends the registration, and the registry if it is hosted here. May be called again."""
        self.leave()
        self.client.close()
        if self._server is not None:
            self._server.close()
