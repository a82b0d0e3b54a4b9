"""Which way a transport really takes between two processes, and how fast it is."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Mapping

import msgspec

from kvferry._version import __version__
from kvferry.applications.doctor.probe import GPU, Measured
from kvferry.findings import Finding, error, good, warning
from kvferry.layout import MemoryKind
from kvferry.transport import Diagnosis

_LONGEST_S = 60.0
_MEASURED = msgspec.json.Decoder(Measured)
_SLOW_BYTES_PER_S = 0.5e9


def wire(
    environment: Mapping[str, str],
    transport: Diagnosis,
    address: str | None = None,
    kind: MemoryKind = MemoryKind.DRAM,
) -> Iterator[Finding]:
    """Writes bytes into another process, as endpoints with these settings would.

    Args:
        environment: of this process; the one that writes gets it, too.
        transport: of the transport that these settings choose.
        address: host and port of a doctor that listens on another machine; None has a process of this one receive.
        kind: of the memory on both sides; of the first GPU's only where no address is given.
    """
    where = "two processes here" if address is None else f"here and {address}"
    if kind is MemoryKind.VRAM:
        where += ", in a GPU's memory"
    target = [GPU] if kind is MemoryKind.VRAM else [] if address is None else [address]
    command = [sys.executable, "-m", "kvferry.applications.doctor.probe", *target]
    try:
        run = subprocess.run(  # noqa: S603 - this interpreter, and a module of ours
            command,
            env={**environment, **transport.says_more},
            capture_output=True,
            text=True,
            timeout=_LONGEST_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield error("wire", f"nothing moved between {where} within {_LONGEST_S:g} s", transport.remedy)
        return
    measured = _measured(run.stdout)
    if measured is None:
        last = (run.stderr or run.stdout).strip().rpartition("\n")[2]
        yield error("wire", f"nothing could be exchanged between {where}: {last}", transport.remedy)
        return
    way = transport.way_taken(run.stdout + run.stderr, is_local=address is None, kind=kind)
    speed = f"{measured.bytes_per_s / 1e9:.1f} GB/s in bulk, {measured.latency_s * 1e6:.0f} us for 4 KiB"
    yield good("wire", f"between {where}: {speed}" + (f"; {way.what}" if way.what else ""))
    if measured.version != __version__:
        yield warning("wire", f"{address} has kvferry {measured.version}, this is {__version__}", "install the same")
    yield from way.problems
    if measured.bytes_per_s < _SLOW_BYTES_PER_S:
        yield warning(
            "wire",
            f"{measured.bytes_per_s / 1e9:.2f} GB/s is slow",
            "is the machine busy? kvferry bench says"
            if address is None
            else "what does the network between them carry?",
        )


def _measured(said: str) -> Measured | None:
    """What the probe has printed, wherever the library printed something as well."""
    for line in said.splitlines():
        if line.startswith("{"):
            with contextlib.suppress(msgspec.MsgspecError):
                return _MEASURED.decode(line)
    return None
