"""From a piece to byte runs: where its bytes lie in the source's memory and where in the receiver's.

Both sides are affine maps over the same logical axes. The axes that are laid out densely and alike on both sides melt
into one contiguous length; the others stay loops. No layout has a name here. Runs are made for one unit, the most
tokens that lie together in a page of either side; pages of different sizes are different numbers of units.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.layout import Box, Entry, Shard

Addresses = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Loop:
    """An axis that both sides step along `count` times, by their own number of bytes."""

    count: int
    source_stride: int
    destination_stride: int


@dataclass(frozen=True, slots=True)
class PageSteps:
    """How one side's units follow each other.

    Attributes:
        units: units in a page.
        unit_stride: bytes from a unit to the next in the same page.
        page_stride: bytes from a page to the next.
    """

    units: int
    unit_stride: int
    page_stride: int


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """The byte runs of one unit of a piece.

    Attributes:
        source_bases: for every index of the piece on its first axis, where its first element lies in unit 0 of page
            0 of the source.
        destination_bases: the same for the receiver.
        loops: from each base the runs start at every combination of steps, the last loop's fastest.
        length: bytes of each run.
        source_steps: to the other units and pages of the source.
        destination_steps: to those of the destination.
    """

    source_bases: Addresses
    destination_bases: Addresses
    loops: tuple[Loop, ...]
    length: int
    source_steps: PageSteps
    destination_steps: PageSteps

    @property
    def count(self) -> int:
        """How many runs a unit has."""
        count = len(self.source_bases)
        for loop in self.loops:
            count *= loop.count
        return count

    @property
    def bytes_per_unit(self) -> int:
        """Bytes that one unit of the piece has."""
        return self.count * self.length

    @property
    def source(self) -> Addresses:
        """Where the runs start in unit 0 of page 0 of the source, shape [runs]."""
        return _starts(self.source_bases, [(loop.count, loop.source_stride) for loop in self.loops])

    @property
    def destination(self) -> Addresses:
        """Where the runs start in unit 0 of page 0 of the receiver, shape [runs], in the same order."""
        return _starts(self.destination_bases, [(loop.count, loop.destination_stride) for loop in self.loops])


def lower(box: Box, source: Shard, destination: Shard, *, unit_tokens: int) -> Runs:
    """Returns the byte runs of the part `box`, which both shards hold.

    Args:
        box: a part that lies in the boxes of both shards, which are shards of the same component.
        unit_tokens: tokens that are moved together, a divisor of both page sizes. Where tokens have no entries of their
            own it is the page size of both.
    """
    loops = [*map(Loop, map(len, box[1:]), source.strides, destination.strides)]
    if source.component.entry is Entry.TOKEN:
        loops.append(Loop(unit_tokens, source.paging.token_stride, destination.paging.token_stride))
    length = source.component.element_bytes
    remaining: list[Loop] = []
    for loop in sorted(loops, key=lambda loop: loop.source_stride):
        if loop.count == 1:
            continue
        if not remaining and loop.source_stride == loop.destination_stride == length:
            length *= loop.count
        else:
            remaining.append(loop)
    return Runs(
        source_bases=_bases(box, source),
        destination_bases=_bases(box, destination),
        loops=tuple(reversed(remaining)),
        length=length,
        source_steps=_page_steps(source, unit_tokens),
        destination_steps=_page_steps(destination, unit_tokens),
    )


def _bases(box: Box, shard: Shard) -> Addresses:
    """Returns where the box's first element lies, for each of its indices on the first axis."""
    first = box[0].start - shard.box[0].start
    within = sum(
        (part.start - held.start) * stride
        for part, held, stride in zip(box[1:], shard.box[1:], shard.strides, strict=True)
    )
    bases: Addresses = np.array(shard.addresses[first : first + len(box[0])], np.uint64) + np.uint64(within)
    return bases


def _page_steps(shard: Shard, unit_tokens: int) -> PageSteps:
    paging = shard.paging
    return PageSteps(
        units=paging.page_tokens // unit_tokens,
        unit_stride=unit_tokens * paging.token_stride,
        page_stride=paging.page_stride,
    )


def _starts(bases: Addresses, loops: list[tuple[int, int]]) -> Addresses:
    offsets = np.zeros(1, np.uint64)
    for count, stride in loops:
        offsets = np.add.outer(offsets, np.arange(count, dtype=np.uint64) * np.uint64(stride)).ravel()
    starts: Addresses = np.add.outer(bases, offsets).ravel()
    return starts
