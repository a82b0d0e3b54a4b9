"""The rules for handing in chunks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import ChunkError, PageError
from kvferry.layout import PageGroup
from kvferry.plan.requests.chunks import Chunk, ChunkPart, ChunkSequence, why_impossible
from kvferry.plan.requests.page_numbers import GroupPages, checked_pages

KV = PageGroup(name="kv", page_tokens=16, num_pages=10, has_slots=False, window_tokens=None)
WINDOW = PageGroup(name="window", page_tokens=16, num_pages=6, has_slots=False, window_tokens=64)
STATE = PageGroup(name="state", page_tokens=1, num_pages=4, has_slots=True, window_tokens=None)


def chunk(sequence: ChunkSequence, pages: Any, *, start: int | None = None, is_last: bool = False) -> Chunk:
    return sequence.hand_in(pages, start=start, is_last=is_last, aux=None, now=0.0).chunk()


def only(made: Chunk) -> ChunkPart:
    (part,) = made.parts
    return part


def test_chunks_are_numbered_and_follow_each_other():
    sequence = ChunkSequence(7, [KV])
    made = [chunk(sequence, [4, 2]), chunk(sequence, [])]
    handed_in = sequence.hand_in([9], start=2, is_last=True, aux=b"token", now=7.5)
    assert handed_in.submitted_at == 7.5
    made.append(handed_in.chunk())
    assert [(one.number, only(one).start, only(one).stop, one.is_last) for one in made] == [
        (0, 0, 2, False),
        (1, 2, 2, False),
        (2, 2, 3, True),
    ]
    assert [only(one).pages.tolist() for one in made] == [[4, 2], [], [9]]
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


def test_a_pool_of_absurd_size_takes_no_memory():
    vast = [2**40, 3, 2**41 - 1]
    assert checked_pages(vast, pool_pages=2**41, where="here").tolist() == vast
    with pytest.raises(PageError, match=f"here: page {2**40} appears 2 times"):
        checked_pages([*vast, 2**40], pool_pages=2**41, where="here")


def test_a_chunk_after_the_last_one_is_refused():
    sequence = ChunkSequence(7, [KV])
    chunk(sequence, [], is_last=True)
    with pytest.raises(ChunkError, match="room 7: a chunk after the last one"):
        chunk(sequence, [1])


def test_the_first_chunk_may_start_behind_a_prefix():
    sequence = ChunkSequence(7, [KV])
    assert (only(chunk(sequence, [1, 2], start=5)).stop, only(chunk(sequence, [3])).start) == (7, 7)


@pytest.mark.parametrize("start", [0, 1, 3])
def test_a_gap_or_a_step_back_is_refused(start: int):
    sequence = ChunkSequence(7, [KV])
    chunk(sequence, [1, 2])
    with pytest.raises(ChunkError, match=f"starts at page {start} of the request where page 2 is next"):
        chunk(sequence, [3], start=start)


def test_no_chunk_starts_before_the_request():
    with pytest.raises(ChunkError, match="starts at page -1"):
        chunk(ChunkSequence(7, [KV]), [1], start=-1)


@pytest.mark.parametrize("start", [1.0, "1", [1]])
def test_a_start_that_is_no_integer_is_refused(start: Any):
    with pytest.raises(ChunkError, match=r"room 7: start is .* it must be an integer"):
        chunk(ChunkSequence(7, [KV]), [1], start=start)
    assert type(only(chunk(ChunkSequence(7, [KV]), [1], start=np.int32(3))).start) is int


def test_a_refused_chunk_changes_nothing():
    sequence = ChunkSequence(7, [KV])
    for pages in ([1.0], [2**70], [0.5], [[1]], np.zeros((1, 1), np.int64), np.zeros(1)):
        with pytest.raises(PageError):
            chunk(sequence, pages, start=4, is_last=True)
        with pytest.raises(PageError):
            chunk(sequence, pages, is_last=True)
    with pytest.raises(ChunkError):
        chunk(sequence, [1], start=-3, is_last=True)
    assert not sequence.is_complete
    first = chunk(sequence, [1, 2])
    assert (first.number, only(first).start) == (0, 0)
    with pytest.raises(ChunkError):
        chunk(sequence, [3], start=9, is_last=True)
    with pytest.raises(PageError):
        chunk(sequence, [-3.5], is_last=True)
    last = chunk(sequence, [3], is_last=True)
    assert (last.number, only(last).start, sequence.is_complete) == (1, 2, True)


def test_a_single_element_may_fill_the_whole_pool():
    assert checked_pages(range(1000), pool_pages=1000, where="here").size == 1000


# ---- several groups --------------------------------------------------------------------------------------------------


def parts(made: Chunk) -> list[tuple[str, int, list[int]]]:
    return [(part.group, part.start, part.pages.tolist()) for part in made.parts]


def test_every_group_counts_its_own_pages():
    sequence = ChunkSequence(7, [KV, WINDOW, STATE])
    assert parts(chunk(sequence, {"kv": [4, 2], "window": [0]})) == [("kv", 0, [4, 2]), ("window", 0, [0])]
    assert parts(chunk(sequence, {"window": [5]})) == [("window", 1, [5])]
    made = chunk(sequence, {"state": [3], "kv": GroupPages([9], start=2), "window": GroupPages([])}, is_last=True)
    assert parts(made) == [("state", 0, [3]), ("kv", 2, [9]), ("window", 2, [])]
    assert sequence.is_complete


def test_a_mapping_may_be_empty_and_may_name_the_only_group():
    sequence = ChunkSequence(7, [KV])
    assert parts(chunk(sequence, {"kv": [1]})) == [("kv", 0, [1])]
    assert parts(chunk(sequence, {})) == []
    assert parts(chunk(sequence, [2], is_last=True)) == [("kv", 1, [2])]


def test_groups_begin_behind_a_prefix_each_in_its_own_chunk():
    late = PageGroup(name="late", page_tokens=16, num_pages=10, has_slots=False, window_tokens=None)
    sequence = ChunkSequence(7, [KV, WINDOW, late])
    assert parts(chunk(sequence, {"kv": GroupPages([1], start=5)})) == [("kv", 5, [1])]
    assert parts(chunk(sequence, {"late": GroupPages([1], start=6)})) == [("late", 6, [1])]
    assert parts(chunk(sequence, {"window": GroupPages([1], start=4)})) == [("window", 4, [1])]
    with pytest.raises(ChunkError, match=r"room 7, group 'kv': a chunk starts at page 7 .* where page 6 is next"):
        chunk(sequence, {"kv": GroupPages([2], start=7)})


def test_only_a_window_may_leave_pages_out():
    sequence = ChunkSequence(7, [KV, WINDOW])
    chunk(sequence, {"kv": [1], "window": [1]})
    assert parts(chunk(sequence, {"window": GroupPages([2], start=3)})) == [("window", 3, [2])]
    for group, start in (("window", 2), ("window", -1), ("kv", 0), ("kv", 2)):
        with pytest.raises(ChunkError, match=f"group {group!r}: a chunk starts at page {start} of the request"):
            chunk(sequence, {group: GroupPages([3], start=start)})
    assert parts(chunk(sequence, {"window": [3], "kv": [2]})) == [("window", 4, [3]), ("kv", 1, [2])]


@pytest.mark.parametrize("slots", [[0, 1], GroupPages([0], start=1)])
def test_a_request_has_one_slot(slots: Any):
    with pytest.raises(PageError, match="room 7, group 'state': 2 slots for one request: hand in its slot once"):
        chunk(ChunkSequence(7, [KV, STATE]), {"state": slots})


def test_a_slot_is_handed_in_once():
    sequence = ChunkSequence(7, [KV, STATE])
    chunk(sequence, {"kv": [1], "state": [3]})
    with pytest.raises(PageError, match="hand in its slot once, when the state is final"):
        chunk(sequence, {"state": [3]})
    assert parts(chunk(sequence, {"kv": [2], "state": []}, is_last=True)) == [("kv", 1, [2]), ("state", 1, [])]


def test_pages_are_checked_against_the_pool_of_their_group():
    """Not when they are handed in: that is where a scheduler waits."""
    for group, pages in (("kv", 10), ("window", 6), ("state", 4)):
        for wrong in ([pages], [-1], [2**62]):
            made = chunk(ChunkSequence(7, [KV, WINDOW, STATE]), {group: wrong})
            expected = f"here: page {wrong[0]} at position 0 is out of range: the pool has {pages} pages"
            assert str(why_impossible(made, where="here")) == expected
        made = chunk(ChunkSequence(7, [KV, WINDOW, STATE]), {group: [pages - 1]})
        assert why_impossible(made, where="here") is None
        assert checked_pages([pages - 1], pool_pages=pages, where="here").tolist() == [pages - 1]


def test_impossible_pages_are_named_with_their_group_where_there_are_several():
    made = chunk(ChunkSequence(7, [KV, WINDOW]), {"kv": [1], "window": [0, 3, 3]})
    assert "room 7, group 'window': page 3 appears 2 times" in str(why_impossible(made, where="room 7"))
    made = chunk(ChunkSequence(7, [KV]), [1, 3, 10, 11])
    expected = "room 7: page 10 at position 2 is out of range: the pool has 10 pages"
    assert str(why_impossible(made, where="room 7")) == expected


# ---- handing in ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pages", [np.array([4, 2, 7]), np.array([4, 0, 2, 0, 7, 0])[::2], np.array([7, 2, 4])[::-1]])
def test_what_was_handed_in_is_a_copy_that_the_caller_cannot_change(pages: Any):
    sequence = ChunkSequence(7, [KV])
    handed_in = sequence.hand_in(pages, start=None, is_last=False, aux=None, now=0.0)
    pages[:] = 0
    assert only(handed_in.chunk()).pages.tolist() == [4, 2, 7]
    assert only(handed_in.chunk()).pages.dtype == np.int64


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=6))
def test_every_way_to_write_pages_is_counted_alike(chunks: list[list[int]]):
    """Arrays of int64 take a shorter way than the others."""
    ways: list[Any] = [
        lambda pages, start: (np.array(pages, np.int64), None),
        lambda pages, start: (pages, None),
        lambda pages, start: (np.array(pages, np.int64), start),
        lambda pages, start: ({"kv": np.array(pages, np.int32)}, None),
        lambda pages, start: ({"kv": GroupPages(pages, start)}, None),
    ]
    found = []
    for way in ways:
        sequence, next_page = ChunkSequence(7, [KV]), 0
        made = []
        for number, pages in enumerate(chunks):
            given_pages, start = way(pages, next_page)
            one = chunk(sequence, given_pages, start=start, is_last=number == len(chunks) - 1)
            made.append((one.number, one.is_last, only(one).start, only(one).stop, only(one).pages.tolist()))
            next_page += len(pages)
        found.append(made)
    assert all(each == found[0] for each in found)


def test_both_ways_in_turn_count_on():
    sequence = ChunkSequence(7, [KV])
    starts = [
        only(chunk(sequence, pages, start=start)).start
        for pages, start in (
            ([1, 2], 3),
            (np.array([3]), None),
            ([4], None),
            (np.array([5, 6]), 7),
            (np.array([7]), None),
        )
    ]
    assert starts == [3, 5, 6, 7, 9]
    with pytest.raises(ChunkError, match="page 9 of the request where page 10 is next"):
        chunk(sequence, np.array([1]), start=9)


@pytest.mark.parametrize(
    ("pages", "start", "says"),
    [
        ([1], None, r"pages are in groups \['kv', 'state'\]: hand in a mapping"),
        ({"kv": [1], "swa": [2]}, None, r"no group \['swa'\]: this rank's pages are in groups \['kv', 'state'\]"),
        ({"kv": [1]}, 0, r"start 0 beside pages by group: say it with GroupPages\(pages, start\)"),
        ({"kv": {"kv": [1]}}, None, "flat sequence of integers"),
    ],
)
def test_groups_are_named_as_in_the_layout(pages: Any, start: int | None, says: str):
    with pytest.raises(PageError, match=f"room 7.*{says}"):
        chunk(ChunkSequence(7, [KV, STATE]), pages, start=start)


def test_a_chunk_of_which_one_group_is_refused_changes_nothing_of_the_others():
    sequence = ChunkSequence(7, [KV, WINDOW, STATE])
    for wrong in ({"state": [0.5]}, {"window": GroupPages([1], start=-1)}, {"state": [0, 1]}):
        with pytest.raises((PageError, ChunkError)):
            chunk(sequence, {"kv": [1, 2], **wrong}, is_last=True)
    made = chunk(sequence, {"kv": GroupPages([3], start=4), "window": [1], "state": [0]})
    assert (made.number, parts(made)) == (0, [("kv", 4, [3]), ("window", 0, [1]), ("state", 0, [0])])
