"""Descriptor rows, and the indices that select from them."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import LayoutError
from kvferry.layout import Device, Interval, MemoryKind, Paging, Shard, attention_components, empty_shard
from kvferry.plan import DescriptorRows, Runs, descriptor_indices, descriptor_rows, lower
from kvferry.plan.lowering import Loop, PageSteps

K, _ = attention_components(num_layers=1, num_kv_heads=4, head_dim=8, dtype="int16")


def runs(count: int, length: int = 64, start: int = 0, granules: tuple[int, int] = (1, 1)) -> Runs:
    """`count` runs every 4096 bytes, in pages of so many granules on the two sides."""
    return Runs(
        source_bases=np.array([0x10000 + start], np.uint64),
        destination_bases=np.array([0x90000 + start], np.uint64),
        loops=(Loop(count, 4096, 4096),),
        length=length,
        source_steps=PageSteps(granules[0], 512, 128),
        destination_steps=PageSteps(granules[1], 1024, 256),
    )


def pool(pages: int, device: int = 0) -> Shard:
    return empty_shard(K, page_tokens=4, num_pages=pages, device=Device(MemoryKind.VRAM, device))


def rows(*pieces: Runs, source_pages: int = 5, destination_pages: int = 7) -> DescriptorRows:
    source, destination = pool(source_pages, device=1), pool(destination_pages, device=2)
    return descriptor_rows([(each, source, destination) for each in pieces])


def test_a_row_is_a_run_repeated_over_the_pages():
    made = rows(runs(2), runs(1, length=32, start=8))
    assert made.source.rows.tolist() == [
        [0x10000, 64, 1, 128, 5],
        [0x11000, 64, 1, 128, 5],
        [0x10008, 32, 1, 128, 5],
    ]
    assert made.destination.rows[2].tolist() == [0x90008, 32, 2, 256, 7]
    assert made.source.rows.dtype == made.destination.rows.dtype == np.uint64


def test_descriptors_are_numbered_row_by_row_with_the_pages_innermost():
    made = rows(runs(2), runs(1))
    assert [each.tolist() for each in made.source.firsts] == [[[0], [5]], [[10]]]
    assert [each.tolist() for each in made.destination.firsts] == [[[0], [7]], [[14]]]
    assert {each.dtype for each in made.source.firsts} == {np.dtype(np.int32)}


def test_every_granule_of_a_run_has_a_row():
    """Two granules a page on the source, three on the receiver: as many runs, but more rows."""
    made = rows(runs(2, granules=(2, 3)))
    assert made.source.rows[:, 0].tolist() == [0x10000, 0x10200, 0x11000, 0x11200]
    assert made.destination.rows[:, 0].tolist() == [0x90000, 0x90400, 0x90800, 0x91000, 0x91400, 0x91800]
    assert made.source.firsts[0].tolist() == [[0, 5], [10, 15]]
    assert made.destination.firsts[0].tolist() == [[0, 7, 14], [21, 28, 35]]


def test_pieces_in_pools_of_different_sizes_are_numbered_one_after_the_other():
    """Groups have pools of their own: a row stands for as many descriptors as its own pool has pages."""
    made = descriptor_rows(
        [
            (runs(2), pool(5), pool(7)),
            (runs(1, granules=(2, 1)), pool(100), pool(3)),
            (runs(1), pool(5), pool(7)),
        ]
    )
    assert made.source.rows[:, 4].tolist() == [5, 5, 100, 100, 5]
    assert [each.tolist() for each in made.source.firsts] == [[[0], [5]], [[10, 110]], [[210]]]
    assert made.destination.rows[:, 4].tolist() == [7, 7, 3, 7]
    assert [each.tolist() for each in made.destination.firsts] == [[[0], [7]], [[14]], [[17]]]


def test_no_pieces_make_no_rows():
    made = rows()
    for side in (made.source, made.destination):
        assert (side.rows.shape, side.firsts) == ((0, 5), ())
        assert side.rows.dtype == np.uint64


def test_the_rows_of_lowered_pieces_reach_every_granule_of_every_page():
    """Pages of 4 and of 8 tokens: the address of a descriptor is that of its granule's runs."""
    arrays = [np.zeros((pages, tokens, 4, 8), np.int16) for pages, tokens in ((6, 4), (3, 8))]
    source, destination = (
        Shard(
            component=K,
            box=K.whole,
            addresses=(array.ctypes.data,),
            strides=array.strides[2:],
            paging=Paging(array.shape[1], array.shape[0], *array.strides[:2]),
        )
        for array in arrays
    )
    heads = (Interval(0, 1), Interval(1, 3), Interval(0, 8))
    made = descriptor_rows([(lower(heads, source, destination, granule_tokens=4), source, destination)])
    for side, array in ((made.source, arrays[0]), (made.destination, arrays[1])):
        granules = array.shape[1] // 4
        everything = np.arange(24 // 4)
        indices = descriptor_indices(side.firsts[0], everything % granules, everything // granules)
        found = []
        start = 0
        for address, length, _, stride, pages in side.rows.tolist():
            found += [(start + page, address + page * stride, length) for page in range(pages)]
            start += pages
        by_number = {number: (address, length) for number, address, length in found}
        expected = [
            (array.ctypes.data + (position // array.shape[1]) * array.strides[0]
             + (position % array.shape[1]) * array.strides[1] + array.strides[2], 2 * 8 * 2)
            for token in range(4)
            for position in range(token, 24, 4)
        ]  # fmt: skip
        assert [by_number[index] for index in indices.tolist()] == expected


# --- indices


def test_indices_go_run_by_run_with_the_granules_innermost():
    firsts = np.array([[10], [0]], np.int32)
    indices = descriptor_indices(firsts, np.zeros(3, np.int64), np.array([4, 1, 2]))
    assert indices.tolist() == [14, 11, 12, 4, 1, 2]
    assert indices.dtype == np.int32


def test_indices_choose_the_granule_of_the_page():
    firsts = np.array([[0, 5], [10, 15]], np.int32)
    indices = descriptor_indices(firsts, np.array([0, 1, 0, 1]), np.array([3, 3, 4, 2]))
    assert indices.tolist() == [3, 8, 4, 7, 13, 18, 14, 17]


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.data())
def test_both_sides_number_the_same_tokens_in_the_same_order(
    count: int, source_granules: int, destination_granules: int, data: st.DataObject
):
    """Whatever granules a page has on either side, the n-th index of both is of the same run and unit."""
    made = rows(runs(count, granules=(source_granules, destination_granules)))
    units = data.draw(st.integers(0, 10))
    decoded = []
    for side, granules, pages in (
        (made.source, source_granules, 5),
        (made.destination, destination_granules, 7),
    ):
        granule = np.array(data.draw(st.lists(st.integers(0, granules - 1), min_size=units, max_size=units)), np.int64)
        page = np.array(data.draw(st.lists(st.integers(0, pages - 1), min_size=units, max_size=units)), np.int64)
        indices = descriptor_indices(side.firsts[0], granule, page)
        row, in_pool = np.divmod(indices, pages)
        run, in_page = np.divmod(row, granules)
        assert in_pool.tolist() == page.tolist() * count
        assert in_page.tolist() == granule.tolist() * count
        decoded.append(run.tolist())
    assert decoded[0] == decoded[1] == [run for run in range(count) for _ in range(units)]


@pytest.mark.parametrize("granules", [1, 2])
def test_no_granules_make_no_indices(granules: int):
    none = np.array([], np.int64)
    assert len(descriptor_indices(np.zeros((2, granules), np.int32), none, none)) == 0


# --- the limit


@pytest.mark.parametrize(
    ("side", "pages"), [("source", {"source_pages": 2**30}), ("receiver", {"destination_pages": 2**30})]
)
def test_more_descriptors_than_an_index_can_number_are_refused(side: str, pages: dict[str, int]):
    message = rf"2 runs a page of the {side}, 2147483648 in all pages, are more than can be prepared \(4194304 and 2147"
    with pytest.raises(LayoutError, match=message):
        rows(runs(2), **pages)


@pytest.mark.parametrize(("side", "granules"), [("source", (2**22 + 1, 1)), ("receiver", (1, 2**22 + 1))])
def test_too_many_rows_are_refused_before_they_are_made(side: str, granules: tuple[int, int]):
    tracemalloc.start()
    with pytest.raises(LayoutError, match=f"4194305 runs a page of the {side}"):
        rows(runs(1, granules=granules), source_pages=1, destination_pages=1)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_the_limit_is_over_all_pieces():
    half = (runs(1), pool(2**30), pool(1))
    assert descriptor_rows([half]).source.firsts[0].tolist() == [[0]]
    with pytest.raises(LayoutError, match="2 runs a page"):
        descriptor_rows([half, half])


def test_the_last_descriptor_that_an_index_can_number_is_numbered():
    made = rows(runs(1), source_pages=2**31 - 1)
    none = np.zeros(1, np.int64)
    assert descriptor_indices(made.source.firsts[0], none, np.array([2**31 - 2])).tolist() == [2**31 - 2]
    made = rows(runs(2), source_pages=2**30 - 1)
    last = descriptor_indices(made.source.firsts[0], none, np.array([2**30 - 2]))
    assert last.tolist() == [2**30 - 2, 2 * (2**30 - 1) - 1]
