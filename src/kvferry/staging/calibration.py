"""How fast a machine gathers, measured in less than a blink."""

from __future__ import annotations

import time

from kvferry.errors import SettingsError
from kvferry.plan.blocks import BlockShape
from kvferry.staging.kernels import Kernels, StartArray
from kvferry.staging.memory import StagingMemory

_BUDGET_S = 0.8e-3
_MOST_TIMES = 5


def gather_speed(kernels: Kernels, starts: StartArray, shape: BlockShape, memory: StagingMemory) -> float:
    """How long it takes to gather these blocks once, in seconds: the best of a few times.

    A first time does not count: it maps pages, and compiles on a GPU. The others end before a millisecond has passed in
    all, or after one of them. Blocks that were gathered just now lie in a cache, if they fit in one; those of a large
    pool do not, and take up to twice as long.

    Args:
        kernels: of the pool.
        starts: byte address of every block's first run.
        shape: of every block.
        memory: where the blocks are packed.

    Raises:
        SettingsError: if they do not fit there.
    """
    needed = len(starts) * shape.num_bytes
    if needed > memory.num_bytes:
        raise SettingsError(f"{needed} bytes to gather do not fit into {memory.num_bytes} bytes of staging memory")
    begin = time.perf_counter()
    kernels.gather(starts, shape, memory.address)
    best = spent = 0.0
    for times in range(_MOST_TIMES):
        before = time.perf_counter()
        kernels.gather(starts, shape, memory.address)
        taken = time.perf_counter() - before
        best = min(best, taken) if times else taken
        spent = time.perf_counter() - begin
        if spent + taken > _BUDGET_S:
            break
    return best
