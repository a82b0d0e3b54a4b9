"""The registry that is upgraded or restarted under load, whichever of the two it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from benchmarks.upgrade.processes import RegistryHost
from benchmarks.upgrade.releases import Release


class Member(Protocol):
    """A process of it."""

    def kill(self) -> None:
        """Ends it."""

    def start(self) -> None:
        """Starts it again, perhaps with another release."""


class Restarted(Protocol):
    """A registry, process by process."""

    @property
    def url(self) -> str:
        """Where it is."""

    @property
    def members(self) -> Sequence[Member]:
        """Its processes."""

    def has_leader(self, member: int = 0) -> bool:
        """Whether a member answers again what clients ask."""


class HttpRegistry:
    """kvferry's own registry: one process, of one release until it is started again, of the other one.

    Attributes:
        members: itself.
    """

    def __init__(self, first: Release, then: Release, *, lease_s: float, secret: str) -> None:
        """Starts it with the first release."""
        self._then = then
        self._start: Callable[[Release, int], RegistryHost] = lambda release, port: RegistryHost(
            release, lease_s=lease_s, secret=secret, port=port
        )
        self._host = self._start(first, 0)
        self.url = self._host.url
        self.members: Sequence[Member] = (self,)

    def kill(self) -> None:
        """Ends it."""
        self._host.close()

    def start(self) -> None:
        """Starts the other release on the same port."""
        self._host = self._start(self._then, int(self.url.rpartition(":")[2]))

    def has_leader(self, member: int = 0) -> bool:
        """Returns True: it answers as soon as it has started."""
        return True
