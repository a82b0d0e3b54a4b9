"""How fast a machine gathers, measured in less than a blink."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import cycle, islice

from kvferry.errors import SettingsError
from kvferry.plan.blocks import BlockShape
from kvferry.staging.kernels import Kernels, StartArray
from kvferry.staging.memory import StagingMemory

_BUDGET_S = 1e-3
_MOST_TIMES = 5


def gather_speed(kernels: Kernels, samples: Sequence[StartArray], shape: BlockShape, memory: StagingMemory) -> float:
    """How many bytes a second are gathered from blocks like these: the best of a few times.

    A first time does not count: it maps pages, and compiles on a GPU. The others end after a millisecond or so. Every
    time takes the next sample: blocks that were gathered just now lie in a cache, where a request's do not.

    Args:
        kernels: of the pool.
        samples: byte address of every block's first run, several times over; at least once.
        shape: of every block.
        memory: where the blocks are packed.

    Raises:
        SettingsError: if they do not fit there.
    """
    needed = max(len(starts) for starts in samples) * shape.num_bytes
    if needed > memory.num_bytes:
        raise SettingsError(f"{needed} bytes to gather do not fit into {memory.num_bytes} bytes of staging memory")
    kernels.gather(samples[0], shape, memory.address)
    best = 0.0
    begin = time.perf_counter()
    for starts in islice(cycle([*samples[1:], samples[0]]), _MOST_TIMES):
        before = time.perf_counter()
        kernels.gather(starts, shape, memory.address)
        taken = time.perf_counter() - before
        best = max(best, len(starts) * shape.num_bytes / taken)
        if time.perf_counter() - begin + taken > _BUDGET_S:
            break
    return best
