"""Time that a wire was busy: however writes overlap, bytes by it never exceed what the wire carries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.observe.records import BusyTime

Interval = tuple[float, float]

intervals = st.lists(
    st.tuples(st.integers(0, 1000), st.integers(0, 200)).map(lambda each: (each[0], each[0] + each[1])),
    min_size=1,
    max_size=30,
)


def union(each: list[Interval]) -> float:
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(each):
        if end > reached:
            total += end - max(begin, reached)
            reached = end
    return total


def measured(each: list[Interval], **options: int) -> BusyTime:
    """In the order in which they are told."""
    busy = BusyTime(**options)
    for begin, end in each:
        busy.add(begin, end)
    return busy


@given(intervals)
def test_it_is_the_union_of_the_intervals(each: list[Interval]):
    assert measured(each).total_s == pytest.approx(union(each))


@given(intervals, st.floats(1.0, 1e12))
def test_no_throughput_exceeds_the_wire(each: list[Interval], wire_bytes_per_s: float):
    """Writes share a wire: whatever share each gets, all together move no more than it carries."""
    carried = union(each) * wire_bytes_per_s
    busy_s = measured(each).total_s
    assert carried <= busy_s * wire_bytes_per_s * (1 + 1e-9)
    added_up = sum(end - begin for begin, end in each)
    assert busy_s <= added_up + 1e-9


@given(intervals, st.integers(1, 4))
def test_with_a_short_memory_it_is_rather_too_long(each: list[Interval], most: int):
    busy_s = measured(each, most_intervals=most).total_s
    assert union(each) <= busy_s + 1e-9
    assert busy_s <= sum(end - begin for begin, end in each) + 1e-9


def test_memory_is_bounded():
    busy = BusyTime(most_intervals=8)
    for begin in range(1000):
        assert busy.add(2.0 * begin, 2.0 * begin + 1.0) == 1.0
        assert len(busy.begins) == len(busy.ends) <= 8


def test_only_what_is_new_counts():
    busy = BusyTime()
    assert busy.add(10.0, 12.0) == 2.0
    assert busy.add(11.0, 13.0) == 1.0
    assert busy.add(5.0, 20.0) == 12.0, "what is told of late"
    assert busy.add(6.0, 7.0) == 0.0
    assert busy.total_s == 15.0
