"""May an endpoint attach and gather while the engine's main thread captures CUDA graphs?

CUDA ends a capture when, depending on its mode, another thread allocates memory, asks an event or makes a context:
what attaching, compiling and UCX's own threads do. vLLM captures in the mode `global`. Every mode is tried in a process
of its own, since a capture that was ended may leave CUDA unusable.

    python -m benchmarks.gpu_contact.probes.capture [--device cpu --tiny] [--mode thread_local]
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from benchmarks.gpu_contact.probes.common import MIB, DeviceName, memory, parser, tell
from benchmarks.gpu_contact.probes.receiver import Receiver, sender, write
from benchmarks.gpu_contact.running import last_json

from kvferry.plan.blocks import BlockShape
from kvferry.staging import kernels_for

MODES = ("global", "thread_local", "relaxed")
_CAPTURES = 10
_LONGEST_S = 25.0


def capturing(device: DeviceName, mode: str) -> Callable[[], bool]:
    """Returns a call that captures some work, with pauses, replays it, and returns whether the result is right."""
    if device == "cpu":
        values = np.zeros(64)

        def compute() -> bool:
            values[:] = 0
            for _ in range(3):
                values[:] += 1
                time.sleep(0.01)
            return bool((values == 3).all())

        return compute
    import torch

    tensor = torch.zeros(1 << 20, device="cuda:0")
    tensor.add_(1)
    torch.cuda.synchronize()

    def capture() -> bool:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=mode):
            for _ in range(3):
                tensor.add_(1)
                time.sleep(0.01)
        tensor.zero_()
        graph.replay()
        torch.cuda.synchronize()
        return bool((tensor == 3).all())

    return capture


class Attaching:
    """What a thread of kvferry's does beside: attaches to a peer, and then gathers and writes."""

    def __init__(self, device: DeviceName, receiver: Receiver, num_bytes: int) -> None:
        self._device: DeviceName = device
        self._receiver, self._num_bytes = receiver, num_bytes
        # The engine's, which is there before anybody captures; taking it would wait for the device.
        self._pool, self._staging = (memory(num_bytes, device) for _ in range(2))
        self._stop = threading.Event()
        self.problem: str | None = None
        self.rounds = 0
        self._thread = threading.Thread(target=self._run, name="attaching")

    def begin(self) -> None:
        """Starts."""
        self._thread.start()

    def end(self) -> None:
        """Ends after the round that is being run."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._round()
                self.rounds += 1
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"

    def _round(self) -> None:
        if self._device == "cuda":
            import torch

            torch.cuda.set_device(0)
        pool, staging = self._pool, self._staging
        transport = sender()
        transport.register([pool.region], pool.device)
        transport.register([staging.region], staging.device)
        peer = transport.connect(self._receiver.metadata)
        kernels = kernels_for([pool.region], pool.device)
        shape = BlockShape(((16, 2048),), 1024)
        starts = pool.address + np.arange(self._num_bytes // 32768, dtype=np.int64) * 32768
        for _ in range(20):
            kernels.gather(starts, shape, staging.address)
            write(transport, staging.region, peer, self._receiver.addresses[0])
        transport.close()


def measure(device: DeviceName, mode: str, *, is_tiny: bool) -> dict[str, Any]:
    """Captures several times beside a thread that attaches."""
    num_bytes = MIB if is_tiny else 16 * MIB
    captured, problem = 0, None
    capture = capturing(device, mode)
    capture()  # alone, so that what fails afterwards fails for the thread
    with Receiver(device, num_bytes) as receiver:
        attaching = Attaching(device, receiver, num_bytes)
        attaching.begin()
        end = time.monotonic() + _LONGEST_S
        try:
            while captured < (2 if is_tiny else _CAPTURES) or (attaching.rounds < 1 and attaching.problem is None):
                if time.monotonic() > end:
                    problem = f"nothing was attached within {_LONGEST_S:g} s"
                    break
                if not capture():
                    problem = "a graph that was captured computes something else"
                    break
                captured += 1
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        attaching.end()
    return {
        "mode": mode,
        "captured": captured,
        "problem": problem,
        "attached": attaching.rounds,
        "problem_of_attaching": attaching.problem,
    }


def main() -> None:
    """Tries one mode here, or all of them, each in a process of its own."""
    options = parser(__doc__)
    options.add_argument("--mode", choices=MODES)
    typed = options.parse_args()
    if typed.mode is not None:
        found = measure(typed.device, typed.mode, is_tiny=typed.tiny)
        tell(found)
        sys.exit(found["problem"] is not None or found["problem_of_attaching"] is not None)
    modes = []
    for mode in MODES[:1] if typed.tiny else MODES:
        run = subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu_contact.probes.capture", *sys.argv[1:], "--mode", mode],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        print(run.stdout)
        ended = f"ended with exit code {run.returncode}"
        modes.append(last_json(run.stdout.splitlines()) or {"mode": mode, "captured": 0, "problem": ended})
    tell({"device": typed.device, "modes": modes})


if __name__ == "__main__":
    main()
