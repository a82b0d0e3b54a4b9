"""Figures of transfers, for vLLM's own metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypedDict

from kvferry import Receiver, Sender, TransferState, errors
from kvferry.loggers import logger_of

log = logger_of(__name__)

NOT_OPENED = "not opened"
"""The kind of failure of a request whose room could not be opened here."""

MEMORY = "memory"
"""That of one that was given up since vLLM needed its blocks."""

OTHER = "other"

_KINDS: tuple[tuple[type[Exception], str], ...] = (
    (errors.PeerDisconnectedError, "disconnect"),
    (errors.RegistryError, "disconnect"),
    (errors.EndpointClosedError, "disconnect"),
    (errors.TransferTimeoutError, "expiry"),
    (errors.UnknownRoomError, "expiry"),
    (errors.TransferRefusedError, "refused"),
    (errors.PeerError, "refused"),
    (errors.TransferAbortedError, "aborted"),
    (errors.ChecksumError, "wrong bytes"),
)

KINDS = (*dict.fromkeys(kind for _, kind in _KINDS), NOT_OPENED, MEMORY, OTHER)


def kind_of(error: BaseException | None) -> str:
    """Returns the kind of failure that an error stands for: its own, that of its cause, or of the other side's."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        there = getattr(errors, error.there, None) if isinstance(error, errors.TransferFailedError) else None
        for each in (type(error), there):
            for known, kind in _KINDS:
                if isinstance(each, type) and issubclass(each, known):
                    return kind
        error = error.__cause__
    return OTHER


class TransferFigures(TypedDict):
    """Figures of the transfers that ended in an interval. A list has an entry for each that was sent or received whole.

    Attributes:
        sent_bytes: of a request, from one rank.
        sent_descriptors: likewise.
        send_s: during which at least one of its writes was on its way.
        receive_s: from asking for it to having it.
        failed_sends: by kind, the transfers that failed, of those that were sent.
        failed_receives: the same, of those that were received.
    """

    sent_bytes: list[int]
    sent_descriptors: list[int]
    send_s: list[float]
    receive_s: list[float]
    failed_sends: dict[str, int]
    failed_receives: dict[str, int]


def no_figures() -> TransferFigures:
    return TransferFigures(
        sent_bytes=[], sent_descriptors=[], send_s=[], receive_s=[], failed_sends={}, failed_receives={}
    )


def added(counts: dict[str, int], more: dict[str, int]) -> dict[str, int]:
    return {kind: counts.get(kind, 0) + more.get(kind, 0) for kind in {**counts, **more}}


@dataclass(slots=True)
class TransferLog:
    """Logs why transfers failed, and keeps figures until they are taken."""

    _figures: TransferFigures = field(default_factory=no_figures)

    def sent(self, request: str, sender: Sender, kind: str = "") -> None:
        """Counts a request that was sent, or could not be.

        Args:
            kind: of its failure; empty for that which its error stands for.
        """
        if sender.state is not TransferState.SUCCESS:
            log.error("request %s was not sent: %s", request, sender.error)
            self.not_sent(kind or kind_of(sender.error))
            return
        stats = sender.stats
        self._figures["sent_bytes"].append(stats.total_bytes)
        self._figures["sent_descriptors"].append(stats.descriptors)
        self._figures["send_s"].append(stats.busy_s)

    def received(self, request: str, receiver: Receiver) -> None:
        """Counts a request that was received, or could not be."""
        stats = receiver.stats
        if receiver.state is not TransferState.SUCCESS or stats.ended_at is None:
            log.error("request %s was not received: %s", request, receiver.error)
            self.not_received(kind_of(receiver.error))
            return
        self._figures["receive_s"].append(stats.ended_at - stats.opened_at)

    def not_sent(self, kind: str = NOT_OPENED) -> None:
        """Counts a request that failed on the prefill side, by default since its room could not be opened."""
        self._figures["failed_sends"] = added(self._figures["failed_sends"], {kind: 1})

    def not_received(self, kind: str = NOT_OPENED) -> None:
        """Counts one that failed on the decode side, likewise."""
        self._figures["failed_receives"] = added(self._figures["failed_receives"], {kind: 1})

    def take(self) -> TransferFigures | None:
        """Returns the figures since the last call; None if no transfer has ended since."""
        if not any(self._figures.values()):
            return None
        figures, self._figures = self._figures, no_figures()
        return figures
