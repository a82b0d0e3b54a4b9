"""Gathers and scatters of rows of three widths, for a profiler that watches: 1 KiB, 132 bytes and 33 bytes.

A sparse index has rows of 132 bytes. What comes back is compared; how long it took says nothing under a profiler.

    ncu -k regex:copy_runs python -m benchmarks.gpu_contact.probes.widths [--device cpu --tiny]
"""

from __future__ import annotations

import numpy as np
from benchmarks.gpu_contact.probes.common import MIB, DeviceName, memory, parser, pattern, tell_and_exit

from kvferry.plan.packing import BlockShape
from kvferry.staging import kernels_for

WIDTHS = (1024, 132, 33)


def measure(device: DeviceName, *, is_tiny: bool) -> dict[str, object]:
    """Moves every width once in each direction."""
    moved = (1 if is_tiny else 64) * MIB
    pool, staging = memory(2 * moved, device), memory(moved, device)
    content = pattern(2 * moved)
    kernels = kernels_for([pool.region], pool.device)
    rows = []
    for width in WIDTHS:
        pool.put(content)
        count = 2 * moved // width
        places = np.random.default_rng(width).permutation(count)[: moved // width].astype(np.int64)
        starts, shape = pool.address + places * width, BlockShape((), width)
        kernels.gather(starts, shape, staging.address)
        expected = content[: count * width].reshape(count, width)[places].ravel()
        is_gathered = bool((staging.get()[: expected.size] == expected).all())
        pool.put(np.zeros_like(content))
        kernels.scatter(staging.address, starts, shape)
        scattered = pool.get()[: count * width].reshape(count, width)[places].ravel()
        rows.append({"bytes": width, "rows": len(places), "exact": is_gathered and bool((scattered == expected).all())})
    return {"device": device, "exact": all(row["exact"] for row in rows), "rows": rows}


def main() -> None:
    """Moves, and prints."""
    typed = parser(__doc__).parse_args()
    tell_and_exit(measure(typed.device, is_tiny=typed.tiny))


if __name__ == "__main__":
    main()
