"""A wire of a known rate: the loopback device of a network namespace, or the wire between two of them.

Takes root, or user namespaces that may be made; `unshare`, `nsenter`, `ip` and `tc`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

BURST_BYTES = 256 << 10  # what a device may send at once: a few of its largest packets

_INSIDE = "KVFERRY_BENCHMARK_IN_NAMESPACE"
"""The environment variable that says that a process is in its namespace."""

_NAMESPACES = ("--net", "--mount")


def enter_namespace(module: str) -> None:
    """Runs a module again, with this process's arguments, in a network namespace of its own, and ends with its status.

    Returns in that namespace, whose loopback device is up.
    """
    if _INSIDE not in os.environ:
        may_make = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        command = ["unshare", *_NAMESPACES, *may_make, sys.executable, "-m", module, *sys.argv[1:]]
        raise SystemExit(subprocess.run(command, env={**os.environ, _INSIDE: "1"}, check=False).returncode)
    _begin(())


def slow_down(device: str, bits_per_s: int, *, inside: Sequence[str] = ()) -> None:
    """Lets a device send no more than so much.

    Args:
        inside: what a command is begun with that runs where the device is.
    """
    bucket = ("tbf", "rate", f"{bits_per_s}bit", "burst", f"{BURST_BYTES}b", "latency", "1s")
    _run(*inside, "tc", "qdisc", "replace", "dev", device, "root", *bucket)


@dataclass(frozen=True)
class Host:
    """One end of a wire.

    Attributes:
        address: its address.
        device: its device, by name.
        inside: what a command is begun with that runs there.
    """

    address: str
    device: str
    inside: tuple[str, ...] = ()


@contextmanager
def two_hosts(bits_per_s: int) -> Iterator[tuple[Host, Host]]:
    """Connects the namespace of this process to another one, by a wire that passes so much either way."""
    with subprocess.Popen(["unshare", *_NAMESPACES, "cat"], stdin=subprocess.PIPE) as other:
        inside = ("nsenter", f"--target={other.pid}", *_NAMESPACES)
        here, there = Host("10.7.0.1", "wire0"), Host("10.7.0.2", "wire1", inside)
        while os.readlink(f"/proc/{other.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            time.sleep(0.01)  # it has not come there yet
        _run("ip", "link", "add", here.device, "type", "veth", "peer", "name", there.device)
        _run("ip", "link", "set", there.device, "netns", str(other.pid))
        _begin(inside)
        for host in (here, there):
            _run(*host.inside, "ip", "address", "add", f"{host.address}/24", "dev", host.device)
            _run(*host.inside, "ip", "link", "set", host.device, "up")
            slow_down(host.device, bits_per_s, inside=host.inside)
        try:
            yield here, there
        finally:
            _run("ip", "link", "delete", here.device)
            other.kill()


def _begin(inside: Sequence[str]) -> None:
    """Makes a namespace ready: its loopback device, and its own devices where programs look for them."""
    _run(*inside, "ip", "link", "set", "lo", "up")
    _run(*inside, "mount", "-t", "sysfs", "none", "/sys")


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
