"""What the endpoints of both sides have in common."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TypeVar

from kvferry.control.owning_process import OwningProcess
from kvferry.endpoint.construction import create_transport, deadlines, endpoint_name
from kvferry.endpoint.runtime.platform import Closing, Platform, SystemPlatform
from kvferry.endpoint.runtime.threads import ThreadHealth
from kvferry.endpoint.telemetry import EndpointTelemetry, endpoint_status
from kvferry.layout import RankCoordinates, RankLayout
from kvferry.observe.status import EndpointStatus, LostPeerStatus, PeerStatus, RoomStatus, Side, StagingStatus
from kvferry.plan import check_token_share
from kvferry.protocol.wire.fingerprint import checked_fingerprint
from kvferry.protocol.wire.rank_identity import Identity
from kvferry.protocol.wire.registrations import check_engine_name
from kvferry.settings import Settings
from kvferry.transport import Transport

EndpointT = TypeVar("EndpointT", bound="Endpoint")


class Endpoint(ABC):
    """One rank of an engine. A context manager; its methods may be called from any thread.

    Attributes:
        layout: what this rank caches and where.
        engine: the engine's name.
        coordinates: this rank's place in the engine.
        engine_rank: its number among all ranks of the engine.
        fingerprint: what its caches are beyond their layout.
        settings: what it was made with.
        transport: moves its bytes.
    """

    _side: Side

    def __init__(
        self,
        layout: RankLayout,
        *,
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
            SettingsError: if a setting is impossible, or no engine can have that name.
            TransportError: if the transport is missing.
        """
        check_engine_name(engine)  # before anything is taken: the registration would check it last
        self._owning_process = OwningProcess()
        self.layout = layout
        self.engine = engine
        self.coordinates = coordinates or RankCoordinates()
        check_token_share(layout, self.coordinates)
        self.fingerprint = checked_fingerprint(fingerprint)
        self.settings = settings or Settings()
        self.engine_rank = self.coordinates.engine_rank
        self._platform = platform or SystemPlatform()
        self.transport = transport or create_transport(
            self.settings, endpoint_name(engine, self.engine_rank), writes=self._side is Side.PREFILL
        )
        self._deadlines = deadlines(self.settings)
        self._started_at = self._platform.now()
        self._telemetry = EndpointTelemetry(self._side, engine, self.engine_rank, self.settings, self.status)
        self._closers = threading.RLock()  # lets one caller of `close` after the other do what is left to do

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
        )

    @property
    @abstractmethod
    def health(self) -> tuple[ThreadHealth, ...]:
        """Health of every thread of the endpoint."""

    @property
    @abstractmethod
    def open_rooms(self) -> int:
        """Number of rooms that are not done."""

    @abstractmethod
    def status(self) -> EndpointStatus:
        """Returns a snapshot of the endpoint, for people and tools."""

    def _status(
        self,
        now: float,
        *,
        problem: str,
        rooms: Sequence[RoomStatus],
        peers: Sequence[PeerStatus],
        staging: StagingStatus,
        quarantine: Sequence[LostPeerStatus] = (),
    ) -> EndpointStatus:
        return endpoint_status(
            self._side,
            self.settings,
            engine=self.engine,
            rank=self.engine_rank,
            endpoint=self.transport.endpoint_name,
            up_s=now - self._started_at,
            problem=problem,
            rooms=rooms,
            peers=peers,
            staging=staging,
            threads=self.health,
            fingerprint=self.fingerprint,
            quarantine=quarantine,
        )

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

        May be called again: where an exception interrupted it, Ctrl-C for one, the next call finishes.
        Does nothing in a process that was forked from the endpoint's: all of it is the parent's.
        """
        if not self._owning_process.is_this:
            return
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
