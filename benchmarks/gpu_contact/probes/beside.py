"""What an engine's decode step loses while caches arrive in its process.

A step is a replayed CUDA graph of 32 small matrix products, as a decode step of a small batch is, and the wait for it;
beside it, what a launch of a small kernel takes. In turns: alone, beside transfers through this process's decode
endpoint, and apart from them, while the same go between two other processes. All processes share one GPU, which takes
turns between them: what is lost against `alone` is more than where each has one; against `apart` it is what transfers
in the same process cost. What steps compute is compared with what they computed alone. Steps that lose nothing to
transfers that stand still would say nothing: GB/s are shown of each, and of `idle`, apart while no step runs.

With --keeps-lock another thread of the process wants the interpreter's lock all the time, as an engine's scheduler may.

    python -m benchmarks.gpu_contact.probes.beside [--device cpu --tiny] [--path staged] [--keeps-lock]
"""

from __future__ import annotations

import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
from benchmarks.compute_beside_transfers import PAGE_BYTES, Others, Requests, computing, endpoint_of, pool
from benchmarks.gpu_contact.probes.common import DeviceName, parser, percentiles_us, tell_and_exit

PHASES = ("alone", "beside", "apart")

_Taken = dict[str, list[float]]


class Engine(ABC):
    """What computes."""

    @abstractmethod
    def step(self) -> None:
        """A decode step, and the wait for it."""

    @abstractmethod
    def launch(self) -> None:
        """Hands in a small piece of work without waiting for it."""

    @abstractmethod
    def is_right(self) -> bool:
        """Returns whether the last step computed what the first did."""


class HostEngine(Engine):
    """Some arithmetic on a CPU."""

    def __init__(self) -> None:
        self._weights = np.random.default_rng(0).standard_normal(4096, np.float32)
        self._small = np.zeros(64, np.float32)
        self.step()
        self._expected = self._product.copy()

    def step(self) -> None:
        self._product = np.sin(self._weights)

    def launch(self) -> None:
        self._small += 1

    def is_right(self) -> bool:
        return bool((self._product == self._expected).all())


class CudaEngine(Engine):
    """A graph on a GPU, captured before any endpoint is there."""

    def __init__(self, layers: int = 32, width: int = 4096) -> None:
        import torch

        generator = torch.Generator(device="cuda").manual_seed(0)
        self._weights = [  # the graph reads them, and keeps nothing
            torch.randn((width, width), dtype=torch.bfloat16, device="cuda", generator=generator) / width**0.5
            for _ in range(layers)
        ]
        self._given = torch.randn((8, width), dtype=torch.bfloat16, device="cuda", generator=generator)
        self._small = torch.zeros(64, device="cuda")

        def forward() -> torch.Tensor:
            hidden = self._given
            for weight in self._weights:
                hidden = torch.nn.functional.silu(hidden @ weight) + self._given
            return hidden

        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):  # libraries set themselves up before they are captured
            forward()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._hidden = forward()
        self._wait = torch.cuda.current_stream().synchronize
        self._equal = torch.equal
        self.step()
        self._expected = self._hidden.clone()

    def step(self) -> None:
        self._graph.replay()
        self._wait()

    def launch(self) -> None:
        self._small.add_(1)

    def is_right(self) -> bool:
        return self._equal(self._hidden, self._expected)


def phase(engine: Engine, seconds: float, launches: int, look: Callable[[], None]) -> _Taken:
    """Times steps for so long, a look at requests between two, and then launches."""
    taken: _Taken = {"step": [], "launch": []}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        look()
        before = time.perf_counter()
        engine.step()
        taken["step"].append(time.perf_counter() - before)
    for number in range(launches):
        if number % 100 == 0:
            look()
            engine.step()  # waits, so that no queue is ever full
        before = time.perf_counter()
        engine.launch()
        taken["launch"].append(time.perf_counter() - before)
    return taken


def _keep_lock() -> None:
    step = computing()
    while True:
        step()


def measure(
    device: DeviceName, path: str, *, is_tiny: bool, seconds: float, keeps_lock: bool = False
) -> dict[str, object]:
    """Runs all phases in turns; the first round, in which connections are made, does not count."""
    engine: Engine = CudaEngine() if device == "cuda" else HostEngine()
    if keeps_lock:
        threading.Thread(target=_keep_lock, daemon=True).start()
    request_pages = (4 << 20 if is_tiny else 64 << 20) // PAGE_BYTES
    rounds, launches, phase_s = (1, 100, 0.1) if is_tiny else (3, 2000, seconds / 20)
    kind = "cuda:0" if device == "cuda" else "cpu"
    others = Others("decode", path, request_pages, kind)
    assert others.registry_url is not None
    memory, layout = pool(request_pages, kind)
    taken: dict[str, _Taken] = {name: {"step": [], "launch": []} for name in PHASES}
    moved: dict[str, list[float]] = {name: [] for name in (*PHASES[1:], "idle")}
    is_right = True
    rooms = itertools.count(1 << 20, 1 << 20)
    with endpoint_of("decode", "beside", path, others.registry_url, layout) as endpoint:
        requests = Requests(endpoint, "peer", request_pages)

        def apart(work: Callable[[], _Taken]) -> tuple[_Taken, float]:
            room, before = next(rooms), time.perf_counter()
            others.run("peer", "apart", room)
            others.run("apart", "peer", room)
            taken = work()
            done, seconds_of_it = others.stop("apart"), time.perf_counter() - before
            others.stop("peer")
            return taken, done * request_pages * PAGE_BYTES / seconds_of_it / 1e9

        def rest() -> _Taken:
            time.sleep(phase_s)
            return {}

        for number in range(rounds + 1):
            found = {"alone": phase(engine, phase_s, launches, lambda: None)}
            room, before = next(rooms), time.perf_counter()
            others.run("peer", "beside", room)
            requests.begin(room)
            found["beside"] = phase(engine, phase_s, launches, requests.look)
            done, seconds_of_it = requests.done, time.perf_counter() - before
            is_right &= engine.is_right()
            requests.end()
            others.stop("peer")
            speeds = {"beside": done * request_pages * PAGE_BYTES / seconds_of_it / 1e9}
            found["apart"], speeds["apart"] = apart(lambda: phase(engine, phase_s, launches, lambda: None))
            _, speeds["idle"] = apart(rest)
            for name in PHASES if number else ():
                for kind_of, values in found[name].items():
                    taken[name][kind_of] += values
            for name in moved if number else ():
                moved[name].append(speeds[name])
    others.end()
    del memory
    figures = {name: {kind: percentiles_us(values) for kind, values in taken[name].items()} for name in PHASES}
    lost = {
        base: {
            f"{what} {kind}": 1 - figures[base][what][kind] / figures["beside"][what][kind]
            for what in ("step", "launch")
            for kind in ("p50", "p99")
        }
        for base in ("alone", "apart")
    }
    return {
        "device": device,
        "path": path,
        "exact": is_right,
        "keeps_lock": keeps_lock,
        "gb_per_s": {name: float(np.median(values)) for name, values in moved.items()},
        "microseconds": figures,
        "lost_beside_against": lost,
    }


def main() -> None:
    """Measures and prints."""
    options = parser(__doc__)
    options.add_argument("--path", choices=("direct", "staged", "auto"), default="staged")
    options.add_argument("--keeps-lock", action="store_true", help="beside a thread that wants the interpreter's lock")
    typed = options.parse_args()
    tell_and_exit(
        measure(typed.device, typed.path, is_tiny=typed.tiny, seconds=typed.seconds, keeps_lock=typed.keeps_lock)
    )


if __name__ == "__main__":
    main()
