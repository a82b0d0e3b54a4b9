"""Arithmetic on the addresses of blocks, and arrays over raw memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.plan.packing import BlockShape, PackedSide
from kvferry.staging.kernels import StartArray


def alignment_of(most: int, *numbers: int | NDArray[np.int64]) -> int:
    """Returns the largest power of two, up to `most`, that divides all of some numbers.

    Args:
        most: a power of two.
        numbers: single ones, or arrays of at least one.
    """
    bits = most
    for each in numbers:
        bits |= int(np.bitwise_or.reduce(each)) if isinstance(each, np.ndarray) else int(each)
    return bits & -bits


def common_alignment(starts: StartArray, shape: BlockShape, address: int, most: int) -> int:
    """Returns the largest power of two, up to `most`, that divides every address at which a run starts or ends.

    Args:
        starts: byte address of every block's first run.
        shape: the shape of every block.
        address: staging memory, where the first block is packed.
        most: a power of two.
    """
    return alignment_of(most, starts, address, shape.length, *(stride for _, stride in shape.loops))


def static_alignment(side: PackedSide, most: int) -> int:
    """Returns a power of two, up to `most`, that divides the addresses of all blocks of a piece, packed or not."""
    steps = side.steps
    strides = BlockShape(((1, steps.page_stride), (1, steps.unit_stride if steps.units > 1 else 0)), most)
    return common_alignment(side.bases, side.shape, common_alignment(side.bases, strides, 0, most), most)


def spread(starts: StartArray, loops: Sequence[tuple[int, int]]) -> StartArray:
    """Returns where every part of a block starts if its outermost loops are taken apart.

    Args:
        starts: byte addresses, shape [blocks].
        loops: (count, stride in bytes), the slowest first.

    Returns:
        Shape [blocks * product of the counts], block by block.
    """
    for count, stride in loops:
        starts = np.add.outer(starts, np.arange(count, dtype=np.int64) * stride).ravel()
    return starts


class _Memory:
    """Raw memory, described for NumPy's array interface (version 3)."""

    __slots__ = ("__array_interface__",)

    def __init__(self, description: dict[str, Any]) -> None:
        self.__array_interface__ = description


def array_at(address: int, shape: tuple[int, ...], dtype: str, strides: tuple[int, ...] | None = None) -> NDArray[Any]:
    """Makes an array over memory that someone else owns and keeps.

    Args:
        address: its first element's address, aligned for the type.
        shape: elements per dimension.
        dtype: NumPy's string for it, such as '<i8', or '|V96' for 96 bytes of anything.
        strides: bytes per step; without gaps if None.
    """
    description = {"data": (address, False), "shape": shape, "typestr": dtype, "strides": strides, "version": 3}
    return np.asarray(_Memory(description))
