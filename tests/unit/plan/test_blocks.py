"""How the runs of a block lie: fewer loops, but the same bytes in the same order."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.plan.packing import BlockShape, block_shape

Loops = tuple[tuple[int, int], ...]


def offsets(loops: Loops, length: int) -> list[int]:
    """Where every byte of a block lies, in the order in which it is packed."""
    return [
        sum(index * stride for index, (_, stride) in zip(indices, loops, strict=True)) + byte
        for indices in product(*(range(count) for count, _ in loops))
        for byte in range(length)
    ]


@pytest.mark.parametrize(
    ("loops", "length", "melted"),
    [
        ((), 8, BlockShape((), 8)),
        (((4, 8),), 8, BlockShape((), 32)),
        (((4, 16),), 8, BlockShape(((4, 16),), 8)),
        (((3, 32), (4, 8)), 8, BlockShape((), 96)),
        (((3, 64), (4, 16)), 8, BlockShape(((12, 16),), 8)),
        (((3, 100), (4, 8)), 8, BlockShape(((3, 100),), 32)),
        (((3, 100), (4, 16)), 8, BlockShape(((3, 100), (4, 16)), 8)),
        (((2, 400), (3, 100), (4, 16)), 8, BlockShape(((2, 400), (3, 100), (4, 16)), 8)),
        (((2, 300), (3, 100), (4, 16)), 8, BlockShape(((6, 100), (4, 16)), 8)),
        (((1, 999), (4, 8), (1, 7)), 8, BlockShape((), 32)),
        # Memory that is read in another order than it lies in.
        (((4, 8), (3, 32)), 8, BlockShape(((4, 8), (3, 32)), 8)),
    ],
)
def test_loops_melt_where_one_goes_on_where_the_one_inside_ends(loops: Loops, length: int, melted: BlockShape):
    assert block_shape(loops, length) == melted


def test_runs_and_bytes_are_counted_over_all_loops():
    shape = BlockShape(((2, 400), (3, 100)), 16)
    assert (shape.num_runs, shape.num_bytes) == (6, 96)
    assert (BlockShape((), 16).num_runs, BlockShape((), 16).num_bytes) == (1, 16)


def test_a_generator_of_loops_will_do():
    assert block_shape(((count, 8) for count in (1, 4)), 8) == BlockShape((), 32)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 40)), max_size=4).map(tuple),
    st.integers(1, 5),
)
def test_the_bytes_and_their_order_stay_the_same(loops: Loops, length: int):
    shape = block_shape(loops, length)
    assert offsets(shape.loops, shape.length) == offsets(loops, length)
    assert shape.num_bytes == prod(count for count, _ in loops) * length


@given(
    st.permutations(range(4)),
    st.lists(st.integers(1, 4), min_size=4, max_size=4),
    st.lists(st.booleans(), min_size=4, max_size=4),
    st.integers(1, 5),
)
def test_no_two_loops_are_left_that_one_could_be(order: list[int], counts: list[int], padded: list[bool], length: int):
    """Of a tensor's dimensions, in any order, any of them padded."""
    strides, step = {}, length
    for dimension in order:
        strides[dimension] = step
        step *= counts[dimension] + padded[dimension]
    shape = block_shape([(counts[dimension], strides[dimension]) for dimension in range(4)], length)
    assert all(count > 1 for count, _ in shape.loops)
    for (_, outer), (count, inner) in pairwise(shape.loops):
        assert outer != count * inner
    if shape.loops:
        assert shape.loops[-1][1] != shape.length
