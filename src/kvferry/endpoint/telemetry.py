"""What an endpoint tells of itself: log lines, and the metrics and traces that a setting turns on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kvferry.control.construction import credentials_of
from kvferry.errors import ConfigurationError
from kvferry.observe.logs import FailureLog
from kvferry.observe.observer import Observer, Several
from kvferry.observe.settings import ObserveSettings
from kvferry.observe.status import EndpointStatus, Side
from kvferry.observe.tracing import Recorder
from kvferry.plan import TransferPath
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
            side: which of the two the endpoint is.
            engine: its engine's name.
            rank: which of its ranks.
            settings: what it was made with.
            status: where it stands now.
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
            from kvferry.observe.server import serve

            is_mapped = settings.forced_path is TransferPath.MAPPED
            metrics = Metrics(status, into_pages=TransferPath.MAPPED if is_mapped else TransferPath.DIRECT)
            recorder = Recorder()
            observers += (metrics, recorder)
            port = own.observe_port + rank if own.observe_port else 0
            credentials = credentials_of(settings)
            token = None if credentials is None else credentials.observe_token
            self._serve = partial(serve, own.observe_host, port, metrics, recorder, status, drain, token)
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
