"""What is reported of a room while it runs: its writes, and the caller's time that handing chunks in took."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TypeVar

from kvferry.observe.observer import Observer
from kvferry.observe.records import WriteRecord

REPORT_INTERVAL_S = 0.25
"""Seconds after which a running room reports its writes again."""

_Item = TypeVar("_Item")


class RoomReport:
    """Reports a room's writes and submissions to an observer, many at a time.

    Between two writes the observer's code leaves the processor's cache, so that reporting each alone costs several
    times as much. Any thread may use it, and everything is reported once.
    """

    def __init__(self, room: int, observer: Observer, now: float) -> None:
        """Begins with nothing reported.

        Args:
            now: when the room was opened.
        """
        self._room = room
        self._observer = observer
        self._submit_seconds: deque[float] = deque()
        self._writes: deque[WriteRecord] = deque()
        self._reported_at = now
        self._has_ended = False

    def submitted(self, seconds: float) -> None:
        """Records how long the caller took to hand a chunk in. Costs the caller next to nothing."""
        self._submit_seconds.append(seconds)
        if self._has_ended:
            self._report_submits()

    def wrote(self, record: WriteRecord) -> None:
        """Records a completed write, and reports what waits if that is due."""
        self._writes.append(record)
        if self._has_ended or record.done_at - self._reported_at >= REPORT_INTERVAL_S:
            self._reported_at = record.done_at
            self._report()

    def end(self) -> None:
        """Reports all that is left, and from now on everything at once. Called when the room has ended."""
        self._has_ended = True  # first: what is added now is reported here or by the thread that adds it
        self._report()

    def _report(self) -> None:
        self._report_submits()
        writes = _taken(self._writes)
        if writes:
            self._observer.wrote(self._room, writes)

    def _report_submits(self) -> None:
        seconds = _taken(self._submit_seconds)
        if seconds:
            self._observer.submitted(seconds)


def _taken(waiting: deque[_Item]) -> list[_Item]:
    """Removes and returns everything that waits. Where several threads do so at once, each item goes to one of them."""
    taken = []
    with suppress(IndexError):
        while True:
            taken.append(waiting.popleft())
    return taken
