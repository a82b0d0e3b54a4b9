"""What an address or a URL says of who reaches it, without asking anybody."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit


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
