"""What 10,000 ranks take of a registry, what they do to one that comes back, and how long many ranks take to attach.

    python -m benchmarks.control_plane [--ranks 10000] [--lease-s 10] [--attach 64x64] [--etcd etcd] [--json]

* **Steady**: the registry's own command as a process, and ranks in engines of 64 in processes of their own. Each rank
  has a connection of its own, kept open, registers over HTTP, and renews when `Renewals` says, as a prefill rank does.
  The share of a core that the registry's process takes, and renewals in a second.
* **Restart**: the registry is killed and comes back on the same port with nothing in memory. The busiest second, what
  failed then, and when the last rank was registered again.
* **Look-ups**: CPU time of the registry for one look-up of an engine of 64 ranks: new, and unchanged.
* **Attach**: whole prefill and decode endpoints over sockets of this machine. Each side is a process in which all
  threads of all ranks take turns in one, so that nothing is measured but their work. Every decode rank attaches to
  every prefill rank. Wall-clock time of all of it, on two cores, and CPU time, in part for looks at what has not come
  yet. An attachment takes four descriptors of the decode side: 64x64 needs a limit of 17,400 (`ulimit -Hn`).
* **etcd**, where `--etcd` names the program: the same ranks by `EtcdRegistry`, in a few processes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import heapq
import json
import multiprocessing
import multiprocessing.connection
import random
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
from benchmarks.growing_costs import Executors
from proof.simulation.control_network import ControlNetwork
from proof.simulation.machines import RegistryProcess, SimulatedPlatform
from proof.simulation.pods import SimulatedPods

import kvferry as kf
from kvferry.control.channel import most_connections
from kvferry.control.ends import ConnectingEnd, ListeningEnd, ZmqConnectingEnd, ZmqListeningEnd
from kvferry.control.etcd.registry import EtcdRegistry
from kvferry.control.process_identity import Sight
from kvferry.control.registry import Grant
from kvferry.control.registry_client import RegistryClient
from kvferry.control.registry_messages import Lease
from kvferry.control.renewals import Renewals
from kvferry.endpoint.runtime.threads import Loop
from kvferry.errors import KVFerryError, RegistryUnreachableError
from kvferry.layout import RankCoordinates, RankLayout, ShardedComponent, VirtualPools, virtual_layout
from kvferry.layout.component import attention_components, latent_component
from kvferry.protocol.links.link import LinkKey, LinkState
from kvferry.protocol.wire.registrations import RankRegistration
from kvferry.settings import Settings
from kvferry.testing.probe import probe
from kvferry.transport import InProcessNetwork, InProcessTransport
from kvferry.transport.base import PeerMetadata
from kvferry.transport.inprocess import InProcessConnection

ENGINE_RANKS = 64
LAYERS = 61
PROCESSES = 2
LOOK_S = 2.0
_LEASE = msgspec.json.Decoder(Lease)


def registration(number: int) -> RankRegistration:
    """The number-th rank of all, as long as a real one."""
    engine, rank = divmod(number, ENGINE_RANKS)
    return RankRegistration(
        engine=f"prefill-{engine}",
        incarnation=f"prefill-{engine}-{rank}-71-5f0c9a6be1d23a47",
        coordinates=RankCoordinates(tp_rank=rank, tp_size=ENGINE_RANKS),
        control_address=f"tcp://10.0.{engine % 250}.{rank}:40000",
        layout_digest="5f0c9a6be1d23a47",
        started_at=0.0,
        protocol_version=1,
    )


# ---- the registry's process -------------------------------------------------------------------------------------


class Registry:
    """The registry's command, as a process that can be killed and started again on its port."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self.port = 0
        self.start()

    def start(self) -> None:
        """Starts it, with nothing in memory."""
        command = [sys.executable, "-m", "kvferry", "registry", "--port", str(self.port)]
        command += ["--lease-s", str(self._lease_s)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        said = re.search(r"http://127\.0\.0\.1:(\d+)", self.process.stdout.readline())
        assert said is not None, "the registry did not start"
        self.url, self.port = said[0], int(said[1])
        self._watched = psutil.Process(self.process.pid)

    def kill(self) -> None:
        """Ends it at once."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def cpu_s(self) -> float:
        """CPU time that it has taken."""
        times = self._watched.cpu_times()
        return float(times.user + times.system)

    @property
    def resident_mib(self) -> float:
        """Memory that it has."""
        return float(self._watched.memory_info().rss / 2**20)


# ---- ranks ------------------------------------------------------------------------------------------------------


class Rank:
    """A rank that keeps itself registered, over a connection of its own, as `LeaseKeeper` does on a thread."""

    def __init__(self, number: int, port: int, timeout_s: float, happened: Happened) -> None:
        mine = registration(number)
        body = msgspec.json.encode(mine)
        self._request = (
            f"PUT /v1/engines/{mine.engine}/ranks/{mine.engine_rank} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n"
            "accept: */*\r\nconnection: keep-alive\r\nuser-agent: python-httpx/0.28.1\r\n"
            f"accept-encoding: identity\r\ncontent-length: {len(body)}\r\n\r\n"
        ).encode() + body
        self._port = port
        self._timeout_s = timeout_s
        self._happened = happened
        self._renewals = Renewals()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.is_registered = False

    async def run(self) -> None:
        """Registers, and renews for ever."""
        while True:
            try:
                grant = await asyncio.wait_for(self._ask(), self._timeout_s)
            except (OSError, EOFError, asyncio.TimeoutError) as error:
                self._happened.failed(error)
                self._hang_up()
                self.is_registered = False
                await asyncio.sleep(self._renewals.failed(timed_out=isinstance(error, asyncio.TimeoutError)))
                continue
            self.is_registered = True
            self._happened.granted()
            await self._wait(self._renewals.granted(grant))

    async def _ask(self) -> Grant:
        if self._streams is not None and self._streams[0].at_eof():
            self._hang_up()
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        writer.write(self._request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        assert head.startswith(b"HTTP/1.1 200 "), head
        assert length is not None
        lease = _LEASE.decode(await reader.readexactly(int(length[1])))
        return Grant(lease.lease_s, lease.lease_s / 3 if lease.renew_s is None else lease.renew_s, lease.return_s)

    async def _wait(self, wait_s: float) -> None:
        until = time.monotonic() + wait_s
        while (left_s := until - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, LOOK_S))
            if self._streams is not None and self._streams[0].at_eof():
                self.is_registered = False
                await asyncio.sleep(max(0.0, min(until - time.monotonic(), self._renewals.hung_up())))
                return

    def _hang_up(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
        self._streams = None


class Happened:
    """What has happened to ranks, by the second of the machine's clock."""

    def __init__(self) -> None:
        self.grants: Counter[int] = Counter()
        self.failures: Counter[tuple[int, str]] = Counter()

    def granted(self) -> None:
        self.grants[int(time.monotonic())] += 1

    def failed(self, error: BaseException) -> None:
        self.failures[int(time.monotonic()), type(error).__name__] += 1


def ranks_of_a_process(
    numbers: Sequence[int],
    port: int,
    start_s: float,
    timeout_s: float,
    connection: multiprocessing.connection.Connection,
) -> None:
    """Keeps ranks registered, and says when asked how many are and what has happened."""

    async def main() -> None:
        happened = Happened()
        ranks = [Rank(number, port, timeout_s, happened) for number in numbers]

        async def started(rank: Rank, after_s: float) -> None:
            await asyncio.sleep(after_s)
            await rank.run()

        # Held: the loop itself would forget them. They start as a cluster does that comes up within some time.
        tasks = [asyncio.ensure_future(started(rank, start_s * i / len(ranks))) for i, rank in enumerate(ranks)]
        loop = asyncio.get_running_loop()
        while (await loop.run_in_executor(None, connection.recv)) is not None:
            registered = sum(rank.is_registered for rank in ranks)
            connection.send((registered, dict(happened.grants), dict(happened.failures)))
        for task in tasks:
            task.cancel()

    _raise_limit()
    with contextlib.suppress(KeyboardInterrupt, EOFError):
        asyncio.run(main())


def _raise_limit() -> None:
    """Lets this process have as many connections as the system lets it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Ranks:
    """Ranks in processes of their own."""

    def __init__(self, count: int, port: int, start_s: float, timeout_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._processes = []
        self._connections = []
        for first in range(PROCESSES):
            ours, theirs = context.Pipe()
            numbers = range(first, count, PROCESSES)
            process = context.Process(
                target=ranks_of_a_process, args=(numbers, port, start_s, timeout_s, theirs), daemon=True
            )
            process.start()
            self._processes.append(process)
            self._connections.append(ours)
            theirs.close()

    def ask(self) -> tuple[int, Counter[int], Counter[tuple[int, str]]]:
        """How many are registered; grants and failures by the second."""
        registered, grants, failures = 0, Counter[int](), Counter[tuple[int, str]]()
        for connection in self._connections:
            connection.send(True)
        for connection in self._connections:
            mine, granted, failed = connection.recv()
            registered += mine
            grants.update(granted)
            failures.update(failed)
        return registered, grants, failures

    def wait_for(self, count: int, timeout_s: float = 120.0) -> None:
        """Waits until so many are registered."""
        until = time.monotonic() + timeout_s
        while (registered := self.ask()[0]) < count:
            assert time.monotonic() < until, f"only {registered} of {count} ranks are registered"
            time.sleep(0.2)

    def close(self) -> None:
        """Ends them."""
        for connection in self._connections:
            connection.send(None)
        for process in self._processes:
            process.join(5)
            process.kill()


def registry_load(options: argparse.Namespace) -> dict[str, Any]:
    """Steady state, a restart, and look-ups."""
    registry = Registry(options.lease_s)
    ranks = Ranks(options.ranks, registry.port, options.start_s, options.timeout_s)
    try:
        ranks.wait_for(options.ranks, options.start_s + 240)
        time.sleep(options.settle_s)  # until every rank has renewed, and goes on by what it was told then
        before, begun_at, (_, granted_before, _) = registry.cpu_s, time.monotonic(), ranks.ask()
        time.sleep(options.seconds)
        after, ended_at, (_, granted, failed) = registry.cpu_s, time.monotonic(), ranks.ask()
        took_s = ended_at - begun_at
        renewals = granted.total() - granted_before.total()
        steady = {
            "ranks": options.ranks,
            "lease_s": options.lease_s,
            "seconds": round(took_s, 1),
            "renewals_per_s": renewals / took_s,
            "cpu_percent": 100 * (after - before) / took_s,
            "us_a_renewal": 1e6 * (after - before) / max(renewals, 1),
            "resident_mib": registry.resident_mib,
            "failed": failed.total(),
        }
        look_ups = _look_ups(registry)
        restart = _restart(registry, ranks, options)
    finally:
        ranks.close()
        registry.kill()
    return {"steady": steady, "restart": restart, "look_ups": look_ups}


def _look_ups(registry: Registry, count: int = 3000) -> dict[str, float]:
    """CPU time of the registry's process for a look-up."""
    found: dict[str, float] = {}
    with RegistryClient(registry.url) as client:
        for name in ("new", "unchanged"):
            before = registry.cpu_s
            for _ in range(count):
                if name == "new":
                    client._views.clear()
                assert client.engine("prefill-0").registrations
            found[f"us_{name}"] = 1e6 * (registry.cpu_s - before) / count
    return found


def _restart(registry: Registry, ranks: Ranks, options: argparse.Namespace) -> dict[str, Any]:
    """Kills the registry and starts it again; what happens from then on."""
    failed_before = ranks.ask()[2].total()
    registry.kill()
    time.sleep(options.away_s)
    failed_while_away = ranks.ask()[2].total() - failed_before
    registry.start()
    back_at = time.monotonic()
    busiest, last_cpu_s, last_at, first_engine_s = 0.0, registry.cpu_s, back_at, None
    look_ups_failed = 0
    with RegistryClient(registry.url, timeout_s=options.timeout_s) as client:
        while True:
            time.sleep(0.5)
            try:
                is_complete = client.engine("prefill-0").complete
            except RegistryUnreachableError:
                is_complete = False
                look_ups_failed += 1
            if is_complete and first_engine_s is None:
                first_engine_s = time.monotonic() - back_at
            if time.monotonic() - last_at >= 1:
                now, cpu_s = time.monotonic(), registry.cpu_s
                busiest = max(busiest, (cpu_s - last_cpu_s) / (now - last_at))
                last_cpu_s, last_at = cpu_s, now
            registered, grants, failures = ranks.ask()
            if registered == options.ranks:
                break
            assert time.monotonic() < back_at + 240, f"{registered} of {options.ranks} ranks came back"
    all_s = time.monotonic() - back_at
    # Whatever is counted in the second in which it came back may have been before.
    late = {name: 0 for _, name in failures}
    for (second, name), number in failures.items():
        late[name] += number if second > int(back_at) else 0
    return {
        "away_s": options.away_s,
        "failed_while_away": failed_while_away,
        "busiest_cpu_percent": 100 * busiest,
        "busiest_second": max(number for second, number in grants.items() if second >= int(back_at)),
        "one_engine_complete_s": first_engine_s,
        "all_registered_s": all_s,
        "look_ups_failed": look_ups_failed,
        "failed_after": {name: number for name, number in late.items() if number},
    }


# ---- etcd -------------------------------------------------------------------------------------------------------


def etcd_ranks(
    numbers: Sequence[int], url: str, lease_s: float, connection: multiprocessing.connection.Connection
) -> None:
    """Keeps ranks registered by one client, when they are due."""
    _raise_limit()
    renewals: dict[int, Renewals] = {number: Renewals() for number in numbers}
    due = [(time.monotonic() + random.uniform(0, lease_s), number) for number in numbers]
    heapq.heapify(due)
    registered, failed, asked = set[int](), 0, 0
    with EtcdRegistry(url, lease_s) as client:
        while True:
            if connection.poll(max(0.0, due[0][0] - time.monotonic())):
                if connection.recv() is None:
                    return
                late_s = max(0.0, time.monotonic() - due[0][0])
                connection.send((len(registered), asked, failed, late_s))
                continue
            _, number = heapq.heappop(due)
            asked += 1
            try:
                wait_s = renewals[number].granted(client.grant(registration(number)))
                registered.add(number)
            except KVFerryError:
                wait_s = renewals[number].failed()
                registered.discard(number)
                failed += 1
            heapq.heappush(due, (time.monotonic() + wait_s, number))


@contextlib.contextmanager
def _etcd(program: str) -> Iterator[tuple[str, psutil.Process]]:
    with contextlib.ExitStack() as made, tempfile.TemporaryDirectory() as folder:
        ports = []
        for _ in range(2):
            taken = made.enter_context(socket.create_server(("127.0.0.1", 0)))
            ports.append(taken.getsockname()[1])
        made.close()
        clients, peers = (f"http://127.0.0.1:{port}" for port in ports)
        command = [program, "--name", "a", "--data-dir", str(Path(folder) / "a"), "--log-level", "error"]
        command += ["--listen-client-urls", clients, "--advertise-client-urls", clients]
        command += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
        command += ["--initial-cluster", f"a={peers}"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                yield f"etcd://127.0.0.1:{ports[0]}", psutil.Process(process.pid)
            finally:
                process.terminate()


def etcd_load(options: argparse.Namespace) -> dict[str, Any]:
    """The same ranks, kept registered in one etcd."""
    context = multiprocessing.get_context("spawn")
    with _etcd(options.etcd) as (url, watched):
        with EtcdRegistry(url) as client:
            until = time.monotonic() + 30
            while True:
                try:
                    client.engines()
                    break
                except KVFerryError:
                    assert time.monotonic() < until, "etcd did not start"
                    time.sleep(0.1)
        processes, connections = [], []
        for first in range(PROCESSES):
            ours, theirs = context.Pipe()
            numbers = range(first, options.etcd_ranks, PROCESSES)
            process = context.Process(target=etcd_ranks, args=(numbers, url, options.lease_s, theirs), daemon=True)
            process.start()
            processes.append(process)
            connections.append(ours)

        def ask() -> list[tuple[int, int, int, float]]:
            for each in connections:
                each.send(True)
            return [each.recv() for each in connections]

        def cpu_s() -> float:
            times = watched.cpu_times()
            return float(times.user + times.system)

        until = time.monotonic() + 120
        while sum(found[0] for found in ask()) < options.etcd_ranks:
            assert time.monotonic() < until, "not all ranks could be registered"
            time.sleep(0.2)
        time.sleep(options.settle_s)
        before, begun_at, asked_before = cpu_s(), time.monotonic(), ask()
        time.sleep(options.seconds)
        after, took_s, asked = cpu_s(), time.monotonic() - begun_at, ask()
        for connection in connections:
            connection.send(None)
        for process in processes:
            process.join(5)
            process.kill()
    renewals = sum(found[1] for found in asked) - sum(found[1] for found in asked_before)
    return {
        "ranks": options.etcd_ranks,
        "lease_s": options.lease_s,
        "renewals_per_s": renewals / took_s,
        "cpu_percent": 100 * (after - before) / took_s,
        "us_a_renewal": 1e6 * (after - before) / max(renewals, 1),
        "failed": sum(found[2] for found in asked),
        "late_s": max(found[3] for found in asked),
    }


# ---- attaching --------------------------------------------------------------------------------------------------


class Machine(SimulatedPlatform):
    """A rank's platform: real sockets and the real time; its threads have their turns when they are given them."""

    def __init__(self, number: int, registry: RegistryProcess) -> None:
        super().__init__(
            "machine",
            time.monotonic,
            random.Random(number),
            ControlNetwork(lambda: False),
            registry,
            address="",
            pid=number,
            pods=SimulatedPods(number),
            pod=None,
            see=lambda process: Sight(is_in_use=True, started=process.started),
            copying_fails=lambda: None,
        )

    def listen(self, settings: Settings) -> ListeningEnd:
        """Opens a socket that decode ranks reach."""
        most = most_connections(settings.max_decode_ranks)
        return ZmqListeningEnd(host="127.0.0.1", port=0, max_connections=most)

    def connect_as(self, endpoint: str, settings: Settings) -> ConnectingEnd:
        """Opens what connects to prefill ranks."""
        return ZmqConnectingEnd(endpoint)


def layout(shape: str, coordinates: RankCoordinates) -> RankLayout:
    """A rank's part of a cache of 61 layers: keys and values of 64 heads, divided, or a latent that all ranks hold."""
    layers = tuple(range(LAYERS))
    if shape == "MLA":
        latent = latent_component(num_layers=LAYERS, latent_dim=576, dtype="bfloat16")
        sharded = [ShardedComponent(component=latent, layers=layers)]
    else:
        both = attention_components(num_layers=LAYERS, num_kv_heads=64, head_dim=128, dtype="bfloat16")
        sharded = [ShardedComponent(component=each, layers=layers, tp_axis="head") for each in both]
    return virtual_layout(sharded, coordinates, VirtualPools(num_pages=1024, layers_per_stage=(LAYERS,)))


_FILES_AN_ATTACHMENT = 4
"""Of the decode side's process: a socket, and what ZMQ wakes its threads and ours by. The prefill side takes one."""


class Unmoved(InProcessTransport):
    """Connects to ranks of another process, to which no bytes are moved here."""

    def open(self, peer: PeerMetadata) -> InProcessConnection:
        """Takes what a rank says of its memory."""
        return InProcessConnection(peer, self)


class Engine:
    """One side's ranks, tensor-parallel, all of their threads in this one.

    Attributes:
        endpoints: the ranks.
        registry: where prefill ranks register, and decode ranks look them up.
    """

    def __init__(self, shape: str, side: str, count: int, *, others: int) -> None:
        self.registry = RegistryProcess(1e9)
        self.endpoints: list[Any] = []
        self._loops: list[Loop] = []
        settings = Settings(
            registry_url="http://registry:1",
            path="direct",
            host="127.0.0.1",
            workers=1,
            queues=1,
            max_decode_ranks=max(64, others),
            # All ranks take turns on one core, so that an answer takes as long as all of them: nobody is to ask twice.
            heartbeat_interval_s=300,
            bootstrap_timeout_s=600,
            peer_timeout_s=600,
        )
        network = InProcessNetwork()
        for rank in range(count):
            machine = Machine(10_000 * (side == "prefill") + rank, self.registry)
            coordinates = RankCoordinates(tp_rank=rank, tp_size=count)
            arguments: dict[str, Any] = {
                "engine": side,
                "coordinates": coordinates,
                "settings": settings,
                "transport": Unmoved(network, f"{side}-{rank}"),
                "platform": machine,
            }
            if side == "prefill":
                self.endpoints.append(kf.PrefillEndpoint(layout(shape, coordinates), host_registry=False, **arguments))
                assert machine.keeper is not None
                machine.keeper.renew()
            else:
                self.endpoints.append(kf.DecodeEndpoint(layout(shape, coordinates), **arguments))
            self._loops += [*(thread.loop for thread in machine.threads), Executors(machine.executors)]

    def turn(self) -> None:
        """Lets every thread of every rank have a turn."""
        for loop in self._loops:
            loop.turn(may_wait=False)

    def attach(self) -> float:
        """Attaches every decode rank to the prefill engine; returns the seconds that it took."""
        begun_at = time.monotonic()
        for endpoint in self.endpoints:
            links, deadline = probe(endpoint).links, begun_at + 600

            def begin(_now: float, links: Any = links, deadline: float = deadline) -> None:
                links.to(LinkKey("prefill", 0), deadline)

            probe(endpoint).context.submit(begin)
        while not self._are_attached:
            assert time.monotonic() < begun_at + 300, "not all ranks were attached"
            self.turn()
        return time.monotonic() - begun_at

    @property
    def _are_attached(self) -> bool:
        return all(
            [link.state for link in probe(endpoint).links.current] == [LinkState.READY] for endpoint in self.endpoints
        )


def attached(shape: str, size: str) -> dict[str, Any]:
    """Attaches two engines of so many ranks, each in a process of its own, whose descriptors are free again then."""
    prefill, decode = map(int, size.split("x"))
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for target, count, others in ((_be_attached_to, prefill, decode), (_attach, decode, prefill)):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=target, args=(shape, count, others, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        pipes[1].send(pipes[0].recv())
        seconds, decode_cpu_s = pipes[1].recv()
        pipes[0].send(None)
        prefill_cpu_s = pipes[0].recv()
    except EOFError:
        raise SystemExit(f"{size} ranks were not attached: see above") from None
    for process in processes:
        process.join(10)
        process.kill()
    return {
        "shape": shape,
        "ranks": size,
        "attachments": prefill * decode,
        "seconds": seconds,
        "prefill_cpu_s": prefill_cpu_s,
        "decode_cpu_s": decode_cpu_s,
    }


def _be_attached_to(shape: str, count: int, others: int, pipe: multiprocessing.connection.Connection) -> None:
    """Runs the prefill ranks, from the message that has their registrations to the one that tells them to end."""
    _check_limit(count * others)
    engine = Engine(shape, "prefill", count, others=others)
    pipe.send(engine.registry.ask().engine("prefill", time.monotonic()).registrations)
    process_s = time.process_time()
    while not pipe.poll():
        engine.turn()
    pipe.send(time.process_time() - process_s)


def _attach(shape: str, count: int, others: int, pipe: multiprocessing.connection.Connection) -> None:
    """Runs the decode ranks."""
    _check_limit(count * others)
    engine = Engine(shape, "decode", count, others=others)
    for registration in pipe.recv():
        engine.registry.ask().register(registration, time.monotonic())
    process_s = time.process_time()
    seconds = engine.attach()
    pipe.send((seconds, time.process_time() - process_s))


def _check_limit(attachments: int) -> None:
    _raise_limit()
    most, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], _FILES_AN_ATTACHMENT * attachments + 1000
    assert needed <= most, f"{attachments} attachments take {needed} open files of {most} here: raise ulimit -n"


# ---- all of it --------------------------------------------------------------------------------------------------


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=10_000, help="ranks at the registry; 0 leaves it out")
    parser.add_argument("--lease-s", type=float, default=10.0)
    parser.add_argument("--start-s", type=float, default=60.0, help="over how long ranks start")
    parser.add_argument("--timeout-s", type=float, default=2.0, help="how long a rank waits; longer on a busy machine")
    parser.add_argument("--settle-s", type=float, default=60.0, help="from when all are registered until it counts")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the steady state is watched")
    parser.add_argument("--away-s", type=float, default=5.0, help="how long the registry is away")
    parser.add_argument("--attach", default="8x8,64x64", help="prefill times decode ranks, by comma; empty for none")
    parser.add_argument("--etcd", help="the program of an etcd to measure as well")
    parser.add_argument("--etcd-ranks", type=int, default=1024)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    _raise_limit()
    found: dict[str, Any] = {}
    if options.ranks:
        found.update(registry_load(options))
    if options.etcd:
        found["etcd"] = etcd_load(options)
    if options.attach:
        found["attach"] = [attached(shape, size) for size in options.attach.split(",") for shape in ("GQA", "MLA")]
    if options.json:
        print(json.dumps(found))
        return
    for name, values in found.items():
        for row in values if isinstance(values, list) else [values]:
            shown = (
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
            print(f"{name}: {', '.join(shown)}")


if __name__ == "__main__":
    main()
