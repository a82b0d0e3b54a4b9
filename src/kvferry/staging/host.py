"""The kernels for CPU memory: one call of compiled code (`blocks.c`) for all blocks, without the interpreter's lock.

Installing kvferry compiles it. Where no compiler was at hand the interpreter copies block by block, more slowly, and
`kvferry doctor` says so.

Measured on one core of a two-core EPYC, 2 MiB at a time from scattered pages, beside the best that NumPy and torch do
(`benchmarks/staging_kernels.py`): runs of 1 KiB are gathered at 5.8 GB/s and 4.3, scattered at 5.3 and 4.5; pages of
16 KiB gathered at 7.1 and 5.1, scattered at 9.8 and 5.8; runs of 256 KiB at 7.5 and 6.1, 11.0 and 6.5.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from kvferry.layout import Region
from kvferry.plan.packing import BlockShape
from kvferry.staging.kernels import AddressRange, Kernels, PackedBlocks, StartArray, Watch, array_at, unwatched

CopyBlocks = Callable[[Sequence[PackedBlocks], int, bool], None]
"""Copies blocks to where they are packed from an address on; or back, if False."""


class Group(ctypes.Structure):
    """Equally shaped blocks, as compiled code takes them."""

    _fields_ = (
        ("starts", ctypes.c_void_p),
        ("blocks", ctypes.c_int64),
        ("loops", ctypes.c_void_p),
        ("num_loops", ctypes.c_int64),
        ("length", ctypes.c_int64),
        ("offset", ctypes.c_int64),
    )


COMPILED = Path(__file__).with_name("blocks.so")


class HostKernels(Kernels):
    """Copies between a pool in CPU memory and staging memory. Releases the interpreter lock while it copies."""

    def __init__(self, regions: Sequence[Region], copy: CopyBlocks) -> None:
        """Takes the pool that the kernels copy from and to.

        Args:
            regions: the pool's memory.
            copy: copies blocks.
        """
        self._range = AddressRange.over(regions)
        self._copy = copy

    @property
    def is_compiled(self) -> bool:
        """Whether compiled code copies."""
        return self._copy is not interpreted

    def check_all(self, blocks: Sequence[PackedBlocks]) -> None:
        """Checks blocks as `gather` does, and copies nothing; raises as that does."""
        for each in blocks:
            self._range.check(each.starts, each.shape)

    def gather(self, starts: StartArray, shape: BlockShape, address: int) -> None:
        self._range.check(starts, shape)
        self._copy([PackedBlocks(starts, shape, 0)], address, True)

    def scatter(self, address: int, starts: StartArray, shape: BlockShape) -> None:
        self.scatter_all(address, [PackedBlocks(starts, shape, 0)])

    def scatter_all(self, address: int, blocks: Sequence[PackedBlocks]) -> None:
        self.check_all(blocks)
        self._copy(blocks, address, False)


def fastest(library: Path = COMPILED, watch: Watch = unwatched) -> tuple[CopyBlocks, str]:
    """Returns what copies blocks fastest here, and why that is not compiled code; empty if it is."""
    try:
        return compiled(library, watch), ""
    except (OSError, AttributeError) as error:
        return interpreted, str(error)


def compiled(library: Path = COMPILED, watch: Watch = unwatched) -> CopyBlocks:
    """Loads the compiled copies.

    Args:
        library: the file.
        watch: is put around each of them.

    Raises:
        OSError: if they are not there, or were compiled from another source than the one beside them.
        AttributeError: if that is another library.
    """
    loaded = ctypes.CDLL(str(library))
    crc32 = loaded.kvferry_source_crc32
    crc32.restype = ctypes.c_uint32
    if crc32() != zlib.crc32(library.with_suffix(".c").read_bytes()):
        raise OSError(f"{library} was compiled from another source: install kvferry anew, or run hatch_build.py")
    loaded.kvferry_copy.argtypes = (ctypes.POINTER(Group), ctypes.c_int64, ctypes.c_void_p, ctypes.c_int)
    loaded.kvferry_copy.restype = None
    copy = watch(loaded.kvferry_copy)

    def copy_blocks(blocks: Sequence[PackedBlocks], address: int, is_gather: bool) -> None:
        groups, kept = described(blocks)
        copy(groups, len(groups), address, is_gather)
        del kept

    return copy_blocks


def described(blocks: Sequence[PackedBlocks]) -> tuple[ctypes.Array[Group], list[object]]:
    """Describes blocks for compiled code. Returns also what must be kept till it is done."""
    groups, kept = (Group * len(blocks))(), []
    for group, each in zip(groups, blocks, strict=True):
        starts = np.ascontiguousarray(each.starts, np.int64)
        loops = (ctypes.c_int64 * (2 * len(each.shape.loops)))(*chain.from_iterable(each.shape.loops))
        # `ctypes.data` takes three times as long.
        group.starts, group.blocks = starts.__array_interface__["data"][0], len(starts)
        group.loops, group.num_loops = ctypes.addressof(loops), len(each.shape.loops)
        group.length, group.offset = each.shape.length, each.offset
        kept += [starts, loops]
    return groups, kept


def interpreted(blocks: Sequence[PackedBlocks], address: int, is_gather: bool) -> None:
    """Copies block by block."""
    for each in blocks:
        counts = [count for count, _ in each.shape.loops]
        strides = [stride for _, stride in each.shape.loops]
        where = address + each.offset
        for start in each.starts.tolist():
            block = array_at(start, (*counts, each.shape.length), "|u1", (*strides, 1))
            packed = array_at(where, (*counts, each.shape.length), "|u1")
            to, source = (packed, block) if is_gather else (block, packed)
            to[...] = source
            where += each.shape.num_bytes
