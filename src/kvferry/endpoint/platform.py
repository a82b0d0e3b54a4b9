"""What an endpoint needs of the machine that it runs on: a clock, chance, threads, sockets, memory.

An endpoint does nothing to the world but through its transport and its platform. `SystemPlatform` is the machine that
we are on. The simulation has another one, whose clock it sets and whose threads it runs turn by turn, in whatever order
a seed says: what runs there is the endpoint itself, not a copy of it.
"""

from __future__ import annotations

import random
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kvferry.control.construction import create_registry, create_registry_client, credentials_of
from kvferry.control.ends import ConnectingEnd, ListeningEnd, ZmqConnectingEnd, ZmqListeningEnd
from kvferry.control.registry_client import LeaseKeeper, RegistryClient
from kvferry.control.registry_server import RegistryServer
from kvferry.endpoint.calibration import Calibration
from kvferry.endpoint.construction import machine_name
from kvferry.endpoint.process_identity import is_gone, this_process
from kvferry.endpoint.threads import Loop, RunningLoop, SupervisedThread
from kvferry.layout import RankLayout
from kvferry.protocol.messages import ProcessIdentity
from kvferry.protocol.registrations import RankRegistration
from kvferry.settings import Settings, bracketed
from kvferry.staging import Kernels, StagingMemory
from kvferry.staging.resources import MachineResources, StagingResources
from kvferry.transport import Transport

_LOOK_S = 1e-3


class Aside(ABC):
    """Where work is done that may take long, and that no loop may wait for."""

    @abstractmethod
    def submit(self, work: Callable[[], None]) -> None:
        """Has it done, some time."""

    @abstractmethod
    def close(self) -> None:
        """Waits for what is being done; the rest never will be."""


class Platform(ABC):
    """A machine.

    Attributes:
        name: what tells it from other machines.
        process: which process this is.
        staging: memory and kernels for staged transfers.
    """

    name: str
    process: ProcessIdentity
    staging: StagingResources

    @abstractmethod
    def now(self) -> float:
        """The time, in seconds of a clock that never goes back."""

    @abstractmethod
    def random_bits(self, count: int) -> int:
        """A number that nobody can guess."""

    @abstractmethod
    def jitter(self) -> float:
        """A number between 0 and 1, to spread what would happen at once. Not for secrets."""

    @abstractmethod
    def is_gone(self, process: ProcessIdentity) -> bool:
        """Whether a process is known to have ended. False where nobody can say from here."""

    @abstractmethod
    def pause(self, seconds: float) -> None:
        """Lets time pass. For loops that may wait."""

    @abstractmethod
    def wait_until(self, holds: Callable[[], bool], deadline: float) -> None:
        """Waits until something holds, or for a point in time."""

    @abstractmethod
    def start(self, name: str, loop: Loop) -> RunningLoop:
        """Gives a loop a thread."""

    @abstractmethod
    def aside(self, name: str) -> Aside:
        """A few threads for what takes long."""

    @abstractmethod
    def listen(self, settings: Settings) -> ListeningEnd:
        """A prefill rank's end of the peer channel.

        Raises:
            SettingsError: if the address cannot be bound, saying why.
        """

    @abstractmethod
    def connect_as(self, endpoint: str, settings: Settings) -> ConnectingEnd:
        """A decode rank's end of the peer channel.

        Args:
            endpoint: its name.
        """

    @abstractmethod
    def registry(self, settings: Settings, url: str) -> RegistryClient:
        """A registry to ask."""

    @abstractmethod
    def serve_registry(self, settings: Settings) -> RegistryServer:
        """A registry in this process, up and running.

        Raises:
            SettingsError: if the port is taken.
        """

    @abstractmethod
    def keep_registered(
        self, registry: RegistryClient, registration: RankRegistration, on_problem: Callable[[Exception], None]
    ) -> LeaseKeeper:
        """Registers a rank, and keeps it registered until the keeper is closed."""

    @abstractmethod
    def calibration(
        self, transport: Transport, kernels: Kernels, layout: RankLayout, memory: StagingMemory
    ) -> Calibration:
        """What measures how fast both ways to a peer are."""


class _Executor(Aside):
    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix=name)

    def submit(self, work: Callable[[], None]) -> None:
        self._pool.submit(work)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


class SystemPlatform(Platform):
    """The machine that we are on."""

    def __init__(self) -> None:
        self.name = machine_name()
        self.process = this_process()
        self.staging = MachineResources()

    def now(self) -> float:
        return time.monotonic()

    def random_bits(self, count: int) -> int:
        return secrets.randbits(count)

    def jitter(self) -> float:
        return random.random()  # noqa: S311 - spreads load, guards nothing

    def is_gone(self, process: ProcessIdentity) -> bool:
        return is_gone(process)

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait_until(self, holds: Callable[[], bool], deadline: float) -> None:
        while not holds() and time.monotonic() < deadline:
            time.sleep(_LOOK_S)

    def start(self, name: str, loop: Loop) -> RunningLoop:
        return SupervisedThread(name, loop)

    def aside(self, name: str) -> Aside:
        return _Executor(name)

    def listen(self, settings: Settings) -> ListeningEnd:
        return ZmqListeningEnd(
            host=bracketed(settings.host), port=settings.control_port, credentials=credentials_of(settings)
        )

    def connect_as(self, endpoint: str, settings: Settings) -> ConnectingEnd:
        return ZmqConnectingEnd(endpoint, credentials_of(settings))

    def registry(self, settings: Settings, url: str) -> RegistryClient:
        return create_registry_client(settings, url)

    def serve_registry(self, settings: Settings) -> RegistryServer:
        server = create_registry(settings)
        server.start()
        return server

    def keep_registered(
        self, registry: RegistryClient, registration: RankRegistration, on_problem: Callable[[Exception], None]
    ) -> LeaseKeeper:
        keeper = LeaseKeeper(registry, registration, on_problem)
        keeper.start()
        return keeper

    def calibration(
        self, transport: Transport, kernels: Kernels, layout: RankLayout, memory: StagingMemory
    ) -> Calibration:
        return Calibration(transport, kernels, layout, memory)
