"""What a rank must be told beside the address that others reach: a secret, a registry, and what peers connect to.

Whoever sets up a cluster forgets several of these at once. They are found together, so that one error names them all,
and `kvferry doctor` can print the lines that are missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvferry.hosts import hosts_of, is_loopback, is_wildcard


class Told(Protocol):
    """The settings that say who reaches a rank, as `Settings` has them."""

    @property
    def host(self) -> str: ...

    @property
    def advertise_host(self) -> str | None: ...

    @property
    def registry_host(self) -> str: ...

    @property
    def registry_address(self) -> str: ...

    @property
    def secret(self) -> object: ...

    @property
    def secret_file(self) -> Path | None: ...

    @property
    def allow_unauthenticated(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Lack:
    """A setting that is missing.

    Attributes:
        name: of the setting.
        why: what is wrong without it, and what to set, as the rest of a sentence that its name begins.
        is_refused: whether nothing starts without it; else only some deployments need it.
    """

    name: str
    why: str
    is_refused: bool = True


def lacks(told: Told) -> Iterator[Lack]:
    """Yields everything that is missing; nothing where only this machine reaches the rank."""
    beyond = [each for each in (told.host, told.registry_host) if not is_loopback(each)]
    if beyond and told.secret is None and told.secret_file is None and not told.allow_unauthenticated:
        yield Lack(
            "secret_file",
            "everyone who reaches that address could read and write caches. Give all ranks and the registry one "
            "secret, in a file (KVFERRY_SECRET_FILE) or as KVFERRY_SECRET; KVFERRY_ALLOW_UNAUTHENTICATED=1 does "
            "without, if only friends are on that network",
        )
    if is_loopback(told.host) or leads_elsewhere(told.registry_address):
        return
    if is_loopback(told.registry_host):
        yield Lack(
            "registry_url",
            f"the registry {told.registry_address} is on this machine, where ranks on others do not find it. Set it to "
            "where `kvferry registry` runs, as they reach it (SGLang's prefill servers have their own)",
            is_refused=False,
        )
    if is_wildcard(told.host) and told.advertise_host is None:
        yield Lack(
            "advertise_host",
            f"peers cannot connect to {told.host}, and no route to a registry on another machine says which address "
            "they reach: set advertise_host (KVFERRY_ADVERTISE_HOST) to one of this machine",
        )


def leads_elsewhere(registry_address: str) -> bool:
    """Whether a route to the registry can tell which address of this machine others reach."""
    return not all(is_loopback(each) or is_wildcard(each) for each in hosts_of(registry_address))
