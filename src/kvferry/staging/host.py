"""The kernels for CPU memory: NumPy gathers and scatters, torch gathers runs that are not evenly apart.

Both see the pool as overlapping windows, one for every place where a block could start, each of them as nested as a
block, and select windows by number. One set of windows reaches from the lowest to the highest address of all tensors,
so that one call serves all layers. Where all runs start a multiple of their length apart, as slices of rows in one
tensor do, gathering sees the pool as rows of that length instead, and NumPy's `take` picks rows.

Measured on one core of a two-core EPYC (Zen 4), 2 MiB at a time, 16 runs of 1 KiB from every scattered page of 32 KiB:
NumPy's `take` gathers 6.8 GB/s, and 14 where a page is one run; torch's `index_select` 5.6 and 12; NumPy's indexing
5.9, but it allocates as much as it copies; all wait for memory. NumPy's assignment through windows of opaque elements
as long as a run scatters 7.8 GB/s; torch's `index_copy_` 4.4 with 8-byte words, its `index_put_` 3.2. Reading ahead
(one word of every cache line or of every run) made gathering slower, as did handling every run as a block of its own
once runs have 1 KiB.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.layout import Region
from kvferry.plan.packing import BlockShape
from kvferry.staging.kernels import (
    AddressRange,
    Kernels,
    StartArray,
    alignment_of,
    array_at,
    block_extent,
    common_alignment,
    spread,
)

_WORDS_PER_CALL = 32768
"""torch's grain size (ATen/Parallel.h): a call that copies more words shares them among the threads of torch's pool.

That pool belongs to the engine, and our caller's threads are parallel already.
"""

_WORDS = {8: "<i8", 4: "<i4", 2: "<i2", 1: "|u1"}
_LARGEST_WORD = 8

_LONG_RUN_BYTES = 1 << 20
"""Runs from this length on are copied one by one: selecting them gains nothing, and NumPy's elements end at 2 GiB."""

_FEWEST_UNLOCKED = 512
"""NumPy keeps the interpreter lock while it assigns up to 500 elements, however large they are."""

_MOST_STRETCHES = 8
"""Most calls of NumPy's for one gather: beyond so many, one of torch's costs less."""

_SHORTEST_ROW_BYTES = 4096
"""Runs of tensors that are out of step are taken in rows of this length or longer: as fast as whole runs in a call for
each tensor, measured with runs of 32 KiB. With rows of 1 or 2 KiB NumPy's `take` is half as fast."""

_MOST_SHAPES = 64
"""Windows kept, of either kind. An endpoint meets a few shapes per peer, peers of one layout the same."""


class HostKernels(Kernels):
    """Copies between a pool in CPU memory and staging memory. Releases the interpreter lock while it copies.

    Attributes:
        rows: windows on the rows of blocks.
        word_windows: on their words.
        run_windows: on their runs.
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        """Takes the pool that the kernels copy from and to.

        Args:
            regions: the pool's memory.
        """
        self._range = AddressRange.over(regions)
        self._regions = sorted(region for region in regions if region.length)
        # torch wants windows to start at multiples of the word: an aligned address before the first serves every word.
        self._base = self._range.start & -_LARGEST_WORD
        self.rows = lru_cache(_MOST_SHAPES)(self._make_rows)
        self.word_windows = lru_cache(_MOST_SHAPES)(self._make_word_windows)
        self.run_windows = lru_cache(_MOST_SHAPES)(self._make_run_windows)

    def gather(self, starts: StartArray, shape: BlockShape, address: int) -> None:
        self._range.check(starts, shape)
        if not len(starts):
            return
        if shape.length >= _LONG_RUN_BYTES:
            self._gather_runs(starts, shape, address)
            return
        stretches = self._stretches_in_step(starts, shape, address)
        if stretches is None or len(stretches) > 1:
            shape = _in_runs_in_step(shape, starts)
            stretches = self._stretches_in_step(starts, shape, address)
        if stretches is None:
            self._gather_words(starts, shape, address)
            return
        loops = [(count, stride // shape.length) for count, stride in shape.loops]
        for first, last, part in stretches:
            before, rows = self.rows(part, shape.length, int(starts[first] % shape.length))
            numbers = spread((starts[first:last] - before) // shape.length, loops)
            packed = array_at(address + first * shape.num_bytes, (len(numbers),), rows.dtype.str)
            rows.take(numbers, out=packed, mode="clip")  # any other mode copies what it takes once more

    def _gather_runs(self, starts: StartArray, shape: BlockShape, address: int) -> None:
        for there, run in self._runs(starts, shape, address):
            there[...] = run

    def _gather_words(self, starts: StartArray, shape: BlockShape, address: int) -> None:
        word = common_alignment(starts, shape, address, _LARGEST_WORD)
        if shape.length // word >= _WORDS_PER_CALL:
            self._gather_runs(starts, shape, address)
            return
        outer, inner = _split_loops(shape, word)
        starts = spread(starts, outer)
        windows = self.word_windows(inner, word)
        indices = torch.from_numpy((starts - self._base) >> (word.bit_length() - 1))
        packed = torch.from_numpy(array_at(address, (len(starts), *windows.shape[1:]), _WORDS[word]))
        at_once = _WORDS_PER_CALL // (inner.num_bytes // word)
        # "Unsafe" concerns autograd alone; the other split is written in Python and takes twice as long.
        for some, place in zip(indices.unsafe_split(at_once), packed.unsafe_split(at_once), strict=True):
            torch.index_select(windows, 0, some, out=place)

    def scatter(self, address: int, starts: StartArray, shape: BlockShape) -> None:
        self._range.check(starts, shape)
        if not len(starts):
            return
        if shape.length >= _LONG_RUN_BYTES:
            for there, run in self._runs(starts, shape, address):
                run[...] = there
            return
        shape = _in_enough_parts(shape, len(starts))
        packed = array_at(address, (len(starts), *(count for count, _ in shape.loops)), f"|V{shape.length}")
        for first, last, part in self._stretches(starts, address):
            self.run_windows(shape, part)[starts[first:last] - part.start] = packed[first:last]

    def _stretches(self, starts: StartArray, address: int) -> Iterator[tuple[int, int, AddressRange]]:
        """Yields which blocks to copy together, and the part of the pool that they are in: first, last + 1, part.

        That is all blocks, unless staging memory lies between tensors of the pool: NumPy would take windows that reach
        over it for memory that it overlaps, and copy all of it first. A part of the pool lies on one side of it.
        """
        number = bisect_right(self._regions, address, key=lambda region: region.address)
        if number in (0, len(self._regions)):
            yield 0, len(starts), self._range
            return
        below = AddressRange(self._range.start, self._regions[number - 1].stop)
        above = AddressRange(self._regions[number].address, self._range.stop)
        is_above = starts > address
        cuts = (np.flatnonzero(np.diff(is_above)) + 1).tolist()
        for first, last in pairwise([0, *cuts, len(starts)]):
            yield first, last, above if is_above[first] else below

    def _stretches_in_step(
        self, starts: StartArray, shape: BlockShape, address: int
    ) -> list[tuple[int, int, AddressRange]] | None:
        """Returns blocks whose runs all start a multiple of their length apart: first, last + 1, part of the pool.

        Tensors that are out of step with each other have a stretch each. Returns None if there are too many.
        """
        if any(stride % shape.length for _, stride in shape.loops):
            return None
        cuts = (np.flatnonzero(np.diff(starts % shape.length)) + 1).tolist()
        if len(cuts) >= _MOST_STRETCHES:
            return None
        found = []
        for first, last, part in self._stretches(starts, address):
            bounds = [first, *(cut for cut in cuts if first < cut < last), last]
            found += [(begin, stop, part) for begin, stop in pairwise(bounds)]
        return found if len(found) <= _MOST_STRETCHES else None

    def _runs(self, starts: StartArray, shape: BlockShape, address: int) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """Returns staging memory and pool of every run, for runs so long that a memory copy each is best."""
        run_starts = spread(starts, shape.loops).tolist()
        return [
            (array_at(address + number * shape.length, (shape.length,), "|u1"), array_at(start, (shape.length,), "|u1"))
            for number, start in enumerate(run_starts)
        ]

    def _make_rows(self, part: AddressRange, length: int, remainder: int) -> tuple[int, NDArray[Any]]:
        """Views part of the pool as opaque rows of a length. Returns the first row's address, and the rows.

        Args:
            remainder: what is left of a row's address when it is divided by the length.
        """
        first = part.start + (remainder - part.start) % length
        return first, array_at(first, ((part.stop - first) // length,), f"|V{length}")

    def _make_word_windows(self, shape: BlockShape, word: int) -> torch.Tensor:
        """Views the pool as words, shape [places where a block could start, *counts, words of a run]."""
        places = (self._range.stop - block_extent(shape) - self._base) // word + 1
        counts, strides = zip(*shape.loops, strict=True) if shape.loops else ((), ())
        return torch.from_numpy(
            array_at(self._base, (places, *counts, shape.length // word), _WORDS[word], (word, *strides, word))
        )

    def _make_run_windows(self, shape: BlockShape, part: AddressRange) -> NDArray[Any]:
        """Views part of the pool as elements as long as a run, shape [places where a block could start, *counts]."""
        places = part.stop - block_extent(shape) - part.start + 1
        counts, strides = zip(*shape.loops, strict=True) if shape.loops else ((), ())
        return array_at(part.start, (places, *counts), f"|V{shape.length}", (1, *strides))


def _in_enough_parts(shape: BlockShape, blocks: int) -> BlockShape:
    """Returns the same shape in so many runs that NumPy lets other threads run while it assigns, where possible."""
    if shape.loops:  # nested ones it always assigns without the lock
        return shape
    parts = 1
    while blocks * parts < _FEWEST_UNLOCKED and shape.length % (2 * parts) == 0:
        parts *= 2
    if parts == 1:
        return shape
    return BlockShape(((parts, shape.length // parts),), shape.length // parts)


def _in_runs_in_step(shape: BlockShape, starts: StartArray) -> BlockShape:
    """Returns the same shape in runs that all start a multiple of their length apart, unless they would be short."""
    length = alignment_of(_LONG_RUN_BYTES, shape.length, starts - starts[0], *(stride for _, stride in shape.loops))
    if length < _SHORTEST_ROW_BYTES:
        return shape
    return BlockShape((*shape.loops, (shape.length // length, length)), length)


def _split_loops(shape: BlockShape, word: int) -> tuple[tuple[tuple[int, int], ...], BlockShape]:
    """Returns the outer loops to take apart, and the rest of a block: fewer words than torch shares among threads."""
    outer = 0
    inner = shape
    while inner.num_bytes // word >= _WORDS_PER_CALL:
        outer += 1
        inner = BlockShape(shape.loops[outer:], shape.length)
    return shape.loops[:outer], inner
