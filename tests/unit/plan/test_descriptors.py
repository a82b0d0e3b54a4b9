"""Descriptor rows, and the indices that select from them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import LayoutError
from kvferry.plan import DescriptorRows, Runs, descriptor_indices, descriptor_rows
from kvferry.plan.descriptors import select_rows


def runs(count: int, length: int = 64, start: int = 0) -> Runs:
    steps = np.arange(count, dtype=np.uint64) * np.uint64(4096)
    return Runs(
        source=np.uint64(0x10000 + start) + steps,
        destination=np.uint64(0x90000 + start) + steps,
        length=length,
        source_page_stride=128,
        destination_page_stride=256,
    )


def rows(*pieces: Runs, source_pages: int = 5, destination_pages: int = 7) -> DescriptorRows:
    return descriptor_rows(
        pieces,
        source_pages=source_pages,
        destination_pages=destination_pages,
        source_device=1,
        destination_device=2,
    )


def test_a_row_is_a_run_repeated_over_the_pages():
    made = rows(runs(2), runs(1, length=32, start=8))
    assert made.source.tolist() == [
        [0x10000, 64, 1, 128, 5],
        [0x11000, 64, 1, 128, 5],
        [0x10008, 32, 1, 128, 5],
    ]
    assert made.destination[2].tolist() == [0x90008, 32, 2, 256, 7]
    assert made.source.dtype == made.destination.dtype == np.uint64
    assert made.piece_rows == (slice(0, 2), slice(2, 3))


def test_no_pieces_make_no_rows():
    made = rows()
    assert (made.source.shape, made.destination.shape, made.piece_rows) == ((0, 5), (0, 5), ())
    assert select_rows(made.piece_rows).tolist() == []


def test_selected_rows_are_the_pieces_rows_in_order():
    made = rows(runs(2), runs(3, length=32), runs(1, length=16))
    selected = select_rows([made.piece_rows[2], made.piece_rows[0]])
    assert selected.tolist() == [5, 0, 1]
    assert selected.dtype == np.int32
    assert made.source[selected, 1].tolist() == [16, 64, 64]


def test_indices_number_row_by_row_with_the_pages_innermost():
    indices = descriptor_indices(np.array([2, 0], np.int32), np.array([4, 1, 2]), pool_pages=5)
    assert indices.tolist() == [14, 11, 12, 4, 1, 2]
    assert indices.dtype == np.int32


@given(st.lists(st.integers(0, 9), min_size=1, unique=True), st.lists(st.integers(0, 6), min_size=1, unique=True))
def test_both_sides_number_the_same_descriptors_in_the_same_order(selected: list[int], pages: list[int]):
    chosen = np.array(selected, np.int32)
    here = descriptor_indices(chosen, np.array(pages), pool_pages=7)
    there = descriptor_indices(chosen, np.array(pages[::-1]), pool_pages=50)
    assert [(index // 7, index % 7) for index in here.tolist()] == [(row, page) for row in selected for page in pages]
    assert [index // 50 for index in there.tolist()] == [index // 7 for index in here.tolist()]
    assert len(set(here.tolist())) == len(here)


def test_no_pages_make_no_indices():
    assert len(descriptor_indices(np.array([1, 2], np.int32), np.array([], np.int64), pool_pages=5)) == 0


@pytest.mark.parametrize(
    ("side", "pages"), [("source", {"source_pages": 2**30}), ("receiver", {"destination_pages": 2**30})]
)
def test_more_descriptors_than_an_index_can_number_are_refused(side: str, pages: dict[str, int]):
    with pytest.raises(LayoutError, match=rf"2 runs a page in 1073741824 pages of the {side} .*use a smaller pool"):
        rows(runs(2), **pages)


def test_the_last_descriptor_that_an_index_can_number_is_numbered():
    made = rows(runs(1), source_pages=2**31 - 1)
    last = descriptor_indices(np.array([0], np.int32), np.array([2**31 - 2]), pool_pages=int(made.source[0, 4]))
    assert last.tolist() == [2**31 - 2]
    last = descriptor_indices(np.array([1], np.int32), np.array([2**30 - 2]), pool_pages=2**30 - 1)
    assert last.tolist() == [2 * (2**30 - 1) - 1]
