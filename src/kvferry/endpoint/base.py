"""What the endpoints of both sides have in common, what they tell of themselves (logs, metrics, traces) included."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TypeVar

from kvferry._version import __version__
from kvferry.addresses import with_found_address
from kvferry.control.construction import credentials_of
from kvferry.control.process_identity import OwningProcess
from kvferry.endpoint.construction import Draining, create_transport, endpoint_name
from kvferry.endpoint.runtime.callers_code import Callbacks
from kvferry.endpoint.runtime.platform import Closing, Platform, SystemPlatform
from kvferry.endpoint.runtime.threads import check_may_wait
from kvferry.endpoint.transfer import Transfer
from kvferry.errors import ConfigurationError, EndpointClosedError, KVFerryError, SettingsError, UsageError
from kvferry.layout import RankCoordinates, RankLayout
from kvferry.loggers import logger_of
from kvferry.observe.logs import FailureLog
from kvferry.observe.records import Observer, Several
from kvferry.observe.settings import ObserveSettings
from kvferry.observe.status import (
    MOST_ROOMS,
    CountedRoom,
    EndpointStatus,
    LostPeerStatus,
    PeerStatus,
    RoomCounts,
    Side,
    StagingStatus,
    ThreadStatus,
)
from kvferry.observe.tracing import Recorder
from kvferry.open_files import SHARE, START
from kvferry.plan import TransferPath, check_token_share
from kvferry.plan.fingerprint import checked_fingerprint
from kvferry.protocol.wire.field_types import Identity
from kvferry.protocol.wire.registrations import check_engine_name
from kvferry.settings import Settings, environment, known_variables
from kvferry.spelling import meaningless
from kvferry.staging.mapped import MappedTransport
from kvferry.staging.sizes import staging_notice
from kvferry.transport import Transport

if TYPE_CHECKING:
    from kvferry.observe.server import ObserveServer

log = logger_of(__name__)


class EndpointTelemetry:
    """The telemetry of an endpoint: its log lines, metrics, traces, and the server for them.

    Attributes:
        observer: to be notified of what happens.
        url: where metrics and status are served; None where no setting asks for it, or before `start`.
    """

    def __init__(
        self,
        side: Side,
        engine: str,
        rank: int,
        settings: Settings,
        *,
        status: Callable[[], EndpointStatus],
        drain: Callable[[], None],
    ) -> None:
        """Prepares what the settings ask for; `start` serves it.

        Args:
            status: where the endpoint stands now.
            drain: drains it, for an operator who may.

        Raises:
            ConfigurationError: if spans are asked for, and OpenTelemetry is not installed.
        """
        observers: list[Observer] = [FailureLog(f"{side.value} rank {rank} of {engine!r}")]
        self.url: str | None = None
        self._server: ObserveServer | None = None
        self._serve: Callable[[], ObserveServer] | None = None
        own = settings.of(ObserveSettings)
        if own.traces:
            observers.append(_spans(engine, rank))
        if own.observe_port is not None:
            # Imported late: processes without metrics need not load a metrics server.
            from kvferry.observe.metrics import Metrics
            from kvferry.observe.server import ObserveServer

            is_mapped = settings.forced_path is TransferPath.MAPPED
            metrics = Metrics(status, into_pages=TransferPath.MAPPED if is_mapped else TransferPath.DIRECT)
            recorder = Recorder()
            observers += (metrics, recorder)
            port = own.observe_port + rank if own.observe_port else 0
            credentials = credentials_of(settings)
            token = None if credentials is None else credentials.observe_token
            self._serve = partial(ObserveServer, own.observe_host, port, metrics, recorder, status, drain, token)
        self.observer: Observer = Several(*observers)

    def start(self) -> None:
        """Starts the server. The endpoint's status must be readable by then.

        Raises:
            SettingsError: if no port is free, or the host is not this machine's.
            ObserveError: if the server does not come up.
        """
        if self._serve is not None:
            self._server = self._serve()
            self._server.start()
            self.url = self._server.url

    def close(self) -> None:
        """Stops the server."""
        if self._server is not None:
            self._server.close()


def _spans(engine: str, rank: int) -> Observer:
    try:
        from kvferry.observe.spans import Spans
    except ImportError as error:
        raise ConfigurationError(
            f"traces (KVFERRY_TRACES) need OpenTelemetry: pip install opentelemetry-api ({error})"
        ) from error
    return Spans(engine, rank)


EndpointT = TypeVar("EndpointT", bound="Endpoint")


class Rooms(Protocol):
    """The rooms of an endpoint, as far as both sides have it."""

    @property
    def draining(self) -> Draining:
        """How far a drain is."""

    @property
    def is_drained(self) -> bool:
        """Whether it has drained; see `Endpoint.is_drained`."""


class Driver(Protocol):
    """What runs an endpoint, likewise."""

    @property
    def rooms(self) -> Rooms:
        """All rooms."""

    @property
    def health(self) -> tuple[ThreadStatus, ...]:
        """Health of every thread."""

    @property
    def open_rooms(self) -> int:
        """Number of rooms that are not done."""

    @property
    def callbacks(self) -> Callbacks:
        """Calls the caller back."""

    def renew(self, fingerprint: Mapping[str, str], reason: str) -> None:
        """Changes the fingerprint; see `Endpoint.renew`."""


class Endpoint(ABC):
    """One rank of an engine. A context manager; its methods may be called from any thread."""

    layout: RankLayout
    """What this rank caches and where."""
    engine: str
    """The engine's name."""
    coordinates: RankCoordinates
    """This rank's place in the engine."""
    engine_rank: int
    """Its number among all ranks of the engine."""
    fingerprint: Mapping[str, str]
    """What its caches are beyond their layout."""
    settings: Settings
    """What it was made with."""
    transport: Transport
    """Moves its bytes."""

    _side: Side
    _driver: Driver

    def __init__(
        self,
        layout: RankLayout,
        engine: str,
        coordinates: RankCoordinates | None,
        settings: Settings | None,
        transport: Transport | None,
        fingerprint: Mapping[str, str] | None,
        platform: Platform | None,
    ) -> None:
        """Checks what it was given, and makes a transport if it was given none.

        Raises:
            LayoutError: if layout and coordinates disagree on context parallelism, or a field of the fingerprint is
                impossible.
            SettingsError: if a setting is impossible, no engine can have that name, no address is found that peers
                could be told, or the process may open too few files.
            TransportError: if the transport is missing.
        """
        check_engine_name(engine)  # before anything is taken: the registration would check it last
        self._owning_process = OwningProcess()
        self.layout = layout
        self.engine = engine
        self.coordinates = coordinates or RankCoordinates()
        check_token_share(layout, self.coordinates)
        self.fingerprint = checked_fingerprint(fingerprint)
        self.settings = with_found_address(settings or Settings())
        for name, hint in meaningless(environment(), known_variables()).items():
            log.warning("%s is set, and means nothing: %s", name, hint)
        self.engine_rank = self.coordinates.engine_rank
        self._platform = platform or SystemPlatform()
        if problem := self._platform.lacks_files(START + SHARE * self.settings.nixl_threads):
            raise SettingsError(f"a {self._side.value} rank cannot start: {problem}")
        self.transport = transport or create_transport(
            self.settings, endpoint_name(engine, self.engine_rank), writes=self._side is Side.PREFILL
        )
        if self.settings.forced_path is TransferPath.MAPPED:
            self.transport = MappedTransport(self.transport, self._platform.staging, offers=self._side is Side.DECODE)
        if problem := self._platform.staging.why_not_mapped(layout.regions(), layout.device):
            log.warning("%s", problem)
        if notice := staging_notice(self.settings, layout.device, sends=self._side is Side.PREFILL):
            log.info("%s", notice)
        self._started_at = self._platform.now()
        self._telemetry = EndpointTelemetry(
            self._side, engine, self.engine_rank, self.settings, status=self.status, drain=self._drain_by_order
        )
        self._is_closing = False
        self._closers = threading.RLock()  # lets one caller of `close` after the other do what is left to do

    def renew(self, fingerprint: Mapping[str, str], reason: str) -> None:
        """Says from now on that the caches are something else, as where an engine has replaced its weights in place.

        What was compared with peers before counts no more. Rooms that are open fail on both sides, and peers compare
        anew with the next one. Returns once no later room can be exchanged by what was compared before: in a moment.

        Args:
            fingerprint: all fields, as they were given to the endpoint when it was made.
            reason: why, in words, for the rooms that fail.

        Raises:
            LayoutError: if a field of the fingerprint is impossible.
            TransferError: if the endpoint's thread does not answer within close_timeout_s.
            UsageError: if the process was forked from the endpoint's.
            EndpointClosedError: if the endpoint was closed.
        """
        self._check_process()
        if self._is_closing:
            raise EndpointClosedError("the endpoint was closed")
        self.fingerprint = checked_fingerprint(fingerprint)
        self._driver.renew(self.fingerprint, reason)

    @property
    def _identity(self) -> Identity:
        """Who this endpoint is, to its peers."""
        return Identity(
            endpoint=self.transport.endpoint_name,
            engine=self.engine,
            coordinates=self.coordinates,
            layout=self.layout,
            transport=self.transport.name,
            host=self._platform.name,
            checksums=self.settings.checksums,
            fingerprint=self.fingerprint,
            may_differ=self.settings.fields_that_may_differ,
            versions=self._platform.versions,
        )

    @property
    def health(self) -> tuple[ThreadStatus, ...]:
        """Health of every thread of the endpoint."""
        return self._driver.health

    @property
    def open_rooms(self) -> int:
        """Number of rooms that have not ended on this rank, or for which something may still be written or read."""
        return self._driver.open_rooms

    # ---- draining -----------------------------------------------------------------------------------------------

    def drain(self, timeout_s: float | None = None, *, grace_s: float = 0.0) -> None:
        """Begins to leave: from now on no new rooms are taken, those that are open end as usual. Returns at once.

        Everyone who looks sees it first: `/readyz`, the registry, and with it gateways. A room that the other side has
        opened here already is not new. Once `is_drained`, `close` finds nothing open. May be called again, to hurry.

        Args:
            timeout_s: after how long rooms that are still open are aborted, in seconds; None leaves that to their own
                deadlines.
            grace_s: for how long new rooms are still taken, of requests that were sent here before anybody could see
                that this endpoint drains, in seconds. Infinite for an engine that refuses new requests by itself and
                opens rooms for all that it has accepted: none is waited for then.

        Raises:
            UsageError: if a time is negative, or the process was forked from the endpoint's.
        """
        self._check_process()
        if not grace_s >= 0 or (timeout_s is not None and not timeout_s >= 0):
            raise UsageError(f"timeout_s is {timeout_s} and grace_s {grace_s}: neither may be negative")
        is_first = self._driver.rooms.draining.begin(grace_s=grace_s, timeout_s=timeout_s)
        if is_first:
            log.info(
                "%s rank %d of %r drains: %d rooms are open", self._side.value, self.engine_rank, self.engine,
                self.open_rooms,
            )  # fmt: skip
        self._go_on_draining()

    def _drain_by_order(self) -> None:
        """Drains as the settings say, for an operator who says so at the registry or at the observe server."""
        self.drain(self.settings.drain_timeout_s, grace_s=self.settings.drain_grace_s)

    @abstractmethod
    def _go_on_draining(self) -> None:
        """Does at once what else a drain takes. Returns soon."""

    @property
    def is_draining(self) -> bool:
        """Whether `drain` was called, or an operator has said so."""
        return self._driver.rooms.draining.has_begun

    @property
    def is_drained(self) -> bool:
        """Whether it drains, takes no new rooms, and nothing is open here or to peers any more, or may be written to.

        For schedulers to poll. A room takes all ranks of its engine: close none of them before all have drained.
        """
        return self._driver.rooms.is_drained

    def wait_drained(self, timeout_s: float | None = None) -> bool:
        """Waits until the endpoint has drained, for scripts.

        Args:
            timeout_s: the longest wait, in seconds.

        Returns:
            Whether it has.

        Raises:
            UsageError: on a thread of kvferry's own.
        """
        check_may_wait("wait_drained()")
        deadline = inf if timeout_s is None else self._platform.now() + timeout_s
        self._platform.wait_until(lambda: self.is_drained, deadline)
        return self.is_drained

    @property
    def not_ready(self) -> str:
        """Why the endpoint takes no new rooms, in a sentence; empty if it does. `/readyz` says so."""
        if self._is_closing:
            return f"this {self._side.value} endpoint is closed"
        if self.is_draining:
            return f"{self._side.value} engine {self.engine!r} is draining: new requests are for other engines"
        return self._not_found

    @property
    def _not_found(self) -> str:
        """Why peers cannot find the endpoint, in a sentence; empty if they can, or nobody needs to."""
        return ""

    @abstractmethod
    def status(self) -> EndpointStatus:
        """Returns a snapshot of the endpoint, for people and tools."""

    def _status(
        self,
        now: float,
        *,
        rooms: Sequence[CountedRoom],
        peers: Sequence[PeerStatus],
        staging: StagingStatus,
        problem: str = "",
        address: str = "",
        quarantine: Sequence[LostPeerStatus] = (),
        pending_rooms: int = 0,
        bytes_in_flight: int = 0,
    ) -> EndpointStatus:
        """Builds the status; its problem is empty if nothing is wrong with the endpoint.

        Args:
            rooms: all of them, in the order in which they were opened; those that are shown alone cost more than a
                moment.
        """
        counts = RoomCounts.of(rooms, now)
        oldest = [room.status(now) for room in rooms[:MOST_ROOMS]]
        return EndpointStatus(
            side=self._side,
            engine=self.engine,
            rank=self.engine_rank,
            endpoint=self.transport.endpoint_name,
            version=__version__,
            process=os.getpid(),
            at_unix_s=self._platform.unix_time(),
            up_s=now - self._started_at,
            peer_timeout_s=self.settings.peer_timeout_s,
            heartbeat_s=self.settings.heartbeat_interval_s,
            problem=problem,
            address=address,
            states=counts.states,
            oldest_room_s=oldest[0].age_s if oldest else 0.0,
            quarantined_pages=counts.quarantined_pages,
            quarantine_s=counts.quarantine_s,
            rooms=tuple(oldest),
            peers=tuple(peers),
            staging=staging,
            quarantine=tuple(quarantine),
            fingerprint=dict(self.fingerprint),
            threads=self.health,
            not_ready=self.not_ready,
            is_draining=self.is_draining,
            is_drained=self.is_drained,
            load=counts.load(self._side, pending_rooms=pending_rooms, bytes_in_flight=bytes_in_flight),
        )

    def _check_process(self) -> None:
        """Raises UsageError in a process that was forked from the endpoint's."""
        self._owning_process.check(f"this {self._side.value} endpoint")

    def _not_opened(self, transfer: Transfer | None, error: BaseException) -> None:
        """Notifies the observer of a room that was refused; ends one whose opening was interrupted, by Ctrl-C for one.

        Args:
            transfer: what its caller is not handed; None if it was not made.
        """
        if isinstance(error, KVFerryError):
            self._telemetry.observer.refused(error)
        elif transfer is not None:
            transfer.abort(f"opening it was interrupted by {type(error).__name__}")

    @property
    def is_healthy(self) -> bool:
        """Whether every thread of the endpoint runs; `health` has more."""
        return all(thread.is_alive for thread in self.health)

    @property
    def observe_url(self) -> str | None:
        """Where metrics and status are served; None where no setting asks for it."""
        return self._telemetry.url

    def close(self) -> None:
        """Aborts open rooms, waits up to close_timeout_s, and gives everything back.

        A prefill endpoint returns also where writes hang for longer: its control thread gives everything back when they
        have ended, and sends the close messages. Until then neither the memory nor the control port may be used again.
        May be called again: where an exception interrupted it, Ctrl-C for one, the next call finishes.
        Does nothing in a process that was forked from the endpoint's: all of it is the parent's.
        Change callbacks may call it; of one that does not return, it waits for the end no longer than for a moment.

        Raises:
            UsageError: on another thread of kvferry's own, such as one that looks at a `ready` signal.
        """
        if not self._owning_process.is_this:
            return
        check_may_wait("close()")
        self._driver.callbacks.note_close()
        self._is_closing = True
        with self._closers:
            for holds, until in self._closing():
                self._platform.wait_until(holds, until)

    @abstractmethod
    def _closing(self) -> Closing:
        """Closes step by step: yields what to wait for, and until when at most.

        Each step may be repeated: it may have been interrupted anywhere.
        """

    def __enter__(self: EndpointT) -> EndpointT:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
