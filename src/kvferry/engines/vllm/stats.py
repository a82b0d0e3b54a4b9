"""What has been moved, for vLLM's own metrics."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TypedDict

from kvferry.endpoint import Receiver, Sender
from kvferry.observe.records import busy_s
from kvferry.protocol.states import TransferState

log = logging.getLogger(__name__)


class TransferFigures(TypedDict):
    """Of the transfers that ended in some interval; one entry of each list for each that was sent or received whole.

    Attributes:
        sent_bytes, sent_descriptors: of a request, from one rank.
        send_s: during which at least one of its writes was on its way.
        receive_s: from asking for it to having it.
        failed_sends, failed_receives: transfers that failed.
    """

    sent_bytes: list[int]
    sent_descriptors: list[int]
    send_s: list[float]
    receive_s: list[float]
    failed_sends: int
    failed_receives: int


def no_figures() -> TransferFigures:
    """Those of no transfer."""
    return TransferFigures(
        sent_bytes=[], sent_descriptors=[], send_s=[], receive_s=[], failed_sends=0, failed_receives=0
    )


@dataclass(slots=True)
class TransferLog:
    """Says why transfers failed, and keeps figures until they are asked for."""

    _figures: TransferFigures = field(default_factory=no_figures)

    def sent(self, request: str, sender: Sender) -> None:
        """A request has been sent, or not."""
        if sender.state is not TransferState.SUCCESS:
            log.error("request %s was not sent: %s", request, sender.error)
            self._figures["failed_sends"] += 1
            return
        stats = sender.stats
        self._figures["sent_bytes"].append(stats.total_bytes)
        self._figures["sent_descriptors"].append(stats.descriptors)
        self._figures["send_s"].append(busy_s(list(stats.writes)))

    def received(self, request: str, receiver: Receiver) -> None:
        """A request has been received, or not."""
        stats = receiver.stats
        if receiver.state is not TransferState.SUCCESS or stats.ended_at is None:
            log.error("request %s was not received: %s", request, receiver.error)
            self._figures["failed_receives"] += 1
            return
        self._figures["receive_s"].append(stats.ended_at - stats.opened_at)

    def take(self) -> TransferFigures | None:
        """What has come together since the last call; None if nothing has."""
        figures, self._figures = self._figures, no_figures()
        return figures if figures != no_figures() else None
