"""What addresses have in common, and arrays over memory that is somebody else's."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.plan.packing import BlockShape
from kvferry.staging.gpu import MOST_PIECES, by_alignment
from kvferry.staging.kernels import array_at, common_alignment, spread

STARTS = [4096, 8192]
SHAPE = BlockShape(((2, 2048), (16, 256)), 64)


@pytest.mark.parametrize(
    ("starts", "shape", "address", "expected"),
    [
        (STARTS, SHAPE, 1 << 20, 16),
        ([4096, 8200], SHAPE, 1 << 20, 8),
        ([4097], SHAPE, 1 << 20, 1),
        (STARTS, SHAPE, (1 << 20) + 12, 4),
        (STARTS, BlockShape(((2, 2048), (16, 258)), 64), 1 << 20, 2),
        (STARTS, BlockShape(((2, 2052), (16, 256)), 64), 1 << 20, 4),
        (STARTS, BlockShape(SHAPE.loops, 63), 1 << 20, 1),
        ([], SHAPE, 1 << 20, 16),
    ],
)
def test_words_are_no_larger_than_every_address_and_length_allows(
    starts: list[int], shape: BlockShape, address: int, expected: int
):
    addresses = np.array(starts, np.int64)
    assert common_alignment(addresses, shape, address, 16) == expected
    assert common_alignment(addresses, shape, address, 8) == min(expected, 8)


@pytest.mark.parametrize(
    ("places", "length", "pieces"),
    [
        ([0, 4, 8], 16, [(0, 3, 16)]),
        ([], 16, [(0, 0, 16)]),
        ([0, 4, 8.25, 12, 16], 16, [(0, 2, 16), (2, 3, 4), (3, 5, 16)]),
        ([0, 4, 8.25, 12, 16], 132, [(0, 5, 4)]),  # the length allows no more anyway
        ([0.5, 1.25, 4], 16, [(0, 2, 4), (2, 3, 16)]),
        ([0.5, 1.5], 16, [(0, 2, 8)]),
        ([0, 1.0625] * MOST_PIECES, 16, [(0, 2 * MOST_PIECES, 1)]),  # too many launches
    ],
    ids=str,
)
def test_blocks_that_begin_at_worse_places_are_launched_apart(
    places: list[float], length: int, pieces: list[tuple[int, int, int]]
):
    starts = np.array([4096 + int(place * 16) for place in places], np.int64)
    assert by_alignment(starts, BlockShape((), length), 1 << 20) == pieces


def test_outer_loops_are_taken_apart_block_by_block():
    assert spread(np.array([100, 0]), ((2, 10), (3, 1))).tolist() == [100, 101, 102, 110, 111, 112, 0, 1, 2, 10, 11, 12]
    assert spread(np.array([7]), ()).tolist() == [7]


def test_an_array_over_memory_shares_it():
    memory = np.arange(8, dtype=np.int32)
    there = array_at(memory.ctypes.data, (2, 2), "<i4", (16, 8))
    assert there.tolist() == [[0, 2], [4, 6]]
    there[1, 1] = -1
    assert memory[6] == -1
