"""The contract of what gathers and scatters, and the addresses that it may touch.

A block is what one unit occupies on one side: nested strided runs (`BlockShape`). A call names the first byte of
every block, of all layers together, so that it is one copy on a CPU and one launch on a GPU however many layers there
are. Bytes are copied as integers: no element type is ever interpreted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import LayoutError, RegistrationError
from kvferry.layout import Region
from kvferry.plan.packing import BlockShape, PackedSide

_P = ParamSpec("_P")
_Returned = TypeVar("_Returned")

StartArray = NDArray[np.int64]
"""The address of the first byte of every block, shape [blocks]."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedBlocks:
    """Equally shaped blocks, and where they are packed.

    Attributes:
        starts: byte address of every block's first run, shape [blocks].
        shape: the shape of every block.
        offset: where the first block is packed, in bytes behind the first of its batch.
    """

    starts: StartArray
    shape: BlockShape
    offset: int

    @property
    def stop(self) -> int:
        """The offset behind the last block."""
        return self.offset + len(self.starts) * self.shape.num_bytes


class Watch(Protocol):
    """Puts something around a call that runs without the interpreter's lock, as a benchmark does to time it."""

    def __call__(self, call: Callable[_P, _Returned], /) -> Callable[_P, _Returned]:
        """Returns a call that does the same."""


def unwatched(call: Callable[_P, _Returned], /) -> Callable[_P, _Returned]:
    """Puts nothing around it."""
    return call


class Gathers(ABC):
    """Gathers batch after batch. Any thread may gather the next once the one before is done."""

    @abstractmethod
    def gather(self, address: int) -> None:
        """Packs the next batch at an address. Returns when the bytes are there; raises as `Kernels.gather`."""


class Kernels(ABC):
    """Copies blocks of a pool to staging memory and back, on one device.

    May be called from several threads at once, each with staging memory of its own. Nothing of the size of the data is
    allocated.
    """

    @abstractmethod
    def gather(self, starts: StartArray, shape: BlockShape, address: int) -> None:
        """Packs blocks one after the other. Returns when the bytes are there.

        Args:
            starts: byte address of every block's first run, shape [blocks].
            shape: the shape of every block.
            address: staging memory, where the first block goes.

        Raises:
            RegistrationError: if a block lies outside the pool. Nothing was copied.
            LayoutError: if the shape is malformed.
        """

    @abstractmethod
    def scatter(self, address: int, starts: StartArray, shape: BlockShape) -> None:
        """Unpacks blocks, the inverse of `gather`. Returns when the bytes are there.

        Args:
            address: staging memory, where the first block lies.
            starts: byte address of every block's first run, shape [blocks]. Blocks must not overlap.
            shape: the shape of every block.

        Raises:
            RegistrationError: if a block lies outside the pool. Nothing was copied.
            LayoutError: if the shape is malformed.
        """

    def gathers(self, batches: Iterable[Sequence[PackedBlocks]]) -> Gathers:
        """Returns what gathers the batches of one write, each at an address of its own.

        Several may be looked at ahead. What lies outside the pool is refused by then, with nothing of its batch copied.
        """
        return _OneByOne(self, batches)

    def scatter_all(self, address: int, blocks: Sequence[PackedBlocks]) -> None:
        """Unpacks a batch. Returns when the bytes are there.

        Args:
            address: staging memory, where the batch begins.
            blocks: what lies there.

        Raises:
            RegistrationError: if a block lies outside the pool.
            LayoutError: if a shape is malformed.
        """
        for each in blocks:
            self.scatter(address + each.offset, each.starts, each.shape)

    def prepare(self, sides: Iterable[PackedSide], *, is_gather: bool) -> None:  # noqa: B027 - only some need it
        """Gets ready for blocks of these pieces, so that no chunk waits: compiles what is not compiled yet.

        Args:
            sides: where this side has the blocks of every piece.
            is_gather: whether they will be gathered; otherwise scattered.
        """


class _OneByOne(Gathers):
    def __init__(self, kernels: Kernels, batches: Iterable[Sequence[PackedBlocks]]) -> None:
        self._kernels = kernels
        self._rest = iter(batches)

    def gather(self, address: int) -> None:
        for each in next(self._rest):
            self._kernels.gather(each.starts, each.shape, address + each.offset)


@dataclass(frozen=True, slots=True)
class AddressRange:
    """From the lowest to the highest address of a pool. There may be holes, which no block touches.

    Attributes:
        start: the first byte.
        stop: the address after the last byte.
    """

    start: int
    stop: int

    @classmethod
    def over(cls, regions: Sequence[Region]) -> AddressRange:
        """Returns the range that covers all regions."""
        used = [region for region in regions if region.length]
        return cls(
            min((region.address for region in used), default=0), max((region.stop for region in used), default=0)
        )

    def check(self, starts: StartArray, shape: BlockShape) -> None:
        """Refuses blocks that reach out of the range: copying them could end the process.

        Raises:
            RegistrationError: naming the block furthest out.
            LayoutError: if the shape has counts, strides or a length that no block has.
        """
        extent = block_extent(shape)
        if not len(starts):
            return
        lowest, highest = int(starts.min()), int(starts.max())
        if lowest >= self.start and highest + extent <= self.stop:
            return
        outside = lowest if lowest < self.start else highest
        raise RegistrationError(
            f"a block of {extent} bytes at {outside:#x} lies outside the pool, which goes from {self.start:#x} to "
            f"{self.stop:#x}: page numbers or addresses of the plan are wrong, please report this"
        )


def block_extent(shape: BlockShape) -> int:
    """Returns how many bytes a block spans in its pool, from its first to its last.

    Raises:
        LayoutError: if a count or the length is not positive, or a stride negative.
    """
    if shape.length < 1 or any(count < 1 or stride < 0 for count, stride in shape.loops):
        raise LayoutError(f"{shape} is no block: counts and the length are at least 1, strides at least 0")
    return shape.length + sum((count - 1) * stride for count, stride in shape.loops)


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
