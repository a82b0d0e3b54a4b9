"""The rules for handing in chunks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvferry.errors import ChunkError, PageError
from kvferry.protocol.chunks import Chunk, ChunkSequence, checked_pages


def chunk(sequence: ChunkSequence, pages: Any, *, start: int | None = None, is_last: bool = False) -> Chunk:
    return sequence.chunk(pages, start=start, is_last=is_last, aux=None)


def test_chunks_are_numbered_and_follow_each_other():
    sequence = ChunkSequence(7, pool_pages=10)
    made = [chunk(sequence, [4, 2]), chunk(sequence, []), sequence.chunk([9], start=2, is_last=True, aux=b"token")]
    assert [(one.number, one.start, one.stop, one.is_last) for one in made] == [
        (0, 0, 2, False),
        (1, 2, 2, False),
        (2, 2, 3, True),
    ]
    assert [one.pages.tolist() for one in made] == [[4, 2], [], [9]]
    assert [one.aux for one in made] == [None, None, b"token"]
    assert sequence.is_complete


@pytest.mark.parametrize(
    "pages",
    [
        [3, 1],
        (3, 1),
        np.array([3, 1], np.int32),
        np.array([3, 1], np.uint64),
        np.array([3, 0, 1])[::2],
        range(3, 0, -2),
    ],
)
def test_pages_of_any_integer_kind_become_int64(pages: Any):
    checked = checked_pages(pages, pool_pages=4, where="here")
    assert checked.dtype == np.int64
    assert checked.tolist() == [3, 1]


def test_pages_are_a_copy_that_the_caller_cannot_change():
    mine = np.array([1, 2, 3])
    checked = checked_pages(mine, pool_pages=4, where="here")
    mine[:] = 0
    assert checked.tolist() == [1, 2, 3]


@pytest.mark.parametrize("pages", [[], (), np.array([], np.float64), np.array([], np.int64)])
def test_no_pages_are_pages_too(pages: Any):
    assert checked_pages(pages, pool_pages=1, where="here").tolist() == []


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([0, 10, 11], "page 10 at position 1 is out of range: the pool has 10 pages"),
        ([0, 1, -1], "page -1 at position 2 is out of range"),
        ([2**63 - 1], "page 9223372036854775807 at position 0"),
        (np.array([2**64 - 1], np.uint64), "page 18446744073709551615 at position 0 is out of range"),
        ([2**70], "integers"),
        ([5, 3, 5], "page 5 appears 2 times"),
        ([1, 2, 2, 2, 1], "page 1 appears 2 times"),
        ([1.0, 2.0], "not float64"),
        ([True, False], "not bool"),
        (["1"], "integers"),
        ([[1, 2], [3, 4]], r"shape \(2, 2\)"),
        ([[1, 2], [3]], "flat sequence of integers"),
        ([[]], r"shape \(1, 0\)"),
        (3, r"shape \(\)"),
        (None, "flat sequence of integers"),
        ({1, 2}, "flat sequence of integers"),
        (b"\x01\x02", "flat sequence of integers"),
    ],
)
def test_impossible_pages_are_refused(pages: Any, message: str):
    with pytest.raises(PageError, match=f"^room 7: .*{message}"):
        checked_pages(pages, pool_pages=10, where="room 7")


def test_a_chunk_after_the_last_one_is_refused():
    sequence = ChunkSequence(7, pool_pages=10)
    chunk(sequence, [], is_last=True)
    with pytest.raises(ChunkError, match="room 7: a chunk after the last one"):
        chunk(sequence, [1])


def test_the_first_chunk_may_start_behind_a_prefix():
    sequence = ChunkSequence(7, pool_pages=10)
    assert (chunk(sequence, [1, 2], start=5).stop, chunk(sequence, [3]).start) == (7, 7)


@pytest.mark.parametrize("start", [0, 1, 3])
def test_a_gap_or_a_step_back_is_refused(start: int):
    sequence = ChunkSequence(7, pool_pages=10)
    chunk(sequence, [1, 2])
    with pytest.raises(ChunkError, match=f"starts at page {start} of the request where page 2 is next"):
        chunk(sequence, [3], start=start)


def test_no_chunk_starts_before_the_request():
    with pytest.raises(ChunkError, match="starts at page -1"):
        chunk(ChunkSequence(7, pool_pages=10), [1], start=-1)


def test_a_refused_chunk_changes_nothing():
    sequence = ChunkSequence(7, pool_pages=10)
    for pages in ([10], [-1], [0.5], [[1]]):
        with pytest.raises(PageError):
            chunk(sequence, pages, start=4, is_last=True)
    with pytest.raises(ChunkError):
        chunk(sequence, [1], start=-3, is_last=True)
    assert not sequence.is_complete
    first = chunk(sequence, [1, 2])
    assert (first.number, first.start) == (0, 0)
    with pytest.raises(ChunkError):
        chunk(sequence, [3], start=9, is_last=True)
    with pytest.raises(PageError):
        chunk(sequence, [-3], is_last=True)
    last = chunk(sequence, [3], is_last=True)
    assert (last.number, last.start, sequence.is_complete) == (1, 2, True)


def test_a_single_element_may_fill_the_whole_pool():
    assert checked_pages(range(1000), pool_pages=1000, where="here").size == 1000
