"""Who reaches an address or a URL, as far as it says so itself, and what a rank lacks that others are to reach."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from pydantic import SecretStr


def is_wildcard(host: str) -> bool:
    """Returns whether a host means every interface, so that nobody can connect to it under that name."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host in ("", "*")


def is_loopback(host: str) -> bool:
    """Returns whether only this machine reaches a host. Other names than localhost count as reachable from afar."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def hosts_of(url: str) -> tuple[str, ...]:
    """Returns the hosts that a registry's URL names, several where commas part them: IPv6 without brackets."""
    authority = re.split("[/?#]", url.partition("://")[2], maxsplit=1)[0]
    try:
        return tuple(urlsplit(f"//{each}").hostname or "" for each in authority.split(","))
    except ValueError:  # it is refused where it is used
        return ("",)


def bracketed(host: str) -> str:
    """Returns a host as it stands in a URL: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


class Told(Protocol):
    """The settings that say who reaches a rank, as `Settings` has them."""

    host: str
    advertise_host: str | None
    registry_host: str
    secret: SecretStr | None
    secret_file: Path | None
    allow_unauthenticated: bool

    @property
    def registry_address(self) -> str: ...


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
    """Yields everything that is missing; nothing where only this machine reaches the rank.

    Whoever sets up a cluster forgets several of these at once. They are found together, so that one error names them
    all, and `kvferry doctor` can print the lines that are missing.
    """
    beyond = [each for each in (told.host, told.registry_host) if not is_loopback(each)]
    if beyond and told.secret is None and told.secret_file is None and not told.allow_unauthenticated:
        yield Lack(
            "secret_file",
            "everyone who reaches that address could read and write caches. Give all ranks and the registry one "
            "secret, in a file (KVFERRY_SECRET_FILE) or as KVFERRY_SECRET; KVFERRY_ALLOW_UNAUTHENTICATED=1 does "
            "without, if only friends are on that network",
        )
    # A route to a registry that is elsewhere tells which address of this machine others reach.
    is_here = all(is_loopback(each) or is_wildcard(each) for each in hosts_of(told.registry_address))
    if is_loopback(told.host) or not is_here:
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
