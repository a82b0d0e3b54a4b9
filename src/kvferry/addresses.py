"""Which of its addresses this machine is reached by: the one that packets to the registry leave from.

Whoever finds a rank at the registry has a way to the registry, so that an address on that way is one that peers reach,
as far as a machine can know from its own routes. Nothing is sent to find it.
"""

from __future__ import annotations

import ipaddress
import socket

from kvferry.errors import SettingsError
from kvferry.hosts import hosts_of, is_loopback, is_wildcard
from kvferry.settings import Settings

_ANY_PORT = 9  # nothing is sent there
_OF_NOBODY = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses that only the default route leads to: they are kept for documentation."""


def with_found_address(settings: Settings) -> Settings:
    """Returns the settings with the address that peers are told, which is looked for where host is a wildcard.

    Raises:
        SettingsError: if none is set, and none is found.
    """
    if settings.advertise_host is not None or not is_wildcard(settings.host):
        return settings
    found = address_towards_registry(settings)
    if found is None:
        raise SettingsError(
            f"host (KVFERRY_HOST) is {settings.host}, and no route of this machine leads to the registry "
            f"{settings.registry_address}: set advertise_host (KVFERRY_ADVERTISE_HOST) to an address of this machine "
            "that peers reach"
        )
    return settings.model_copy(update={"advertise_host": found})


def address_towards_registry(settings: Settings) -> str | None:
    """Returns the address of this machine that packets to the registry leave from; None if there is no way to it.

    Where a name of the registry is not known yet, and no other leads to it, that of the default route.
    """
    families = _families(settings.host)
    hosts = [each for each in hosts_of(settings.registry_address) if not is_wildcard(each) and not is_loopback(each)]
    known = [_known(host) for host in hosts]
    ways = [way for each in known for way in each if way[0] in families]
    if not all(known):
        ways += [(family, _OF_NOBODY[family]) for family in families]
    return next((found for family, address in ways if (found := source_address(family, address))), None)


def default_address() -> str | None:
    """Returns the address of this machine that packets leave from by the default route; None without one."""
    return next((found for family, address in _OF_NOBODY.items() if (found := source_address(family, address))), None)


def source_address(family: socket.AddressFamily, address: str) -> str | None:
    """Returns the address of this machine that packets to an address leave from; None without a route.

    An address that means something on one link alone is none: peers would have to say which of their links.
    """
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, _ANY_PORT))
        except OSError:
            return None
        found = str(probe.getsockname()[0])
    ip = ipaddress.ip_address(found.partition("%")[0])
    return None if ip.is_link_local or ip.is_unspecified else found


def _families(host: str) -> tuple[socket.AddressFamily, ...]:
    """Of the addresses by which whoever listens on a wildcard is reached: 0.0.0.0 takes IPv4 alone."""
    is_v4 = is_wildcard(host) and host.count(".") == 3
    return (socket.AF_INET,) if is_v4 else (socket.AF_INET, socket.AF_INET6)


def _known(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """Returns the addresses of a host; none if its name is not known."""
    try:
        found = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return []
    return [(family, str(address[0])) for family, _, _, _, address in found]
