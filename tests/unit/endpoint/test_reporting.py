"""A room's report tells an observer of everything once, and of many things together."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from tests.support.statuses import WRITE

from kvferry.endpoint.transfer import REPORT_INTERVAL_S, RoomReport
from kvferry.observe.records import Observer, WriteRecord


class Listener(Observer):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.submits: list[list[float]] = []
        self.writes: list[tuple[int, list[WriteRecord]]] = []

    def submitted(self, seconds: Sequence[float]) -> None:
        self.submits.append(list(seconds))

    def wrote(self, room: int, writes: Sequence[WriteRecord]) -> None:
        self.writes.append((room, list(writes)))


@pytest.fixture
def switching_often() -> Iterator[None]:
    """Threads take turns as often as the interpreter can: the moments between two calls are short."""
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual_s)


def write(done_at: float) -> WriteRecord:
    return replace(WRITE, done_at=done_at)


def test_a_room_that_ends_soon_is_told_of_once():
    listener = Listener()
    report = RoomReport(7, listener, now=100.0)
    for number in range(4):
        report.submitted(number)
        report.wrote(write(100.0 + number * REPORT_INTERVAL_S / 8))
    assert (listener.submits, listener.writes) == ([], [])
    report.end()
    assert listener.submits == [[0, 1, 2, 3]]
    assert listener.writes == [(7, [write(100.0 + number * REPORT_INTERVAL_S / 8) for number in range(4)])]


def test_a_room_that_goes_on_is_told_of_now_and_then():
    listener = Listener()
    report = RoomReport(7, listener, now=100.0)
    times = [100.0 + number * REPORT_INTERVAL_S / 4 for number in range(1, 13)]
    for at in times:
        report.wrote(write(at))
    assert [[each.done_at for each in writes] for _, writes in listener.writes] == [times[:4], times[4:8], times[8:]]


def test_what_comes_after_the_end_is_told_at_once():
    """Writes of a room that has failed may be on their way still, and its caller may hand chunks in."""
    listener = Listener()
    report = RoomReport(7, listener, now=100.0)
    report.end()
    assert (listener.submits, listener.writes) == ([], [])
    report.wrote(write(100.0))
    report.submitted(0.5)
    assert (listener.submits, listener.writes) == ([[0.5]], [(7, [write(100.0)])])


def test_threads_lose_nothing_and_tell_nothing_twice(switching_often: None):
    listener = Listener()
    report = RoomReport(7, listener, now=0.0)
    started = threading.Barrier(5)

    def work(first: int) -> None:
        started.wait()
        for number in range(first, first + 2000):
            report.wrote(write(number * REPORT_INTERVAL_S / 3))
            report.submitted(number)

    threads = [threading.Thread(target=work, args=(2000 * number,)) for number in range(4)]
    for each in threads:
        each.start()
    started.wait()
    report.end()
    for each in threads:
        each.join()
    assert sorted(seconds for told in listener.submits for seconds in told) == list(range(8000))
    times = sorted(each.done_at for _, writes in listener.writes for each in writes)
    assert times == [number * REPORT_INTERVAL_S / 3 for number in range(8000)]
