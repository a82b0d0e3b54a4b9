"""Whether a shape fits into memory, said before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry.applications.bench.options import BenchOptions, Side, variant_of
from kvferry.applications.bench.pool import pool_bytes
from kvferry.errors import SettingsError
from kvferry.layout import Device, MemoryKind
from kvferry.settings import Settings
from kvferry.staging.sizes import StagingSettings, staging_sizes

PROCESS_BYTES = 200 << 20
"""What a rank's process takes beside its pool: the interpreter, the transport, and a little to check with."""

GPU_PROCESS_BYTES = 2 << 30
"""The same where it uses a GPU, with torch and CUDA's own."""

GPU_CONTEXT_BYTES = 600 << 20
"""What every process takes of a GPU's memory before it has allocated anything."""

_MEMORY_INFORMATION = Path("/proc/meminfo")
_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


@dataclass(frozen=True, slots=True)
class Amount:
    """Bytes of main memory, and of a GPU's."""

    main: int
    gpu: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.main + other.main, self.gpu + other.gpu)


def needed(options: BenchOptions, sides: Sequence[Side]) -> Amount:
    """What all ranks of some sides take together."""
    return sum((_needed_by_side(options, side) for side in sides), Amount(0))


def needed_bytes(options: BenchOptions) -> int:
    """What all ranks of both sides take of both kinds of memory together."""
    amount = needed(options, options.sides)
    return amount.main + amount.gpu


def _needed_by_side(options: BenchOptions, side: Side) -> Amount:
    pools = sum(pool_bytes(options, side, coordinates) for coordinates in side.coordinates)
    staging = side.tp_size * staging_bytes(options, side)
    if options.device.kind is MemoryKind.VRAM:  # with a copy in main memory, to fill and to check
        return Amount(
            main=pools + side.tp_size * GPU_PROCESS_BYTES, gpu=pools + staging + side.tp_size * GPU_CONTEXT_BYTES
        )
    return Amount(main=pools + staging + side.tp_size * PROCESS_BYTES)


def staging_bytes(options: BenchOptions, side: Side) -> int:
    """The most staging memory that the endpoints of one rank take: each variant that may stage has its own."""
    settings = Settings()
    sizes, most = staging_sizes(settings, options.device.kind), settings.of(StagingSettings).most_bytes
    if side is options.prefill:
        wanted = sum(sizes.of_sender(settings.gather_workers))
    else:
        wanted = options.prefill.tp_size * sizes.ring_bytes
    return sum(variant_of(name).may_stage for name in options.variants) * min(wanted, most)


def available_bytes() -> int | None:
    """What may still be allocated: free memory, or less if this process's group has a limit. None if nobody says."""
    found = [_free_bytes(), *(_left_in_group(limit, usage) for limit, usage in _CGROUPS)]
    return min((amount for amount in found if amount is not None), default=None)


def available_gpu_bytes(device: Device) -> int | None:
    """What is free of a GPU's memory. None for other devices."""
    if device.kind is not MemoryKind.VRAM:
        return None
    import torch

    free, _ = torch.cuda.mem_get_info(device.index)
    return int(free)


def check_fits(options: BenchOptions, sides: Sequence[Side], main: int | None, gpu: int | None = None) -> None:
    """Refuses a shape that does not fit.

    Args:
        sides: those that run on this machine.
        main: bytes that are available of main memory; None if nobody knows.
        gpu: the same of the GPU's memory.

    Raises:
        SettingsError: naming what is needed and what is available.
    """
    amount = needed(options, sides)
    for kind, wanted, available in (("", amount.main, main), (" of the GPU's memory", amount.gpu, gpu)):
        if available is not None and wanted > available:
            raise SettingsError(
                f"{options.requests} requests of {options.tokens} tokens of {options.model.name} need {in_gib(wanted)}"
                f"{kind} in {sum(side.tp_size for side in sides)} processes, and {in_gib(available)} is available: "
                "give fewer --requests, fewer --tokens, fewer --variants or a smaller --preset"
            )


def in_gib(amount: int) -> str:
    """Bytes in words."""
    return f"{amount / 2**30:.2f} GiB"


def _free_bytes() -> int | None:
    try:
        lines = _MEMORY_INFORMATION.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def _left_in_group(limit: Path, usage: Path) -> int | None:
    try:
        return int(limit.read_text(encoding="ascii")) - int(usage.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such group, or "max"
        return None
