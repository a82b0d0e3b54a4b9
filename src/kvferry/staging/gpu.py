"""The kernels for GPU memory: whatever is copied at a time is queued at once and waited for once.

Every thread has a stream of its own. Where blocks begin is uploaded for many sub-chunks together, and neighbours in
staging memory whose blocks have the same shape are one launch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kvferry.layout import Region
from kvferry.plan.packing import BlockShape, PackedSide
from kvferry.staging.accelerator import MOST_LOOPS, Accelerator, CopyLaunch, ThreadStreams
from kvferry.staging.kernels import (
    AddressRange,
    Gathers,
    Kernels,
    PackedBlocks,
    StartArray,
    alignment_of,
    spread,
    static_alignment,
)

VECTOR_BYTES = 16

UPLOADED_BLOCKS = 1 << 18
"""From so many blocks on, further sub-chunks have an upload of their own: 2 MiB of addresses."""


MOST_PIECES = 8
"""Most launches that blocks of one shape are split into, by whether they are aligned: each costs some microseconds."""


class _Launch(NamedTuple):
    """As a `CopyLaunch`, before its starts are uploaded.

    Attributes:
        starts: where blocks begin.
        shape: of every block, with no more loops than the kernel follows.
        offset: where the first block is packed in the staging memory of its batch.
    """

    starts: StartArray
    shape: BlockShape
    offset: int


class GpuKernels(Kernels):
    """Copies between a pool and staging memory on one GPU.

    A call waits for what it launched and for nothing else, and releases the interpreter lock meanwhile. Pages must hold
    their bytes when something is gathered: it does not wait for the engine's streams.
    """

    def __init__(self, regions: Sequence[Region], accelerator: Accelerator) -> None:
        """Takes the pool that the kernels copy from and to.

        Args:
            regions: the pool's memory.
            accelerator: what copies.
        """
        self._range = AddressRange.over(regions)
        self._streams = ThreadStreams(accelerator)
        self._compiled: set[tuple[int, int, bool]] = set()  # alignment, loops, direction: once for all threads

    def gather(self, starts: StartArray, shape: BlockShape, address: int) -> None:
        self.gathers([[PackedBlocks(starts, shape, 0)]]).gather(address)

    def scatter(self, address: int, starts: StartArray, shape: BlockShape) -> None:
        self.scatter_all(address, [PackedBlocks(starts, shape, 0)])

    def gathers(self, batches: Iterable[Sequence[PackedBlocks]]) -> Gathers:
        return _GpuGathers(self, batches)

    def scatter_all(self, address: int, blocks: Sequence[PackedBlocks]) -> None:
        (copies,) = self.uploaded([self.launches(blocks)], is_gather=False)
        self.run(copies, address)

    def prepare(self, sides: Iterable[PackedSide], *, is_gather: bool) -> None:
        wanted: set[tuple[int, int, bool]] = set()
        for side in sides:
            # Blocks of a chunk may happen to be better aligned than all that there are.
            alignment = static_alignment(side, VECTOR_BYTES)
            while alignment <= VECTOR_BYTES:
                wanted.add((alignment, min(len(side.shape.loops), MOST_LOOPS), is_gather))
                alignment *= 2
        missing = wanted - self._compiled
        if missing:
            self._compile(missing)

    def compile(self) -> None:
        """Compiles what most layouts need: runs that are multiples of 16 bytes, in blocks of one and of several."""
        self._compile({(VECTOR_BYTES, loops, is_gather) for loops in (0, 1) for is_gather in (True, False)})

    def _compile(self, variants: Iterable[tuple[int, int, bool]]) -> None:
        stream = self._streams.own()
        starts = stream.upload(np.zeros(1, np.int64))
        for alignment, loops, is_gather in sorted(variants):
            shape = BlockShape(((1, 0),) * loops, alignment)
            stream.launch(CopyLaunch(starts, 0, 0, shape.loops, shape.length, 0, alignment, is_gather))
            self._compiled.add((alignment, loops, is_gather))
        stream.synchronize()

    def launches(self, blocks: Iterable[PackedBlocks]) -> list[_Launch]:
        """Makes launches of blocks that are copied together: neighbours of one shape are one.

        Raises:
            RegistrationError: if a block lies outside the pool.
            LayoutError: if a shape is malformed.
        """
        found: list[_Launch] = []
        together: list[PackedBlocks] = []
        for each in blocks:
            self._range.check(each.starts, each.shape)
            if not len(each.starts):
                continue
            if together and (each.shape != together[-1].shape or each.offset != together[-1].stop):
                found.append(_launch(together))
                together = []
            together.append(each)
        if together:
            found.append(_launch(together))
        return found

    def uploaded(self, batches: Sequence[Sequence[_Launch]], *, is_gather: bool) -> deque[list[CopyLaunch]]:
        """Queues the upload of where the blocks of some batches begin, all together.

        Returns:
            What is to be launched for each, with addresses in staging memory that count from 0. For this thread, until
            it has run one of them.
        """
        every = [launch.starts for launches in batches for launch in launches]
        if not every:
            return deque([] for _ in batches)
        starts, first = self._streams.own().upload(np.concatenate(every)), 0
        found: deque[list[CopyLaunch]] = deque()
        for launches in batches:
            found.append([])
            for each in launches:
                shape = each.shape
                for begin, end, alignment in by_alignment(each.starts, shape, each.offset):
                    address = each.offset + begin * shape.num_bytes
                    piece = starts, first + begin, first + end, shape.loops, shape.length, address, alignment
                    found[-1].append(CopyLaunch(*piece, is_gather))
                first += len(each.starts)
        return found

    def run(self, copies: Sequence[CopyLaunch], address: int) -> None:
        """Launches what is copied at a time, and waits for all of it, also for what was launched before an error."""
        if not copies:
            return
        stream = self._streams.own()
        try:
            for copy in copies:
                where = copy.address + address
                stream.launch(replace(copy, address=where, alignment=alignment_of(copy.alignment, where)))
        finally:
            stream.synchronize()


class _GpuGathers(Gathers):
    def __init__(self, kernels: GpuKernels, batches: Iterable[Sequence[PackedBlocks]]) -> None:
        self._kernels = kernels
        self._rest = iter(batches)
        self._uploaded: deque[list[CopyLaunch]] = deque()

    def gather(self, address: int) -> None:
        if not self._uploaded:
            self._uploaded = self._kernels.uploaded(self._next_batches(), is_gather=True)
        self._kernels.run(self._uploaded.popleft(), address)

    def _next_batches(self) -> list[list[_Launch]]:
        batches: list[list[_Launch]] = []
        num_blocks = 0
        for blocks in self._rest:
            batches.append(self._kernels.launches(blocks))
            num_blocks += sum(len(launch.starts) for launch in batches[-1])
            if num_blocks >= UPLOADED_BLOCKS:
                break
        return batches


def by_alignment(starts: StartArray, shape: BlockShape, address: int) -> list[tuple[int, int, int]]:
    """Splits blocks where some begin at worse places than their shape allows, so that these alone are copied slowly.

    Args:
        starts: byte address of every block's first run, shape [blocks].
        shape: the shape of every block.
        address: where the first block is packed.

    Returns:
        First and last of each piece, half-open, and the largest power of two up to 16 that divides its addresses and
        lengths. One piece if there would be too many.
    """
    best = alignment_of(VECTOR_BYTES, address, shape.length, *(stride for _, stride in shape.loops))
    common = alignment_of(best, starts)
    if common == best:
        return [(0, len(starts), best)]
    aligned = starts & (best - 1) == 0
    bounds = [0, *(np.flatnonzero(aligned[1:] != aligned[:-1]) + 1).tolist(), len(starts)]
    if len(bounds) - 1 > MOST_PIECES:
        return [(0, len(starts), common)]
    return [(begin, end, alignment_of(best, starts[begin:end])) for begin, end in pairwise(bounds)]


def _launch(together: Sequence[PackedBlocks]) -> _Launch:
    starts = together[0].starts if len(together) == 1 else np.concatenate([each.starts for each in together])
    shape = together[0].shape
    outer, inner = shape.loops[:-MOST_LOOPS], shape.loops[-MOST_LOOPS:]
    return _Launch(spread(starts, outer), BlockShape(inner, shape.length), together[0].offset)
