"""Timers find what is due, and nothing else is looked at."""

from __future__ import annotations

import heapq
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.endpoint.runtime.run_queue import Timers

KEYS = st.sampled_from("abcdefgh")
SETTINGS = st.tuples(KEYS, st.none() | st.integers(0, 30))


@given(st.lists(SETTINGS | st.integers(0, 30), max_size=60))
@example([("b", 0), 1, ("a", 0), ("b", 1), 0])  # moved later, and due all the same
@example([("a", 1), ("a", 5), 2, 5])  # moved later, and not due when its first time has come
def test_what_is_due_is_found_by_the_time_that_was_set_last(steps: list[tuple[str, int | None] | int]):
    timers: Timers[str] = Timers()
    expected: dict[str, int] = {}
    now = 0
    for step in steps:
        if isinstance(step, tuple):
            key, due_at = step
            timers.set(key, due_at)
            expected.pop(key, None)
            if due_at is not None:
                expected[key] = due_at
        else:
            now = max(now, step)
            due = {key for key, due_at in expected.items() if due_at <= now}
            for found in (timers.due(now), timers.due(now)):  # they stay due
                assert set(found) == due
                assert len(found) == len(due)
                assert [expected[key] for key in found] == sorted(expected[key] for key in found)
        assert len(timers) == len(expected)


def test_a_look_at_ten_thousand_of_which_one_is_due_takes_one_from_the_queue(monkeypatch: pytest.MonkeyPatch):
    timers: Timers[int] = Timers()
    for number in range(10_000):
        timers.set(number, 1000.0 + number)
    for number in range(10_000):  # progress: all of them move
        timers.set(number, 2000.0 + number)
    timers.set(7, 5.0)
    taken: list[object] = []
    pop = heapq.heappop

    def counted(queue: list[Any]) -> Any:
        taken.append(queue[0])
        return pop(queue)

    monkeypatch.setattr(heapq, "heappop", counted)
    assert timers.due(4.9) == []
    assert not taken
    assert timers.due(5.0) == [7]
    assert len(taken) == 1


def test_what_was_taken_out_or_moved_takes_no_memory():
    timers: Timers[int] = Timers()
    for number in range(10_000):
        timers.set(number, 1e6)
        timers.set(number, None)
    for moved in range(10_000):
        timers.set(1, 1e6 - moved)
    assert len(timers) == 1
    assert len(timers.queue) < 200
