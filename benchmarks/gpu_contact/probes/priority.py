"""Does a stream's priority keep gathers from waiting behind an engine's large kernels?

Runs of 1 KiB are gathered on a stream of their own: alone, and beside matrix products that fill all of the GPU and are
queued without a pause, as a prefill's are, on a stream of priority 0 and on one of -1, which is higher.

    python -m benchmarks.gpu_contact.probes.priority [--device cpu --tiny]
"""

from __future__ import annotations

import time

import numpy as np
from benchmarks.gpu_contact.probes.common import MIB, DeviceName, memory, parser, percentiles_us, tell

_RUN = 1 << 10


def _on_cpu(rounds: int) -> dict[str, list[float]]:
    """The same arithmetic where nothing has a priority."""
    pool, staging = memory(2 * MIB, "cpu"), np.zeros((MIB // _RUN, _RUN), np.uint8)
    runs = np.random.default_rng(0).permutation(2 * MIB // _RUN)[: len(staging)]
    taken = []
    for _ in range(rounds):
        before = time.perf_counter()
        np.take(pool.get().reshape(-1, _RUN), runs, axis=0, out=staging)
        taken.append(time.perf_counter() - before)
    return {"alone": taken}


def _on_gpu(rounds: int) -> dict[str, list[float]]:
    import torch
    from benchmarks.gpu_contact.probes.device_kernels import launch_runs, runs_to_runs

    moved = 64 * MIB
    pool, staging = memory(4 * moved, "cuda"), memory(moved, "cuda")
    places = np.random.default_rng(0).permutation(pool.num_bytes // _RUN)[: moved // _RUN].astype(np.int64)
    prepared = runs_to_runs(
        pool.address, staging.address, moved, _RUN, places, np.arange(moved // _RUN), torch.device("cuda")
    )
    large = torch.randn((8192, 8192), dtype=torch.bfloat16, device="cuda")
    product = torch.empty_like(large)
    torch.cuda.synchronize()
    taken: dict[str, list[float]] = {}
    for name, level, is_busy in (("alone", 0, False), ("priority 0", 0, True), ("priority -1", -1, True)):
        stream = torch.cuda.Stream(priority=level)  # type: ignore[no-untyped-call]
        taken[name] = []
        for number in range(rounds + 2):
            for _ in range(8 if is_busy else 0):
                torch.mm(large, large, out=product)
            before = time.perf_counter()
            with torch.cuda.stream(stream):
                launch_runs(prepared)
            stream.synchronize()
            if number >= 2:
                taken[name].append(time.perf_counter() - before)
            torch.cuda.synchronize()
    return taken


def measure(device: DeviceName, *, is_tiny: bool) -> dict[str, object]:
    """Times a gather in each way."""
    rounds = 3 if is_tiny else 30
    taken = _on_gpu(rounds) if device == "cuda" else _on_cpu(rounds)
    return {"device": device, "microseconds": {name: percentiles_us(values) for name, values in taken.items()}}


def main() -> None:
    """Measures and prints."""
    typed = parser(__doc__).parse_args()
    tell(measure(typed.device, is_tiny=typed.tiny))


if __name__ == "__main__":
    main()
