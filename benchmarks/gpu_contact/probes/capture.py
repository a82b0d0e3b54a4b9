"""What may an endpoint do while the engine's main thread captures CUDA graphs?

CUDA ends a capture when, depending on its mode, another thread allocates memory, asks an event or makes a context:
what attaching, compiling and UCX's own threads do. vLLM captures in the mode `global`. Each step of an endpoint's life
is done by another thread in the middle of a capture of its own. A capture that was ended may leave torch's allocator
unusable: what comes after it goes on in another process, which has done the steps before it outside of captures.

    python -m benchmarks.gpu_contact.probes.capture [--device cpu --tiny] [--mode thread_local]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from benchmarks.gpu_contact.probes.common import MIB, DeviceName, memory, parser, synchronize, tell
from benchmarks.gpu_contact.probes.receiver import Receiver, sender, write
from benchmarks.gpu_contact.running import last_json

from kvferry.plan.packing import BlockShape
from kvferry.staging import allocate, kernels_for

MODES = ("global", "thread_local", "relaxed")
Beside = Callable[[], None]


class Endpoint:
    """The steps of an endpoint's life, in order, each as a call that this thread waits for and another one makes."""

    def __init__(self, device: DeviceName, receiver: Receiver, num_bytes: int) -> None:
        self._device: DeviceName = device
        self._receiver, self._num_bytes = receiver, num_bytes
        self._pool = memory(num_bytes, device)  # the engine's, which is there before anybody captures
        self._thread = ThreadPoolExecutor(1)
        self._thread.submit(self._bind).result()
        self.steps: Mapping[str, Beside] = {
            "load NIXL": self._load,
            "take staging memory": self._take,
            "register": self._register,
            "connect": self._connect,
            "compile": self._compile,
            "gather": self._gather,
            "first write": self._write,
            "second write": self._write,
            "deregister": self._close,
        }

    def do(self, step: str) -> None:
        """Has the other thread do a step, and waits for it."""
        self._thread.submit(self.steps[step]).result()

    def _bind(self) -> None:
        if self._device == "cuda":
            from kvferry.staging.cuda import bind_thread

            bind_thread(0)

    def _load(self) -> None:
        self._transport = sender()

    def _take(self) -> None:
        self._staging = allocate(self._num_bytes, self._pool.device)

    def _register(self) -> None:
        self._transport.register([self._pool.region], self._pool.device)
        self._transport.register([self._staging.region], self._staging.device)

    def _connect(self) -> None:
        self._peer = self._transport.connect(self._receiver.metadata)

    def _compile(self) -> None:
        self._kernels = kernels_for([self._pool.region], self._pool.device)
        self._gather()

    def _gather(self) -> None:
        starts = self._pool.address + np.arange(self._num_bytes // 32768, dtype=np.int64) * 32768
        self._kernels.gather(starts, BlockShape(((16, 2048),), 1024), self._staging.address)

    def _write(self) -> None:
        write(self._transport, self._staging.region, self._peer, self._receiver.addresses[0])

    def _close(self) -> None:
        self._transport.close()


def capturing(device: DeviceName, mode: str) -> Callable[[Beside], bool]:
    """Returns a call that captures work around what is done beside, replays it, and returns whether it is right."""
    if device == "cpu":
        values = np.zeros(64)

        def compute(beside: Beside) -> bool:
            values[:] = 1
            beside()
            values[:] += 1
            return bool((values == 2).all())

        return compute
    import torch

    tensor = torch.zeros(1 << 20, device="cuda:0")
    tensor.add_(1)
    torch.cuda.synchronize()

    def capture(beside: Beside) -> bool:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=mode):
            tensor.add_(1)
            beside()
            tensor.add_(1)
        tensor.zero_()
        graph.replay()
        torch.cuda.synchronize()
        return bool((tensor == 2).all())

    return capture


def measure(device: DeviceName, mode: str, first: int, *, is_tiny: bool) -> dict[str, Any]:
    """Does the steps from one on, each beside a capture, up to the first that ends one.

    Returns:
        What became of each: "" if all is well; and of the step itself, where it failed.
    """
    found: dict[str, dict[str, str]] = {}
    capture = capturing(device, mode)
    assert capture(lambda: None), "a graph that was captured alone computes something else"
    with Receiver(device, MIB if is_tiny else 16 * MIB) as receiver:
        endpoint = Endpoint(device, receiver, MIB if is_tiny else 16 * MIB)
        for number, step in enumerate(endpoint.steps):
            if number < first:
                endpoint.do(step)
                synchronize(device)
                continue
            its_own = ""

            def beside(step: str = step) -> None:
                nonlocal its_own
                try:
                    endpoint.do(step)
                except Exception as error:
                    its_own = _said(error)

            try:
                problem = "" if capture(beside) else "the graph computes something else"
            except Exception as error:
                problem = _said(error)
            found[step] = {"capture": problem, "step": its_own}
            if problem or its_own:
                break
    return {"mode": mode, "steps": found, "of": list(endpoint.steps)}


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def every_step(mode: str, flags: Sequence[str]) -> dict[str, Any]:
    """Tries one mode, in as many processes as it takes."""
    found: dict[str, dict[str, str]] = {}
    while True:
        run = subprocess.run(
            [
                *(sys.executable, "-m", "benchmarks.gpu_contact.probes.capture", *flags),
                *("--mode", mode, "--first", str(len(found))),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        print(run.stdout, flush=True)
        said = last_json(run.stdout.splitlines())
        if said is None or not said["steps"]:
            return {"mode": mode, "steps": found, "problem": f"ended with exit code {run.returncode}"}
        found |= said["steps"]
        if len(found) == len(said["of"]):
            return {"mode": mode, "steps": found, "problem": None}


def main() -> None:
    """Tries one mode from a step on here, or all of them in processes of their own, side by side."""
    options = parser(__doc__)
    options.add_argument("--mode", choices=MODES)
    options.add_argument("--first", type=int, help=argparse.SUPPRESS)
    typed = options.parse_args()
    if typed.first is not None:
        tell(measure(typed.device, typed.mode, typed.first, is_tiny=typed.tiny))
        return
    flags = ["--device", typed.device, *(["--tiny"] if typed.tiny else [])]
    modes = [typed.mode] if typed.mode else MODES[:1] if typed.tiny else MODES
    with ThreadPoolExecutor(len(modes)) as side_by_side:
        found = list(side_by_side.map(lambda mode: every_step(mode, flags), modes))
    rows = [
        {"mode": each["mode"], "beside": step, "capture": result["capture"], "step": result["step"]}
        for each in found
        for step, result in each["steps"].items()
    ]
    problems = {each["mode"]: each["problem"] for each in found if each["problem"]}
    tell({"device": typed.device, "rows": rows, "problems": problems})
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
