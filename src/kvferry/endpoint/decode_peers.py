"""The decode ranks that are connected to a prefill rank."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from kvferry.endpoint.actors import Actor, RunQueue
from kvferry.endpoint.attachment import Attachment, attach, detach
from kvferry.endpoint.workers import Worker
from kvferry.layout import RankCoordinates, RankLayout
from kvferry.protocol.messages import Attach, Attached, Message, Refused
from kvferry.transport import Transport

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DetachRequested:
    """The decode rank left, or is lost."""


PeerEvent: TypeAlias = Attach | DetachRequested


class DecodePeer(Actor):
    """One decode rank: connected and prepared for on a worker, since that may take a while.

    Attributes:
        name: its endpoint.
        last_heard_at: when the control thread last got a message from it; only that thread writes it.
        attachment: what was prepared, once it is.
    """

    def __init__(
        self,
        name: str,
        run_queue: RunQueue,
        *,
        transport: Transport,
        layout: RankLayout,
        coordinates: RankCoordinates,
        send: Callable[[str, Message], None],
        now: float,
    ) -> None:
        super().__init__(run_queue)
        self.name = name
        self.last_heard_at = now
        self.attachment: Attachment | None = None
        self._transport = transport
        self._layout = layout
        self._coordinates = coordinates
        self._send = send

    def handle(self, event: PeerEvent, worker: Worker) -> None:
        """Connects or disconnects."""
        match event:
            case Attach():
                self._drop()
                self.attachment = attach(
                    event, layout=self._layout, coordinates=self._coordinates, transport=self._transport
                )
                self._send(self.name, Attached(endpoint=self._transport.endpoint_name))
            case DetachRequested():
                self._drop()

    def broke(self, error: Exception, worker: Worker) -> None:
        """Tells the decode rank why it cannot be served."""
        log.warning("refused decode rank %s: %s", self.name, error)
        self._send(
            self.name,
            Refused(endpoint=self._transport.endpoint_name, error=type(error).__name__, reason=str(error)),
        )

    def _drop(self) -> None:
        dropped, self.attachment = self.attachment, None
        if dropped is not None:
            detach(dropped, self._transport)


class DecodePeers:
    """The table of connected decode ranks. May be read from any thread; the control thread writes it."""

    def __init__(self, make: Callable[[str], DecodePeer]) -> None:
        self._make = make
        # Guards the table, which workers read while the control thread adds and removes.
        self._lock = threading.Lock()
        self._peers: dict[str, DecodePeer] = {}

    def get(self, name: str) -> DecodePeer | None:
        """The decode rank of that name, if it is known."""
        with self._lock:
            return self._peers.get(name)

    def get_or_make(self, name: str) -> DecodePeer:
        """The decode rank of that name, made if it is new."""
        with self._lock:
            if name not in self._peers:
                self._peers[name] = self._make(name)
            return self._peers[name]

    def remove(self, name: str) -> DecodePeer | None:
        """Takes a decode rank out of the table."""
        with self._lock:
            return self._peers.pop(name, None)

    def all(self) -> list[DecodePeer]:
        """Everyone in the table now."""
        with self._lock:
            return list(self._peers.values())
