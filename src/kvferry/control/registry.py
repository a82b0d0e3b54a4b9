"""What endpoints and commands ask of a registry, whatever keeps the registrations: kvferry's own server, or etcd.

`construction` makes the one that the settings name, by the scheme of its URL.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from kvferry.findings import Finding
from kvferry.protocol.wire.registrations import EngineView, RankRegistration

Self = TypeVar("Self", bound="Registry")

OnChange: TypeAlias = Callable[[str | None], None]
"""Called with the name of an engine whose registrations have changed; None where any may have."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What a registry grants a rank that it has registered.

    Attributes:
        lease_s: how long the registration lasts without being renewed, in seconds.
        renew_s: after how many seconds to renew it: the later, the more ranks there are.
        return_s: over how many seconds to spread what ranks do at once, such as coming back to a registry that was
            away.
    """

    lease_s: float
    renew_s: float
    return_s: float = 0.0


class Registry(ABC):
    """A registry, as its clients have it. May be used from several threads at once.

    Every method that asks it raises RegistryUnreachableError if nothing answers, RegistryAccessError if it lets only
    others in, RegistryError if what answers is no registry or fails, and UsageError once this object was closed, or in
    a process that was forked from its own.
    """

    @property
    @abstractmethod
    def url(self) -> str:
        """The registry's address, without a slash at the end."""

    def url_for(self, engine: str) -> str:
        """Returns the address of the registry that is asked for an engine: this one, unless a subclass knows several.

        Args:
            engine: the prefill engine's name.
        """
        return self.url

    @abstractmethod
    def register(self, registration: RankRegistration) -> float:
        """Registers a rank, or renews its lease.

        Returns:
            How long the lease lasts, in seconds.

        Raises:
            RegistrationRefusedError: with the registry's reason; nothing has changed.
        """

    def grant(self, registration: RankRegistration) -> Grant:
        """Does what `register` does, and says when to renew the lease."""
        lease_s = self.register(registration)
        return Grant(lease_s, renew_s=lease_s / 3)

    @property
    def has_hung_up(self) -> bool:
        """Whether the registry has closed the connection by which it granted a lease last: it may have restarted.

        False where that cannot be seen.
        """
        return False

    @abstractmethod
    def remove(self, engine: str, engine_rank: int, incarnation: str) -> bool:
        """Ends a rank's registration, if this incarnation holds it; otherwise nothing changes.

        Returns:
            Whether a registration was ended.

        Raises:
            SettingsError: if no engine can have this name.
        """

    @abstractmethod
    def engine(self, name: str) -> EngineView:
        """Returns the live ranks of one engine; a view without any, and with others' names, if none is registered.

        Raises:
            EngineEndedError: if it is known that there will never be any again.
            SettingsError: if no engine can have this name.
        """

    @abstractmethod
    def engines(self) -> tuple[EngineView, ...]:
        """Returns every engine that has a live rank, by name."""

    @abstractmethod
    def drain(self, engine: str) -> tuple[str, ...]:
        """Tells the live ranks of a prefill engine to drain, as `PrefillEndpoint.drain` does.

        Everyone who asks sees them draining from now on; they learn of it when they renew their registration. Ranks
        that start later are not meant.

        Returns:
            The endpoints that are meant: a start of a rank each.

        Raises:
            RegistrationRefusedError: if no rank of the engine is registered.
            SettingsError: if no engine can have this name.
        """

    @abstractmethod
    def drains(self, endpoint: str) -> bool:
        """Whether an operator has told an endpoint to drain, as far as its last registration by this object has shown.

        Asks nobody.
        """

    @abstractmethod
    def release(self, endpoint: str) -> None:
        """Tells every decode rank that asks this registry that a prefill endpoint has ended.

        Args:
            endpoint: the name of one start of a prefill rank.

        Raises:
            RegistrationRefusedError: if the endpoint is registered, so that it seems to live.
        """

    @abstractmethod
    def released(self) -> tuple[str, ...]:
        """Returns the prefill endpoints that operators have released."""

    @abstractmethod
    def findings(self) -> Iterator[Finding]:
        """Says how the registry is, for `kvferry doctor`."""

    def watch(self, changed: OnChange) -> None:  # noqa: B027 - not every registry can
        """Has a callable called when registrations change, until this object is closed.

        Look-ups and registrations that must wait are tried again soon in any case: a registry that cannot tell of
        changes calls nobody.

        Args:
            changed: should return soon; called on a thread of the registry's own.
        """

    def lost(self, engine: str) -> None:  # noqa: B027 - most know nothing beyond their registrations
        """Hears that a link to an engine has ended, on the endpoint's own thread: what else is known of it may be old.

        Returns at once.
        """

    def load(self) -> None:  # noqa: B027 - not every registry has anything to load
        """Loads what requests need, without making one: the first is as fast as the others then."""

    @abstractmethod
    def close(self) -> None:
        """Closes the connections. May be called again; requests made later raise UsageError."""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
