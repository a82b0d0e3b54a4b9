"""What `kvferry doctor` says of NIXL: which wheel is there, which network device is used, and which way UCX takes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvferry.errors import TransportUnavailableError
from kvferry.findings import Finding, error, good, warning
from kvferry.settings import Settings
from kvferry.transport.devices import interfaces, rdma_devices
from kvferry.transport.diagnosis import Diagnosis, WayTaken, installed_version
from kvferry.transport.nixl.bindings import load_bindings, why_other_cuda

_WHEELS = ("nixl-cu13", "nixl-cu12", "nixl")
_TITLE = "remote memory write by ucp_put"
_ROW = re.compile(r"\|\s*(?P<range>[\w.]+)\s*\|[^|]*\|\s*(?P<config>[^|]+?)\s*\|")


class NixlDiagnosis(Diagnosis):
    """What there is to know of NIXL and UCX on this machine."""

    variables = ("UCX_", "NIXL_")
    read_by = "UCX and NIXL"
    says_more = {"UCX_PROTO_INFO": "y"}  # noqa: RUF012 - read, never changed
    remedy = "run with UCX_LOG_LEVEL=info, and look at UCX_TLS, UCX_NET_DEVICES and KVFERRY_NIXL_DEVICE"

    def findings(self, settings: Settings) -> Iterator[Finding]:
        yield from _installed()
        yield _device(settings)

    def way_taken(self, said: str, *, is_local: bool) -> WayTaken:
        ways = picked(said)
        if not ways:
            return WayTaken("UCX does not say which way")
        problems = tuple(_problems(ways, is_local=is_local))
        return WayTaken(f"UCX takes {', '.join(ways)}", problems)


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


def _device(settings: Settings) -> Finding:
    used = settings.used_nixl_device
    if used is None:
        return good("devices", "which one NIXL uses is left to UCX (KVFERRY_NIXL_DEVICE is not set, or all)")
    known = {*rdma_devices(), *interfaces()}
    if used.partition(":")[0] not in known:
        return error(
            "devices",
            f"NIXL is told to use {used!r} (KVFERRY_NIXL_DEVICE), which is not there",
            f"choose one of {', '.join(sorted(known))}, or all",
        )
    if used == "lo" and settings.nixl_device is None:
        return good("devices", "NIXL uses lo, since nothing here listens beyond loopback (KVFERRY_HOST)")
    return good("devices", f"NIXL uses {used} (KVFERRY_NIXL_DEVICE)")


def _problems(ways: list[str], *, is_local: bool) -> Iterator[Finding]:
    if not all("tcp" in way for way in ways):
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


def picked(said: str) -> list[str]:
    """Returns the ways that UCX says it has picked for writes, in the order of its saying so."""
    found: dict[str, None] = {}
    is_of_writes = False
    for line in said.splitlines():
        if _TITLE in line:
            is_of_writes = True
        elif " by ucp_" in line:
            is_of_writes = False
        elif is_of_writes and (row := _ROW.search(line)) and ".." in row["range"]:
            found[row["config"]] = None
    return list(found)
