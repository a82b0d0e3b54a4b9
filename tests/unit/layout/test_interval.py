"""Intervals and boxes: the laws that the planner builds on."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import LayoutError
from kvferry.layout import Box, Interval
from kvferry.layout.interval import covers, overlap, volume


@st.composite
def intervals(draw: st.DrawFn) -> Interval:
    start = draw(st.integers(0, 6))
    return Interval(start, draw(st.integers(start, 7)))


def boxes(axes: int) -> st.SearchStrategy[Box]:
    return st.tuples(*[intervals()] * axes)


def indices(interval: Interval) -> set[int]:
    return set(range(interval.start, interval.stop))


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(interval.start, interval.stop) for interval in box)))


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (-2, -1)])
def test_an_interval_that_runs_backwards_or_below_zero_is_refused(start: int, stop: int):
    with pytest.raises(LayoutError, match=rf"\[{start}, {stop}\) must satisfy 0 <= start <= stop"):
        Interval(start, stop)


def test_an_interval_prints_as_mathematics_and_is_false_when_empty():
    assert str(Interval(2, 5)) == "[2, 5)"
    assert (len(Interval(2, 5)), bool(Interval(2, 5)), bool(Interval(2, 2))) == (3, True, False)


@given(intervals(), intervals())
def test_overlap_is_the_intersection_of_the_indices(one: Interval, other: Interval):
    both = one.overlap(other)
    assert (indices(both) if both else set()) == indices(one) & indices(other)
    assert both == other.overlap(one)
    assert both is None or both


@given(intervals(), intervals())
def test_covers_is_the_subset_relation_for_what_is_not_empty(one: Interval, other: Interval):
    if other:
        assert one.covers(other) == (indices(other) <= indices(one))


@given(boxes(2), boxes(2))
def test_boxes_overlap_in_the_elements_that_both_have(one: Box, other: Box):
    both = overlap(one, other)
    assert (elements(both) if both else set()) == elements(one) & elements(other)


@given(boxes(3))
def test_volume_counts_the_elements(box: Box):
    assert volume(box) == len(elements(box))


def test_boxes_of_different_axes_are_never_compared_in_part():
    short, long = (Interval(0, 2),), (Interval(0, 2), Interval(0, 2))
    for compare in (overlap, covers):
        with pytest.raises(ValueError, match="zip"):
            compare(short, long)
