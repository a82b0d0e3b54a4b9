"""Which network device NIXL is told to use.

Left to itself, UCX takes each interface that is up for one that leads to every peer, and spreads large writes over two
of them: a bridge of containers, or a network of another purpose, holds up every connection. With RDMA devices it knows
how to choose.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.addresses import address_towards_registry
from kvferry.hosts import is_loopback, is_wildcard
from kvferry.settings import Settings, environment
from kvferry.transport.devices import interface_of, rdma_devices
from kvferry.transport.nixl.settings import NixlSettings

OF_UCX = "UCX_NET_DEVICES"


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """A device, and why it is that one.

    Attributes:
        device: as UCX calls it; None leaves it to UCX.
        reason: in words that follow the device's name.
    """

    device: str | None
    reason: str


def chosen_device(settings: Settings) -> DeviceChoice:
    """Returns the device that these settings choose on this machine."""
    told = settings.of(NixlSettings).nixl_device
    if told == "all":
        return DeviceChoice(None, "KVFERRY_NIXL_DEVICE is all")
    if told is not None:
        return DeviceChoice(told, "KVFERRY_NIXL_DEVICE")
    if devices := environment().get(OF_UCX):
        return DeviceChoice(None, f"{OF_UCX} is {devices}")
    if settings.is_on_loopback:
        return DeviceChoice("lo", "since nothing here listens beyond loopback (KVFERRY_HOST)")
    if found := rdma_devices():
        return DeviceChoice(None, f"there is RDMA: {', '.join(found)}")
    has_address = not is_wildcard(settings.host) and not is_loopback(settings.host)
    address = settings.host if has_address else address_towards_registry(settings)
    interface = interface_of(address) if address is not None else None
    if interface is None or address is None:
        return DeviceChoice(None, "no interface is known to have the address that peers reach")
    why = "KVFERRY_HOST" if has_address else "the way to the registry"
    return DeviceChoice(interface, f"which has {address}: {why}; KVFERRY_NIXL_DEVICE chooses another")
