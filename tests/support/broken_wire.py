"""A wire between two processes that is slow, and of whose TCP connections one breaks after some bytes.

A library, built here from `broken_wire.c`, takes the place of the system's calls in a process that starts with it:

    monkeypatch.setenv("LD_PRELOAD", str(built(tmp_path)))
    rank = RankProcess(is_fresh=True)
    rank.do(Rank.wire_breaks, 1 << 20)
"""

from __future__ import annotations

import ctypes
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

_SOURCE = Path(__file__).with_suffix(".c")


def built(folder: Path) -> Path:
    """Builds the library in a folder; skips the test where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the library that breaks connections: apt-get install gcc")
    library = folder / "broken_wire.so"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, _SOURCE, "-ldl", "-lpthread"], check=True)
    return library


def two_interfaces() -> str:
    """Names two interfaces of this machine, so that UCX has two connections; skips the test if there are none."""
    others = [name for _, name in socket.if_nameindex() if name != "lo" and _is_up(name)]
    if not others:
        pytest.skip("UCX has one connection where loopback is the only interface: ip link add dummy0 type dummy")
    return f"lo,{others[0]}"


def _is_up(name: str) -> bool:
    return Path(f"/sys/class/net/{name}/operstate").read_text().strip() == "up"


def is_slow(bytes_per_s: float) -> None:
    """Receives no faster, from now on, in this process."""
    call = ctypes.CDLL(None).wire_is_slow
    call.argtypes = [ctypes.c_double]
    call(bytes_per_s)


def breaks(after_bytes: int) -> None:
    """Lets the first connection of this process break that has sent so many bytes."""
    call = ctypes.CDLL(None).wire_breaks
    call.argtypes = [ctypes.c_long]
    call(after_bytes)


def refuses(after_puts: int) -> None:
    """Lets UCX refuse a put of this process after so many others, so that a post fails in the middle."""
    call = ctypes.CDLL(None).wire_refuses
    call.argtypes = [ctypes.c_long]
    call(after_puts)


def is_broken() -> bool:
    """Whether one has broken."""
    return bool(ctypes.CDLL(None).wire_is_broken())
