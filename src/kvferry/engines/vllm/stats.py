"""Figures of transfers, for vLLM's own metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypedDict

from kvferry import Receiver, Sender, TransferState
from kvferry.loggers import logger_of

log = logger_of(__name__)


class TransferFigures(TypedDict):
    """Figures of the transfers that ended in an interval. A list has an entry for each that was sent or received whole.

    Attributes:
        sent_bytes: of a request, from one rank.
        sent_descriptors: likewise.
        send_s: during which at least one of its writes was on its way.
        receive_s: from asking for it to having it.
        failed_sends: transfers that failed, of those that were sent.
        failed_receives: the same, of those that were received.
    """

    sent_bytes: list[int]
    sent_descriptors: list[int]
    send_s: list[float]
    receive_s: list[float]
    failed_sends: int
    failed_receives: int


def no_figures() -> TransferFigures:
    """Returns the figures of no transfer."""
    return TransferFigures(
        sent_bytes=[], sent_descriptors=[], send_s=[], receive_s=[], failed_sends=0, failed_receives=0
    )


@dataclass(slots=True)
class TransferLog:
    """Logs why transfers failed, and keeps figures until they are taken."""

    _figures: TransferFigures = field(default_factory=no_figures)

    def sent(self, request: str, sender: Sender) -> None:
        """Counts a request that was sent, or could not be."""
        if sender.state is not TransferState.SUCCESS:
            log.error("request %s was not sent: %s", request, sender.error)
            self._figures["failed_sends"] += 1
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
            self._figures["failed_receives"] += 1
            return
        self._figures["receive_s"].append(stats.ended_at - stats.opened_at)

    def take(self) -> TransferFigures | None:
        """Returns the figures since the last call; None if no transfer has ended since."""
        if not any(self._figures.values()):
            return None
        figures, self._figures = self._figures, no_figures()
        return figures
