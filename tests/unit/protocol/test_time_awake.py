"""What counts of the time between two looks."""

from __future__ import annotations

import pytest

from kvferry.protocol.time_awake import Lateness, TimeAwake


def test_time_counts_from_look_to_look():
    awake = TimeAwake(2.0)
    awake.passed_s(10.0)
    assert [awake.passed_s(now) for now in (10.2, 10.2, 10.6)] == pytest.approx([0.2, 0.0, 0.4])


@pytest.mark.parametrize(("awaited_s", "counts_s"), [(1.0, 0.25), (2.0, 0.5), (60.0, 0.5)])
def test_of_a_freeze_half_a_second_counts_and_no_more_than_a_quarter_of_what_is_waited_for(
    awaited_s: float, counts_s: float
):
    awake = TimeAwake(awaited_s)
    awake.passed_s(10.0)
    assert [awake.passed_s(now) for now in (100.0, 100.1)] == pytest.approx([counts_s, 0.1])


def test_a_clock_that_goes_back_takes_nothing_away():
    awake = TimeAwake(2.0)
    awake.passed_s(10.0)
    assert [awake.passed_s(now) for now in (5.0, 5.3)] == pytest.approx([0.0, 0.3])


def test_looks_that_come_in_time_are_not_late():
    lateness = Lateness()
    assert [lateness.seconds(now, most_apart_s=1.0) for now in (100.0, 100.5, 101.5)] == [0.0, 0.0, 0.0]


def test_a_look_is_late_by_what_it_comes_after_its_time():
    lateness = Lateness()
    lateness.seconds(100.0, most_apart_s=1.0)
    assert [lateness.seconds(now, most_apart_s=1.0) for now in (104.0, 104.5)] == [3.0, 0.0]
