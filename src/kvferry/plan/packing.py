"""What goes through staging memory together, and in which order it is packed there.

A piece is packed index by index of its first axis, unit by unit, each unit's runs one after the other in the order in
which the source has them. Both sides work this out from the same layouts, so that the bytes need no description but
which units they are. A chunk's bytes are cut into sub-chunks, of which one is scattered while the next is gathered; a
small chunk has all layers together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvferry.layout import Interval
from kvferry.plan.lowering import Addresses, PageSteps, Runs


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Nested strided runs, which lie one after the other, without gaps, once they are packed.

    Attributes:
        loops: (count, stride in bytes) of every nesting, the slowest first.
        length: bytes of each run.
    """

    loops: tuple[tuple[int, int], ...]
    length: int

    @property
    def num_runs(self) -> int:
        """Runs of a block."""
        count = 1
        for times, _ in self.loops:
            count *= times
        return count

    @property
    def num_bytes(self) -> int:
        """Bytes of a packed block."""
        return self.num_runs * self.length


def block_shape(loops: Iterable[tuple[int, int]], length: int) -> BlockShape:
    """Describes the same bytes in the same order, with as few loops as one side's strides allow.

    Args:
        loops: (count, stride in bytes), the slowest first.
        length: bytes of each run.
    """
    melted: list[tuple[int, int]] = []  # the fastest first
    for count, stride in reversed(list(loops)):
        if count == 1:
            continue
        if not melted and stride == length:
            length *= count
        elif melted and stride == melted[-1][0] * melted[-1][1]:
            melted[-1] = (melted[-1][0] * count, melted[-1][1])
        else:
            melted.append((count, stride))
    return BlockShape(tuple(reversed(melted)), length)


Starts = NDArray[np.int64]

SEGMENT_ALIGNMENT = 64
"""Every segment begins at a multiple of so many bytes, so that it can be copied in large words."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedSide:
    """Where one side has the blocks of a piece. A block is one unit of one index of the first axis.

    Attributes:
        bases: for every index of the first axis, where unit 0 of page 0 begins, in bytes; int64, shape [bases].
        shape: how a block lies there.
        steps: steps to the other units and pages.
        num_pages: pages of its pool.
    """

    bases: Starts
    shape: BlockShape
    steps: PageSteps
    num_pages: int

    def starts(self, first_base: int, stop_base: int, units: Starts, pages: Starts) -> Starts:
        """Returns where blocks begin, index by index of the first axis.

        Args:
            first_base: first index of the first axis.
            stop_base: the one after the last.
            units: which unit of its page each is.
            pages: the page's number of each.

        Returns:
            Addresses, shape [bases * units].
        """
        offsets = pages * self.steps.page_stride
        if self.steps.units > 1:
            offsets = offsets + units * self.steps.unit_stride
        starts: Starts = np.add.outer(self.bases[first_base:stop_base], offsets).ravel()
        return starts


@dataclass(frozen=True, slots=True, eq=False)
class PackedPiece:
    """One piece, as it is packed.

    Attributes:
        component: the name of its component.
        first_layer: the index of the component's first axis that is the piece's first.
        source: where the source side has its blocks. Packed, both sides look the same.
        destination: where the destination side has them.
        num_bases: indices of the first axis.
        block_bytes: bytes of a block.
        block_runs: runs of a block in a direct write.
    """

    component: str
    first_layer: int
    source: PackedSide
    destination: PackedSide
    num_bases: int
    block_bytes: int
    block_runs: int

    def bases(self, layers: Mapping[str, Interval] | None) -> tuple[int, int]:
        """Returns which indices of its first axis lie in some layers: the first, and the one after the last.

        Args:
            layers: by component; None for all.
        """
        if layers is None:
            return 0, self.num_bases
        held = Interval(self.first_layer, self.first_layer + self.num_bases)
        part = held.overlap(layers[self.component]) if self.component in layers else None
        return (0, 0) if part is None else (part.start - self.first_layer, part.stop - self.first_layer)


def packed_piece(
    runs: Runs, *, component: str, first_layer: int, source_pages: int, destination_pages: int
) -> PackedPiece:
    """Works out how a piece with these runs is packed.

    Args:
        component: as of a `PackedPiece`.
        first_layer: as of a `PackedPiece`.
        source_pages: pages of the source's pool.
        destination_pages: pages of the destination's pool.
    """
    source = [(loop.count, loop.source_stride) for loop in runs.loops]
    destination = [(loop.count, loop.destination_stride) for loop in runs.loops]
    return PackedPiece(
        component=component,
        first_layer=first_layer,
        source=PackedSide(
            _signed(runs.source_bases), block_shape(source, runs.length), runs.source_steps, source_pages
        ),
        destination=PackedSide(
            _signed(runs.destination_bases),
            block_shape(destination, runs.length),
            runs.destination_steps,
            destination_pages,
        ),
        num_bases=len(runs.source_bases),
        block_bytes=runs.bytes_per_unit // len(runs.source_bases),
        block_runs=runs.count // len(runs.source_bases),
    )


def _signed(bases: Addresses) -> Starts:
    return bases.astype(np.int64)  # no address has the highest bit set


@dataclass(frozen=True, slots=True)
class MovedBlocks:
    """All blocks of one piece that one write moves.

    Attributes:
        move: the number of the move in the write.
        piece: the number of the piece in the pair's plan.
        num_bases: indices of the first axis.
        num_units: units of every index.
        block_bytes: bytes of a block.
        first_base: the first of the indices.
    """

    move: int
    piece: int
    num_bases: int
    num_units: int
    block_bytes: int
    first_base: int = 0

    @property
    def stop_base(self) -> int:
        """The index of the first axis after the last."""
        return self.first_base + self.num_bases


@dataclass(frozen=True, slots=True)
class Segment:
    """Blocks of one piece that are packed together: these units of these indices of the first axis.

    Attributes:
        move: as in `MovedBlocks`.
        piece: as in `MovedBlocks`.
        first_base: first index of the first axis.
        stop_base: the one after the last.
        first_unit: first unit, by its order in the move.
        stop_unit: the one after the last.
        num_bytes: bytes of all blocks.
    """

    move: int
    piece: int
    first_base: int
    stop_base: int
    first_unit: int
    stop_unit: int
    num_bytes: int

    @property
    def num_blocks(self) -> int:
        """How many blocks they are."""
        return (self.stop_base - self.first_base) * (self.stop_unit - self.first_unit)


@dataclass(frozen=True, slots=True)
class SubChunk:
    """What is gathered, written in bulk and scattered at a time.

    Attributes:
        segments: what it is made of.
        num_bytes: bytes in staging memory, with the gaps between segments.
    """

    segments: tuple[Segment, ...]
    num_bytes: int


def aligned(num_bytes: int) -> int:
    """Returns where the next segment begins after so many bytes."""
    return -(-num_bytes // SEGMENT_ALIGNMENT) * SEGMENT_ALIGNMENT


def sub_chunks(all_moved: Iterable[MovedBlocks], chunk_bytes: int) -> Iterator[SubChunk]:
    """Cuts what a write moves into sub-chunks.

    A sub-chunk has whole indices of the first axis as long as they fit, of several pieces where those are small. An
    index that is larger is cut evenly between units; a block that is larger by itself goes alone.

    Args:
        chunk_bytes: the most that a sub-chunk should have.
    """
    segments: list[Segment] = []
    filled = 0
    for moved in all_moved:
        base_bytes = moved.num_units * moved.block_bytes
        if base_bytes > chunk_bytes:
            if segments:
                yield SubChunk(tuple(segments), filled)
                segments, filled = [], 0
            yield from _cut_between_units(moved, chunk_bytes)
            continue
        base = moved.first_base
        while base < moved.stop_base:
            fitting = max(0, chunk_bytes - aligned(filled)) // base_bytes if base_bytes else moved.num_bases
            if fitting == 0:
                yield SubChunk(tuple(segments), filled)
                segments, filled = [], 0
                continue
            stop = min(moved.stop_base, base + fitting)
            segment = Segment(moved.move, moved.piece, base, stop, 0, moved.num_units, (stop - base) * base_bytes)
            segments.append(segment)
            filled = aligned(filled) + segment.num_bytes
            base = stop
    if segments:
        yield SubChunk(tuple(segments), filled)


def _cut_between_units(moved: MovedBlocks, chunk_bytes: int) -> Iterator[SubChunk]:
    parts = _parts(moved, chunk_bytes)
    cuts = [part * moved.num_units // parts for part in range(parts + 1)]
    for base in range(moved.first_base, moved.stop_base):
        for first, stop in pairwise(cuts):
            num_bytes = (stop - first) * moved.block_bytes
            yield SubChunk((Segment(moved.move, moved.piece, base, base + 1, first, stop, num_bytes),), num_bytes)


def _parts(moved: MovedBlocks, chunk_bytes: int) -> int:
    """Returns in how many parts the units of an index are cut, so that each fits, or is a single unit."""
    return -(-moved.num_units // max(1, chunk_bytes // moved.block_bytes))


def digested_together(all_moved: Iterable[MovedBlocks], most_bytes: int) -> Iterator[Segment]:
    """Cuts what a write moves into the segments that are digested at a time.

    Cuts are between units; all indices of the first axis stay together as far as they fit.

    Args:
        most_bytes: the most that a segment should have; a block that is larger by itself is one.
    """
    for moved in all_moved:
        bases = max(1, min(moved.num_bases, most_bytes // moved.block_bytes))
        units = max(1, most_bytes // (bases * moved.block_bytes))
        for first_unit in range(0, moved.num_units, units):
            stop_unit = min(moved.num_units, first_unit + units)
            for base in range(moved.first_base, moved.stop_base, bases):
                stop = min(moved.stop_base, base + bases)
                num_bytes = (stop - base) * (stop_unit - first_unit) * moved.block_bytes
                yield Segment(moved.move, moved.piece, base, stop, first_unit, stop_unit, num_bytes)


def count_sub_chunks(all_moved: Iterable[MovedBlocks], chunk_bytes: int) -> int:
    """Estimates how many sub-chunks `sub_chunks` makes, without making them."""
    count, small = 0, 0
    for moved in all_moved:
        base_bytes = moved.num_units * moved.block_bytes
        if base_bytes > chunk_bytes:
            count += moved.num_bases * _parts(moved, chunk_bytes)
        else:
            small += moved.num_bases * base_bytes
    return max(1, count + -(-small // chunk_bytes))
