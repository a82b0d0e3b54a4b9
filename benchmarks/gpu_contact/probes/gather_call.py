"""What one gather call costs before a byte moves: checks in Python, the upload of addresses, the launch, the wait.

The parts are measured each on its own, as the kernels do them, and beside the whole call for 8 MiB and for one block.
What the whole takes beyond the sum is the kernel itself.

    python -m benchmarks.gpu_contact.probes.gather_call [--device cpu --tiny]
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from benchmarks.gpu_contact.probes.common import MIB, DeviceName, memory, parser, percentiles_us, seconds_of, tell

from kvferry.plan.packing import BlockShape
from kvferry.staging import kernels_for
from kvferry.staging.kernels import AddressRange, StartArray, common_alignment, spread

SHAPE, STEP = BlockShape(((16, 2048),), 1024), 32768


def parts(
    device: DeviceName, starts: StartArray, extent: AddressRange, address: int
) -> dict[str, Callable[[], object]]:
    """Returns each part of a call as a call of its own."""

    def python() -> None:
        extent.check(starts, SHAPE)
        common_alignment(np.array(spread(starts, ()), np.int64), SHAPE, address, 16)

    if device == "cpu":
        return {"python": python}
    import torch
    from benchmarks.gpu_contact.probes.device_kernels import nothing

    from kvferry.staging.accelerator import CopyLaunch
    from kvferry.staging.cuda import CudaAccelerator, launch_kernel

    stream = CudaAccelerator(0).stream()
    uploaded = stream.upload(starts)
    copy = CopyLaunch(uploaded, 0, len(starts), SHAPE.loops, SHAPE.length, address, 16, True)
    one = torch.zeros(1, dtype=torch.int64, device="cuda:0")

    def upload_and_wait() -> None:
        stream.upload(starts)
        stream.synchronize()

    def launch_and_wait() -> None:
        stream.launch(copy)
        stream.synchronize()

    def choose_stream() -> None:
        with torch.cuda.device(0), torch.cuda.stream(torch.cuda.default_stream()):
            pass

    return {
        "python": python,
        "upload": lambda: stream.upload(starts),
        "upload and wait": upload_and_wait,
        "choose a stream": choose_stream,
        "launch nothing": lambda: nothing[(1,)](one),
        "launch on the current stream": lambda: launch_kernel(copy),
        "launch": lambda: stream.launch(copy),
        "launch and wait": launch_and_wait,
        "wait for nothing": stream.synchronize,
    }


def measure(device: DeviceName, *, is_tiny: bool) -> dict[str, object]:
    """Times the parts and the whole."""
    rounds = 5 if is_tiny else 300
    num_bytes = MIB if is_tiny else 8 * MIB
    pool = memory((4 if is_tiny else 1024) * MIB, device)
    staging = memory(num_bytes, device)
    kernels = kernels_for([pool.region], pool.device)
    places = np.random.default_rng(0).permutation(pool.num_bytes // STEP)
    starts = pool.address + np.resize(places, num_bytes // SHAPE.num_bytes).astype(np.int64) * STEP
    calls = parts(device, starts, AddressRange.over([pool.region]), staging.address)
    calls |= {
        "whole call, one block": lambda: kernels.gather(starts[:1], SHAPE, staging.address),
        f"whole call, {num_bytes // MIB} MiB": lambda: kernels.gather(starts, SHAPE, staging.address),
    }
    return {
        "device": device,
        "blocks": len(starts),
        "microseconds": {name: percentiles_us(seconds_of(call, rounds)) for name, call in calls.items()},
    }


def main() -> None:
    """Measures and prints."""
    typed = parser(__doc__).parse_args()
    tell(measure(typed.device, is_tiny=typed.tiny))


if __name__ == "__main__":
    main()
