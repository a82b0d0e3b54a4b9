"""Network devices of this machine, as the system shows them: for transports that choose one, and for the doctor."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_RDMA = Path("/sys/class/infiniband")
_INTERFACES = Path("/sys/class/net")
_V6 = Path("/proc/net/if_inet6")
_SIOCGIFADDR = 0x8915


def rdma_devices() -> dict[str, str]:
    """Returns RDMA devices by name, each with the state of its ports."""
    return {name: _ports(_RDMA / name) for name in _entries(_RDMA)}


def interfaces() -> dict[str, str]:
    """Returns network interfaces by name, each with its state."""
    return {name: text_of(_INTERFACES / name / "operstate", "unknown") for name in _entries(_INTERFACES)}


def interface_of(address: str) -> str | None:
    """Returns the network interface that has an address; None if none is known to."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:  # a name
        return None
    return next((name for name, has in _addresses() if has == ip), None)


def interfaces_with_addresses() -> list[str]:
    """Returns the interfaces that have an address which is neither loopback nor of one link alone."""
    return sorted({name for name, has in _addresses() if not has.is_loopback and not has.is_link_local})


def _addresses() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """Yields interfaces with their addresses: the first of IPv4, all of IPv6."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                yield name, ipaddress.IPv4Address(answer[20:24])
    with suppress(OSError):  # this machine has no IPv6
        for line in _V6.read_text().splitlines():
            digits, *_, name = line.split()
            yield name, ipaddress.IPv6Address(bytes.fromhex(digits))


def _entries(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []


def _ports(device: Path) -> str:
    states = sorted((device / "ports").glob("*/state"))
    return ", ".join(text_of(state, "unknown") for state in states) or "no port"


def text_of(file: Path, otherwise: str) -> str:
    """Returns what a file of the system's says; something else if it does not."""
    try:
        return file.read_text().strip()
    except OSError:
        return otherwise
