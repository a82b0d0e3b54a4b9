"""What one step of an engine costs in its plug-in, by the number of open requests of which nothing happens.

The hooks that an engine calls in every step are called every 10 ms, as a decode engine would. Requests are open all
the while: on the prefill side their pages wait until the decode side asks for them, on the decode side nothing has come
yet. An engine's own backend has its turn in the same process: the same hooks of its own classes, as many requests.

* vLLM: the connector's hooks in a worker, and in the scheduler, where 256 other requests run; beside `NixlConnector`'s,
  whose handles answer at once that their transfers go on (a real look at one takes longer);
* SGLang: one poll of every request; beside `NixlKVSender`'s and `NixlKVReceiver`'s.

Prints, by step: microseconds of the thread that calls (median), locks that it takes, the most memory that it allocates
for the moment, and how often all other threads of the process wake up. What is compared has no threads but NIXL's,
which are not started here.

    python benchmarks/engine_steps.py [--engine vllm] [--requests 0,100,1000,10000] [--json]

Without the engine's packages only kvferry's side is measured. About 20 s for each of two sides.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import logging
import multiprocessing
import multiprocessing.connection
import statistics
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

STEP_S = 0.01
LONGEST_S = 600.0  # how long rooms stay open

counted_by: int | None = None
locks_taken = 0
_Lock, _RLock = threading.Lock, threading.RLock


class CountedLock:
    """A lock that counts how often the thread that is counted takes it."""

    def __init__(self, make: Callable[[], Any] = _Lock) -> None:
        self._lock = make()

    def acquire(self, *args: Any, **named: Any) -> bool:
        """Takes the lock."""
        global locks_taken  # noqa: PLW0603 - one count for all locks
        if threading.get_ident() == counted_by:
            locks_taken += 1
        taken: bool = self._lock.acquire(*args, **named)
        return taken

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


@dataclass(frozen=True)
class Step:
    """What a step costs.

    Attributes:
        microseconds: of the thread that calls: the median.
        locks: that it takes.
        peak_bytes: the most memory that it holds beyond what it held before.
        wake_ups: of all other threads of the process.
    """

    microseconds: float
    locks: float
    peak_bytes: float
    wake_ups: float


def wake_ups() -> int:
    """How often all threads but this one have waited and gone on."""
    mine = threading.get_native_id()
    return sum(
        int((task / "status").read_text().split("\nvoluntary_ctxt_switches:")[1].split()[0])
        for task in Path("/proc/self/task").iterdir()
        if int(task.name) != mine
    )


def measured(step: Callable[[], object], count: int) -> Step:
    """Runs steps at an engine's pace, and a few more for what measuring would change."""
    global counted_by, locks_taken  # noqa: PLW0603
    for _ in range(3):
        step()
    gc.collect()
    gc.disable()
    taken = []
    wakes = wake_ups()
    for _ in range(count):
        begun_ns = time.thread_time_ns()
        step()
        taken.append(time.thread_time_ns() - begun_ns)
        time.sleep(STEP_S)
    wakes = wake_ups() - wakes
    locks_taken, counted_by = 0, threading.get_ident()
    for _ in range(10):
        step()
    counted_by = None
    tracemalloc.start()
    peaks = []
    for _ in range(10):
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        step()
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
    tracemalloc.stop()
    gc.enable()
    return Step(
        statistics.median(taken) * 1e-3,
        locks_taken / 10,
        statistics.median(peaks),
        wakes / count,
    )


def pool() -> tuple[list[np.ndarray], Any]:
    """Two layers in 128 pages: the memory, which must outlive the endpoint, and its layout."""
    import kvferry as kf

    components = kf.attention_components(num_layers=2, num_kv_heads=2, head_dim=64, dtype="float32")
    memory, shards = [], []
    for component in components:
        tensors = [np.zeros((128, 16, 2, 64), np.float32) for _ in range(2)]
        memory += tensors
        shards.append(kf.shard_from_tensors(component, tensors, dims=("page", "token", "head", "dim")))
    return memory, kf.RankLayout(shards=tuple(shards))


def settings(**others: Any) -> Any:
    """Settings with which rooms stay open."""
    import kvferry as kf

    return kf.Settings(
        max_rooms=20_000,
        bootstrap_timeout_s=LONGEST_S,
        waiting_timeout_s=LONGEST_S,
        close_timeout_s=1.0,
        **others,
    )


def prefill_engine(connection: multiprocessing.connection.Connection) -> None:
    """The other side of decode ranks: opens rooms and sends nothing, in a process of its own."""
    import kvferry as kf

    logging.getLogger("kvferry").setLevel(logging.CRITICAL)  # the other side's requests are given up at the end
    memory, layout = pool()
    with kf.PrefillEndpoint(layout, engine="prefill", settings=settings(registry_port=0)) as endpoint:
        connection.send(endpoint.registry_url)
        while (rooms := connection.recv()) is not None:
            for room in range(*rooms):
                endpoint.open(room)
            connection.send(None)
    del memory


class PrefillEngine:
    """The same, from outside."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=prefill_engine, args=(theirs,), daemon=True)
        self._process.start()
        self.registry_url: str = self._connection.recv()

    def open(self, first: int, stop: int) -> None:
        """Opens rooms."""
        self._connection.send((first, stop))
        self._connection.recv()

    def close(self) -> None:
        """Ends it."""
        self._connection.send(None)
        self._process.join(60)


Grow = Callable[[int, int], None]
"""Opens requests from one number up to another."""

Sides = Iterator[tuple[str, Grow, Callable[[], object]]]
"""What is measured: its name, how it gets requests, and its step."""


def until(holds: Callable[[], bool]) -> None:
    """Waits."""
    while not holds():
        time.sleep(0.01)


# ---- vLLM -----------------------------------------------------------------------------------------------------------


def vllm_worker(*, sends: bool, registry: dict[str, Any]) -> Any:
    """Makes kvferry's side of a worker."""
    import kvferry as kf
    from kvferry.engines.vllm.layouts import DescribedCaches
    from kvferry.engines.vllm.worker import WorkerSide

    memory, layout = pool()
    side = WorkerSide(
        DescribedCaches(layout, {group.name: 1 for group in layout.groups}),
        kf.RankCoordinates(),
        settings(**registry),
        engine="measured",
        sends=sends,
        receives=not sends,
        fingerprint={},
    )
    side.kept_memory = memory  # type: ignore[attr-defined]
    return side


def vllm_hooks(side: Any) -> Callable[[], object]:
    """What vLLM calls in a worker in every step: on the connector, or without vLLM on what that passes to."""
    from kvferry.engines.vllm.steps import Step as EngineStep

    if importlib.util.find_spec("vllm") is None:

        def hooks() -> object:
            step = EngineStep()
            side.before(step)
            side.receive(step)
            side.after(step, None)
            return side.results(set()), side.log.take()

        return hooks
    from kvferry.engines.vllm.connector import KVFerryConnector, KVFerryMetadata

    connector = KVFerryConnector.__new__(KVFerryConnector)
    connector._worker = side

    def connector_hooks() -> object:
        metadata = KVFerryMetadata(EngineStep())
        connector.bind_connector_metadata(metadata)
        connector.handle_preemptions(metadata)
        connector.start_load_kv(None)
        connector.wait_for_save()
        return connector.get_transfer_results(set()), connector.get_kv_connector_stats()

    return connector_hooks


def vllm_prefill() -> Sides:
    """A worker whose requests wait for the decode side."""
    from kvferry.engines.vllm.steps import BlocksToSend, GroupBlocks
    from kvferry.engines.vllm.steps import Step as EngineStep

    side = vllm_worker(sends=True, registry={"registry_port": 0})
    group = side.prefill.layout.groups[0].name

    def grow(first: int, stop: int) -> None:
        for number in range(first, stop):
            blocks = {group: GroupBlocks(0, (number % 128,))}
            side.after(EngineStep(send=[BlocksToSend(str(number), number, 16, blocks, True)]), None)
        until(lambda: side.prefill.open_rooms == stop - 1)

    yield "kvferry", grow, vllm_hooks(side)
    side.close()
    if importlib.util.find_spec("vllm") is not None:
        worker = stock_vllm_worker()

        def grow_stock(first: int, stop: int) -> None:
            for number in range(first, stop):
                worker._reqs_to_send[str(number)] = time.perf_counter() + LONGEST_S
                worker._reqs_to_process.add(str(number))

        yield "NixlConnector", grow_stock, partial(stock_vllm_hooks, worker)


def vllm_decode() -> Sides:
    """A worker whose requests wait for their caches."""
    from kvferry.engines.vllm.steps import BlocksToReceive, GroupBlocks
    from kvferry.engines.vllm.steps import Step as EngineStep

    engine = PrefillEngine()
    side = vllm_worker(sends=False, registry={"registry_url": engine.registry_url})
    group = side.decode.layout.groups[0].name

    def grow(first: int, stop: int) -> None:
        engine.open(first, stop)
        for number in range(first, stop):
            blocks = {group: GroupBlocks(0, (number % 128,))}
            request = BlocksToReceive(str(number), number, "prefill", 0, 16, blocks)
            side.receive(EngineStep(receive=[request]))
        until(lambda: all(each.state.value != "bootstrapping" for each in side.incoming.receivers))

    yield "kvferry", grow, vllm_hooks(side)
    side.close()
    engine.close()
    if importlib.util.find_spec("vllm") is not None:
        worker = stock_vllm_worker()

        def grow_stock(first: int, stop: int) -> None:
            for number in range(first, stop):
                worker._recving_transfers[str(number)] = [number]

        yield "NixlConnector", grow_stock, partial(stock_vllm_hooks, worker)


class AgentWithTransfers:
    """NIXL's agent, with transfers that go on for ever."""

    def check_xfer_state(self, handle: int) -> str:
        """Says that a transfer goes on."""
        return "PROC"

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """Says that nothing has come."""
        return {}


def stock_vllm_worker() -> Any:
    """Makes vLLM's own worker with what its hooks use, without an engine."""
    import collections
    import queue

    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

    worker = NixlPullConnectorWorker.__new__(NixlPullConnectorWorker)
    worker.nixl_wrapper = AgentWithTransfers()
    worker.transfer_topo = object()
    worker.xfer_stats = NixlKVConnectorStats()
    worker.tp_rank = worker.pcp_rank = 0
    worker.pcp_dcp_sharded = False
    worker.use_host_buffer = worker._has_mamba = False
    for name in ("_ready_requests", "_failed_recv_reqs", "_invalid_block_ids"):
        setattr(worker, name, queue.Queue())
    for name in ("_recving_transfers", "_recving_metadata", "_reqs_to_send", "_pending_recv_notifs"):
        setattr(worker, name, {})
    for name in ("_recv_failures", "_reqs_to_process", "_replicated_pcp_done_sending"):
        setattr(worker, name, set())
    worker.consumer_notification_counts_by_req = collections.Counter()
    worker.expected_consumer_notifications_by_req = {}
    worker._cleanup_remote_engines = lambda: None
    worker.shutdown = lambda: None
    return worker


def stock_vllm_hooks(worker: Any) -> object:
    """What vLLM calls in a worker in every step, on its own connector."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

    worker.start_load_kv(NixlConnectorMetadata())
    return worker.get_transfer_results(), worker.get_kv_connector_stats()


@dataclass(eq=False)
class Request:
    """As much of vLLM's requests as its scheduler's side uses."""

    request_id: str
    kv_transfer_params: dict[str, Any]
    num_prompt_tokens: int = 17
    num_computed_tokens: int = 0
    arrival_time: float = 0.0


@dataclass(eq=False)
class Block:
    """A block of vLLM's."""

    block_id: int
    is_null: bool = False


def vllm_scheduler() -> Sides:
    """The scheduler of a prefill engine: 256 requests run, and the blocks of others are kept until they are sent."""
    from kvferry.engines.vllm.caches import CacheGroup
    from kvferry.engines.vllm.scheduling import SchedulerSide

    conditions: Any = SimpleNamespace(of=lambda *_: {}, are_known=lambda *_: True, computed_here=lambda _: None)
    groups = [CacheGroup("all", ("layer",), 16)]
    side = SchedulerSide(groups, engine="measured", may_send=True, may_receive=True, conditions=conditions)
    side.bind(lambda _: [[Block(1), Block(2)]], None)  # type: ignore[arg-type]
    running = {f"running {number}": 1 for number in range(256)}

    def grow(first: int, stop: int) -> None:
        for number in range(first, stop):
            request = Request(str(number), {"do_remote_decode": True, "kvferry_room": number})
            side.allocated(request, [[Block(1), Block(2)]], 0)  # type: ignore[arg-type]
            side.take_step({str(number): 16}, ())
            side.finished(request, is_aborted=False)  # type: ignore[arg-type]

    def step() -> object:
        taken = side.take_step(running, ())
        side.reported((), ())
        return taken

    yield "kvferry", grow, step
    if importlib.util.find_spec("vllm") is None:
        return
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
    from vllm.v1.outputs import KVConnectorOutput

    nothing = KVConnectorOutput()
    stock = NixlPullConnectorScheduler.__new__(NixlPullConnectorScheduler)
    stock._reqs_need_recv, stock._reqs_need_send = {}, {}
    stock._reqs_in_batch, stock._reqs_not_processed = set(), set()
    stock._heartbeat_by_engine = {}
    stock.use_host_buffer = False
    stock.shutdown = lambda: None

    def stock_step() -> object:
        taken = stock.build_connector_meta(None)
        stock.update_connector_output(nothing)
        return taken

    yield "NixlConnector", lambda _first, _stop: None, stock_step


# ---- SGLang ---------------------------------------------------------------------------------------------------------


def sglang_manager(kind: Any) -> Any:
    """Makes a manager with what its requests' polls use, without an engine."""
    manager = object.__new__(kind)
    manager.request_status = {}
    manager._staging_outstanding = {}
    manager._deferred_ack_targets, manager._deferred_ack_poisoned_rooms = {}, set()
    manager.deferred_bootstrap = None
    manager.defer_decode_allocation = False
    manager.bootstrap_timeout = manager.waiting_timeout = LONGEST_S
    return manager


def sglang_request(kind: Any, manager: Any, room: int, status: int) -> Any:
    """Makes a sender or receiver of a manager, in a state."""
    request = object.__new__(kind)
    request.kv_mgr = manager
    request.bootstrap_room = room
    request.conclude_state = None
    request.init_time = time.time()
    manager.request_status[room] = status
    return request


def sglang_prefill() -> Sides:
    """Requests of a prefill rank that no decode rank has asked for."""
    from sglang.srt.disaggregation.base.conn import KVPoll
    from sglang.srt.disaggregation.nixl.conn import NixlKVManager, NixlKVSender

    import kvferry as kf
    from kvferry.engines.sglang.manager import KVFerryManager
    from kvferry.engines.sglang.sender import KVFerrySender

    memory, layout = pool()
    ours, stock = sglang_manager(KVFerryManager), sglang_manager(NixlKVManager)
    our_pollers: list[Any] = []
    stock_pollers: list[Any] = []
    with kf.PrefillEndpoint(layout, engine="measured", settings=settings(registry_port=0)) as endpoint:

        def grow(first: int, stop: int) -> None:
            for number in range(first, stop):
                sender = sglang_request(KVFerrySender, ours, number, KVPoll.Bootstrapping)
                sender.transfer = endpoint.open(number)
                sender._seen = None
                sender._opens_later = False
                our_pollers.append(sender)

        yield "kvferry", grow, lambda: [int(each.poll()) for each in our_pollers]
    del memory

    def grow_stock(first: int, stop: int) -> None:
        stock_pollers.extend(
            sglang_request(NixlKVSender, stock, number, KVPoll.Bootstrapping) for number in range(first, stop)
        )

    yield "NixlKVSender", grow_stock, lambda: [int(each.poll()) for each in stock_pollers]


def sglang_decode() -> Sides:
    """Requests of a decode rank whose caches have not come."""
    from sglang.srt.disaggregation.base.conn import KVPoll
    from sglang.srt.disaggregation.nixl.conn import NixlKVManager, NixlKVReceiver

    import kvferry as kf
    from kvferry.engines.sglang.manager import KVFerryManager
    from kvferry.engines.sglang.receiver import KVFerryReceiver

    engine = PrefillEngine()
    memory, layout = pool()
    ours, stock = sglang_manager(KVFerryManager), sglang_manager(NixlKVManager)
    our_pollers: list[Any] = []
    stock_pollers: list[Any] = []
    with kf.DecodeEndpoint(layout, engine="measured", settings=settings(registry_url=engine.registry_url)) as endpoint:

        def grow(first: int, stop: int) -> None:
            engine.open(first, stop)
            for number in range(first, stop):
                receiver = sglang_request(KVFerryReceiver, ours, number, KVPoll.WaitingForInput)
                receiver.transfer = endpoint.open(number, np.arange(1))
                receiver._seen = None
                our_pollers.append(receiver)
            until(lambda: all(each.transfer.state.value != "bootstrapping" for each in our_pollers))

        yield "kvferry", grow, lambda: [int(each.poll()) for each in our_pollers]
    engine.close()
    del memory

    def grow_stock(first: int, stop: int) -> None:
        stock_pollers.extend(
            sglang_request(NixlKVReceiver, stock, number, KVPoll.WaitingForInput) for number in range(first, stop)
        )

    yield "NixlKVReceiver", grow_stock, lambda: [int(each.poll()) for each in stock_pollers]


# ----------------------------------------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Callable[[], Sides]]] = {
    "vllm": {
        "a prefill worker": vllm_prefill,
        "a decode worker": vllm_decode,
        "a prefill engine's scheduler": vllm_scheduler,
    },
    "sglang": {"a prefill rank": sglang_prefill, "a decode rank": sglang_decode},
}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    installed = "sglang" if importlib.util.find_spec("sglang") is not None else "vllm"
    parser.add_argument("--engine", choices=tuple(CASES), default=installed)
    parser.add_argument("--requests", default="0,100,1000,10000", help="how many are open, in rising order")
    parser.add_argument("--steps", type=int, default=100, help="how many a figure is of")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    logging.getLogger("kvferry").setLevel(logging.CRITICAL)  # requests are given up at the end
    threading.Lock = CountedLock  # type: ignore[assignment]
    threading.RLock = partial(CountedLock, _RLock)  # type: ignore[assignment]
    counts = [int(each) for each in arguments.requests.split(",")]
    found: dict[str, dict[str, dict[int, dict[str, float]]]] = {}
    for case, sides in CASES[arguments.engine].items():
        if not arguments.json:
            print(f"{arguments.engine}, {case}")
            print(f"{'':18}{'requests':>10}{'us':>10}{'locks':>8}{'peak KiB':>10}{'wake-ups':>10}")
        found[case] = {}
        for name, grow, step in sides():
            opened = 0
            found[case][name] = {}
            for count in counts:
                grow(opened + 1, count + 1)
                opened = count
                time.sleep(0.5)  # what opening them takes is over
                cost = measured(step, arguments.steps)
                found[case][name][count] = asdict(cost)
                if not arguments.json:
                    print(
                        f"{name:18}{count:10}{cost.microseconds:10.1f}{cost.locks:8.1f}{cost.peak_bytes / 1024:10.1f}"
                        f"{cost.wake_ups:10.1f}",
                        flush=True,
                    )
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
