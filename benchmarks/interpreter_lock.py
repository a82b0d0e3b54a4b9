"""How long other threads of a process wait for the interpreter lock while blocks are gathered and scattered.

An engine's scheduler lives in the same process. A second thread only counts, and notes when it could not: with the lock
kept for a whole call it would wait as long as that takes. Prints milliseconds, medians over the calls:

    python benchmarks/interpreter_lock.py [--calls 20]

Beside other work the threads wait for a processor as well: run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable

import numpy as np

from kvferry.layout import Device, Region
from kvferry.plan.packing import BlockShape
from kvferry.staging import allocate, kernels_for

MIB = 1 << 20
BLOCKS = 64
STEP = 2 * MIB


def measured(call: Callable[[], None], calls: int) -> tuple[float, float]:
    """How long a call takes, and how long another thread cannot run meanwhile, in seconds."""
    took: list[float] = []
    awake: list[float] = []
    done = threading.Event()

    def work() -> None:
        for _ in range(calls):
            begun_at = time.perf_counter()
            call()
            took.append(time.perf_counter() - begun_at)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not done.is_set():
        awake.append(time.perf_counter())
    thread.join()
    longest = np.sort(np.diff(awake))[-calls:]
    return float(np.median(took)), float(np.median(longest))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20, help="how many a figure is a median of")
    calls = parser.parse_args().calls
    tensor = np.zeros(BLOCKS * STEP, np.uint8)
    kernels = kernels_for([Region(tensor.ctypes.data, tensor.size)], Device())
    starts = tensor.ctypes.data + np.arange(BLOCKS, dtype=np.int64) * STEP
    print(f"{'':24}{'a call':>12}{'others wait':>14}")
    for runs in (1, 16):
        shape = BlockShape(((runs, STEP // runs),) if runs > 1 else (), MIB // 2 // runs)
        with allocate(BLOCKS * shape.num_bytes, Device()) as memory:
            for name, call in (
                ("gather", lambda: kernels.gather(starts, shape, memory.address)),  # noqa: B023 - called here and now
                ("scatter", lambda: kernels.scatter(memory.address, starts, shape)),  # noqa: B023
            ):
                call_s, wait_s = measured(call, calls)
                print(f"{f'{name}, {runs} runs a block':24}{call_s * 1e3:9.2f} ms{wait_s * 1e3:11.2f} ms")


if __name__ == "__main__":
    main()
