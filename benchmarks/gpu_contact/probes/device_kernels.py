"""Kernels of the probes' own, and kvferry's own as they launch them.

Triton cannot follow postponed annotations of types here in every version, so this file does without.
"""

import numpy as np
import torch
import triton
import triton.language as tl

from kvferry.staging.accelerator import DeviceRows, RunsLaunch
from kvferry.staging.cuda import TensorArray, launch_runs
from kvferry.staging.gpu import VECTOR_BYTES

ROWS = 128
"""Of each side's table."""


@triton.jit
def nothing(value):
    """Reads a number that is not used: what a launch costs."""
    tl.load(value)


def runs_to_runs(source: int, target: int, num_bytes: int, run_bytes: int, runs, places, device) -> RunsLaunch:
    """Prepares a copy of runs of one piece of memory to places of another, as the mapped path launches it.

    Args:
        source: where the memory begins that is read, a multiple of 16.
        target: where the other begins.
        num_bytes: how large each is: as many rows as an engine has layers of K and V, and the kernel has to find them.
        run_bytes: of every run, a multiple of 16.
        runs: the number of each run that is read.
        places: the number of each that is written.
        device: torch's, which copies.
    """
    firsts = np.arange(ROWS, dtype=np.int64) * (num_bytes // run_bytes // ROWS)
    tables = [
        np.concatenate([firsts, start + firsts * run_bytes, np.full(ROWS, run_bytes)]) for start in (source, target)
    ]
    here, there = (DeviceRows(TensorArray(torch.from_numpy(each).to(device)), ROWS) for each in tables)
    numbers = TensorArray(torch.from_numpy(np.concatenate([runs, places]).astype(np.int32)).to(device))
    return RunsLaunch(here, there, numbers, 0, len(runs), len(runs), run_bytes, VECTOR_BYTES)


__all__ = ["launch_runs", "nothing", "runs_to_runs"]
