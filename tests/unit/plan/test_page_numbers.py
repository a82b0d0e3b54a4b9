"""Page numbers as they travel and are kept: as runs where that is smaller, and counted before they are written out."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.errors import MessageError, PageError
from kvferry.plan.requests.page_numbers import MAX_PAGES, PageNumbers, checked_pages

INT64 = st.integers(-(2**63), 2**63 - 1)


def packed(pages: Sequence[int]) -> PageNumbers:
    return PageNumbers.of(np.array(pages, np.int64))


def runs(*each: tuple[int, int]) -> bytes:
    return b"".join(struct.pack("<qq", *run) for run in each)


@st.composite
def lists_of_pages(draw: st.DrawFn) -> list[int]:
    """Runs of neighbours, some of one page, some that meet or overlap; and numbers without any order."""
    made: list[int] = []
    for first, count in draw(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=6)):
        made += range(first, first + count)
    return draw(st.just(made) | st.lists(INT64 | st.integers(0, 60), max_size=40))


@pytest.mark.parametrize(
    ("pages", "data"),
    [
        ([], b""),
        ([7], struct.pack("<q", 7)),
        ([7, 8], struct.pack("<qq", 7, 8)),  # a run is no smaller
        ([7, 8, 9], runs((7, 3))),
        ([4, 5, 6, 0, 1, 2], runs((4, 3), (0, 3))),
        ([9, 8, 7], struct.pack("<qqq", 9, 8, 7)),
        ([1, 2, 9, 4, 6], struct.pack("<qqqqq", 1, 2, 9, 4, 6)),
        (range(100_000, 100_000 + MAX_PAGES), runs((100_000, MAX_PAGES))),
    ],
    ids=str,
)
def test_pages_travel_as_runs_where_that_is_smaller(pages: Sequence[int], data: bytes):
    made = packed(pages)
    assert (made.count, made.data) == (len(pages), data)
    assert made.numbers().tolist() == list(pages)


def test_pages_travel_in_the_same_order_of_bytes_from_every_machine():
    assert PageNumbers.of(np.array([3, 1, 2], ">i8")) == packed([3, 1, 2])


@given(lists_of_pages())
@example([2**63 - 1, -(2**63)])
def test_pages_come_back_as_they_were_packed(pages: list[int]):
    made = packed(pages)
    assert len(made.data) <= 8 * len(pages)
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=PageNumbers)
    assert back == made
    assert len(back) == len(pages)
    assert back.numbers().dtype == np.int64
    assert back.numbers().tolist() == pages


@given(lists_of_pages(), st.data())
def test_the_page_at_a_position_is_that_of_the_list(pages: list[int], data: st.DataObject):
    order = data.draw(st.lists(st.integers(0, len(pages) - 1)) if pages else st.just([]))
    assert packed(pages)[np.array(order, np.int64)].tolist() == [pages[position] for position in order]
    with pytest.raises(IndexError):
        packed(pages)[np.array([*order, len(pages)])]


def test_only_what_lies_between_the_positions_is_written_out(monkeypatch: pytest.MonkeyPatch):
    made = packed([page for first in range(0, 10_000, 100) for page in range(first, first + 50)])
    asked: list[int] = []

    def counted(firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        asked.append(int(counts.sum()))
        return np.concatenate([np.arange(first, first + count) for first, count in zip(firsts, counts, strict=True)])

    monkeypatch.setattr("kvferry.plan.requests.page_numbers.ascending_ranges", counted)
    assert made[np.array([2049, 2050])].tolist() == [4049, 4100]
    assert made[np.array([120, 130])].tolist() == [220, 230]
    assert asked == [2, 11], "of the ends of two runs, and of the middle of one"


@given(lists_of_pages(), st.integers(0, 70))
@example([5, 6, 7, 5], 70)
@example([10, 11, 12, 13, 8, 9, 10, 11, 20, 21, 22], 70)
@example([1, 2, 3, 68, 69, 70, 71], 70)
@example([-2, -1, 0, 1], 70)
def test_pages_are_refused_as_they_are_in_a_plain_list(pages: list[int], pool_pages: int):
    """The same pages, the same position, the same sentence, whether or not they travel as runs."""

    def verdict(check: Callable[[], object]) -> str:
        try:
            check()
        except PageError as error:
            return str(error)
        return "fine"

    plain = verdict(lambda: checked_pages(pages, pool_pages=pool_pages, where="room 7"))
    assert verdict(lambda: packed(pages).check(pool_pages=pool_pages, where="room 7")) == plain


@pytest.mark.parametrize(
    ("count", "data", "says"),
    [
        (2, b"\0" * 15, "15 bytes of page numbers are neither 2 numbers"),
        (1, b"", "0 bytes"),
        (0, runs((0, 0)), "16 bytes of page numbers are neither 0"),
        (2, b"\0" * 24, "24 bytes"),
        (5, b"\0" * 24, "24 bytes"),
        (3, runs((0, 4)), "1 runs of 4 to 4 pages are not 3"),
        (3, runs((0, 2)), "1 runs of 2 to 2 pages are not 3"),
        (7, runs((0, 8), (9, -1)), "2 runs of -1 to 8 pages are not 7"),
        (7, runs((0, 7), (9, 0)), "2 runs of 0 to 7 pages are not 7"),
        (MAX_PAGES, runs((0, 2**40)), f"1 runs of {2**40} to {2**40} pages are not {MAX_PAGES}"),
        (8, runs((0, 2**63 - 1), (0, 2**63 - 1), (0, 10)), f"to {2**63 - 1} pages are not 8"),
    ],
)
def test_what_are_not_so_many_pages_is_refused_before_any_is_written_out(
    count: int, data: bytes, says: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("kvferry.plan.requests.page_numbers.ascending_ranges", lambda *_: pytest.fail("written out"))
    sent = msgspec.msgpack.encode([count, data])
    with pytest.raises(MessageError, match=says):
        msgspec.msgpack.decode(sent, type=PageNumbers)


def test_more_pages_than_a_list_may_have_are_refused():
    for count in (-1, MAX_PAGES + 1, 2**40):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode([count, runs((0, count))]), type=PageNumbers)


@given(st.integers(0, 30), st.lists(st.tuples(INT64 | st.integers(0, 20), INT64 | st.integers(0, 20)), max_size=5))
def test_whatever_comes_is_pages_or_refused(count: int, sent: list[tuple[int, int]]):
    try:
        made = PageNumbers(count, runs(*sent))
        made.check(pool_pages=50, where="room 7")
    except (MessageError, PageError):
        return
    assert len(made.numbers()) == count
    assert len(set(made.numbers().tolist())) == count
