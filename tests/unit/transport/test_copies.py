"""From rows and indices to ranges, against an oracle that goes byte by byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import TransportError
from kvferry.plan.descriptors import RowArray
from kvferry.transport import Copies, copies, ranges
from kvferry.transport.copies import copies_between, list_of_rows

PEER = "there"


def bytes_of(rows: RowArray, index: int) -> range:
    """The addresses of a descriptor's bytes, counted through row by row: nothing of what is tested is used."""
    for address, length, _, stride, count in rows.tolist():
        if index < count:
            return range(address + index * stride, address + index * stride + length)
        index -= count
    raise AssertionError("no such descriptor")


def moved(some: Copies) -> list[tuple[int, int]]:
    """Every byte that is copied, in order: from where, to where."""
    return [(source + byte, destination + byte) for source, destination, length in some for byte in range(length)]


def ranges_of(pairs: list[tuple[int, int]], lengths: list[int]) -> list[list[int]]:
    """The fewest ranges: a new one where a descriptor begins that does not go on on both sides."""
    found: list[list[int]] = []
    at = 0
    for length in lengths:
        source, destination = pairs[at]
        if found and found[-1][0] + found[-1][2] == source and found[-1][1] + found[-1][2] == destination:
            found[-1][2] += length
        else:
            found.append([source, destination, length])
        at += length
    return found


@st.composite
def writes(draw: st.DrawFn) -> tuple[RowArray, RowArray, list[int], list[int]]:
    """Rows of two sides, and indices that select descriptors of the same lengths."""
    lengths = draw(st.lists(st.sampled_from([1, 2, 8]), min_size=1, max_size=3))
    sides, numbers = [], []
    for _ in range(2):
        rows: list[tuple[int, int, int, int, int]] = []
        firsts: list[tuple[int, int]] = []
        count_so_far = 0
        for length in lengths:
            count = draw(st.integers(1, 6))
            stride = length + draw(st.sampled_from([0, 0, 3]))
            address = draw(st.integers(0, 40)) if not rows else rows[-1][0] + rows[-1][3] * rows[-1][4]
            rows.append((address, length, 0, stride, count))
            firsts.append((count_so_far, count))
            count_so_far += count
        sides.append(np.array(rows, np.uint64))
        numbers.append(firsts)
    chosen = draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=20))
    here: list[int] = []
    there: list[int] = []
    for row in chosen:
        goes_on = draw(st.sampled_from([(True, True), (True, True), (True, False), (False, True), (False, False)]))
        for indices, firsts, follows in ((here, numbers[0], goes_on[0]), (there, numbers[1], goes_on[1])):
            first, count = firsts[row]
            after = indices[-1] + 1 if indices and follows else -1
            indices.append(after if first <= after < first + count else first + draw(st.integers(0, count - 1)))
    return sides[0], sides[1], here, there


@given(writes(), st.integers(1, 7), st.integers(1, 5))
def test_every_byte_is_copied_in_as_few_ranges_as_there_are(
    write: tuple[RowArray, RowArray, list[int], list[int]], at_a_time: int, most: int
):
    here, there, local, remote = write
    pairs = [
        pair
        for one, other in zip(local, remote, strict=True)
        for pair in zip(bytes_of(here, one), bytes_of(there, other), strict=True)
    ]
    lengths = [len(bytes_of(here, index)) for index in local]
    lists = list_of_rows(here, None), list_of_rows(there, PEER)
    arguments = lists[0], np.array(local, np.int32), lists[1], np.array(remote, np.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "AT_A_TIME", at_a_time)
        whole = copies_between(*arguments)
        single = copies_between(*arguments, merges=False)
    assert moved(whole) == moved(single) == pairs
    assert [list(each) for each in whole] == ranges_of(pairs, lengths)
    assert single.lengths.tolist() == lengths
    assert whole.total_bytes == single.total_bytes == len(pairs)
    batches = list(whole.batches(most))
    assert [len(batch) for batch in batches[:-1]] == [most] * (len(batches) - 1)
    assert 1 <= len(batches[-1]) <= most
    assert [each for batch in batches for each in batch] == list(whole)


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ((108, 508), [(100, 500, 16)]),
        ((108, 509), [(100, 500, 8), (108, 509, 8)]),
        ((109, 508), [(100, 500, 8), (109, 508, 8)]),
        ((92, 492), [(100, 500, 8), (92, 492, 8)]),
    ],
    ids=["both go on", "only ours", "only theirs", "backwards"],
)
def test_ranges_are_joined_where_both_sides_go_on(second: tuple[int, int], expected: list[tuple[int, int, int]]):
    sources, destinations = (np.array(each, np.uint64) for each in zip((100, 500), second, strict=True))
    assert list(Copies(sources, destinations, np.array([8, 8], np.uint64)).merged()) == expected


def test_what_is_needed_beside_the_result_stays_small(monkeypatch: pytest.MonkeyPatch):
    """However many descriptors there are, they are expanded some at a time."""
    count = 3 * copies.AT_A_TIME + 5
    rows = np.array([[4096, 8, 0, 8, count]], np.uint64)
    seen: list[int] = []
    expanded = copies._Rows.expanded

    def watch(self: Any, indices: Any) -> Any:
        seen.append(len(indices))
        return expanded(self, indices)

    monkeypatch.setattr(copies._Rows, "expanded", watch)
    every = np.arange(count, dtype=np.int32)
    whole = copies_between(list_of_rows(rows, None), every, list_of_rows(rows, PEER), every)
    assert list(whole) == [(4096, 4096, 8 * count)]
    assert max(seen) == copies.AT_A_TIME


def test_nothing_is_begun_where_only_the_last_descriptor_is_wrong(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(copies, "AT_A_TIME", 2)
    here = np.array([[0, 8, 0, 8, 9]], np.uint64)
    there = np.array([[0, 8, 0, 8, 8], [100, 4, 0, 4, 1]], np.uint64)
    every = np.arange(9, dtype=np.int32)
    with pytest.raises(TransportError, match="differ in length"):
        copies_between(list_of_rows(here, None), every, list_of_rows(there, PEER), every)
    with pytest.raises(TransportError, match=r"\[1, 9\] exceed a list of 9"):
        copies_between(list_of_rows(here, None), every + 1, list_of_rows(here, PEER), every)
    with pytest.raises(TransportError, match=r"\[-1, 7\] exceed a list of 9"):
        copies_between(list_of_rows(here, None), every, list_of_rows(here, PEER), every - 1)


def test_only_kinds_of_memory_that_can_be_copied_are_taken():
    assert [kind.value for kind in ranges.RangeTransport.memory_kinds] == ["DRAM"]


@given(
    many=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(1, 40)), max_size=6),
    sources=st.sets(st.integers(0, 110)),
    destinations=st.sets(st.integers(0, 110)),
)
def test_cutting_moves_the_same_bytes_and_crosses_no_border(
    many: list[tuple[int, int, int]], sources: set[int], destinations: set[int]
):
    whole = Copies(*(np.array([each[at] for each in many], np.uint64) for at in range(3)))
    cut = whole.cut_at(*(np.array(sorted(borders), np.uint64) for borders in (sources, destinations)))
    assert moved(cut) == moved(whole)
    for source, destination, length in cut:
        assert not sources & set(range(source + 1, source + length))
        assert not destinations & set(range(destination + 1, destination + length))
    assert len(cut) <= len(whole) + sum(
        len(sources & set(range(source + 1, source + length)))
        + len(destinations & set(range(destination + 1, destination + length)))
        for source, destination, length in many
    )
