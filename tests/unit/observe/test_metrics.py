"""Metrics count everything once, and never in the time of those who hand something in."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from tests.support.metrics import samples
from tests.support.statuses import WELL

from kvferry.observe.metrics import Metrics
from kvferry.observe.records import PartRecord, WriteRecord
from kvferry.plan import Path

PART = PartRecord(
    ready_at=1.0, begun_at=1.0, gathered_at=1.1, posted_at=1.2, landed_at=1.5, num_bytes=1000, runs=10, thread="t"
)
WRITE = WriteRecord(
    receiver="d",
    path=Path.DIRECT,
    why="it is",
    total_bytes=1000,
    descriptors=4,
    submitted_at=0.5,
    posted_at=1.2,
    done_at=1.5,
    transport_post_s=0.0,
    transport_transfer_s=0.0,
    parts=(PART,),
)


def write_at(seconds: float) -> WriteRecord:
    """The same, so much later."""
    part = replace(PART, gathered_at=PART.gathered_at + seconds, landed_at=PART.landed_at + seconds)
    return replace(WRITE, parts=(part,))


def counted(metrics: Metrics) -> dict[tuple[str, ...], float]:
    return samples(metrics.exposition().decode())


@pytest.mark.parametrize("writes", [0, 1, 63, 64, 65, 1000])
def test_everything_told_is_there_when_it_is_read(writes: int):
    metrics = Metrics(lambda: WELL)
    for number in range(writes):
        metrics.submitted(0.001)
        metrics.write_ended(1, write_at(10.0 * number))
    for _ in range(2):
        found = counted(metrics)
        assert found["writes_total", "direct"] == found["submit_seconds_count",] == writes
        assert found["sent_bytes_total", "direct"] == 1000 * writes
        assert found["phase_seconds_count", "wire"] == writes
        assert found["phase_seconds_sum", "wire"] == pytest.approx(0.4 * writes)
        assert found["wire_busy_seconds_total",] == pytest.approx(0.4 * writes)


def test_threads_lose_nothing_and_count_nothing_twice():
    metrics = Metrics(lambda: WELL)
    started, over = threading.Barrier(5), threading.Event()

    def tell() -> None:
        started.wait()
        for _ in range(3000):
            metrics.write_ended(1, WRITE)

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
        metrics.submitted(0.001)
        metrics.write_ended(1, WRITE)
    assert len(metrics._told) < 200


def test_a_caller_that_hands_in_counts_nothing():
    metrics = Metrics(lambda: WELL)
    for _ in range(1000):
        metrics.submitted(0.001)
    assert len(metrics._told) == 1000
    metrics.write_ended(1, WRITE)
    assert not metrics._told
