"""What an endpoint shows of itself: its status, and the metrics that a setting turns on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvferry._version import __version__
from kvferry.endpoint.runtime.threads import ThreadHealth
from kvferry.errors import ConfigurationError
from kvferry.observe.logs import FailureLog
from kvferry.observe.observer import Observer, Several
from kvferry.observe.status import (
    MOST_ROOMS,
    EndpointStatus,
    LostPeerStatus,
    PeerStatus,
    RoomStatus,
    Side,
    StagingStatus,
    ThreadStatus,
)
from kvferry.observe.tracing import Recorder
from kvferry.settings import Settings

if TYPE_CHECKING:
    from kvferry.observe.server import ObserveServer


class EndpointTelemetry:
    """The telemetry of an endpoint: its log lines, metrics, traces, and the server for them.

    Attributes:
        observer: to be notified of what happens.
        url: where metrics and status are served; None where no setting asks for it, or before `start`.
    """

    def __init__(
        self, side: Side, engine: str, rank: int, settings: Settings, status: Callable[[], EndpointStatus]
    ) -> None:
        """Prepares what the settings ask for; `start` serves it.

        Raises:
            ConfigurationError: if spans are asked for, and OpenTelemetry is not installed.
        """
        observers: list[Observer] = [FailureLog(f"{side.value} rank {rank} of {engine!r}")]
        self.url: str | None = None
        self._server: ObserveServer | None = None
        self._serve: Callable[[], ObserveServer] | None = None
        if settings.traces:
            observers.append(_spans(engine, rank))
        if settings.observe_port is not None:
            # Imported late: processes without metrics need not load a metrics server.
            from kvferry.observe.metrics import Metrics
            from kvferry.observe.server import serve

            metrics, recorder = Metrics(status), Recorder()
            observers += (metrics, recorder)
            port = settings.observe_port + rank if settings.observe_port else 0
            self._serve = partial(serve, settings.observe_host, port, metrics, recorder, status)
        self.observer: Observer = Several(*observers)

    def start(self) -> None:
        """Starts the server. The endpoint's status must be readable by then.

        Raises:
            SettingsError: if no port is free, or the host is not this machine's.
            ObserveError: if the server does not come up.
        """
        if self._serve is not None:
            self._server = self._serve()
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


def endpoint_status(
    side: Side,
    settings: Settings,
    *,
    engine: str,
    rank: int,
    endpoint: str,
    up_s: float,
    problem: str,
    rooms: Sequence[RoomStatus],
    peers: Sequence[PeerStatus],
    staging: StagingStatus,
    threads: Sequence[ThreadHealth],
    fingerprint: Mapping[str, str],
    quarantine: Sequence[LostPeerStatus] = (),
) -> EndpointStatus:
    """Builds the status of an endpoint.

    Args:
        up_s: for how long it has run.
        problem: what is wrong with it; empty if nothing is.
        rooms: all that are open.
        fingerprint: what its caches are beyond their layout.
    """
    states: dict[str, int] = {}
    for room in rooms:
        states[room.state] = states.get(room.state, 0) + 1
    oldest = sorted(rooms, key=lambda room: -room.age_s)
    return EndpointStatus(
        side=side,
        engine=engine,
        rank=rank,
        endpoint=endpoint,
        version=__version__,
        process=os.getpid(),
        at_unix_s=time.time(),
        up_s=up_s,
        peer_timeout_s=settings.peer_timeout_s,
        heartbeat_s=settings.heartbeat_interval_s,
        problem=problem,
        states=states,
        oldest_room_s=oldest[0].age_s if oldest else 0.0,
        quarantined_pages=sum(room.quarantined_pages for room in rooms),
        quarantine_s=max((room.failed_for_s for room in rooms if room.quarantined_pages), default=0.0),
        rooms=tuple(oldest[:MOST_ROOMS]),
        peers=tuple(peers),
        staging=staging,
        quarantine=tuple(quarantine),
        fingerprint=dict(fingerprint),
        threads=tuple(
            ThreadStatus(
                name=thread.name,
                is_alive=thread.is_alive,
                failures=thread.failures,
                last_failure=thread.last_failure,
            )
            for thread in threads
        ),
    )
