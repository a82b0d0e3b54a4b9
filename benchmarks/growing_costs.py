"""What one more thing costs where many are open already: writes on their way, connections, regions, rooms.

Four tables. Nothing in them needs NIXL: what is measured is the work of the library itself, in CPU time.

* a worker's turn with one event, by writes on their way;
* a decode rank's look at its connections when nothing has come, and when one message has, by connections (over ZMQ);
* one more registration, and one more write checked against what is registered, by regions;
* whole ranks: prefill and decode endpoints on a platform whose clock and network are made here, a millisecond a round,
  over a wire that carries one write after the other. CPU time of each side, and for each room and pair of ranks.

With --json, the same as JSON. --ranks, --rooms and --pages choose the last table's size.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from proof.simulation.control_network import (
    ControlNetwork,
    Line,
    SimulatedConnectingEnd,
    SimulatedListeningEnd,
)
from proof.simulation.machines import RegistryProcess, SimulatedPlatform
from proof.simulation.pods import SimulatedPods

import kvferry as kf
from kvferry.control.ends import ConnectingEnd, Connection, ListeningEnd, ZmqConnectingEnd, ZmqListeningEnd
from kvferry.control.process_identity import Sight
from kvferry.endpoint.runtime.run_queue import Actor, RunQueue
from kvferry.endpoint.runtime.threads import Loop
from kvferry.endpoint.runtime.workers import Settling, Worker
from kvferry.errors import PeerDisconnectedError
from kvferry.layout import Device, RankCoordinates, Region, VirtualPools
from kvferry.layout.sharding import ShardedComponent
from kvferry.plan.descriptors import DescriptorIndices
from kvferry.pools.pool import Pool
from kvferry.settings import Settings
from kvferry.transport import InProcessNetwork, InProcessTransport, PreparedList, TransferHandle, TransferReport

WRITES = (1, 10, 100, 1_000, 10_000)
CONNECTIONS = (1, 64, 512)
REGIONS = (1, 100, 10_000)
ROUND_S = 1e-3
WIRE_BYTES_PER_S = 1e7
MOST_ROUNDS = 200_000


def cpu_us(work: Callable[[], object], *, at_least_s: float = 0.1) -> float:
    """CPU time of one call, in microseconds: the best of five runs."""
    count = 1
    while _cpu_s(work, count) < at_least_s / 5:
        count *= 2
    return min(_cpu_s(work, count) / count for _ in range(5)) * 1e6


def _cpu_s(work: Callable[[], object], count: int) -> float:
    begun = time.thread_time()
    for _ in range(count):
        work()
    return time.thread_time() - begun


# ---- a worker's turn --------------------------------------------------------------------------------------------


class Unfinished(InProcessTransport):
    """Its writes never end."""

    polls = 0

    def poll(self, transfer: TransferHandle) -> TransferReport | None:
        self.polls += 1
        return None


class Idle(Actor):
    """Does nothing with its events."""

    def handle(self, event: object, worker: Worker) -> None:
        pass

    def broke(self, error: BaseException, worker: Worker) -> None:
        raise error


@dataclass(frozen=True, eq=False)
class Ignored:
    """A write on its way that nobody waits for."""

    receiver: str
    transfer: TransferHandle

    def done(self, _: TransferReport) -> None:
        pass

    def failed(self, _: Exception, *, is_read: bool) -> None:
        pass

    def settled(self, _: Exception) -> None:
        pass

    def broke(self, _: BaseException) -> None:
        pass


def turns() -> list[dict[str, Any]]:
    """A worker's turn with one event, by writes on their way to 64 peers."""
    rows = []
    for writes in WRITES:
        transport, run_queue = Unfinished(InProcessNetwork()), RunQueue()
        worker, actor = Worker(run_queue, transport, Settling(2.0, time.monotonic)), Idle(run_queue)
        for number in range(writes):
            worker.watch(Ignored(f"decode-{number % 64}", TransferHandle()))
        transport.polls = 0
        count = 0

        def turn(worker: Worker = worker, actor: Idle = actor) -> None:
            nonlocal count
            count += 1
            actor.post(None)
            worker.turn(may_wait=False)

        us = cpu_us(turn)
        rows.append({"writes": writes, "turn_us": us, "polls": transport.polls / count})
    return rows


# ---- a decode rank's look ---------------------------------------------------------------------------------------


def looks() -> list[dict[str, Any]]:
    """A decode rank's look at its connections, by their number."""
    rows = []
    for count in CONNECTIONS:
        listening = ZmqListeningEnd(host="127.0.0.1", port=0)
        connecting = ZmqConnectingEnd("decode")
        # Each of its own, as to so many ranks; one listener serves them all.
        connections = [connecting.connect(f"tcp://127.0.0.1:{listening.port}") for _ in range(count)]
        for connection in connections:
            connection.send(b"hello")
        greeted = 0
        while greeted < count:
            listening.wait(100)
            greeted += len(listening.receive())
        time.sleep(0.2)
        while connecting.wait(20):
            for connection in connecting.wait(0):
                connection.receive()
        rows.append({"connections": count, "nothing_us": cpu_us(partial(connecting.wait, 0))})
        for connection in connections:
            connecting.disconnect(connection)
        connecting.close()
        listening.close()
    return rows


# ---- registered memory ------------------------------------------------------------------------------------------


def registrations() -> list[dict[str, Any]]:
    """One more registration and one more write, by regions that are registered."""
    rows = []
    for count in REGIONS:
        network = InProcessNetwork()
        ours, theirs = InProcessTransport(network), InProcessTransport(network)
        regions = [Region(4096 * (1 + number), 4096) for number in range(count)]
        for transport in (ours, theirs):
            transport.register(regions, Device())
        ours.connect(theirs.metadata())
        write_us = cpu_us(partial(ours.write, regions[0], theirs.endpoint_name, 4096, b""))
        grown = 0

        def register(transport: InProcessTransport = ours, beyond: int = 4096 * (count + 1)) -> None:
            nonlocal grown
            grown += 1
            transport.register([Region(beyond + 4096 * grown, 4096)], Device())

        register_us = min(_cpu_s(register, 20) / 20 for _ in range(5)) * 1e6
        rows.append({"regions": count, "register_us": register_us, "write_us": write_us})
    return rows


# ---- whole ranks ------------------------------------------------------------------------------------------------


class Straight(Line):
    """A connection without a network between: what is sent has arrived."""

    def __init__(self, address: str, end: Connecting) -> None:
        super().__init__(address, end.identity, end.network)
        self._end = end

    def send(self, message: bytes) -> None:
        listening = self.network.listening[self.address]
        listening.lines[self.identity] = self
        listening.arrived.append((self.identity, message))

    def came(self, message: bytes) -> None:
        """Takes a message from the prefill rank."""
        self.arrived.append(message)
        self._end.ready.add(self)


class Listening(SimulatedListeningEnd):
    """A prefill rank's end."""

    def send(self, identity: str, message: bytes) -> None:
        line = self.lines.get(identity)
        if not isinstance(line, Straight):
            raise PeerDisconnectedError(f"no connection to {identity}")
        line.came(message)


class Connecting(SimulatedConnectingEnd):
    """A decode rank's end: it knows what has news, so that a look costs nothing but the product's own."""

    def __init__(self, network: ControlNetwork, identity: str) -> None:
        super().__init__(network, identity)
        self.network = network
        self.identity = identity
        self.ready: set[Line] = set()

    def connect(self, address: str) -> Connection:
        line = Straight(address, self)
        self.lines.append(line)
        return line

    def wait(self, timeout_ms: int) -> Collection[Connection]:
        ready, self.ready = self.ready, set()
        return ready


class Machine(SimulatedPlatform):
    """A rank's platform, on the cluster's clock and network."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.port = 1000 + number
        super().__init__(
            "machine",
            lambda: cluster.now,
            random.Random(number),
            cluster.control,
            cluster.registry,
            address=f"tcp://127.0.0.1:{self.port}",
            pid=number,
            pods=SimulatedPods(number),
            pod=None,
            see=lambda process: Sight(is_in_use=True, started=process.started),
            copying_fails=lambda: None,
        )
        self._control = cluster.control

    def listen(self, settings: Settings) -> ListeningEnd:
        return Listening(self._control, f"tcp://127.0.0.1:{self.port}")

    def connect_as(self, endpoint: str, settings: Settings) -> ConnectingEnd:
        return Connecting(self._control, endpoint)


class Wire(InProcessTransport):
    """One write after the other, so many bytes a second of the cluster's clock."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        super().__init__(cluster.network, name)
        self._cluster = cluster
        self._free_at = 0.0
        self._ends_at: dict[TransferHandle, float] = {}
        self.polls = 0
        self.most_at_once = 0

    def post(
        self,
        local: PreparedList,
        local_indices: DescriptorIndices,
        remote: PreparedList,
        remote_indices: DescriptorIndices,
        notification: bytes,
    ) -> TransferHandle:
        transfer = super().post(local, local_indices, remote, remote_indices, notification)
        moved = int(transfer.copies.lengths.sum())  # type: ignore[attr-defined]
        self._free_at = max(self._free_at, self._cluster.now) + moved / WIRE_BYTES_PER_S
        self._ends_at[transfer] = self._free_at
        self.most_at_once = max(self.most_at_once, len(self._ends_at))
        return transfer

    def poll(self, transfer: TransferHandle) -> TransferReport | None:
        self.polls += 1
        if self._ends_at.get(transfer, 0.0) > self._cluster.now:
            return None
        self._ends_at.pop(transfer, None)
        return super().poll(transfer)


class Cluster:
    """A prefill and a decode engine, tensor-parallel both, all of their threads in this one."""

    def __init__(self, prefill_ranks: int, decode_ranks: int, *, pages: int) -> None:
        self.now = 1.0
        self.network = InProcessNetwork()
        self.control = ControlNetwork(lambda: False)
        self.registry = RegistryProcess(1e9)
        self.cpu_s = {"prefill": 0.0, "decode": 0.0}
        self.decoders: list[kf.DecodeEndpoint] = []
        self.prefillers: list[kf.PrefillEndpoint] = []
        self.wires: list[Wire] = []
        self._threads: dict[str, list[Loop]] = {"prefill": [], "decode": []}
        heads = np.lcm(prefill_ranks, decode_ranks)
        self._pools: list[Pool] = []
        # Long waits: many rooms take their time here, and nothing is to fail for it.
        settings = Settings(
            registry_url="http://registry:1",
            path="direct",
            workers=1,
            queues=1,
            max_rooms=100_000,
            bootstrap_timeout_s=3600,
            waiting_timeout_s=3600,
            write_timeout_s=3600,
            peer_timeout_s=600,
        )
        for side, count in (("prefill", prefill_ranks), ("decode", decode_ranks)):
            for rank in range(count):
                machine = Machine(self, len(self._pools))
                pool = make_pool(int(heads), RankCoordinates(tp_rank=rank, tp_size=count), pages)
                wire = Wire(self, f"{side}-{rank}")
                arguments: dict[str, Any] = {
                    "engine": side,
                    "coordinates": pool.coordinates,
                    "settings": settings,
                    "transport": wire,
                    "platform": machine,
                }
                self._pools.append(pool)
                self.wires.append(wire)
                if side == "prefill":
                    self.prefillers.append(kf.PrefillEndpoint(pool.layout, host_registry=False, **arguments))
                    assert machine.keeper is not None
                    machine.keeper.renew()
                else:
                    self.decoders.append(kf.DecodeEndpoint(pool.layout, **arguments))
                self._threads[side] += [thread.loop for thread in machine.threads]
                machine_executors = machine.executors
                self._threads[side] += [Executors(machine_executors)]

    def round(self) -> None:
        """A millisecond passes: every thread has turns while it has something to do."""
        self.now += ROUND_S
        for side, loops in self._threads.items():
            begun = time.thread_time()
            for loop in loops:
                loop.turn(may_wait=False)
                if isinstance(loop, Worker):
                    while loop._run_queue.has_any:
                        loop.turn(may_wait=False)
            self.cpu_s[side] += time.thread_time() - begun

    def until(self, holds: Callable[[], bool]) -> int:
        """Goes on until a condition holds; returns how many rounds it took."""
        for count in range(MOST_ROUNDS):
            if holds():
                return count
            self.round()
        raise TimeoutError("the cluster does not get there")

    def run(self, rooms: int, pages: int) -> dict[str, Any]:
        """All rooms at once; what they cost."""
        warm = self._open(10**6, range(pages))
        connecting = self.until(lambda: all(each.state.is_final for each in warm))
        self.cpu_s = dict.fromkeys(self.cpu_s, 0.0)
        polls = sum(wire.polls for wire in self.wires)
        transfers = []
        begun = time.thread_time()
        for room in range(rooms):
            transfers += self._open(room, range(pages))
        submitting = time.thread_time() - begun
        begun_at = self.now
        self.until(lambda: transfers[-1].state.is_final and all(each.state.is_final for each in transfers))
        virtual_s = self.now - begun_at
        assert all(each.error is None for each in transfers)
        idle = self._idle_ms()
        pairs = rooms * len(self.prefillers) * len(self.decoders)
        return {
            "prefill_ranks": len(self.prefillers),
            "decode_ranks": len(self.decoders),
            "rooms": rooms,
            "connecting_rounds": connecting,
            "submit_cpu_s": submitting,
            "prefill_cpu_s": self.cpu_s["prefill"],
            "decode_cpu_s": self.cpu_s["decode"],
            "us_a_room_and_pair": sum(self.cpu_s.values()) / pairs * 1e6,
            "virtual_s": virtual_s,
            "most_writes_at_once": max(wire.most_at_once for wire in self.wires),
            "polls_a_write": (sum(wire.polls for wire in self.wires) - polls)
            / (rooms * max(len(self.prefillers), len(self.decoders))),
            **idle,
        }

    def _idle_ms(self) -> dict[str, float]:
        """CPU time of a rank for a second of the cluster's clock in which nothing happens, all rooms being over."""
        before = dict(self.cpu_s)
        for _ in range(1000):
            self.round()
        after, self.cpu_s = self.cpu_s, before
        ranks = {"prefill": len(self.prefillers), "decode": len(self.decoders)}
        return {f"{side}_idle_ms_a_s": (after[side] - before[side]) / ranks[side] * 1e3 for side in before}

    def _open(self, room: int, pages: Sequence[int]) -> list[kf.Receiver | kf.Sender]:
        numbers = np.asarray(pages, np.int64)
        transfers: list[kf.Receiver | kf.Sender] = [
            decode.open(room, numbers, engine="prefill") for decode in self.decoders
        ]
        for prefill in self.prefillers:
            sender = prefill.open(room)
            sender.submit(numbers, last=True)
            transfers.append(sender)
        return transfers


class Executors(Loop):
    """The background executors of a rank."""

    def __init__(self, executors: list[Any]) -> None:
        self._executors = executors

    def has_work(self) -> bool:
        return any(executor.work for executor in self._executors)

    def turn(self, *, may_wait: bool) -> bool:
        for executor in self._executors:
            while executor.work:
                executor.work.popleft()()
        return True


def make_pool(heads: int, coordinates: RankCoordinates, pages: int) -> Pool:
    """One layer of attention, its heads divided among the ranks."""
    components = kf.attention_components(num_layers=1, num_kv_heads=heads, head_dim=8, dtype="float16")
    sharded = [ShardedComponent(component=each, layers=(0,), tp_axis="head") for each in components]
    pools = VirtualPools(page_tokens=4, num_pages=pages, layers_per_stage=(1,))
    return Pool.allocate(sharded, pools, coordinates)


# ---- all of it --------------------------------------------------------------------------------------------------


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Prints a table."""
    print(f"\n{title}")
    print("  ".join(f"{name:>20}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{value:20.2f}" if isinstance(value, float) else f"{value:20d}" for value in row.values()))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--ranks", default="8x8", help="prefill times decode ranks of the last table, by comma")
    parser.add_argument("--rooms", type=int, default=100, help="rooms of the last table, all at once")
    parser.add_argument("--pages", type=int, default=4, help="pages of each of them")
    parser.add_argument("--only", choices=("turns", "looks", "registrations", "clusters"), help="one table")
    options = parser.parse_args()

    def clusters() -> list[dict[str, Any]]:
        rows = []
        for size in options.ranks.split(","):
            prefill, decode = map(int, size.split("x"))
            rows.append(Cluster(prefill, decode, pages=options.pages).run(options.rooms, options.pages))
        return rows

    tables = {
        "turns": ("a worker's turn with one event", turns),
        "looks": ("a decode rank's look at its connections", looks),
        "registrations": ("registered memory", registrations),
        "clusters": ("whole ranks", clusters),
    }
    results = {}
    for name, (title, measure) in tables.items():
        if options.only in (None, name):
            results[name] = measure()
            if not options.json:
                show(title, results[name])
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
