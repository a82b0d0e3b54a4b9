"""What endpoints run on in the simulation: processes on machines, whose threads take turns when the world says so."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvferry.control.ends import ConnectingEnd, ListeningEnd
from kvferry.control.kubernetes import Orchestrator
from kvferry.control.leases import Leases
from kvferry.control.process_identity import Sight
from kvferry.control.registry import Grant, Registry
from kvferry.control.registry_client import RegistryClient
from kvferry.control.registry_server import RegistryServer
from kvferry.control.renewals import LeaseKeeper, Renewals
from kvferry.endpoint.runtime.calibration import Calibration, WireKey
from kvferry.endpoint.runtime.platform import BackgroundExecutor, Platform
from kvferry.endpoint.runtime.threads import Loop, RunningLoop
from kvferry.errors import RegistryUnreachableError, TransportUnavailableError
from kvferry.layout import Device, RankLayout, Region
from kvferry.observe.status import ThreadStatus
from kvferry.plan import PathCosts
from kvferry.plan.packing import BlockShape
from kvferry.protocol.links.proofs import NodeObject, PodObject
from kvferry.protocol.wire.field_types import PodIdentity, ProcessIdentity
from kvferry.protocol.wire.registrations import EngineView, RankRegistration
from kvferry.protocol.wire.versions import SPOKEN, Versions
from kvferry.settings import Settings
from kvferry.staging import Kernels, StagingMemory
from kvferry.staging.kernels import StartArray, array_at, spread
from kvferry.staging.runs import Comings, Runs, Step
from kvferry.staging.sharing import MappedCopies
from kvferry.transport import TransferHandle, Transport
from proof.made_up_resources import MadeUpResources
from proof.simulation.control_network import ControlNetwork, SimulatedConnectingEnd, SimulatedListeningEnd
from proof.simulation.pods import SimulatedPods


class Thread(RunningLoop):
    """A loop that has a turn when the world says so.

    Attributes:
        has_work: what the loop says of itself, as of `asked_at`.
        polls: whether it looks at what ends by itself, as of then.
        asked_at: how many `changes` its process had seen then.
        looked_at: when it last had a turn; what it polls then changes with time, or with an end that it was not told.
        blocked_until: until when it is in code of a caller's that does not return.
    """

    def __init__(self, name: str, loop: Loop) -> None:
        self.name = name
        self.loop = loop
        self.has_ended = False
        self.has_work = False
        self.polls = False
        self.asked_at = -1
        self.looked_at = -1.0
        self.blocked_until = 0.0

    def ask(self, changes: int) -> None:
        """Asks the loop what a turn would find."""
        self.asked_at = changes
        self.has_work = self.loop.has_work()
        self.polls = self.loop.polls()

    @property
    def health(self) -> ThreadStatus:
        return ThreadStatus(name=self.name, is_alive=not self.has_ended, failures=0, last_failure="")

    def turn(self) -> None:
        """One turn."""
        self.has_ended = not self.loop.turn(may_wait=False)


class PlainKernels(Kernels):
    """Copies run by run, and fails half-way when the world says so."""

    def __init__(self, fails: Callable[[], Exception | None]) -> None:
        self._fails = fails

    def gather(self, starts: StartArray, shape: BlockShape, address: int) -> None:
        runs = spread(starts, shape.loops).tolist()
        packed = array_at(address, (len(runs), shape.length), "|u1")
        for number, start in self._until_it_fails(runs):
            packed[number] = array_at(start, (shape.length,), "|u1")

    def scatter(self, address: int, starts: StartArray, shape: BlockShape) -> None:
        runs = spread(starts, shape.loops).tolist()
        packed = array_at(address, (len(runs), shape.length), "|u1")
        for number, start in self._until_it_fails(runs):
            array_at(start, (shape.length,), "|u1")[...] = packed[number]

    def _until_it_fails(self, runs: list[int]) -> Iterator[tuple[int, int]]:
        problem = self._fails()
        yield from enumerate(runs[: len(runs) // 2] if problem is not None else runs)
        if problem is not None:
            raise problem


class SimulatedRuns(Runs):
    """Runs of one step, or of several that somebody cuts short now and then."""

    def __init__(self, kernels: Kernels, transport: Transport, now: Callable[[], float], chance: random.Random) -> None:
        """As for `Runs`; `chance` decides how many steps there are."""
        super().__init__(kernels, transport, now, most_steps=chance.choice((1, 3, 3)))
        self._chance = chance

    def run(self, steps: Sequence[Step], receiver: str, comings: Comings) -> int:
        return super().run(steps[: self._chance.randint(1, len(steps))], receiver, comings)


class SimulatedResources(MadeUpResources):
    """Memory that is there, and copies that take no time."""

    def __init__(
        self, chance: random.Random, copying_fails: Callable[[], Exception | None], *, of_runs: random.Random
    ) -> None:
        """Makes resources without any memory taken.

        Args:
            chance: decides what is left to chance.
            copying_fails: called before bytes are copied; an exception that it returns makes the copy fail.
            of_runs: decides how long runs are.
        """
        self._chance = chance
        self._copying_fails = copying_fails
        self._of_runs = of_runs

    def runs(self, kernels: Kernels, transport: Transport, now: Callable[[], float]) -> Runs:
        return SimulatedRuns(kernels, transport, now, self._of_runs)

    def kernels(self, regions: Sequence[Region], device: Device) -> Kernels:
        return PlainKernels(self._copying_fails)

    def mapped_copies(self, device: Device) -> MappedCopies:
        raise TransportUnavailableError(f"nobody can map memory on {device} in the simulation")

    def bind_thread(self, device: Device) -> None:
        pass

    def epoch(self) -> int:
        return self._chance.getrandbits(63)


class SimulatedCalibration(Calibration):
    """Both ways are as fast as the seed says, so that either may be chosen."""

    def __init__(
        self,
        chance: random.Random,
        transport: Transport,
        memory: StagingMemory,
        measuring: Callable[[Callable[[], TransferHandle]], None],
    ) -> None:
        self._descriptor_s = chance.choice([1e-9, 1e-5, 1e-4, 1e-2])
        self._wire = transport
        self._source = memory
        self._measuring = measuring

    def costs(self, key: WireKey, peer: str, ring: Region, *arguments: Any, **named: Any) -> PathCosts:
        source = Region(self._source.address, min(self._source.num_bytes, ring.length))
        self._measuring(lambda: self._wire.write(source, peer, ring.address, b""))
        return PathCosts(seconds_per_descriptor=self._descriptor_s)


class RegistryProcess:
    """The registry.

    Attributes:
        is_alive: whether it answers.
        is_frozen: whether it would if it could.
        named_since: since when it has known starts of engines that have a name without forgetting them, by both.
    """

    def __init__(self, lease_s: float, now: Callable[[], float] = lambda: 0.0) -> None:
        self._lease_s = lease_s
        self._now = now
        self.named_since: dict[tuple[str, str | None], float] = {}
        self.is_alive = True
        self.is_frozen = False
        self._registrations = Leases(lease_s)

    @property
    def answers(self) -> bool:
        """Whether it would answer now."""
        return self.is_alive and not self.is_frozen

    def restart(self) -> None:
        """Starts anew, and knows nothing."""
        self._registrations = Leases(self._lease_s)
        self.named_since.clear()
        self.is_alive, self.is_frozen = True, False

    def register(self, registration: RankRegistration) -> Grant:
        """Grants or renews a rank's lease, and takes down since when it knows the start of its engine."""
        leases, now = self.ask(), self._now()
        known = {each.instance for each in leases.engine(registration.engine, now).registrations}
        granted = leases.register(registration, now)
        if registration.instance not in known:
            self.named_since[registration.engine, registration.instance] = now
        return granted

    def ask(self) -> Leases:
        """Returns the registrations, as a client of the registry gets them.

        Raises:
            RegistryUnreachableError: if it does not answer.
        """
        if not self.answers:
            raise RegistryUnreachableError("the registry does not answer")
        return self._registrations


class SimulatedRegistryClient(RegistryClient):
    """Asks the registry without a network between."""

    def __init__(self, registry: RegistryProcess, now: Callable[[], float]) -> None:
        super().__init__("http://registry:1")
        self._registry = registry
        self._now = now

    def grant(self, registration: RankRegistration) -> Grant:
        return self._registry.register(registration)

    def remove(self, engine: str, engine_rank: int, incarnation: str) -> bool:
        return self._registry.ask().remove(engine, engine_rank, incarnation)

    def engine(self, name: str) -> EngineView:
        return self._registry.ask().engine(name, self._now())

    def drain(self, engine: str) -> tuple[str, ...]:
        return self._registry.ask().drain(engine, self._now())

    def drains(self, endpoint: str) -> bool:
        return self._registry.ask().drains(endpoint)

    def released(self) -> tuple[str, ...]:
        return self._registry.ask().released()

    def load(self) -> None:
        pass

    def close(self) -> None:
        pass


class SimulatedOrchestrator(Orchestrator):
    """What runs the pods, asked without a network between."""

    def __init__(self, pods: SimulatedPods) -> None:
        self._pods = pods

    def pod(self, pod: PodIdentity) -> PodObject | None:
        return self._pods.pod(pod)

    def node(self, name: str) -> NodeObject | None:
        return self._pods.node(name)

    def close(self) -> None:
        pass


class SimulatedKeeper(LeaseKeeper):
    """Keeps a rank registered when it has a turn.

    Attributes:
        due_at: when it has to renew.
    """

    due_at = 0.0
    is_closed = False

    def update(self, registration: RankRegistration) -> None:
        super().update(registration)
        self.due_at = 0.0

    def close(self, timeout_s: float = 0.0) -> bool:
        if not self.is_closed:
            self.is_closed = True
            self.remove()
        return True


class SimulatedExecutor(BackgroundExecutor):
    """Work that is done some time."""

    def __init__(self) -> None:
        self.work: deque[Callable[[], None]] = deque()

    def submit(self, work: Callable[[], None]) -> None:
        self.work.append(work)

    def close(self) -> None:
        self.work.clear()


def _ignore(_: Exception) -> None:
    pass


class SimulatedPlatform(Platform):
    """A process: what it runs, and what it sees of the world.

    Attributes:
        threads: those that it has started.
        executors: its work that takes long.
        keeper: keeps it registered, if it is a prefill rank.
        skew_s: how far its clock has jumped ahead of the world's.
        listening: its end of the peer channel, if it is a prefill rank.
        connecting: the same, if it is a decode rank.
        last_bits: the last number that it drew.
    """

    def __init__(
        self,
        machine: str,
        clock: Callable[[], float],
        chance: random.Random,
        network: ControlNetwork,
        registry: RegistryProcess,
        *,
        address: str,
        pid: int,
        see: Callable[[ProcessIdentity], Sight],
        pods: SimulatedPods,
        pod: PodIdentity | None,
        copying_fails: Callable[[], Exception | None],
        measuring: Callable[[Callable[[], TransferHandle]], None] = lambda _: None,
        versions: Versions = SPOKEN,
        of_runs: random.Random | None = None,
    ) -> None:
        """Makes the process, on a machine of the world.

        Args:
            machine: what tells it from others.
            clock: the world's.
            chance: decides what the process would leave to chance.
            address: where it listens, if it does.
            pid: its number on its machine.
            see: what the machine shows of another process on it.
            pods: what the orchestrator knows.
            pod: the one that the process runs in, if it does.
            copying_fails: called before bytes are copied; an exception that it returns makes the copy fail.
            measuring: called where the wire to a peer is measured, with what posts a write into its ring; may raise
                what measuring may.
            versions: which versions of the protocol it speaks.
            of_runs: decides how many sub-chunks a run gathers and posts; None for one.
        """
        self._measuring = measuring
        self.name = machine
        self.versions = versions
        self.process = ProcessIdentity(machine=machine, pid=pid, started=pid, pod=pod)
        self._pods = pods
        self._see = see
        self.staging = SimulatedResources(chance, copying_fails, of_runs=of_runs or random.Random(1))
        self.threads: list[Thread] = []
        self.executors: list[SimulatedExecutor] = []
        self.keeper: SimulatedKeeper | None = None
        self.listening: SimulatedListeningEnd | None = None
        self.connecting: SimulatedConnectingEnd | None = None
        self.skew_s = 0.0
        self.last_bits = 0
        self._clock = clock
        self._chance = chance
        self._network = network
        self._registry = registry
        self._address = address

    def now(self) -> float:
        return self._clock() + self.skew_s

    def unix_time(self) -> float:
        return self._clock()

    def random_bits(self, count: int) -> int:
        self.last_bits = self._chance.getrandbits(count)
        return self.last_bits

    def jitter(self) -> float:
        return self._chance.random()

    def identity(self, settings: Settings) -> ProcessIdentity:
        return self.process

    def orchestrator(self, settings: Settings) -> Orchestrator:
        return SimulatedOrchestrator(self._pods)

    def is_gone(self, process: ProcessIdentity) -> bool:
        return process.machine == self.process.machine and self._see(process).proves_end_of(process)

    def pause(self, seconds: float) -> None:
        raise AssertionError("a turn that must not wait does")

    def wait_until(self, holds: Callable[[], bool], deadline: float) -> None:
        raise AssertionError("nobody may wait in the simulation")

    def start(self, name: str, loop: Loop) -> RunningLoop:
        thread = Thread(name, loop)
        self.threads.append(thread)
        return thread

    def background_executor(self, name: str) -> BackgroundExecutor:
        self.executors.append(SimulatedExecutor())
        return self.executors[-1]

    @property
    def has_input(self) -> bool:
        """Whether messages wait to be read."""
        if self.listening is not None:
            return bool(self.listening.arrived)
        if self.connecting is not None:
            for line in self.connecting.lines:
                if line.arrived or line.has_broken:
                    return True
        return False

    def listen(self, settings: Settings) -> ListeningEnd:
        self.listening = SimulatedListeningEnd(self._network, self._address)
        return self.listening

    def connect_as(self, endpoint: str, settings: Settings) -> ConnectingEnd:
        self.connecting = SimulatedConnectingEnd(self._network, endpoint)
        return self.connecting

    def registry(self, settings: Settings, url: str) -> RegistryClient:
        return SimulatedRegistryClient(self._registry, self._clock)

    def serve_registry(self, settings: Settings) -> RegistryServer:
        raise AssertionError("the registry is a process of its own in the simulation")

    def keep_registered(
        self,
        registry: Registry,
        registration: RankRegistration,
        on_problem: Callable[[Exception], None],
        on_drain: Callable[[], None],
    ) -> LeaseKeeper:
        self.keeper = SimulatedKeeper(
            registry,
            registration,
            _ignore,
            on_drain=on_drain,
            now=self.now,
            renewals=Renewals(jitter=lambda: self._chance.uniform(0.5, 1.0)),
        )
        return self.keeper

    def calibration(
        self, transport: Transport, kernels: Kernels, layout: RankLayout, memory: StagingMemory
    ) -> Calibration:
        return SimulatedCalibration(self._chance, transport, memory, self._measuring)
