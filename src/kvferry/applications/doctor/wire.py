"""Which way NIXL really takes between two processes, and how fast it is."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping

import msgspec

from kvferry._version import __version__
from kvferry.applications.doctor.findings import Finding, error, good, warning
from kvferry.applications.doctor.machine import rdma_devices
from kvferry.applications.doctor.probe import Measured

_LONGEST_S = 60.0
_MEASURED = msgspec.json.Decoder(Measured)
_SLOW_BYTES_PER_S = 0.5e9
_TITLE = "remote memory write by ucp_put"
_ROW = re.compile(r"\|\s*(?P<range>[\w.]+)\s*\|[^|]*\|\s*(?P<config>[^|]+?)\s*\|")


def wire(environment: Mapping[str, str], address: str | None = None) -> Iterator[Finding]:
    """Writes bytes into another process, as endpoints with these settings would.

    Args:
        environment: of this process; the one that writes gets it, too.
        address: host and port of a doctor that listens on another machine; None has a process of this one receive.
    """
    where = "two processes here" if address is None else f"here and {address}"
    command = [sys.executable, "-m", "kvferry.applications.doctor.probe", *([] if address is None else [address])]
    try:
        # UCX says which protocols it picks when it picks them.
        run = subprocess.run(  # noqa: S603 - this interpreter, and a module of ours
            command,
            env={**environment, "UCX_PROTO_INFO": "y"},
            capture_output=True,
            text=True,
            timeout=_LONGEST_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield error("wire", f"nothing moved between {where} within {_LONGEST_S:g} s", _REMEDY)
        return
    measured = _measured(run.stdout)
    if measured is None:
        last = (run.stderr or run.stdout).strip().rpartition("\n")[2]
        yield error("wire", f"nothing could be exchanged between {where}: {last}", _REMEDY)
        return
    ways = picked(run.stdout + run.stderr)
    speed = f"{measured.bytes_per_s / 1e9:.1f} GB/s in bulk, {measured.latency_s * 1e6:.0f} us for 4 KiB"
    how = f"UCX takes {', '.join(ways)}" if ways else "UCX does not say which way"
    yield good("wire", f"between {where}: {speed}; {how}")
    if measured.version != __version__:
        yield warning("wire", f"{address} has kvferry {measured.version}, this is {__version__}", "install the same")
    is_tcp = bool(ways) and all("tcp" in way for way in ways)
    if is_tcp and address is None:
        yield warning(
            "wire",
            "bytes go over TCP between processes of one machine, though memory would be faster",
            "look at UCX_TLS: it needs cma or an RDMA transport; containers need the ptrace capability for cma",
        )
    elif is_tcp and (rdma := rdma_devices()):
        yield warning(
            "wire",
            f"bytes go over TCP between the machines, though this one has {', '.join(rdma)}",
            "look at UCX_TLS, UCX_NET_DEVICES and KVFERRY_NIXL_DEVICE on both sides, and at the state of the ports",
        )
    if measured.bytes_per_s < _SLOW_BYTES_PER_S:
        yield warning(
            "wire",
            f"{measured.bytes_per_s / 1e9:.2f} GB/s is slow",
            "is the machine busy? kvferry bench says"
            if address is None
            else "what does the network between them carry?",
        )


_REMEDY = "run with UCX_LOG_LEVEL=info, and look at UCX_TLS, UCX_NET_DEVICES and KVFERRY_NIXL_DEVICE"


def _measured(said: str) -> Measured | None:
    """What the probe has printed, wherever UCX printed something as well."""
    for line in said.splitlines():
        if line.startswith("{"):
            with contextlib.suppress(msgspec.MsgspecError):
                return _MEASURED.decode(line)
    return None


def picked(said: str) -> list[str]:
    """The ways that UCX says it has picked for writes, in the order of its saying so."""
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
