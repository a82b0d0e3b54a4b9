"""Whether a shape fits into memory, said before anything is allocated."""

from __future__ import annotations

from pathlib import Path

from kvferry.cli.bench.options import BenchOptions
from kvferry.cli.bench.pool import pool_bytes
from kvferry.errors import SettingsError

PROCESS_BYTES = 200 << 20
"""What a rank's process takes beside its pool: the interpreter, NIXL, and a little to check with."""

_MEMORY_INFORMATION = Path("/proc/meminfo")
_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def needed_bytes(options: BenchOptions) -> int:
    """What all ranks of both sides take together."""
    return sum(
        pool_bytes(options, side, coordinates) + PROCESS_BYTES
        for side in options.sides
        for coordinates in side.coordinates
    )


def available_bytes() -> int | None:
    """What may still be allocated: free memory, or less if this process's group has a limit. None if nobody says."""
    found = [_free_bytes(), *(_left_in_group(limit, usage) for limit, usage in _CGROUPS)]
    return min((amount for amount in found if amount is not None), default=None)


def check_fits(options: BenchOptions, available: int | None) -> None:
    """Refuses a shape that does not fit.

    Raises:
        SettingsError: naming what is needed and what is available.
    """
    needed = needed_bytes(options)
    if available is not None and needed > available:
        ranks = options.prefill.tp_size + options.decode.tp_size
        raise SettingsError(
            f"{options.requests} requests of {options.tokens} tokens of {options.model.name} need {in_gib(needed)} in "
            f"{ranks} processes, and {in_gib(available)} is available: give fewer --requests, fewer --tokens or a "
            "smaller --preset"
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
