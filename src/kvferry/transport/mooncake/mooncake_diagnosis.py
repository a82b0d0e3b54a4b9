"""Mooncake's wheels, which of them is installed, and what `kvferry doctor` is told of it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

from kvferry.errors import TransportUnavailableError
from kvferry.findings import Finding, error, good
from kvferry.layout import MemoryKind
from kvferry.settings import Settings, environment
from kvferry.transport.devices import rdma_devices
from kvferry.transport.diagnosis import Diagnosis, WayTaken, installed_version
from kvferry.transport.mooncake.settings import MooncakeSettings

WHEELS = (
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine-npu",
    "mooncake-transfer-engine-rocm",
)
"""The packages that Mooncake's transfer engine comes in, one for each kind of device."""

FIRST_SAFE_VERSION = (0, 3, 12)
"""Before it, a write over TCP was said to have ended once it had left: with 0.3.11, 193 of 200 writes of 2.4 MB were
torn when that was said, with 0.3.13 none."""


def uses_tcp() -> bool:
    """Returns whether Mooncake will use TCP: where it finds no RDMA device, or is forced to."""
    return not rdma_devices() or "MC_FORCE_TCP" in environment()


@dataclass(frozen=True, slots=True)
class Installed:
    """Which of Mooncake's wheels is installed.

    Attributes:
        wheel: its name.
        version: as it calls itself.
    """

    wheel: str
    version: str

    @property
    def is_safe(self) -> bool:
        """Whether a write that has ended is in the peer's memory."""
        return tuple(int(number) for number in re.findall(r"\d+", self.version)[:3]) >= FIRST_SAFE_VERSION


def installed() -> list[Installed]:
    """Returns Mooncake's wheels in this environment."""
    return [Installed(wheel, version) for wheel in WHEELS if (version := installed_version(wheel))]


def load_engine() -> ModuleType:
    """Imports Mooncake's transfer engine.

    Raises:
        TransportUnavailableError: if it is not installed, cannot be loaded, or is a version that says too early that a
            write has ended, saying what to do.
    """
    wheels = installed()
    if not wheels:
        raise TransportUnavailableError(
            "Mooncake is not installed: pip install mooncake-transfer-engine-cuda13 (CUDA 13), "
            "mooncake-transfer-engine (CUDA 12) or mooncake-transfer-engine-non-cuda"
        )
    for wheel in wheels:
        if not wheel.is_safe:
            raise TransportUnavailableError(
                f"{wheel.wheel} {wheel.version} says that a write over TCP has ended before its bytes have arrived: "
                f"install {'.'.join(map(str, FIRST_SAFE_VERSION))} or newer"
            )
    try:
        return importlib.import_module("mooncake.engine")
    except ImportError as problem:
        hint = ": apt-get install --no-install-recommends libibverbs1" if "libibverbs" in str(problem) else ""
        raise TransportUnavailableError(
            f"{wheels[0].wheel} {wheels[0].version} is installed, but cannot be loaded: {problem}{hint}"
        ) from problem


class MooncakeDiagnosis(Diagnosis):
    """What `kvferry doctor` is told."""

    variables = ("MC_",)
    read_by = "Mooncake"
    remedy = "run with MC_LOG_LEVEL=INFO, and look at MC_FORCE_TCP, KVFERRY_MOONCAKE_DEVICE and KVFERRY_HOST"

    def findings(self, settings: Settings) -> Iterator[Finding]:
        try:
            load_engine()
            yield good("mooncake", ", ".join(f"{each.wheel} {each.version}" for each in installed()))
        except TransportUnavailableError as problem:
            yield error("mooncake", str(problem), "set KVFERRY_TRANSPORT=nixl where it cannot be installed")
        used, known = settings.of(MooncakeSettings).mooncake_device, rdma_devices()
        missing = sorted({name for name in (used or "").split(",") if name} - set(known))
        if missing:
            yield error(
                "devices",
                f"Mooncake is told to use {', '.join(missing)} (KVFERRY_MOONCAKE_DEVICE), which is not there",
                f"choose of {', '.join(sorted(known))}" if known else "this machine has no RDMA device: unset it",
            )
        else:
            yield good("devices", f"Mooncake uses {used or 'whichever RDMA device it finds, else TCP'}")

    def way_taken(self, said: str, *, is_local: bool, kind: MemoryKind = MemoryKind.DRAM) -> WayTaken:
        return WayTaken("Mooncake takes TCP" if uses_tcp() else "Mooncake takes RDMA")
