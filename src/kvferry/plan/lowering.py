"""From a piece to byte runs: where its bytes lie in the source's memory and where in the receiver's.

Both sides are affine maps over the same logical axes. The axes that are laid out densely and alike on both sides melt
into one contiguous length; the others are enumerated. No layout has a name here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.layout import Box, Shard

Addresses = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Runs:
    """The byte runs of one page of a piece; in page p every address is p page strides further on.

    Attributes:
        source: addresses of the runs in page 0 of the source, shape [runs].
        destination: addresses in page 0 of the receiver, shape [runs], in the same order.
        length: bytes of each run.
        source_page_stride, destination_page_stride: bytes from a page to the next.
    """

    source: Addresses
    destination: Addresses
    length: int
    source_page_stride: int
    destination_page_stride: int

    @property
    def bytes_per_page(self) -> int:
        """Bytes that one page of the piece takes on the way."""
        return len(self.source) * self.length


@dataclass(frozen=True, slots=True)
class _Loop:
    """An axis that both sides step along `count` times."""

    count: int
    source_stride: int
    destination_stride: int


def lower(box: Box, source: Shard, destination: Shard) -> Runs:
    """The byte runs of the part `box`, which both shards hold, with pages of equally many tokens.

    Args:
        box: lies in the boxes of both shards, which are shards of the same component.
    """
    source_start, destination_start = _offset(box, source), _offset(box, destination)
    loops = [
        _Loop(source.paging.page_tokens, source.paging.token_stride, destination.paging.token_stride),
        *map(_Loop, map(len, box[1:]), source.strides, destination.strides),
    ]
    length = source.component.element_bytes
    remaining: list[_Loop] = []
    for loop in sorted(loops, key=lambda loop: loop.source_stride):
        if loop.count == 1:
            continue
        if not remaining and loop.source_stride == loop.destination_stride == length:
            length *= loop.count
        else:
            remaining.append(loop)
    source_offsets = np.zeros(1, np.uint64)
    destination_offsets = np.zeros(1, np.uint64)
    for loop in reversed(remaining):
        steps = np.arange(loop.count, dtype=np.uint64)
        source_offsets = np.add.outer(source_offsets, steps * np.uint64(loop.source_stride)).ravel()
        destination_offsets = np.add.outer(destination_offsets, steps * np.uint64(loop.destination_stride)).ravel()
    return Runs(
        source=np.add.outer(_bases(box, source) + np.uint64(source_start), source_offsets).ravel(),
        destination=np.add.outer(_bases(box, destination) + np.uint64(destination_start), destination_offsets).ravel(),
        length=length,
        source_page_stride=source.paging.page_stride,
        destination_page_stride=destination.paging.page_stride,
    )


def _offset(box: Box, shard: Shard) -> int:
    """Bytes from a base address to the first element of the box."""
    return sum(
        (part.start - held.start) * stride
        for part, held, stride in zip(box[1:], shard.box[1:], shard.strides, strict=True)
    )


def _bases(box: Box, shard: Shard) -> Addresses:
    """The base addresses of the box's indices on the first axis."""
    first = box[0].start - shard.box[0].start
    return np.array(shard.addresses[first : first + len(box[0])], np.uint64)
