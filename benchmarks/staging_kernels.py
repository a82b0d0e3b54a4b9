"""How fast blocks are gathered into staging memory and scattered out of it, beside plain copies of as many bytes.

Blocks lie scattered over a pool that no cache holds, and every sub-chunk takes other blocks, as in a transfer. The
copies, there and back, take consecutive bytes of the pool. Prints GB/s, the best of several rounds over all variants:

    python benchmarks/staging_kernels.py [--device cuda] [--rounds 7] [--huge-pages]

A pool in huge pages is what NumPy asks the kernel for; torch does not, and scattered blocks then wait for page tables.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from kvferry.layout import Device, MemoryKind, Region
from kvferry.plan.packing import BlockShape
from kvferry.staging import allocate, kernels_for

MIB = 1 << 20
POOL_BYTES = 1024 * MIB
BYTES_A_ROUND = 64 * MIB
SUB_CHUNKS = (MIB // 4, MIB // 2, MIB, 2 * MIB, 4 * MIB)

SHAPES = {
    "16 runs of 512 B, of 2 KiB rows": (BlockShape(((16, 2048),), 512), 32768),
    "16 runs of 1 KiB, of 2 KiB rows": (BlockShape(((16, 2048),), 1024), 32768),
    "16 runs of 2 KiB, of 4 KiB rows": (BlockShape(((16, 4096),), 2048), 65536),
    "8 x 16 runs of 256 B (HND)": (BlockShape(((8, 8192), (16, 512)), 256), 65536),
    "16 KiB without gaps": (BlockShape((), 16384), 16384),
    "2 KiB, single tokens": (BlockShape((), 2048), 2048),
    "256 KiB runs": (BlockShape((), 262144), 262144),
}
"""Shapes, and bytes from a block's place to the next."""


def variants(shape: BlockShape, step: int, sub_chunk: int, pool: torch.Tensor) -> dict[str, Callable[[], None]]:
    """What to time: each moves all bytes of a round, in sub-chunks."""
    kind = pool.device.type
    device = Device(MemoryKind.DRAM if kind == "cpu" else MemoryKind.VRAM)
    memory = allocate(sub_chunk, device)
    kernels = kernels_for([Region(pool.data_ptr(), POOL_BYTES)], device)
    staged = torch.ones(sub_chunk, dtype=torch.uint8, device=kind)
    blocks = sub_chunk // shape.num_bytes
    rounds = BYTES_A_ROUND // sub_chunk
    places = np.random.default_rng(0).permutation(POOL_BYTES // step)
    starts = [
        pool.data_ptr() + np.take(places, np.arange(number * blocks, (number + 1) * blocks), mode="wrap") * step
        for number in range(rounds)
    ]

    def gather() -> None:
        for some in starts:
            kernels.gather(some, shape, memory.address)

    def scatter() -> None:
        for some in starts:
            kernels.scatter(memory.address, some, shape)

    def copy(back: bool) -> None:
        for number in range(rounds):
            here = pool[number * sub_chunk :][:sub_chunk]
            destination, source = (here, staged) if back else (staged, here)
            if kind == "cpu":  # torch would share the copy among its threads
                destination.numpy()[:] = source.numpy()
            else:
                destination.copy_(source)
                torch.cuda.synchronize()

    return {"gather": gather, "copy": partial(copy, False), "scatter": scatter, "copy back": partial(copy, True)}


def best(calls: dict[str, Callable[[], None]], rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """The shortest time of each in seconds, taken in turns."""
    seconds = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            before = clock()
            call()
            seconds[name] = min(seconds[name], clock() - before)
    return seconds


def row(name: str, cells: Sequence[str]) -> str:
    """A line of the table."""
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Prints a table in Markdown: GB/s of every variant, for every shape and sub-chunk."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--huge-pages", action="store_true")
    options = parser.parse_args()
    if options.huge_pages:
        storage = np.ones(POOL_BYTES + 64, np.uint8)  # where NumPy starts is no cache line's start, as torch's is
        pool = torch.from_numpy(storage[-storage.ctypes.data % 64 :][:POOL_BYTES])
    else:
        pool = torch.ones(POOL_BYTES, dtype=torch.uint8, device=options.device)
    # The CPU's kernels never wait and use one thread: its time is what they take where no other process is in the way.
    clock = time.thread_time if options.device == "cpu" else time.perf_counter
    print(row("gather, copy / scatter, copy back, GB/s", [f"{size // 1024} KiB" for size in SUB_CHUNKS]))
    print(row("---", ["---"] * len(SUB_CHUNKS)))
    for name, (shape, step) in SHAPES.items():
        cells = []
        for sub_chunk in SUB_CHUNKS:
            seconds = best(variants(shape, step, sub_chunk, pool), options.rounds, clock)
            speeds = [f"{BYTES_A_ROUND / taken / 1e9:.1f}" for taken in seconds.values()]
            cells.append(f"{speeds[0]}, {speeds[1]} / {speeds[2]}, {speeds[3]}")
        print(row(name, cells), flush=True)


if __name__ == "__main__":
    main()
