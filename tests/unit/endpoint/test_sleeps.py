"""Looks are few where another thread keeps the interpreter's lock, and as many as ever where none does."""

from __future__ import annotations

import pytest

from kvferry.endpoint.runtime.sleeps import SleepBounds, Sleeps

BOUNDS = SleepBounds(shortest_s=1e-4, of_quiet=1 / 16, longest_s=0.01, longest_contended_s=0.04)
SWITCH_S = 5e-3  # after which Python asks a thread for the lock


def looks_within(seconds: float, *, late_s: float) -> int:
    """How often a thread looks while nothing happens, if every sleep ends so late."""
    sleeps, now, looks = Sleeps(BOUNDS), 0.0, 0
    while now < seconds:
        sleep_s = sleeps.next_s(now)
        sleeps.slept(sleep_s, sleep_s + late_s)
        now += sleep_s + late_s
        looks += 1
    return looks


def test_sleeps_grow_with_the_quiet_while_the_lock_is_free():
    sleeps = Sleeps(BOUNDS)
    assert [sleeps.next_s(quiet_s) for quiet_s in (0.0, 0.016, 0.08, 10.0)] == pytest.approx([1e-4, 1e-3, 5e-3, 0.01])


def test_a_thread_that_gets_the_lock_late_looks_a_third_as_often():
    assert looks_within(1.0, late_s=SWITCH_S) < looks_within(1.0, late_s=0.0) / 3
    assert looks_within(1.0, late_s=SWITCH_S) < 35


def test_what_happens_after_a_short_time_is_noticed_soon_even_so():
    sleeps = Sleeps(BOUNDS)
    sleeps.slept(1e-3, 1e-3 + SWITCH_S)
    assert sleeps.next_s(0.004) == pytest.approx(0.002)
    assert sleeps.next_s(0.0) == pytest.approx(1e-4)


def test_the_lock_counts_as_free_again_once_some_sleeps_ended_in_time():
    sleeps = Sleeps(BOUNDS)
    sleeps.slept(1e-3, 1e-3 + SWITCH_S)
    for _ in range(2):
        assert sleeps.next_s(0.1) == pytest.approx(0.04)
        sleeps.slept(0.04, 0.0401)
    assert sleeps.next_s(0.1) == pytest.approx(0.1 / 16)


def test_a_sleep_that_was_ended_says_nothing():
    sleeps = Sleeps(BOUNDS)
    sleeps.slept(1e-3, 1e-3 + SWITCH_S)
    for _ in range(10):
        sleeps.slept(0.04, 0.003)
    assert sleeps.next_s(0.1) == pytest.approx(0.04)
