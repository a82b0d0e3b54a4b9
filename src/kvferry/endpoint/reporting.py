"""What is told of a room while it runs: its writes, and what handing chunks in took of its caller's time."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TypeVar

from kvferry.observe.observer import Observer
from kvferry.observe.records import WriteRecord

TELL_S = 0.25
"""Seconds in which a room that goes on tells of its writes once."""

_Item = TypeVar("_Item")


class RoomReport:
    """Tells an observer of many things together.

    Between two writes the processor has forgotten the code of whoever is told, so that to tell of each alone costs
    several times as much. Any thread may use it, and each thing is told once.
    """

    def __init__(self, room: int, observer: Observer, now: float) -> None:
        """Args:
        now: when the room was opened.
        """
        self._room = room
        self._observer = observer
        self._submit_seconds: deque[float] = deque()
        self._writes: deque[WriteRecord] = deque()
        self._told_at = now
        self._has_ended = False

    def submitted(self, seconds: float) -> None:
        """The caller handed a chunk in, which took so long. Costs it next to nothing."""
        self._submit_seconds.append(seconds)
        if self._has_ended:
            self._tell_submits()

    def wrote(self, record: WriteRecord) -> None:
        """A write is through."""
        self._writes.append(record)
        if self._has_ended or record.done_at - self._told_at >= TELL_S:
            self._told_at = record.done_at
            self._tell()

    def end(self) -> None:
        """The room has ended: tells all that is left, and what comes later at once."""
        self._has_ended = True  # first, so that whatever is added now is told here or by whoever adds it
        self._tell()

    def _tell(self) -> None:
        self._tell_submits()
        writes = _taken(self._writes)
        if writes:
            self._observer.wrote(self._room, writes)

    def _tell_submits(self) -> None:
        seconds = _taken(self._submit_seconds)
        if seconds:
            self._observer.submitted(seconds)


def _taken(waiting: deque[_Item]) -> list[_Item]:
    """Everything that waits, taken out. Where several threads take at once, each thing goes to one of them."""
    taken = []
    with suppress(IndexError):
        while True:
            taken.append(waiting.popleft())
    return taken
