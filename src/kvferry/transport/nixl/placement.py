"""Which network device is near which GPU, and whether the one that NIXL is told to use is."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.findings import Finding, good, warning
from kvferry.transport.pci import Distance, PciDevice, Topology


def placement(device: str | None, topology: Topology) -> Iterator[Finding]:
    """Says for every GPU which network devices are nearest. Nothing where there is no GPU.

    Args:
        device: the network device that NIXL is told to use, as UCX calls it; None if that is left to UCX.
        topology: of this machine.
    """
    name = (device or "").partition(":")[0]
    used = next((nic for nic in topology.nics if nic.name == name), None)
    for gpu in topology.gpus:
        found = topology.nearest(gpu)
        if found is None:
            yield good("placement", f"{_name(gpu)}: no network device is on a bus of this machine")
            continue
        nearest, distance = found
        near = f"{', '.join(f'{nic.name} ({nic.kind})' for nic in nearest)}, across {distance.words}"
        if used is None or used in nearest or gpu.distance(used) is distance:
            yield good("placement", f"{_name(gpu)}: the nearest network devices are {near}")
        elif gpu.distance(used) is Distance.SYSTEM:
            yield warning(
                "placement",
                f"NIXL is told to use {used.name}, which is across {Distance.SYSTEM.words} from {_name(gpu)}; nearer "
                f"are {near}",
                "set KVFERRY_NIXL_DEVICE for each rank to a device near its GPU, or to all, which lets UCX choose",
            )
        else:
            yield good(
                "placement",
                f"{_name(gpu)}: the nearest network devices are {near}; {used.name}, which NIXL is told to use, is "
                f"across {gpu.distance(used).words}",
            )


def _name(gpu: PciDevice) -> str:
    node = f", NUMA node {gpu.numa_node}" if gpu.numa_node >= 0 else ""
    return f"{gpu.kind} GPU {gpu.name}{node}"
