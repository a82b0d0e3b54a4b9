"""What is given up of the requests that are held, when vLLM lacks blocks."""

from __future__ import annotations

from kvferry.engines.vllm.holding import HeldRequests


def test_each_is_held_for_a_while_in_any_case():
    time = [0.0]
    held = HeldRequests(10.0, lambda: time[0])
    for second in range(3):
        time[0] = float(second)
        held.add(str(second), 4)
    assert held.to_give_up(12) == []
    time[0] = 11.0
    assert held.to_give_up(12) == ["0", "1"]
    time[0] = 12.0
    assert held.to_give_up(12) == ["2"]


def test_no_more_are_given_up_than_are_needed_and_those_that_were_count_as_coming():
    held = HeldRequests(0.0)
    for name in "abcd":
        held.add(name, 4)
    assert held.to_give_up(5) == ["a", "b"]
    assert held.to_give_up(8) == []
    assert held.to_give_up(9) == ["c"]
    for name in "abc":
        held.forget(name)
    assert held.to_give_up(1) == ["d"]
    held.forget("d")
    held.forget("never held")
    assert not len(held)


def test_nothing_is_given_up_where_nothing_is_missing():
    held = HeldRequests(0.0)
    held.add("a", 4)
    assert held.to_give_up(0) == held.to_give_up(-3) == []
