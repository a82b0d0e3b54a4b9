"""What an endpoint needs of the machine that it runs on: a clock, randomness, threads, sockets, memory.

An endpoint acts on the world only through its transport and its platform. `SystemPlatform` is this machine. The
simulation has another one, whose clock it sets and whose threads it runs turn by turn, in the order that a seed gives:
what runs there is the endpoint itself, not a copy of it.
"""

from __future__ import annotations

import platform
import random
import secrets
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

from msgspec import structs

from kvferry.control.channel import most_connections
from kvferry.control.construction import create_registry, create_registry_client, credentials_of
from kvferry.control.ends import ConnectingEnd, ListeningEnd, ZmqConnectingEnd, ZmqListeningEnd
from kvferry.control.etcd.address import EtcdSettings
from kvferry.control.kubernetes import Orchestrator, create_kubernetes_client, pod_of
from kvferry.control.process_identity import is_gone, this_machine, this_process
from kvferry.control.registry import Registry
from kvferry.control.registry_server import RegistryServer
from kvferry.control.renewals import LeaseKeeper
from kvferry.control.shared_registry import SharedRegistries
from kvferry.endpoint.runtime.calibration import Calibration
from kvferry.endpoint.runtime.threads import Loop, RunningLoop, SupervisedThread
from kvferry.hosts import bracketed
from kvferry.layout import RankLayout
from kvferry.open_files import lack
from kvferry.protocol.wire.field_types import ProcessIdentity
from kvferry.protocol.wire.registrations import RankRegistration
from kvferry.protocol.wire.versions import SPOKEN, Versions
from kvferry.settings import Settings
from kvferry.staging import Kernels, StagingMemory
from kvferry.staging.resources import MachineResources, StagingResources
from kvferry.transport import Transport

_LOOK_S = 1e-3

Closing: TypeAlias = Iterator[tuple[Callable[[], bool], float]]
"""Closes step by step: yields what to wait for, and until when at most (`Platform.wait_until`)."""


class BackgroundExecutor(ABC):
    """Runs work that may take long, so that no loop waits for it."""

    @abstractmethod
    def submit(self, work: Callable[[], None]) -> None:
        """Runs the callable later, on one of the executor's threads."""

    @abstractmethod
    def close(self) -> None:
        """Waits for work that has begun, and drops the rest."""


class Platform(ABC):
    """The machine that an endpoint runs on.

    Attributes:
        name: what tells it from other machines.
        process: which process this is.
        staging: memory and kernels for staged transfers.
        versions: which versions of the protocol the process speaks.
    """

    name: str
    process: ProcessIdentity
    staging: StagingResources
    versions: Versions = SPOKEN

    @abstractmethod
    def now(self) -> float:
        """Returns the time, in seconds of a clock that never goes back."""

    @abstractmethod
    def unix_time(self) -> float:
        """Returns the time by this host's clock, in seconds of Unix time."""

    @abstractmethod
    def random_bits(self, count: int) -> int:
        """Returns a number that nobody can guess."""

    @abstractmethod
    def jitter(self) -> float:
        """Returns a number between 0 and 1, to spread what would happen at once. Not for secrets."""

    @abstractmethod
    def identity(self, settings: Settings) -> ProcessIdentity:
        """Returns this process as peers are to know it, with the pod that the settings name.

        Raises:
            SettingsError: if the pod's termination message file cannot be used.
        """

    @abstractmethod
    def orchestrator(self, settings: Settings) -> Orchestrator:
        """Makes a client of what runs the pods."""

    @abstractmethod
    def is_gone(self, process: ProcessIdentity) -> bool:
        """Whether a process is known to have ended. False where that cannot be seen from here."""

    def lacks_files(self, needed: int) -> str:
        """Says what is missing for so many more open files; empty if nothing is, or if there is no such limit."""
        return ""

    @abstractmethod
    def pause(self, seconds: float) -> None:
        """Waits for so many seconds. For loops that may wait."""

    @abstractmethod
    def wait_until(self, holds: Callable[[], bool], deadline: float) -> None:
        """Waits until a condition holds, or until the deadline."""

    @abstractmethod
    def start(self, name: str, loop: Loop) -> RunningLoop:
        """Runs a loop on a thread of its own."""

    @abstractmethod
    def background_executor(self, name: str) -> BackgroundExecutor:
        """Makes an executor with a few threads."""

    @abstractmethod
    def listen(self, settings: Settings) -> ListeningEnd:
        """Opens a prefill rank's end of the peer channel.

        Raises:
            SettingsError: if the address cannot be bound, saying why.
        """

    @abstractmethod
    def connect_as(self, endpoint: str, settings: Settings) -> ConnectingEnd:
        """Opens a decode rank's end of the peer channel.

        Args:
            endpoint: its name.
        """

    @abstractmethod
    def registry(self, settings: Settings, url: str) -> Registry:
        """Makes a client of a registry."""

    @abstractmethod
    def serve_registry(self, settings: Settings) -> RegistryServer:
        """Starts a registry in this process.

        Raises:
            SettingsError: if the port is taken.
        """

    @abstractmethod
    def keep_registered(
        self,
        registry: Registry,
        registration: RankRegistration,
        on_problem: Callable[[Exception], None],
        on_drain: Callable[[], None],
    ) -> LeaseKeeper:
        """Registers a rank, and keeps it registered until the keeper is closed; the callables as of `LeaseKeeper`."""

    @abstractmethod
    def calibration(
        self, transport: Transport, kernels: Kernels, layout: RankLayout, memory: StagingMemory
    ) -> Calibration:
        """Makes what measures how fast both paths to a peer are."""


class _ThreadExecutor(BackgroundExecutor):
    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix=name)

    def submit(self, work: Callable[[], None]) -> None:
        self._pool.submit(work)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


class SystemPlatform(Platform):
    """This machine. Endpoints of one process that are given the same one share a client of each registry."""

    def __init__(self) -> None:
        """Makes it."""
        self.name = f"{platform.node()}-{uuid.getnode():x}"  # tells two containers on it apart
        self.process = this_process()
        self._machine = this_machine()  # read once: peers are asked about all the time, and most are elsewhere
        self.staging = MachineResources()
        self._registries = SharedRegistries()

    now = staticmethod(time.monotonic)  # itself: every event asks for the time
    unix_time = staticmethod(time.time)

    def random_bits(self, count: int) -> int:
        return secrets.randbits(count)

    def jitter(self) -> float:
        return random.random()  # noqa: S311 - spreads load, guards nothing

    def identity(self, settings: Settings) -> ProcessIdentity:
        return structs.replace(self.process, pod=pod_of(settings))

    def orchestrator(self, settings: Settings) -> Orchestrator:
        return create_kubernetes_client(settings)

    def is_gone(self, process: ProcessIdentity) -> bool:
        return is_gone(process, self._machine)

    def lacks_files(self, needed: int) -> str:
        return lack(needed)

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait_until(self, holds: Callable[[], bool], deadline: float) -> None:
        while not holds() and time.monotonic() < deadline:
            time.sleep(_LOOK_S)

    def start(self, name: str, loop: Loop) -> RunningLoop:
        return SupervisedThread(name, loop)

    def background_executor(self, name: str) -> BackgroundExecutor:
        return _ThreadExecutor(name)

    def listen(self, settings: Settings) -> ListeningEnd:
        return ZmqListeningEnd(
            host=bracketed(settings.host),
            port=settings.control_port,
            credentials=credentials_of(settings),
            max_connections=most_connections(settings.max_decode_ranks),
            peer_timeout_s=settings.peer_timeout_s,
        )

    def connect_as(self, endpoint: str, settings: Settings) -> ConnectingEnd:
        return ZmqConnectingEnd(endpoint, credentials_of(settings))

    def registry(self, settings: Settings, url: str) -> Registry:
        own = settings.of(EtcdSettings)
        key = (url, settings.shared_secret, settings.registry_lease_s, settings.registry_tls_ca, own)
        return self._registries.registry(key, lambda: create_registry_client(settings, url))

    def serve_registry(self, settings: Settings) -> RegistryServer:
        server = create_registry(settings)
        server.start()
        return server

    def keep_registered(
        self,
        registry: Registry,
        registration: RankRegistration,
        on_problem: Callable[[Exception], None],
        on_drain: Callable[[], None],
    ) -> LeaseKeeper:
        keeper = LeaseKeeper(registry, registration, on_problem, on_drain=on_drain)
        keeper.start()
        return keeper

    def calibration(
        self, transport: Transport, kernels: Kernels, layout: RankLayout, memory: StagingMemory
    ) -> Calibration:
        return Calibration(transport, kernels, layout, memory)
