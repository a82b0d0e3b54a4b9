"""What a thread that computes loses to transfers that run in its process: an engine's scheduler lives beside kvferry.

A thread does steps of about 200 us of pure computing, Python and small arrays, so that it wants the interpreter's lock
all the time. In turns, several times, it does so

* alone: its process has an endpoint that is connected and does nothing;
* beside: requests of so many MiB go through that endpoint as fast as they can, several at a time, over NIXL;
* apart: the same requests go through an endpoint of another process. What is lost to that is lost to the machine
  (processors, caches, memory); what is lost beyond it beside them is lost to kvferry's threads: the interpreter's lock.

The thread that computes has a processor to itself; kvferry's threads and the other processes share the rest. Between
two steps it opens, submits and looks at rooms as an engine would; that time is shown, and is no part of a step. Prints
the 50th and the 99th percentile of a step and how much computing was done, each compared with `alone` in the same round
and as the median over rounds, what is lost of each beside transfers against `alone` and against `apart`, and what
kvferry's threads took of the processor. With --json, the same as JSON.

A step's time is without what the thread stood in line for a processor, by the operating system's account, so that
other work on the machine counts less; it counts where kvferry's threads stand in line while they have the lock. "gave"
is in how many steps the thread gave the lock away, "waits" how much of its time it neither ran nor stood in line, and
so waited for the lock. Both repeat from run to run; where a machine's own speed changes, the times of steps do not.

    python benchmarks/compute_beside_transfers.py [--side prefill] [--path staged] [--device cuda] [--rounds 5]
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import resource
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before NumPy: the thread that computes has one processor

import numpy as np

import kvferry as kf

STEP_S = 200e-6
SETTLE_S = 0.5  # of every phase, not measured: until as many requests are in flight as there will be
LAYERS, PAGE_TOKENS, HEADS, HEAD_DIM = 8, 16, 8, 128
PAGE_BYTES = 2 * LAYERS * PAGE_TOKENS * HEADS * HEAD_DIM * 2
IN_FLIGHT = 4
SIDES = ("prefill", "decode")
PHASES = ("alone", "beside", "apart")

logging.getLogger("kvferry").setLevel(logging.CRITICAL)  # every phase ends with requests that are aborted

Connection = multiprocessing.connection.Connection


def waits_of_this_thread() -> int:
    """Returns how often the calling thread has waited for anything, since it began."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def pool(request_pages: int, device: str = "cpu") -> tuple[list[Any], kf.RankLayout]:
    """Memory for as many requests as are in flight, which must outlive the endpoint, and its layout."""
    components = kf.attention_components(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=HEAD_DIM, dtype="float16")
    memory: list[Any] = []
    shards = []
    for component in components:
        shape = (IN_FLIGHT * request_pages, PAGE_TOKENS, HEADS, HEAD_DIM)
        tensors = [ones(shape, device) for _ in range(LAYERS)]
        memory += tensors
        shards.append(kf.shard_from_tensors(component, tensors, dims=("page", "token", "head", "dim")))
    return memory, kf.RankLayout(shards=tuple(shards))


def ones(shape: tuple[int, ...], device: str) -> Any:
    """Makes a tensor of a device, or an array."""
    if device == "cpu":
        return np.ones(shape, np.float16)
    import torch

    tensor = torch.ones(shape, dtype=torch.float16, device=device)
    torch.cuda.synchronize()
    return tensor


def page_sets(request_pages: int) -> list[np.ndarray]:
    """Scattered pages for each of the requests in flight."""
    pages = np.random.default_rng(0).permutation(IN_FLIGHT * request_pages).astype(np.int64)
    return np.split(pages, IN_FLIGHT)


class Requests:
    """Keeps requests in flight at one endpoint, as an engine does: opens, submits, and looks which have ended."""

    def __init__(self, endpoint: kf.PrefillEndpoint | kf.DecodeEndpoint, engine: str, request_pages: int) -> None:
        self._endpoint = endpoint
        self._engine = engine
        self._rooms = itertools.count()
        self._free: deque[np.ndarray] = deque(page_sets(request_pages))
        self._open: list[tuple[kf.Sender | kf.Receiver, np.ndarray]] = []
        self.done = 0

    def begin(self, first_room: int) -> None:
        """Numbers the next requests from here on."""
        self._rooms = itertools.count(first_room)
        self.done = 0

    def look(self) -> None:
        """Opens another request in place of each that has ended."""
        for entry in [each for each in self._open if each[0].pages_reusable]:
            self._open.remove(entry)
            self._free.append(entry[1])
            self.done += entry[0].state is kf.TransferState.SUCCESS
        while self._free:
            pages = self._free.popleft()
            self._open.append((self._opened(next(self._rooms), pages), pages))

    def _opened(self, room: int, pages: np.ndarray) -> kf.Sender | kf.Receiver:
        if isinstance(self._endpoint, kf.DecodeEndpoint):
            return self._endpoint.open(room, pages, engine=self._engine)
        sender = self._endpoint.open(room)
        sender.submit(pages, last=True)
        return sender

    def end(self) -> None:
        """Aborts what is open, and waits until its pages are free."""
        for transfer, _ in self._open:
            transfer.abort("the phase is over")
        for transfer, pages in self._open:
            assert transfer.wait_pages_reusable(30)
            self._free.append(pages)
        self._open.clear()


def endpoint_of(side: str, engine: str, path: str, registry_url: str, layout: kf.RankLayout) -> Any:
    """Makes an endpoint of either side."""
    settings = kf.Settings.model_validate({"path": path, "registry_url": registry_url})
    if side == "decode":
        return kf.DecodeEndpoint(layout, engine=engine, settings=settings)
    return kf.PrefillEndpoint(layout, engine=engine, settings=settings)


def other_process(
    connection: Connection,
    side: str,
    name: str,
    path: str,
    request_pages: int,
    registry_url: str | None,
    device: str = "cpu",
) -> None:
    """Runs requests when it is told to, until it is told to stop: the peer of both others, or what transfers apart."""
    registry = kf.create_registry(kf.Settings(registry_port=0)) if registry_url is None else None
    if registry is not None:
        registry.start()
        registry_url = registry.url
    assert registry_url is not None
    memory, layout = pool(request_pages, device)
    with endpoint_of(side, name, path, registry_url, layout) as endpoint:
        connection.send(registry_url)
        while (message := connection.recv()) is not None:
            engine, first_room = message
            requests = Requests(endpoint, engine, request_pages)
            requests.begin(first_room)
            while not connection.poll():
                requests.look()
                time.sleep(0.0005)
            connection.recv()
            requests.end()
            connection.send(requests.done)
    if registry is not None:
        registry.close()
    del memory


@dataclass(frozen=True)
class Measured:
    """One phase.

    Attributes:
        steps: seconds of each, without the line for a processor.
        interrupted: in how many of them the thread gave the lock away.
        calls_s: seconds of each look at the requests between two steps.
        requests: how many were done, since the phase began.
        threads: the accounts of all other threads, by name.
        seconds: how long was measured.
        ran_s: how long the thread that computes ran.
        waited_s: how long it waited for something other than a processor.
        waits: how often.
    """

    steps: np.ndarray
    interrupted: int
    calls_s: np.ndarray
    requests: int
    threads: dict[str, Account]
    seconds: float
    ran_s: float
    waited_s: float
    waits: int

    @property
    def wanted_s(self) -> float:
        """How long it was not in line for a processor."""
        return self.ran_s + self.waited_s


def computing() -> Callable[[], None]:
    """Returns a step: Python and small arrays, which keep the interpreter's lock."""
    values = np.arange(64, dtype=np.float64)
    numbers = list(range(40))

    def rounds(count: int) -> None:
        total = 0
        for _ in range(count):
            scaled = values * 1.5 + 2.0
            for number in numbers:
                total = (total * 31 + number) & 0xFFFF
            total += int(scaled[total & 63])

    count = 1
    while True:
        taken = []
        for _ in range(200):
            begun_at = time.perf_counter()
            rounds(count)
            taken.append(time.perf_counter() - begun_at)
        if statistics.median(taken) >= STEP_S:
            return lambda: rounds(count)
        count += 1


@dataclass(frozen=True)
class Account:
    """The operating system's account of threads.

    Attributes:
        ran_s: on a processor.
        queued_s: in line for one.
        waits: how often they waited for anything else.
    """

    ran_s: float = 0.0
    queued_s: float = 0.0
    waits: int = 0

    def __add__(self, other: Account) -> Account:
        return Account(self.ran_s + other.ran_s, self.queued_s + other.queued_s, self.waits + other.waits)

    def __sub__(self, other: Account) -> Account:
        return Account(self.ran_s - other.ran_s, self.queued_s - other.queued_s, self.waits - other.waits)


def account(task: Path) -> Account:
    """The account of one thread."""
    ran, queued, _ = (task / "schedstat").read_text().split()
    waits = (task / "status").read_text().split("\nvoluntary_ctxt_switches:")[1].split()[0]
    return Account(int(ran) * 1e-9, int(queued) * 1e-9, int(waits))


def threads() -> tuple[Account, dict[str, Account]]:
    """The accounts of this thread, and of all others by name."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    mine = threading.get_native_id()
    others: dict[str, Account] = {}
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != mine:
            name = names.get(int(task.name), "not Python's")
            others[name] = others.get(name, Account()) + account(task)
    return account(Path(f"/proc/self/task/{mine}")), others


def phase(step: Callable[[], None], seconds: float, look: Callable[[], None]) -> Measured:
    """Computes for some seconds, and before that until it is as it will be."""
    settled_at = time.perf_counter() + SETTLE_S
    while time.perf_counter() < settled_at:
        look()
        step()
    steps, calls, interrupted = [], [], 0
    others_before = threads()[1]
    with Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").open("rb") as schedstat:
        read, descriptor = ctypes.PyDLL(None).pread, schedstat.fileno()  # which keeps the lock, as `os.pread` does not
        buffer = ctypes.create_string_buffer(100)

        def queued_s() -> float:
            read(descriptor, buffer, 100, 0)
            return int(buffer.value.split()[1]) * 1e-9

        before, begun_at = threads()[0], time.perf_counter()
        now = begun_at
        while now - begun_at < seconds:
            look()
            waits = waits_of_this_thread()
            called_at = time.perf_counter()
            calls.append(called_at - now)
            queued = queued_s()
            step()
            queued = queued_s() - queued
            now = time.perf_counter()
            steps.append(now - called_at - queued)
            interrupted += waits_of_this_thread() > waits
    mine, others_after = threads()
    mine -= before
    others = {name: each - others_before.get(name, Account()) for name, each in others_after.items()}
    return Measured(
        np.array(steps),
        interrupted,
        np.array(calls),
        requests=0,
        threads=others,
        seconds=now - begun_at,
        ran_s=mine.ran_s,
        waited_s=max(0.0, now - begun_at - mine.ran_s - mine.queued_s),
        waits=mine.waits,
    )


class Others:
    """The other processes."""

    def __init__(self, side: str, path: str, request_pages: int, device: str = "cpu") -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: dict[str, Connection] = {}
        self._processes = []
        self.registry_url: str | None = None
        for name, its_side in (("peer", SIDES[1 - SIDES.index(side)]), ("apart", side)):
            self._pipes[name], theirs = context.Pipe()
            self._processes.append(
                context.Process(
                    target=other_process,
                    args=(theirs, its_side, name, path, request_pages, self.registry_url, device),
                    daemon=True,  # ends with this process, where something fails
                )
            )
            self._processes[-1].start()
            self.registry_url = self._pipes[name].recv()

    def run(self, name: str, engine: str, first_room: int) -> None:
        """Has one run requests with an engine."""
        self._pipes[name].send((engine, first_room))

    def stop(self, name: str) -> int:
        """Has one stop; returns how many were done."""
        self._pipes[name].send(None)
        done: int = self._pipes[name].recv()
        return done

    def end(self) -> None:
        """Ends all."""
        for pipe in self._pipes.values():
            pipe.send(None)
        for process in self._processes:
            process.join(60)


def measured(
    side: str, path: str, device: str, rounds: int, seconds: float, *, request_pages: int, is_bound: bool
) -> list[dict[str, Measured]]:
    """Runs all phases, in turns; the first round, in which connections are made, does not count."""
    first, *others = sorted(os.sched_getaffinity(0))
    if is_bound and others:
        os.sched_setaffinity(0, others)  # inherited by all that is started now
    processes = Others(side, path, request_pages, device)
    assert processes.registry_url is not None
    memory, layout = pool(request_pages, device)
    results = []
    first_rooms = itertools.count(1 << 20, 1 << 20)
    with endpoint_of(side, "beside", path, processes.registry_url, layout) as endpoint:
        requests = Requests(endpoint, "peer", request_pages)
        if is_bound:
            os.sched_setaffinity(0, {first})  # this thread alone
        step = computing()
        for number in range(rounds + 1):
            found = {"alone": phase(step, seconds, lambda: None)}
            room = next(first_rooms)
            processes.run("peer", "beside", room)
            requests.begin(room)
            found["beside"] = phase(step, seconds, requests.look)
            requests.end()
            processes.stop("peer")
            room = next(first_rooms)
            processes.run("peer", "apart", room)
            processes.run("apart", "peer", room)
            found["apart"] = phase(step, seconds, lambda: None)
            done = processes.stop("apart")
            processes.stop("peer")
            found["beside"] = replace(found["beside"], requests=requests.done)
            found["apart"] = replace(found["apart"], requests=done)
            if number:
                results.append(found)
    processes.end()
    del memory
    return results


def ratios(results: list[dict[str, Measured]], of: Callable[[np.ndarray], float], name: str, base: str) -> float:
    """How many times longer something takes in one phase than in another: the median over rounds."""
    return statistics.median(of(each[name].steps) / of(each[base].steps) for each in results)


def p50(steps: np.ndarray) -> float:
    """The median."""
    return float(np.percentile(steps, 50))


def p99(steps: np.ndarray) -> float:
    """The 99th percentile."""
    return float(np.percentile(steps, 99))


def mean(steps: np.ndarray) -> float:
    """The mean, which says how much computing was done."""
    return float(np.mean(steps))


def summary(results: list[dict[str, Measured]], request_pages: int) -> dict[str, Any]:
    """All figures."""
    request_gb = request_pages * PAGE_BYTES / 1e9
    kinds = {"p50": p50, "p99": p99, "mean": mean}
    phases = {
        name: {
            **{
                f"{kind}_us": statistics.median(of(each[name].steps) for each in results) * 1e6
                for kind, of in kinds.items()
            },
            **{f"{kind}_of_alone": ratios(results, of, name, "alone") for kind, of in kinds.items()},
            "gb_per_s": statistics.median(
                each[name].requests * request_gb / (SETTLE_S + each[name].seconds) for each in results
            ),
            "call_us": statistics.median(mean(each[name].calls_s) for each in results) * 1e6,
            "interrupted": statistics.median(each[name].interrupted / len(each[name].steps) for each in results),
            "waited": statistics.median(each[name].waited_s / each[name].wanted_s for each in results),
            "waits_per_s": statistics.median(each[name].waits / each[name].wanted_s for each in results),
            "step_cpu_us": statistics.median(each[name].ran_s / len(each[name].steps) for each in results) * 1e6,
        }
        for name in PHASES
    }
    lost = {
        base: {kind: 1 - 1 / ratios(results, of, "beside", base) for kind, of in kinds.items()}
        for base in ("alone", "apart")
    }
    last = results[-1]["beside"]
    threads_of = {
        name: {"cpu_ms_per_s": 1e3 * each.ran_s / last.seconds, "waits_per_s": each.waits / last.seconds}
        for name, each in sorted(last.threads.items(), key=lambda item: -item[1].ran_s)
        if each.ran_s > 1e-3 * last.seconds
    }
    return {"phases": phases, "lost_beside_against": lost, "threads": threads_of}


def show(title: str, found: dict[str, Any]) -> None:
    """Prints the figures of one side and path."""
    print(title)
    print(
        f"{'':10}{'p50 us':>9}{'of alone':>10}{'p99 us':>10}{'of alone':>10}{'mean us':>9}{'of alone':>10}"
        f"{'GB/s':>8}{'calls us':>10}{'gave %':>9}{'waits %':>9}{'waits/s':>9}{'CPU us':>8}"
    )
    for name, each in found["phases"].items():
        print(
            f"{name:10}{each['p50_us']:9.1f}{each['p50_of_alone']:10.3f}{each['p99_us']:10.1f}{each['p99_of_alone']:10.3f}"
            f"{each['mean_us']:9.1f}{each['mean_of_alone']:10.3f}{each['gb_per_s']:8.2f}{each['call_us']:10.1f}"
            f"{100 * each['interrupted']:9.2f}{100 * each['waited']:9.1f}{each['waits_per_s']:9.0f}"
            f"{each['step_cpu_us']:8.0f}"
        )
    for base, lost in found["lost_beside_against"].items():
        print(f"computing lost beside them against {base}: {100 * lost['mean']:.1f} %", end="")
        print(f" (by the median step {100 * lost['p50']:.1f} %, by the 99th percentile {100 * lost['p99']:.1f} %)")
    for name, each in found["threads"].items():
        print(f"  {name:36}{each['cpu_ms_per_s']:8.1f} ms of CPU a second,{each['waits_per_s']:8.0f} wake-ups")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=(*SIDES, "both"), default="both", help="whose endpoint is beside")
    parser.add_argument("--path", choices=("direct", "staged", "both"), default="both")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where pools are; cuda: the first GPU")
    parser.add_argument("--request-mib", type=int, default=512, help="of a request; three processes hold four")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a phase")
    parser.add_argument("--unbound", action="store_true", help="let the operating system choose processors")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    if arguments.request_mib < 1:
        parser.error("--request-mib: a request has 1 MiB at least")
    request_pages = arguments.request_mib * 2**20 // PAGE_BYTES
    processors = os.sched_getaffinity(0)
    found = {}
    for side in SIDES if arguments.side == "both" else (arguments.side,):
        for path in ("direct", "staged") if arguments.path == "both" else (arguments.path,):
            os.sched_setaffinity(0, processors)
            results = measured(
                side,
                path,
                "cuda:0" if arguments.device == "cuda" else "cpu",
                arguments.rounds,
                arguments.seconds,
                request_pages=request_pages,
                is_bound=not arguments.unbound,
            )
            found[f"{side}, {path}"] = summary(results, request_pages)
            if not arguments.json:
                show(f"{side}, {path}", found[f"{side}, {path}"])
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
