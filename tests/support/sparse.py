"""A pool larger than 4 GiB of which only the pages exist that are touched."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence

import numpy as np

from kvferry.layout import Region
from kvferry.plan.packing import BlockShape
from kvferry.staging import Kernels

GIB = 1 << 30
POOL_BYTES = 9 * GIB
_MAP_NORESERVE = 0x4000  # mmap has a name for it from Python 3.13 on
FAR_BLOCKS = {
    "blocks beyond 4 GiB": (BlockShape(((16, 2048),), 1024), (5 * GIB + 4096, 8 * GIB + 16, (1 << 32) - 512)),
    "runs of a block 5 GiB apart": (BlockShape(((2, 5 * GIB),), 256), (64, 3 * GIB + 64)),
    "loops of 2 and of 4 GiB": (BlockShape(((2, 1 << 32), (2, 1 << 31), (2, 4096)), 64), (128, 2 * GIB - 64)),
}
"""Shapes, and offsets of blocks that do not overlap: numbers of 32 bits would wrap, signed or not."""


class SparsePool:
    """Zeros as far as one can see."""

    def __init__(self) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._pages = mmap.mmap(-1, POOL_BYTES, flags=flags)
        self.bytes = np.frombuffer(self._pages, np.uint8)

    @property
    def region(self) -> Region:
        """All of it."""
        return Region(self.bytes.ctypes.data, POOL_BYTES)


def offsets_of(shape: BlockShape) -> list[int]:
    """Where the runs of a block start, by plain Python."""
    offsets = [0]
    for count, stride in shape.loops:
        offsets = [offset + number * stride for offset in offsets for number in range(count)]
    return offsets


def check_far_blocks(make: Callable[[Sequence[Region]], Kernels], shape: BlockShape, blocks: Sequence[int]) -> None:
    """Gathers blocks of a large pool, and scatters them into another, each compared with plain Python."""
    source, target = SparsePool(), SparsePool()
    runs = [block + offset for block in blocks for offset in offsets_of(shape)]
    contents = np.random.default_rng(7).integers(1, 256, (len(runs), shape.length), np.uint8)
    for at, content in zip(runs, contents, strict=True):
        source.bytes[at : at + shape.length] = content
    packed = np.zeros(contents.size + 64, np.uint8)
    starts = np.array(blocks, np.int64)
    make([source.region]).gather(source.region.address + starts, shape, packed.ctypes.data)
    assert (packed[: contents.size] == contents.ravel()).all()
    assert not packed[contents.size :].any()
    make([target.region]).scatter(packed.ctypes.data, target.region.address + starts, shape)
    for at, content in zip(runs, contents, strict=True):
        assert (target.bytes[at : at + shape.length] == content).all(), f"the run at {at}"
    low = [run & 0xFFFFFFFF for run in runs if run & 0xFFFFFFFF != run]
    for at in low:
        if not any(run - shape.length < at < run + shape.length for run in runs):
            assert not target.bytes[at : at + shape.length].any(), f"what belongs at 2**32 + {at} is at {at}"
