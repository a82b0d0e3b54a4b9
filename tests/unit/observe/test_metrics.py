"""Metrics count everything once, and never in the time of those who hand something in."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from tests.support.statuses import PART, WELL, WRITE, samples

from kvferry.observe.metrics import Metrics
from kvferry.observe.records import ReceiverStats, WriteRecord
from kvferry.plan import TransferPath


def write_at(seconds: float) -> WriteRecord:
    """The same, so much later."""
    part = replace(PART, gathered_at=PART.gathered_at + seconds, landed_at=PART.landed_at + seconds)
    return replace(WRITE, parts=(part,))


def counted(metrics: Metrics) -> dict[tuple[str, ...], float]:
    return samples(metrics.exposition().decode())


@pytest.mark.parametrize("together", [1, 7])
@pytest.mark.parametrize("writes", [0, 1, 63, 64, 65, 1000])
def test_everything_told_is_there_when_it_is_read(writes: int, together: int):
    metrics = Metrics(lambda: WELL)
    for number in range(0, writes, together):
        several = range(number, min(number + together, writes))
        metrics.submitted([0.001] * len(several))
        metrics.wrote(1, [write_at(10.0 * each) for each in several])
    for _ in range(2):
        found = counted(metrics)
        assert found["writes_total", "direct"] == found["submit_seconds_count",] == writes
        assert found["sent_bytes_total", "direct"] == 1000 * writes
        assert found["phase_seconds_count", "wire"] == writes
        assert found["phase_seconds_sum", "wire"] == pytest.approx(0.4 * writes)
        assert found["wire_busy_seconds_total",] == pytest.approx(0.4 * writes)


def test_writes_that_are_told_together_count_by_their_own_path():
    metrics = Metrics(lambda: WELL)
    metrics.wrote(1, [WRITE, replace(WRITE, path=TransferPath.STAGED, total_bytes=7, descriptors=1), WRITE])
    found = counted(metrics)
    assert (found["writes_total", "direct"], found["writes_total", "staged"]) == (2, 1)
    assert (found["sent_bytes_total", "direct"], found["sent_bytes_total", "staged"]) == (2000, 7)
    assert (found["descriptors_total", "direct"], found["descriptors_total", "staged"]) == (8, 1)
    assert (found["runs_total", "direct"], found["runs_total", "staged"]) == (20, 10)


@pytest.mark.parametrize("path", [TransferPath.DIRECT, TransferPath.MAPPED])
def test_what_arrives_in_pages_counts_by_the_path_that_goes_there(path: TransferPath):
    metrics = Metrics(lambda: WELL, into_pages=path)
    metrics.received(1, ReceiverStats(opened_at=0.0, first_arrival_at=0.5, ended_at=1.0, chunks=2), None)
    assert {key: number for key, number in counted(metrics).items() if key[0] == "transfers_total" and number} == {
        ("transfers_total", "success", path.value): 1
    }


def test_threads_lose_nothing_and_count_nothing_twice():
    metrics = Metrics(lambda: WELL)
    started, over = threading.Barrier(5), threading.Event()

    def tell() -> None:
        started.wait()
        for _ in range(3000):
            metrics.wrote(1, [WRITE])

    def read() -> None:
        started.wait()
        while not over.is_set():
            metrics.exposition()

    writers = [threading.Thread(target=tell) for _ in range(4)]
    reader = threading.Thread(target=read)
    for each in (*writers, reader):
        each.start()
    for each in writers:
        each.join()
    over.set()
    reader.join()
    assert counted(metrics)["writes_total", "direct"] == 12_000


def test_what_waits_to_be_counted_is_bounded():
    metrics = Metrics(lambda: WELL)
    for _ in range(10_000):
        metrics.submitted([0.001])
        metrics.wrote(1, [WRITE])
    assert len(metrics.uncounted) < 200


def test_a_caller_that_hands_in_counts_nothing():
    metrics = Metrics(lambda: WELL)
    for _ in range(1000):
        metrics.submitted([0.001])
    assert len(metrics.uncounted) == 1000
    metrics.wrote(1, [WRITE])
    assert not metrics.uncounted
