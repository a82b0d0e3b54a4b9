"""Time that a wire was busy: however writes overlap, bytes by it never exceed what the wire carries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.observe.busy import BusyTime

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


def measured(each: list[Interval]) -> BusyTime:
    """In the order in which things happen."""
    busy = BusyTime()
    events = sorted([(begin, 0) for begin, _ in each] + [(end, 1) for _, end in each])
    for now, is_end in events:
        if is_end:
            busy.end(now)
        else:
            busy.begin(now)
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


def test_a_write_that_is_told_of_late_began_when_it_did():
    busy = BusyTime()
    busy.begin(10.0)
    busy.end(12.0)
    busy.begin(11.0)  # the transport was posting while the other ended
    assert busy.end(13.0) == 1.0
    assert busy.total_s == 3.0


def test_nothing_counts_before_it_ends():
    busy = BusyTime()
    busy.begin(1.0)
    assert busy.total_s == 0.0
