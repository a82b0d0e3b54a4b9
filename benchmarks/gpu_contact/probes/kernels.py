"""How fast blocks are gathered and scattered, from 1 to 128 MiB a call, beside the device's own copies.

A gather reads and writes every byte once, as a copy within the device does: their ratio says what scattered blocks and
the call's own cost take. Prints GB/s of bytes moved (each counted once), the median of some rounds.

    python -m benchmarks.gpu_contact.probes.kernels [--device cpu --tiny]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import numpy as np
from benchmarks.gpu_contact.probes.common import (
    MIB,
    Clock,
    CudaMemory,
    DeviceName,
    HostMemory,
    Memory,
    memory,
    parser,
    seconds_of,
    synchronize,
    tell,
)

from kvferry.plan.packing import BlockShape
from kvferry.staging import kernels_for

SIZES_MIB = (1, 8, 32, 64, 128)
SHAPES = {
    "16 runs of 1 KiB, of 2 KiB rows": (BlockShape(((16, 2048),), 1024), 32768),
    "16 runs of 256 B, of 2 KiB rows": (BlockShape(((16, 2048),), 256), 32768),
    "32 KiB without gaps": (BlockShape((), 32768), 32768),
    "2 KiB, single tokens": (BlockShape((), 2048), 2048),
}
"""Shapes, and bytes from a block's place to the next: half the heads, an eighth, whole pages, tokens."""


def copies(source: Memory, target: Memory, num_bytes: int, device: DeviceName) -> Callable[[], None]:
    """Returns a plain copy within the device."""

    def copy() -> None:
        if isinstance(source, CudaMemory) and isinstance(target, CudaMemory):
            target.tensor[:num_bytes].copy_(source.tensor[:num_bytes])
        elif isinstance(source, HostMemory) and isinstance(target, HostMemory):
            target.array[:num_bytes] = source.array[:num_bytes]
        synchronize(device)

    return copy


def measure(device: DeviceName, *, is_tiny: bool, seconds: float) -> dict[str, object]:
    """Times every shape at every size."""
    clock, rounds = Clock(seconds), 2 if is_tiny else 9
    sizes = (1,) if is_tiny else SIZES_MIB
    pool = memory((8 if is_tiny else 4096) * MIB, device)
    staging = memory(max(sizes) * MIB, device)
    kernels = kernels_for([pool.region], pool.device)
    rows = []
    for mib in sizes:  # all shapes of a size, so that what time is left for can be compared
        num_bytes = mib * MIB
        copied_s = statistics.median(seconds_of(copies(pool, staging, num_bytes, device), rounds))
        for name, (shape, step) in SHAPES.items():
            if not clock.has_time_for(f"{name}, {mib} MiB"):
                continue
            places = np.random.default_rng(0).permutation(pool.num_bytes // step)
            starts = pool.address + np.resize(places, num_bytes // shape.num_bytes).astype(np.int64) * step
            gathered_s, scattered_s = (
                statistics.median(seconds_of(call, rounds))
                for call in (
                    partial(kernels.gather, starts, shape, staging.address),
                    partial(kernels.scatter, staging.address, starts, shape),
                )
            )
            rows.append(
                {
                    "shape": name,
                    "mib": mib,
                    "gather_gb_per_s": num_bytes / gathered_s / 1e9,
                    "scatter_gb_per_s": num_bytes / scattered_s / 1e9,
                    "copy_gb_per_s": num_bytes / copied_s / 1e9,
                    "gather_of_copy": copied_s / gathered_s,
                }
            )
    return {"device": device, "rows": rows, "left_out": clock.left_out}


def main() -> None:
    """Measures and prints."""
    typed = parser(__doc__).parse_args()
    tell(measure(typed.device, is_tiny=typed.tiny, seconds=typed.seconds))


if __name__ == "__main__":
    main()
