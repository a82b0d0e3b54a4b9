"""Descriptor rows, and the indices that select from them."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import LayoutError
from kvferry.layout import Device, Interval, MemoryKind, Paging, Shard, attention_components, empty_shard
from kvferry.plan import DescriptorRows, Runs, Selector, descriptor_rows, lower, selectors
from kvferry.plan.descriptors import MERGED_BYTES, Numbers
from kvferry.plan.lowering import Loop, PageSteps

K, _ = attention_components(num_layers=1, num_kv_heads=4, head_dim=8, dtype="int16")


def runs(count: int, length: int = 64, start: int = 0, units: tuple[int, int] = (1, 1)) -> Runs:
    """`count` runs every 4096 bytes, in pages of so many units on the two sides."""
    return Runs(
        source_bases=np.array([0x10000 + start], np.uint64),
        destination_bases=np.array([0x90000 + start], np.uint64),
        loops=(Loop(count, 4096, 4096),),
        length=length,
        source_steps=PageSteps(units[0], 512, 128),
        destination_steps=PageSteps(units[1], 1024, 256),
    )


def pool(pages: int, device: int = 0) -> Shard:
    return empty_shard(K, page_tokens=4, num_pages=pages, device=Device(MemoryKind.VRAM, device))


def rows(*pieces: Runs, source_pages: int = 5, destination_pages: int = 7) -> DescriptorRows:
    source, destination = pool(source_pages, device=1), pool(destination_pages, device=2)
    return descriptor_rows([(each, source, destination) for each in pieces])


def test_a_row_is_a_run_repeated_over_the_pages():
    made = rows(runs(2), runs(1, length=32, start=8))
    assert made.source.tolist() == [
        [0x10000, 64, 1, 128, 5],
        [0x11000, 64, 1, 128, 5],
        [0x10008, 32, 1, 128, 5],
    ]
    assert made.destination[2].tolist() == [0x90008, 32, 2, 256, 7]
    assert made.source.dtype == made.destination.dtype == np.uint64
    assert [piece.length for piece in made.pieces] == [64, 32]


def numbers(made: DescriptorRows, side: str) -> list[tuple[list[int], int, int]]:
    """First descriptors, step to the next unit and step to the next page of every piece."""
    pieces = [getattr(piece, side) for piece in made.pieces]
    return [(each.firsts.tolist(), each.unit_step, each.page_step) for each in pieces]


def test_descriptors_are_numbered_row_by_row_with_the_pages_innermost():
    made = rows(runs(2), runs(1))
    assert numbers(made, "source") == [([0, 5], 5, 1), ([10], 5, 1)]
    assert numbers(made, "destination") == [([0, 7], 7, 1), ([14], 7, 1)]
    assert {piece.source.firsts.dtype for piece in made.pieces} == {np.dtype(np.int32)}


def test_every_unit_of_a_run_has_a_row():
    """Two units a page on the source, three on the receiver: as many runs, but more rows."""
    made = rows(runs(2, units=(2, 3)))
    assert made.source[:, 0].tolist() == [0x10000, 0x10200, 0x11000, 0x11200]
    assert made.destination[:, 0].tolist() == [0x90000, 0x90400, 0x90800, 0x91000, 0x91400, 0x91800]
    assert numbers(made, "source") == [([0, 10], 5, 1)]
    assert numbers(made, "destination") == [([0, 21], 7, 1)]


def test_units_that_go_on_from_page_to_page_share_a_row():
    """Four units of 64 bytes and pages of 256: the next page's first lies where a fifth would."""
    dense = replace(runs(2), source_steps=PageSteps(4, 64, 256), destination_steps=PageSteps(2, 128, 256))
    made = rows(dense, runs(1))
    assert made.source.tolist() == [[0x10000, 64, 1, 64, 20], [0x11000, 64, 1, 64, 20], [0x10000, 64, 1, 128, 5]]
    assert made.destination[:2].tolist() == [[0x90000, 64, 2, 128, 14], [0x91000, 64, 2, 128, 14]]
    assert numbers(made, "source") == [([0, 20], 1, 4), ([40], 5, 1)]
    assert numbers(made, "destination") == [([0, 14], 1, 2), ([28], 7, 1)]


def test_pieces_in_pools_of_different_sizes_are_numbered_one_after_the_other():
    """Groups have pools of their own: a row stands for as many descriptors as its own pool has pages."""
    made = descriptor_rows(
        [
            (runs(2), pool(5), pool(7)),
            (runs(1, units=(2, 1)), pool(100), pool(3)),
            (runs(1), pool(5), pool(7)),
        ]
    )
    assert made.source[:, 4].tolist() == [5, 5, 100, 100, 5]
    assert [firsts for firsts, *_ in numbers(made, "source")] == [[0, 5], [10], [210]]
    assert made.destination[:, 4].tolist() == [7, 7, 3, 7]
    assert [firsts for firsts, *_ in numbers(made, "destination")] == [[0, 7], [14], [17]]


def test_no_pieces_make_no_rows():
    made = rows()
    for side in (made.source, made.destination):
        assert side.shape == (0, 5)
        assert side.dtype == np.uint64
    assert made.pieces == ()


@pytest.mark.parametrize("padding", [0, 64])
def test_the_rows_of_lowered_pieces_reach_every_unit_of_every_page(padding: int):
    """Pages of 4 and of 8 tokens: the address of a descriptor is that of its unit's runs."""
    arrays = [np.zeros((pages, tokens, 4, 8), np.int16) for pages, tokens in ((6, 4), (3, 8))]
    page_strides = [array.strides[0] + padding for array in arrays]
    source, destination = (
        Shard(
            component=K,
            box=K.whole,
            addresses=(array.ctypes.data,),
            strides=array.strides[2:],
            paging=Paging(array.shape[1], array.shape[0], page_stride, array.strides[1]),
        )
        for array, page_stride in zip(arrays, page_strides, strict=True)
    )
    heads = (Interval(0, 1), Interval(1, 3), Interval(0, 8))
    made = descriptor_rows([(lower(heads, source, destination, unit_tokens=4), source, destination)])
    assert len(made.destination) == (4 if padding == 0 else 8)
    (piece,) = made.pieces
    sides = (made.source, piece.source), (made.destination, piece.destination)
    for (table, side), array, page_stride in zip(sides, arrays, page_strides, strict=True):
        units = array.shape[1] // 4
        everything = np.arange(24 // 4)
        indices = side.indices(everything % units, everything // units)
        expected = [
            (array.ctypes.data + (position // array.shape[1]) * page_stride
             + (position % array.shape[1]) * array.strides[1] + array.strides[2], 2 * 8 * 2)
            for token in range(4)
            for position in range(token, 24, 4)
        ]  # fmt: skip
        assert places(table, indices) == expected


def places(rows: Any, indices: Any) -> list[tuple[int, int]]:
    """Address and length of descriptors."""
    found = [
        (address + number * stride, length)
        for address, length, _, stride, count in rows.tolist()
        for number in range(count)
    ]
    return [found[index] for index in indices.tolist()]


# --- indices


def test_indices_go_run_by_run_with_the_units_innermost():
    indices = Numbers(np.array([10, 0], np.int32), 5, 1).indices(np.zeros(3, np.int64), np.array([4, 1, 2]))
    assert indices.tolist() == [14, 11, 12, 4, 1, 2]
    assert indices.dtype == np.int32


def test_indices_choose_the_unit_of_the_page():
    units, pages = np.array([0, 1, 0, 1]), np.array([3, 3, 4, 2])
    firsts = np.array([0, 10], np.int32)
    assert Numbers(firsts, 5, 1).indices(units, pages).tolist() == [3, 8, 4, 7, 13, 18, 14, 17]
    assert Numbers(firsts, 1, 2).indices(units, pages).tolist() == [6, 7, 8, 5, 16, 17, 18, 15]


def test_no_units_make_no_indices():
    none = np.array([], np.int64)
    piece = rows(runs(2)).pieces
    (selector,) = selectors(piece, [0])
    assert [len(each) for each in selector.select(none, none, none, none)] == [0, 0]


@given(st.integers(1, 3), st.integers(1, 3), st.booleans(), st.sampled_from([1, 64, 128, 200, 1 << 20]), st.data())
def test_selected_descriptors_pair_up_whatever_order_they_are_in(
    source_units: int, destination_units: int, is_dense: bool, merged_bytes: int, data: st.DataObject
):
    """Every run of every unit is there once on both sides, each beside its own."""
    steps = [
        PageSteps(units, 64, 64 * units) if is_dense else PageSteps(units, 512, 128 * units)
        for units in (source_units, destination_units)
    ]
    made = rows(
        *(replace(runs(count), source_steps=steps[0], destination_steps=steps[1]) for count in (2, 1)),
        replace(runs(1, length=16), source_steps=steps[0], destination_steps=steps[1]),
    )
    count = data.draw(st.integers(0, min(5 * source_units, 7 * destination_units)))
    here = data.draw(st.permutations(range(5 * source_units)))[:count]
    there = data.draw(st.permutations(range(7 * destination_units)))[:count]
    chosen = data.draw(st.permutations(range(3)))[: data.draw(st.integers(1, 3))]
    pages, units = np.divmod(np.array(here, np.int64), source_units)
    to_pages, to_units = np.divmod(np.array(there, np.int64), destination_units)
    found: Counter[tuple[int, int, int]] = Counter()
    for selector in selectors(made.pieces, chosen, merged_bytes=merged_bytes):
        local, remote = selector.select(units, pages, to_units, to_pages)
        for (source, length), (destination, as_long) in zip(
            places(made.source, local), places(made.destination, remote), strict=True
        ):
            assert length == as_long
            found[source, destination, length] += 1
    expected: Counter[tuple[int, int, int]] = Counter()
    for number in chosen:
        piece = made.pieces[number]
        for run in range(len(piece.source.firsts)):
            firsts = int(piece.source.firsts[run]), int(piece.destination.firsts[run])
            for unit, page, to_unit, to_page in zip(units, pages, to_units, to_pages, strict=True):
                local = firsts[0] + unit * piece.source.unit_step + page * piece.source.page_step
                remote = firsts[1] + to_unit * piece.destination.unit_step + to_page * piece.destination.page_step
                (source, length), (destination, _) = (
                    places(made.source, np.array([local]))[0],
                    places(made.destination, np.array([remote]))[0],
                )
                expected[source, destination, length] += 1
    assert found == expected


def test_pieces_that_are_numbered_alike_share_a_selector():
    made = descriptor_rows(
        [
            (runs(2), pool(5), pool(7)),
            (runs(1), pool(5), pool(7)),
            (runs(1), pool(6), pool(7)),
            (runs(1, length=16), pool(5), pool(7)),
        ]
    )
    found = selectors(made.pieces, [1, 0, 2, 3], merged_bytes=128)
    assert [each.source.firsts.tolist() for each in found] == [[10, 0, 5], [15], [21]]
    assert [each.destination.firsts.tolist() for each in found] == [[14, 0, 7], [21], [28]]
    assert [each.merged_units for each in found] == [2, 2, 8]


# --- merging


def merged(side: Any, other: Any) -> list[int]:
    """How many indices become one, as transports merge: neighbours in the list that are neighbours on both sides."""
    counts = [1]
    for here, there in zip(np.diff(side).tolist(), np.diff(other).tolist(), strict=True):
        if here == there == 1:
            counts[-1] += 1
        else:
            counts.append(1)
    return counts


def selector(runs: int, pool_pages: int, merged_units: int) -> Selector:
    firsts = np.arange(runs, dtype=np.int32) * pool_pages
    return Selector(Numbers(firsts, 1, 1), Numbers(firsts, 1, 1), merged_units)


@pytest.mark.parametrize("order", ["ascending", "descending", "random"])
@pytest.mark.parametrize("pages", [1, 4, 5, 16, 30])
def test_neighbours_are_merged_in_whatever_order_they_come_but_not_into_more_than_the_most(order: str, pages: int):
    """A free list may hand pages out from the last to the first; both sides' still lie side by side."""
    none, here = np.zeros(pages, np.int64), np.arange(3, 3 + pages)
    here = {"ascending": here, "descending": here[::-1], "random": np.random.default_rng(pages).permutation(here)}[
        order
    ]
    local, remote = selector(2, 64, 4).select(none, here, none, here + 20)
    blocks = [4] * (pages // 4) + [pages % 4] * (pages % 4 > 0)
    assert merged(local, remote) == 2 * blocks[::-1]


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 3), st.randoms())
def test_only_what_lies_together_on_both_sides_is_merged_and_no_more_than_the_most(
    pages: int, most: int, num_runs: int, random: Any
):
    here, there = random.sample(range(60), pages), random.sample(range(60), pages)
    none = np.zeros(pages, np.int64)
    # A run has more pages than these: else its last would be the neighbour of the next one's first.
    local, remote = selector(num_runs, 64, most).select(none, np.array(here), none, np.array(there))
    counts = merged(local, remote)
    assert max(counts) <= most
    assert sum(counts) == num_runs * pages
    goes_on = sum((page + 1, to + 1) in zip(here, there, strict=True) for page, to in zip(here, there, strict=True))
    fewest = pages - goes_on  # without a most
    assert len(counts) <= num_runs * (fewest + -(-pages // most) - 1)
    if most >= pages:
        assert len(counts) == num_runs * fewest


def test_the_most_is_counted_in_bytes():
    (found,) = selectors(rows(runs(1, length=64)).pieces, [0], merged_bytes=1000)
    assert found.merged_units == 15
    (found,) = selectors(rows(runs(1, length=64)).pieces, [0], merged_bytes=10)
    assert found.merged_units == 1
    (found,) = selectors(rows(runs(1, length=64)).pieces, [0])
    assert found.merged_units == MERGED_BYTES // 64


# --- the limit


@pytest.mark.parametrize(
    ("side", "pages"), [("source", {"source_pages": 2**30}), ("receiver", {"destination_pages": 2**30})]
)
def test_more_descriptors_than_an_index_can_number_are_refused(side: str, pages: dict[str, int]):
    message = rf"2 runs a page of the {side}, 2147483648 in all pages, are more than can be prepared \(4194304 and 2147"
    with pytest.raises(LayoutError, match=message):
        rows(runs(2), **pages)


@pytest.mark.parametrize(("side", "units"), [("source", (2**22 + 1, 1)), ("receiver", (1, 2**22 + 1))])
def test_too_many_rows_are_refused_before_they_are_made(side: str, units: tuple[int, int]):
    tracemalloc.start()
    with pytest.raises(LayoutError, match=f"4194305 runs a page of the {side}"):
        rows(runs(1, units=units), source_pages=1, destination_pages=1)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_the_limit_is_over_all_pieces():
    half = (runs(1), pool(2**30), pool(1))
    assert descriptor_rows([half]).pieces[0].source.firsts.tolist() == [0]
    with pytest.raises(LayoutError, match="2 runs a page"):
        descriptor_rows([half, half])


def test_the_last_descriptor_that_an_index_can_number_is_numbered():
    made = rows(runs(1), source_pages=2**31 - 1)
    none = np.zeros(1, np.int64)
    assert made.pieces[0].source.indices(none, np.array([2**31 - 2])).tolist() == [2**31 - 2]
    made = rows(runs(2), source_pages=2**30 - 1)
    last = made.pieces[0].source.indices(none, np.array([2**30 - 2]))
    assert last.tolist() == [2**30 - 2, 2 * (2**30 - 1) - 1]
