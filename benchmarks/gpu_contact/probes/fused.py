"""The limit on one host: one kernel that copies from pages here straight into pages of another process.

The other process hands its pool over by CUDA IPC (on a CPU by shared memory), this one maps it and copies scattered
runs to scattered places, with no ring, no wire and no second kernel. Beside it stands the least that the staged path
needs there: a gather, a copy of the whole into the mapped pool, and a scatter. All of them are prepared, as in a write
of many sub-chunks: where runs lie is on the GPU before the time is taken.

    python -m benchmarks.gpu_contact.probes.fused [--device cpu --tiny]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from benchmarks.gpu_contact.probes.common import MIB, Clock, DeviceName, parser, seconds_of, synchronize, tell_and_exit
from benchmarks.gpu_contact.probes.receiver import digest

from kvferry.layout import Device, MemoryKind, Region
from kvferry.plan.packing import BlockShape
from kvferry.staging import Kernels, kernels_for
from kvferry.staging.gpu import GpuKernels
from kvferry.staging.kernels import PackedBlocks

if TYPE_CHECKING:
    import torch

RUNS = (256, 1 << 10, 32 << 10)


def _hold(device: DeviceName, num_bytes: int, offered: Any, asked: Any, answered: Any) -> None:
    import torch

    pool = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda:0" if device == "cuda" else "cpu")
    synchronize(device)
    offered.put(pool)
    while asked.get() is not None:
        synchronize(device)
        answered.put(digest(pool.cpu().numpy()))


def fused(source: torch.Tensor, target: torch.Tensor, run: int, here: np.ndarray, there: np.ndarray) -> Any:
    """Returns a call that copies runs of one pool to places of another."""
    import torch

    if source.device.type == "cpu":
        runs, places = torch.from_numpy(here), torch.from_numpy(there)

        def copy() -> None:
            target.view(-1, run)[places] = source.view(-1, run)[runs]

        return copy
    from benchmarks.gpu_contact.probes.device_kernels import launch_runs, runs_to_runs

    copies = runs_to_runs(source.data_ptr(), target.data_ptr(), len(source), run, here, there, source.device)

    def launch() -> None:
        launch_runs(copies)
        torch.cuda.synchronize()

    return launch


def prepared(kernels: Kernels, starts: np.ndarray, run: int, address: int, *, is_gather: bool) -> Callable[[], None]:
    """Returns a call that gathers or scatters runs, with where they begin uploaded already."""
    shape = BlockShape((), run)
    if not isinstance(kernels, GpuKernels):
        if is_gather:
            return partial(kernels.gather, starts, shape, address)
        return partial(kernels.scatter, address, starts, shape)
    (copies,) = kernels.uploaded([kernels.launches([PackedBlocks(starts, shape, 0)])], is_gather=is_gather)
    return partial(kernels.run, copies, address)


def whole(staging: torch.Tensor, mapped: torch.Tensor, device: DeviceName) -> None:
    """Copies a full ring into the other process's memory."""
    mapped[: len(staging)].copy_(staging)
    synchronize(device)


def measure(device: DeviceName, *, is_tiny: bool, seconds: float) -> dict[str, object]:
    """Times both ways for every length of run."""
    import torch
    import torch.multiprocessing

    clock, rounds = Clock(seconds), 2 if is_tiny else 9
    pool_bytes, moved = (2 * MIB, MIB) if is_tiny else (512 * MIB, 64 * MIB)
    context = torch.multiprocessing.get_context("spawn")
    offered, asked, answered = context.Queue(), context.Queue(), context.Queue()
    holder = context.Process(target=_hold, args=(device, pool_bytes, offered, asked, answered), daemon=True)
    holder.start()
    mapped = offered.get(timeout=60)
    kind = "cuda:0" if device == "cuda" else "cpu"
    generator = torch.Generator(device=kind).manual_seed(1)
    source = torch.randint(0, 256, (pool_bytes,), dtype=torch.uint8, device=kind, generator=generator)
    staging = torch.zeros(moved, dtype=torch.uint8, device=kind)
    where = Device(MemoryKind.VRAM, 0) if device == "cuda" else Device()
    kernels = kernels_for([Region(source.data_ptr(), pool_bytes)], where)
    synchronize(device)
    rows, is_exact = [], True
    for run in RUNS:
        if not clock.has_time_for(f"{run} B"):
            continue
        random = np.random.default_rng(run)
        here, there = (random.permutation(pool_bytes // run)[: moved // run].astype(np.int64) for _ in range(2))
        mapped.zero_()
        copy = fused(source, mapped, run, here, there)
        fused_s = statistics.median(seconds_of(copy, rounds))
        expected = np.zeros((pool_bytes // run, run), np.uint8)
        expected[there] = source.cpu().numpy().reshape(-1, run)[here]
        asked.put("digest")
        is_right = answered.get(timeout=60) == digest(expected)
        is_exact &= is_right
        starts = source.data_ptr() + here * run
        gathered_s, copied_s, scattered_s = (
            statistics.median(seconds_of(call, rounds))
            for call in (
                prepared(kernels, starts, run, staging.data_ptr(), is_gather=True),
                partial(whole, staging, mapped, device),
                prepared(kernels, starts, run, staging.data_ptr(), is_gather=False),
            )
        )
        rows.append(
            {
                "bytes": run,
                "fused_gb_per_s": moved / fused_s / 1e9,
                "gather_gb_per_s": moved / gathered_s / 1e9,
                "mapped_copy_gb_per_s": moved / copied_s / 1e9,
                "scatter_gb_per_s": moved / scattered_s / 1e9,
                "staged_one_after_the_other_gb_per_s": moved / (gathered_s + copied_s + scattered_s) / 1e9,
                "exact": is_right,
            }
        )
    del mapped
    asked.put(None)
    holder.join(10)
    return {"device": device, "exact": is_exact, "rows": rows, "left_out": clock.left_out}


def main() -> None:
    """Measures and prints."""
    typed = parser(__doc__).parse_args()
    tell_and_exit(measure(typed.device, is_tiny=typed.tiny, seconds=typed.seconds))


if __name__ == "__main__":
    main()
