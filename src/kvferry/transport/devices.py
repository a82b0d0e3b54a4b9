"""Network devices of this machine, as the system shows them: for transports that choose one, and for the doctor."""

from __future__ import annotations

from pathlib import Path

_RDMA = Path("/sys/class/infiniband")
_INTERFACES = Path("/sys/class/net")


def rdma_devices() -> dict[str, str]:
    """Returns RDMA devices by name, each with the state of its ports."""
    return {name: _ports(_RDMA / name) for name in _entries(_RDMA)}


def interfaces() -> dict[str, str]:
    """Returns network interfaces by name, each with its state."""
    return {name: _text(_INTERFACES / name / "operstate") for name in _entries(_INTERFACES)}


def _entries(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []


def _ports(device: Path) -> str:
    states = sorted((device / "ports").glob("*/state"))
    return ", ".join(_text(state) for state in states) or "no port"


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return "unknown"
