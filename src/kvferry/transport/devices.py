"""Network devices of this machine, and which is near which GPU: for transports that choose one, and for the doctor.

Read from the system's own trees (/sys, /proc), so that no driver, library or GPU is needed. The distance of two devices
is that of their paths in the PCI tree: below one switch bytes need not pass a processor, below one root complex, or on
one NUMA node, they pass one, and otherwise they go from one processor to another as well.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

_RDMA = Path("/sys/class/infiniband")
_INTERFACES = Path("/sys/class/net")
_V6 = Path("/proc/net/if_inet6")
_SIOCGIFADDR = 0x8915
_SYS = Path("/sys")
_DISPLAY_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
"""VGA, 3D and other display controllers, and processing accelerators: as a GPU of a server may call itself."""
_GPU_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}
_AMAZON = "0x1d0f"


def rdma_devices() -> dict[str, str]:
    """Returns RDMA devices by name, each with the state of its ports."""
    return {each.name: _ports(each) for each in _folders(_RDMA)}


def interfaces() -> dict[str, str]:
    """Returns network interfaces by name, each with its state."""
    return {each.name: text_of(each / "operstate", "unknown") for each in _folders(_INTERFACES)}


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


def _folders(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _ports(device: Path) -> str:
    states = sorted((device / "ports").glob("*/state"))
    return ", ".join(text_of(state, "unknown") for state in states) or "no port"


def text_of(file: Path, otherwise: str) -> str:
    """Returns what a file of the system's says; something else if it does not."""
    try:
        return file.read_text().strip()
    except OSError:
        return otherwise


class Distance(IntEnum):
    """How far apart two devices are, the nearest first."""

    SWITCH = 0
    ROOT = 1
    NODE = 2
    SYSTEM = 3

    @property
    def words(self) -> str:
        """What lies between them."""
        return ("one PCI switch", "one PCI root complex", "one NUMA node", "two NUMA nodes")[self]


@dataclass(frozen=True, slots=True)
class PciDevice:
    """A device, with its place in the PCI tree.

    Attributes:
        name: as the system calls it: a PCI address for a GPU, such as mlx5_0 or eth0 for a network device.
        path: PCI addresses from the root complex to the device itself, the former as pci0000:17.
        numa_node: the processor's memory that it is next to; -1 if the system does not say.
        kind: what it is, for people.
    """

    name: str
    path: tuple[str, ...]
    numa_node: int
    kind: str

    def distance(self, other: PciDevice) -> Distance:
        """Returns how far away another device is."""
        shared = 0
        for ours, theirs in zip(self.path, other.path, strict=False):
            if ours != theirs:
                break
            shared += 1
        if shared >= 3:  # the root complex, its port, and a bridge: what is below that port has a switch in common
            return Distance.SWITCH
        if shared >= 1:
            return Distance.ROOT
        return Distance.NODE if self.numa_node == other.numa_node >= 0 else Distance.SYSTEM


@dataclass(frozen=True, slots=True)
class Topology:
    """The GPUs and the network devices of a machine, each sorted by name."""

    gpus: tuple[PciDevice, ...]
    nics: tuple[PciDevice, ...]

    def nearest(self, gpu: PciDevice) -> tuple[tuple[PciDevice, ...], Distance] | None:
        """Returns the network devices that are nearest to a GPU, and how near; None where there are none."""
        if not self.nics:
            return None
        least = min(gpu.distance(nic) for nic in self.nics)
        return tuple(nic for nic in self.nics if gpu.distance(nic) is least), least


def read_topology(system: Path = _SYS) -> Topology:
    """Reads where GPUs and network devices sit. Virtual devices, which are on no bus, are left out.

    A network device with RDMA is listed by the name that RDMA has for it, which is what UCX calls it.

    Args:
        system: the system's tree.
    """
    gpus = [
        PciDevice(folder.name, _path(folder), _node(folder), _GPU_VENDORS[text_of(folder / "vendor", "")])
        for folder in _folders(system / "bus" / "pci" / "devices")
        if text_of(folder / "vendor", "") in _GPU_VENDORS and text_of(folder / "class", "").startswith(_DISPLAY_CLASSES)
    ]
    rdma = list(_network_devices(_folders(system / "class" / "infiniband")))
    buses = {nic.path for nic in rdma}
    others = [nic for nic in _network_devices(_folders(system / "class" / "net")) if nic.path not in buses]
    return Topology(tuple(gpus), (*rdma, *others))


def _network_devices(folders: Iterable[Path]) -> Iterable[PciDevice]:
    for folder in folders:
        path = _path(folder / "device")
        if len(path) > 1:
            yield PciDevice(folder.name, path, _node(folder / "device"), _kind(folder))


def _kind(folder: Path) -> str:
    layers = sorted({text_of(layer, "") for layer in (folder / "ports").glob("*/link_layer")})
    if text_of(folder / "device" / "vendor", "") == _AMAZON and (folder / "ports").is_dir():
        return "EFA"
    if layers == ["Ethernet"]:
        return "RoCE"
    return "/".join(layer for layer in layers if layer) or "Ethernet"


def _path(device: Path) -> tuple[str, ...]:
    """The PCI addresses on the way from the root complex to a device; empty for one that is not there."""
    try:
        parts = device.resolve(strict=True).parts
    except OSError:
        return ()
    first = next((index for index, part in enumerate(parts) if part.startswith("pci")), len(parts))
    return tuple(part for part in parts[first:] if part.startswith("pci") or part.count(":") == 2)


def _node(device: Path) -> int:
    text = text_of(device / "numa_node", "")
    return int(text) if text.lstrip("-").isdecimal() else -1
