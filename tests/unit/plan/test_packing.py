"""What is packed together: every block of every load, once, in order, in sub-chunks of the right size."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.layout import Axis, Component, Entry, Interval, Paging, Shard
from kvferry.plan import Runs, lower
from kvferry.plan.lowering import PageSteps
from kvferry.plan.packing import (
    SEGMENT_ALIGNMENT,
    BlockShape,
    MovedBlocks,
    PackedSide,
    Segment,
    SubChunk,
    aligned,
    count_sub_chunks,
    packed_piece,
    sub_chunks,
)

# ---- sub-chunks -----------------------------------------------------------------------------------------------------


def load(num_bases: int, num_units: int, block_bytes: int, *, move: int = 0, piece: int = 0) -> MovedBlocks:
    return MovedBlocks(move, piece, num_bases, num_units, block_bytes)


def cut(chunk_bytes: int, *loads: MovedBlocks) -> list[SubChunk]:
    return list(sub_chunks(loads, chunk_bytes))


def ranges(chunk: SubChunk) -> list[tuple[int, int, int, int]]:
    return [(each.first_base, each.stop_base, each.first_unit, each.stop_unit) for each in chunk.segments]


@pytest.mark.parametrize(("num_bytes", "then"), [(0, 0), (1, 64), (63, 64), (64, 64), (65, 128), (1000, 1024)])
def test_the_next_segment_begins_at_a_multiple_of_its_alignment(num_bytes: int, then: int):
    assert SEGMENT_ALIGNMENT == 64
    assert aligned(num_bytes) == then


def test_a_small_load_goes_in_one_sub_chunk():
    (chunk,) = cut(1 << 20, load(4, 10, 256, move=3, piece=5))
    assert chunk == SubChunk((Segment(3, 5, 0, 4, 0, 10, 10240),), 10240)


def test_whole_indices_of_the_first_axis_stay_together_while_they_fit():
    chunks = cut(1000, load(7, 10, 32))
    assert [ranges(chunk) for chunk in chunks] == [[(0, 3, 0, 10)], [(3, 6, 0, 10)], [(6, 7, 0, 10)]]
    assert [chunk.num_bytes for chunk in chunks] == [960, 960, 320]


def test_a_sub_chunk_may_be_filled_to_the_last_byte():
    (chunk,) = cut(960, load(3, 10, 32))
    assert chunk.num_bytes == 960


def test_pieces_share_a_sub_chunk_and_each_begins_where_large_words_do():
    (chunk,) = cut(1000, load(1, 3, 10, piece=0), load(2, 3, 10, piece=1), load(1, 1, 7, move=1, piece=0))
    assert [(each.move, each.piece, each.num_bytes) for each in chunk.segments] == [(0, 0, 30), (0, 1, 60), (1, 0, 7)]
    assert chunk.num_bytes == 64 + 64 + 7


def test_gaps_between_segments_count():
    chunks = cut(100, load(1, 1, 30, piece=0), load(1, 1, 36, piece=1), load(1, 1, 1, piece=2))
    assert [[each.piece for each in chunk.segments] for chunk in chunks] == [[0, 1], [2]]
    assert [chunk.num_bytes for chunk in chunks] == [100, 1]


def test_an_index_that_is_too_large_is_cut_between_units_evenly():
    chunks = cut(100, load(2, 10, 30, piece=4))
    assert [ranges(chunk) for chunk in chunks] == [
        [(base, base + 1, first, stop)] for base in (0, 1) for first, stop in ((0, 2), (2, 5), (5, 7), (7, 10))
    ]
    assert {chunk.segments[0].piece for chunk in chunks} == {4}


def test_as_many_units_as_fit_and_no_more():
    """Five units where two fit: in three parts, since one of two would have three units."""
    chunks = cut(5, load(1, 5, 2))
    assert [chunk.num_bytes for chunk in chunks] == [2, 4, 4]


def test_a_block_that_is_larger_than_a_sub_chunk_goes_alone():
    chunks = cut(100, load(1, 1, 10), load(2, 2, 1000, piece=1), load(1, 1, 10, piece=2))
    assert [chunk.num_bytes for chunk in chunks] == [10, 1000, 1000, 1000, 1000, 10]


def test_what_came_before_a_large_load_goes_before_it():
    chunks = cut(100, load(1, 1, 10, piece=0), load(1, 2, 60, piece=1), load(1, 1, 10, piece=2))
    assert [[each.piece for each in chunk.segments] for chunk in chunks] == [[0], [1], [1], [2]]


def test_of_nothing_there_is_no_sub_chunk():
    assert cut(100) == []


loads = st.lists(
    st.builds(
        MovedBlocks,
        move=st.integers(0, 3),
        piece=st.integers(0, 3),
        num_bases=st.integers(1, 6),
        num_units=st.integers(1, 12),
        block_bytes=st.integers(1, 300),
    ),
    max_size=6,
)
chunk_sizes = st.integers(1, 1500)


@given(loads, chunk_sizes)
def test_sub_chunks_tile_every_block_of_every_load_once_and_in_order(loads: list[MovedBlocks], chunk_bytes: int):
    blocks = [
        (each.move, each.piece, base, unit)
        for each in loads
        for base in range(each.num_bases)
        for unit in range(each.num_units)
    ]
    packed = [
        (segment.move, segment.piece, base, unit)
        for chunk in sub_chunks(loads, chunk_bytes)
        for segment in chunk.segments
        for base in range(segment.first_base, segment.stop_base)
        for unit in range(segment.first_unit, segment.stop_unit)
    ]
    assert packed == blocks


@given(loads, chunk_sizes)
def test_no_sub_chunk_is_larger_than_asked_unless_a_single_block_is(loads: list[MovedBlocks], chunk_bytes: int):
    for chunk in sub_chunks(loads, chunk_bytes):
        num_blocks = sum(
            (each.stop_base - each.first_base) * (each.stop_unit - each.first_unit) for each in chunk.segments
        )
        assert chunk.num_bytes <= chunk_bytes or num_blocks == 1


@given(loads, chunk_sizes)
def test_a_sub_chunk_has_room_for_its_segments_and_the_gaps_between_them(loads: list[MovedBlocks], chunk_bytes: int):
    chunks = list(sub_chunks(loads, chunk_bytes))
    for chunk in chunks:
        stop = 0
        for segment in chunk.segments:
            begin = ceil(stop / 64) * 64
            stop = begin + segment.num_bytes
        assert chunk.num_bytes == stop
    total = sum(each.num_bases * each.num_units * each.block_bytes for each in loads)
    assert sum(segment.num_bytes for chunk in chunks for segment in chunk.segments) == total


@given(loads, chunk_sizes)
def test_the_count_is_close(loads: list[MovedBlocks], chunk_bytes: int):
    """It leaves out that whole indices are kept together, and the gaps between segments."""
    count, really = count_sub_chunks(loads, chunk_bytes), len(list(sub_chunks(loads, chunk_bytes)))
    assert count >= 1
    if not loads:
        return
    is_cut = [each.num_units * each.block_bytes > chunk_bytes for each in loads]
    slack = len(loads) + len(loads) * SEGMENT_ALIGNMENT // chunk_bytes
    # A sub-chunk and the one behind it have together more than fits into one, but where a load is cut.
    assert count - sum(is_cut) - 1 <= really <= 2 * count + slack
    if all(is_cut):
        assert count == really


# ---- where the blocks are -------------------------------------------------------------------------------------------


def side(bases: Sequence[int], steps: PageSteps, num_pages: int = 100) -> PackedSide:
    return PackedSide(np.array(bases, np.int64), BlockShape((), 8), steps, num_pages)


def test_blocks_begin_index_by_index_and_unit_by_unit():
    pages = side([1000, 9000], PageSteps(units=4, unit_stride=8, page_stride=100))
    units, numbers = np.array([3, 0, 1]), np.array([5, 6, 6])
    assert pages.starts(0, 2, units, numbers).tolist() == [1524, 1600, 1608, 9524, 9600, 9608]
    assert pages.starts(1, 2, units, numbers).tolist() == [9524, 9600, 9608]
    assert pages.starts(0, 0, units, numbers).tolist() == []


def test_addresses_do_not_overflow():
    pages = side([1 << 60], PageSteps(units=2, unit_stride=1 << 20, page_stride=1 << 40))
    starts = pages.starts(0, 1, np.array([1]), np.array([1 << 19]))
    assert starts.dtype == np.int64
    assert starts.tolist() == [(1 << 60) + (1 << 20) + (1 << 59)]


def test_where_a_page_is_one_unit_only_the_page_counts():
    """Of a packed page too, whose units, if any are named, are all the same."""
    pages = side([0], PageSteps(units=1, unit_stride=100, page_stride=100))
    assert pages.starts(0, 1, np.array([0, 0]), np.array([4, 2])).tolist() == [400, 200]


COMPONENT = Component(name="k", axes=(Axis("layer", 2), Axis("head", 4), Axis("dim", 3)), dtype="float16")
BOX = (Interval(0, 2), Interval(1, 3), Interval(0, 3))
"""Heads 1 and 2, of 6 bytes each."""


def attention(order: str, heads: Interval, page_tokens: int, *, base: int) -> Shard:
    """Two layers of some heads, as NHD or HND."""
    head = 6 if order == "NHD" else 6 * page_tokens
    token = 6 * len(heads) if order == "NHD" else 6
    return Shard(
        component=COMPONENT,
        box=(Interval(0, 2), heads, Interval(0, 3)),
        addresses=(base, base + (1 << 16)),
        strides=(head, 2),
        paging=Paging(page_tokens, 10, 6 * len(heads) * page_tokens, token),
    )


def runs(source: str, destination: str, unit_tokens: int = 2) -> Runs:
    here = attention(source, Interval(0, 4), 4, base=1 << 20)
    there = attention(destination, Interval(1, 3), 2, base=1 << 24)
    return lower(BOX, here, there, unit_tokens=unit_tokens)


def test_each_side_has_as_few_loops_as_its_own_strides_allow():
    piece = packed_piece(runs("NHD", "NHD"), component="kv", first_layer=0, source_pages=10, destination_pages=10)
    assert piece.source.shape == BlockShape(((2, 24),), 12)
    assert piece.destination.shape == BlockShape((), 24)
    assert (piece.num_bases, piece.block_bytes, piece.block_runs) == (2, 24, 2)
    assert piece.source.steps == PageSteps(units=2, unit_stride=48, page_stride=96)
    assert piece.destination.steps == PageSteps(units=1, unit_stride=24, page_stride=24)


def test_packed_bytes_are_in_the_order_of_the_source_on_both_sides():
    piece = packed_piece(runs("NHD", "HND"), component="kv", first_layer=0, source_pages=10, destination_pages=10)
    assert piece.source.shape == BlockShape(((2, 24),), 12), "token by token"
    assert piece.destination.shape == BlockShape(((2, 6), (2, 12)), 6), "of each, head by head"


@given(st.sampled_from(["NHD", "HND"]), st.sampled_from(["NHD", "HND"]), st.sampled_from([1, 2]))
def test_both_sides_have_the_same_bytes_of_a_block_in_the_same_place(source: str, destination: str, unit: int):
    """Followed byte by byte, from an element's place at the source to the same element's at the receiver."""
    lowered = runs(source, destination, unit)
    piece = packed_piece(lowered, component="kv", first_layer=0, source_pages=10, destination_pages=10)
    assert piece.block_bytes * piece.num_bases == lowered.bytes_per_unit
    assert piece.source.shape.num_bytes == piece.destination.shape.num_bytes == piece.block_bytes

    def places(shape: BlockShape) -> list[int]:
        return [
            sum(index * stride for index, (_, stride) in zip(indices, shape.loops, strict=True)) + byte
            for indices in product(*(range(count) for count, _ in shape.loops))
            for byte in range(shape.length)
        ]

    def elements(order: str, num_heads: int, page_tokens: int) -> dict[int, tuple[int, int, int]]:
        """(token, head, byte) of every byte of a page, by its place from heads 1 of token 0 on."""
        strides = (6 * num_heads, 6) if order == "NHD" else (6, 6 * page_tokens)
        return {
            token * strides[0] + head * strides[1] + byte: (token, head, byte)
            for token, head, byte in product(range(page_tokens), range(2), range(6))
        }

    here, there = elements(source, 4, 4), elements(destination, 2, 2)
    packed = [here[place] for place in places(piece.source.shape)]
    assert packed == [there[place] for place in places(piece.destination.shape)]
    assert sorted(packed) == sorted(product(range(unit), range(2), range(6)))


def test_a_packed_page_is_one_block():
    component = Component(
        name="k", axes=(Axis("layer", 1), Axis("packed", 5)), dtype="uint8", entry=Entry.PAGE, packing="test"
    )
    shard = Shard(
        component=component,
        box=component.whole,
        addresses=(4096,),
        strides=(1,),
        paging=Paging(16, 10, 8, 0),
    )
    piece = packed_piece(
        lower(shard.box, shard, shard, unit_tokens=16),
        component="kv",
        first_layer=0,
        source_pages=10,
        destination_pages=10,
    )
    assert piece.source.shape == piece.destination.shape == BlockShape((), 5)
    assert piece.source.steps.units == 1
