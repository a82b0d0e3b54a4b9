"""Which units make a row: both sides cut alike, at pages, and never into more rows than a message can hold."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.plan.requests.moved_blocks import row_bounds, row_bytes_of


def bounds(pages: list[int], unit_bytes: int = 512, row_bytes: int = 512) -> list[int]:
    found: list[int] = row_bounds(np.array(pages, np.int64), unit_bytes=unit_bytes, row_bytes=row_bytes).tolist()
    return found


def test_a_row_is_a_page():
    assert bounds([7, 7, 3, 9, 9, 9]) == [0, 2, 3, 6]
    assert bounds([5]) == [0, 1]
    assert bounds([5, 5]) == [0, 2]


def test_small_pages_share_a_row():
    assert bounds([1, 2, 3, 4, 5, 6, 7], unit_bytes=128) == [0, 4, 7]
    assert bounds([1, 1, 1, 2, 2, 2], unit_bytes=256) == [0, 3, 6]
    assert bounds([1, 2, 3], unit_bytes=1) == [0, 3]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=30), st.integers(1, 600), st.integers(0, 2000))
def test_rows_cover_all_units_cut_only_between_pages_and_are_few(counts: list[int], unit_bytes: int, row_bytes: int):
    pages = np.repeat(np.arange(len(counts)) * 3 % 7 + 10 * np.arange(len(counts)), counts)
    found = bounds(pages.tolist(), unit_bytes, row_bytes)
    assert (found[0], found[-1]) == (0, len(pages))
    assert all(before < after for before, after in pairwise(found))
    assert all(pages[cut - 1] != pages[cut] for cut in found[1:-1])
    assert len(found) - 1 <= len(pages) * unit_bytes // max(row_bytes, 1) + 1


@pytest.mark.parametrize(
    ("num_bytes", "row_bytes"), [(1, 512), (32 << 20, 512), (1 << 30, 16384), (2**34 + 1, 2**18 + 1)]
)
def test_a_message_has_a_digest_of_at_least_so_many_bytes(num_bytes: int, row_bytes: int):
    assert row_bytes_of(num_bytes) == row_bytes
