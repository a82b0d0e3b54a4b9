"""What `kvferry doctor` says of NIXL: its wheel, the network device that it uses, how near a GPU, and UCX's ways."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from kvferry.errors import TransportUnavailableError
from kvferry.findings import Finding, error, good, warning
from kvferry.layout import MemoryKind
from kvferry.settings import Settings, environment
from kvferry.transport.devices import (
    Distance,
    PciDevice,
    Topology,
    interfaces,
    interfaces_with_addresses,
    rdma_devices,
    read_topology,
)
from kvferry.transport.diagnosis import Diagnosis, WayTaken, installed_version
from kvferry.transport.nixl.bindings import load_bindings, why_other_cuda
from kvferry.transport.nixl.device_choice import OF_UCX, DeviceChoice, chosen_device
from kvferry.transport.nixl.nixl_posts import post_calls
from kvferry.transport.nixl.scatter_gather import check_lists, knows_lists, plugin_file
from kvferry.transport.nixl.settings import NixlSettings

_WHEELS = ("nixl-cu13", "nixl-cu12", "nixl")
_TITLE = re.compile(r"remote memory write by ucp_put\S* from (?P<source>.+?) to (?P<target>.+?)\s*\|")
_CONFIGURATION = re.compile(r"\| \S+ (?P<between>\S+) cfg#")
_WITHIN_PROCESS = "self"
_ROW = re.compile(r"\|\s*(?P<range>[\w.]+)\s*\|\s*(?P<how>[^|]*?)\s*\|\s*(?P<config>[^|]+?)\s*\|")
_EMULATED = "software emulation"


class NixlDiagnosis(Diagnosis):
    """What there is to know of NIXL and UCX on this machine."""

    variables = ("UCX_", "NIXL_")
    read_by = "UCX and NIXL"
    says_more = {"UCX_PROTO_INFO": "y"}  # noqa: RUF012 - read, never changed
    remedy = "run with UCX_LOG_LEVEL=info, and look at UCX_TLS, UCX_NET_DEVICES and KVFERRY_NIXL_DEVICE"

    def findings(self, settings: Settings) -> Iterator[Finding]:
        yield from _installed()
        yield from _compiled_code()
        yield from _lists(settings)
        choice = chosen_device(settings)
        yield from placement(choice.device, read_topology())
        yield device_finding(choice)

    def way_taken(self, said: str, *, is_local: bool, kind: MemoryKind = MemoryKind.DRAM) -> WayTaken:
        ways = ways_of_writes(said, kind)
        if not ways:
            return WayTaken("UCX does not say which way")
        problems = tuple(_problems(ways, is_local=is_local))
        return WayTaken(f"UCX takes {', '.join(dict.fromkeys(way.config for way in ways))}", problems)


def _installed() -> Iterator[Finding]:
    found = [f"{name} {version}" for name in _WHEELS if (version := installed_version(name))]
    if not found:
        yield error("nixl", "not installed: nothing can be moved between processes", "pip install nixl-cu13")
    else:
        try:
            loaded = load_bindings()
            if other := why_other_cuda(loaded.__name__):
                yield warning(
                    "nixl",
                    f"{other}: an older driver may end the process when bytes of a GPU are moved",
                    "install the one for torch's (nixl-cu12 or nixl-cu13), and uninstall the other one",
                )
            else:
                yield good("nixl", ", ".join(found))
        except TransportUnavailableError as problem:
            yield error(
                "nixl",
                f"{', '.join(found)} is installed, but cannot be loaded: {problem}",
                "install the nixl of your CUDA's major version: nixl-cu13 or nixl-cu12",
            )
    if len(found) > 1:
        yield warning("nixl", f"{' and '.join(found)} are both installed", "uninstall the one for the other CUDA")


def _compiled_code() -> Iterator[Finding]:
    """Whether compiled code can post. Nothing where NIXL is missing, which was said."""
    try:
        loaded = load_bindings()
    except TransportUnavailableError:
        return
    try:
        post_calls(loaded)
        yield good("posts", "sub-chunks of pools in CPU memory are gathered and posted by compiled code")
    except TransportUnavailableError as problem:
        yield warning(
            "posts",
            f"the interpreter posts sub-chunks, half as fast beside a thread that computes: {problem}",
            "install NIXL's own wheel, nixl-cu12 or nixl-cu13",
        )


def _lists(settings: Settings) -> Iterator[Finding]:
    """Whether UCX gets lists of descriptors. Nothing where NIXL is missing, which was said."""
    try:
        plugin = plugin_file(load_bindings(), environment())
    except TransportUnavailableError:
        return
    own = settings.of(NixlSettings)
    if not own.nixl_sgl:
        if plugin is not None and knows_lists(plugin):
            yield good("lists", "NIXL can hand UCX descriptors as lists, and is not told to (KVFERRY_NIXL_SGL)")
        return
    try:
        check_lists(own.nixl_backend, plugin)
    except TransportUnavailableError as problem:
        yield error("lists", str(problem), "unset KVFERRY_NIXL_SGL")
        return
    yield good("lists", "NIXL hands UCX the descriptors of direct writes as lists (KVFERRY_NIXL_SGL)")


def device_finding(choice: DeviceChoice) -> Finding:
    """Says which device was chosen, and why."""
    if choice.device is None:
        return _left_to_ucx(choice.reason)
    known = {*rdma_devices(), *interfaces()}
    if choice.device.partition(":")[0] not in known:
        return error(
            "devices",
            f"NIXL is told to use {choice.device!r} (KVFERRY_NIXL_DEVICE), which is not there",
            f"choose one of {', '.join(sorted(known))}, or all",
        )
    joined = f" ({choice.reason})" if choice.reason.isupper() else f", {choice.reason}"
    return good("devices", f"NIXL uses {choice.device}{joined}")


def _left_to_ucx(reason: str) -> Finding:
    """What it means that UCX may take any: without RDMA, each interface counts as one that leads to every peer."""
    said = f"which one NIXL uses is left to UCX ({reason})"
    several = interfaces_with_addresses()
    if rdma_devices() or OF_UCX in reason or len(several) < 2:
        return good("devices", said)
    return warning(
        "devices",
        f"{said}, and {', '.join(several)} have addresses: UCX uses two of them for every peer, and connects to nobody "
        "where one of these does not lead there",
        f"set KVFERRY_NIXL_DEVICE to the one that leads to peers, such as {several[0]}",
    )


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


def _problems(ways: list[Way], *, is_local: bool) -> Iterator[Finding]:
    if emulated := [way.config for way in ways if way.is_emulated]:
        yield warning(
            "wire",
            f"UCX emulates writes over {', '.join(emulated)}: the receiver's processor copies what arrives",
            "look at UCX_TLS, which must not leave out cuda where memory is a GPU's, and at docs/gpu.md",
        )
    if not all("tcp" in way.config for way in ways):
        return
    if is_local:
        yield warning(
            "wire",
            "bytes go over TCP between processes of one machine, though memory would be faster",
            "look at UCX_TLS: it needs cma or an RDMA transport; containers need the ptrace capability for cma",
        )
    elif rdma := rdma_devices():
        yield warning(
            "wire",
            f"bytes go over TCP between the machines, though this one has {', '.join(rdma)}",
            "look at UCX_TLS, UCX_NET_DEVICES and KVFERRY_NIXL_DEVICE on both sides, and at the state of the ports",
        )


@dataclass(frozen=True, slots=True)
class Way:
    """How UCX writes lengths of some range.

    Attributes:
        config: the transport and its device, such as cuda_ipc/cuda or rc_mlx5/mlx5_0:1; several where it stripes.
        how: UCX's protocol, such as zero-copy, or "software emulation", where the other side's processor copies.
    """

    config: str
    how: str

    @property
    def is_emulated(self) -> bool:
        """Whether the receiver's processor must copy what arrives."""
        return _EMULATED in self.how


def ways_of_writes(said: str, kind: MemoryKind) -> list[Way]:
    """Returns what UCX says (`UCX_PROTO_INFO=y`) it has picked for writes, each once, in the order of its saying so.

    UCX picks ahead of time, for kinds of memory that nothing is written between, and for writes within the process.

    Args:
        said: the tables that it has printed.
        kind: of the memory on both sides; writes between others are left out.
    """
    found: dict[Way, None] = {}
    is_within = is_wanted = False
    for line in said.splitlines():
        if configuration := _CONFIGURATION.search(line):
            is_within, is_wanted = configuration["between"] == _WITHIN_PROCESS, False
        elif title := _TITLE.search(line):
            kinds = {_kind(title["source"]), _kind(title["target"])}
            is_wanted = not is_within and kinds == {kind}
        elif is_wanted and (row := _ROW.search(line)) and ".." in row["range"]:
            found[Way(row["config"], row["how"])] = None
    return list(found)


def _kind(memory: str) -> MemoryKind:
    """The kind of memory that UCX calls host, host memory, cuda/GPU0 or cuda/dev[1]."""
    return MemoryKind.DRAM if memory.startswith("host") else MemoryKind.VRAM
