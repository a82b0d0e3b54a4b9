"""What is given up of the requests that are held, when vLLM lacks blocks."""

from __future__ import annotations

from kvferry.engines.vllm.holding import HeldRequests


def given_up(held: HeldRequests, missing: int, free: int = 3) -> list[str]:
    """What is given up for a request that lacks so many blocks."""
    held.asked(free + missing)
    return held.to_give_up(free)


def held_for_10_s(count: int) -> tuple[HeldRequests, list[float]]:
    """So many requests of four blocks, one a second; and the time."""
    time = [0.0]
    held = HeldRequests(10.0, lambda: time[0])
    for second in range(count):
        time[0] = float(second)
        held.add(str(second), 4)
    return held, time


def test_each_is_held_for_a_while_in_any_case():
    held, time = held_for_10_s(3)
    assert given_up(held, 12) == []
    time[0] = 11.0
    assert given_up(held, 12) == ["0", "1"]
    time[0] = 12.0
    assert given_up(held, 12) == ["2"]


def test_no_more_are_given_up_than_are_needed_and_those_that_were_count_as_coming():
    held = HeldRequests(0.0)
    for name in "abcd":
        held.add(name, 4)
    assert given_up(held, 5) == ["a", "b"]
    assert given_up(held, 8) == []
    assert given_up(held, 9) == ["c"]
    for name in "abc":
        held.forget(name)
    assert given_up(held, 1) == ["d"]
    held.forget("never held")


def test_nothing_is_given_up_where_nothing_is_missing_or_nobody_waits():
    held = HeldRequests(0.0)
    held.add("a", 4)
    assert given_up(held, 0) == given_up(held, -3) == held.to_give_up(0) == []
    held.asked(9)
    held.served()
    assert held.to_give_up(0) == []


def test_a_pause_waits_for_each_for_a_while_and_then_for_none():
    held, time = held_for_10_s(2)
    assert held.to_give_up(9, is_paused=True) == []
    time[0] = 10.0
    assert held.to_give_up(9) == []
    assert held.to_give_up(9, is_paused=True) == ["0"]
    time[0] = 11.0
    assert held.to_give_up(9, is_paused=True) == ["1"]
    assert held.to_give_up(9, is_paused=True) == []
