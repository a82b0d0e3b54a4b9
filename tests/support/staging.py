"""Blocks in pools, their bytes by plain Python, and the laws that every kernel keeps, on any device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvferry.layout import Region
from kvferry.plan.packing import BlockShape
from kvferry.staging import Kernels
from kvferry.staging.kernels import block_extent

Bytes = NDArray[np.uint8]
GUARD_BYTES = 64
ALIGNED_BYTES = 64
NAN_PATTERNS = {
    "any": ("<u1", ()),
    "float16": ("<u2", (0x7C01, 0xFC02, 0x7E55, 0xFFFF)),
    "bfloat16": ("<u2", (0x7F81, 0xFF82, 0x7FC5, 0xFFFF)),
    "float32": ("<u4", (0x7F800001, 0xFF812345, 0x7FC0BEEF, 0xFFFFFFFF)),
    "float64": ("<u8", (0x7FF0000000000001, 0xFFF0DEADBEEF0001, 0x7FF8000000000007, 0xFFFFFFFFFFFFFFFF)),
}
"""Quiet and signalling NaNs of both signs, with payloads: what a copy as floating-point numbers may change."""


def some_bytes(count: int, kind: str, seed: int) -> Bytes:
    """That many bytes: any, or one NaN after the other, in any order."""
    random = np.random.default_rng(seed)
    dtype, patterns = NAN_PATTERNS[kind]
    if not patterns:
        return random.integers(0, 256, count, np.uint8)
    words = random.choice(np.array(patterns, dtype), count // np.dtype(dtype).itemsize + 1)
    return np.frombuffer(words.tobytes()[:count], np.uint8)


@dataclass(frozen=True)
class Case:
    """Blocks that do not overlap, in several tensors, and staging memory somewhere among these.

    Attributes:
        tensors: bytes of each.
        blocks: (tensor, offset in it) of every block.
        shape: of every block.
        before: how many of the tensors have lower addresses than staging memory.
        shift: where staging memory starts, in bytes after an aligned address.
        contents: a kind of `NAN_PATTERNS`.
    """

    tensors: tuple[int, ...]
    blocks: tuple[tuple[int, int], ...]
    shape: BlockShape
    before: int = 0
    shift: int = 0
    contents: str = "any"


@st.composite
def cases(draw: st.DrawFn, most_loops: int = 6) -> Case:
    """Blocks of any nesting, sizes and alignment, some in the gaps of others."""
    unit = draw(st.sampled_from([1, 1, 2, 4, 8, 16]))
    length = unit * draw(
        st.one_of(st.integers(1, 24), st.integers(1, 700 // unit), st.integers(2048 // unit, 2200 // unit))
    )
    lanes = draw(st.integers(1, 3))  # blocks that lie in the gaps of each other, as heads do in a row of tokens
    lane_bytes = length + unit * draw(st.integers(0, 3))
    extent, loops = lanes * lane_bytes, []
    for _ in range(draw(st.integers(0, most_loops if length < 100 else 2))):
        stride, count = extent + unit * draw(st.integers(0, 5)), draw(st.integers(1, 3))
        loops.append((count, stride))
        extent = count * stride
    tensors, blocks = [], []
    for tensor in range(draw(st.integers(1, 3))):
        pages, first = draw(st.integers(1, 3)), unit * draw(st.integers(0, 3))
        tensors.append(first + pages * extent + unit * draw(st.integers(0, 3)))
        blocks += [
            (tensor, first + page * extent + lane * lane_bytes) for page in range(pages) for lane in range(lanes)
        ]
    chosen = draw(st.lists(st.sampled_from(blocks), unique=True, max_size=6))
    shape = BlockShape(tuple(reversed(loops)), length)
    aligned = draw(st.booleans())
    shift = unit * draw(st.integers(0, 2)) if aligned else draw(st.integers(0, 15))
    before = draw(st.integers(0, len(tensors)))
    return Case(tuple(tensors), tuple(chosen), shape, before, shift, draw(st.sampled_from(sorted(NAN_PATTERNS))))


class Arena:
    """A case's tensors and its staging memory in one piece of a device's memory, all of which is looked at."""

    def __init__(self, case: Case, device: str, seed: int) -> None:
        sizes = list(case.tensors)
        sizes.insert(case.before, case.shift + len(case.blocks) * case.shape.num_bytes)
        ends = np.cumsum([GUARD_BYTES + -(-size // ALIGNED_BYTES) * ALIGNED_BYTES for size in sizes])
        firsts = [GUARD_BYTES, *(ends + GUARD_BYTES).tolist()]
        self.staging = slice(firsts[case.before] + case.shift, firsts[case.before] + sizes[case.before])
        self._tensors = [slice(first, first + size) for first, size in zip(firsts, sizes, strict=False)]
        del self._tensors[case.before]
        self._case = case
        self.contents = some_bytes(firsts[-1], "any", seed)
        self._memory = torch.from_numpy(self.contents.copy()).to(device)

    def fill(self, *where: slice, kind: str, seed: int) -> None:
        """Puts bytes of that kind there."""
        for part in where:
            self.contents[part] = some_bytes(part.stop - part.start, kind, seed)
        self._memory.copy_(torch.from_numpy(self.contents))

    @property
    def pool(self) -> list[slice]:
        """Where the tensors are."""
        return self._tensors

    @property
    def regions(self) -> list[Region]:
        start = self._memory.data_ptr()
        return [Region(start + part.start, part.stop - part.start) for part in self._tensors]

    @property
    def starts(self) -> NDArray[np.int64]:
        offsets = [self._tensors[tensor].start + offset for tensor, offset in self._case.blocks]
        return np.array(offsets, np.int64) + self._memory.data_ptr()

    @property
    def address(self) -> int:
        """Of staging memory."""
        return int(self._memory.data_ptr()) + int(self.staging.start)

    @property
    def blocks(self) -> NDArray[np.int64]:
        """Where every byte of the blocks is, in the order in which they are packed. By loops, as a reader would."""
        shape = self._case.shape
        steps = [[index * stride for index in range(count)] for count, stride in shape.loops]
        places = [
            self._tensors[tensor].start + offset + sum(path) + byte
            for tensor, offset in self._case.blocks
            for path in itertools.product(*steps)
            for byte in range(shape.length)
        ]
        return np.array(places, np.int64)

    def read(self) -> Bytes:
        """Every byte of the memory."""
        contents: Bytes = self._memory.cpu().numpy()
        return contents

    def expect(self, contents: Bytes) -> None:
        """Checks every byte of the memory."""
        np.testing.assert_array_equal(self.read(), contents)


KernelMaker = Callable[[Sequence[Region]], Kernels]


def check_gather(make: KernelMaker, case: Case, device: str) -> None:
    """What is gathered are the blocks' bytes, one after the other; every other byte stays."""
    arena = Arena(case, device, 1)
    arena.fill(*arena.pool, kind=case.contents, seed=2)
    make(arena.regions).gather(arena.starts, case.shape, arena.address)
    expected = arena.contents.copy()
    expected[arena.staging] = arena.contents[arena.blocks]
    arena.expect(expected)


def check_scatter(make: KernelMaker, case: Case, device: str) -> None:
    """What is scattered lies in the blocks; every other byte stays."""
    arena = Arena(case, device, 3)
    arena.fill(arena.staging, kind=case.contents, seed=4)
    make(arena.regions).scatter(arena.address, arena.starts, case.shape)
    expected = arena.contents.copy()
    expected[arena.blocks] = arena.contents[arena.staging]
    arena.expect(expected)


def check_round_trip(make: KernelMaker, case: Case, device: str) -> None:
    """What is gathered and scattered again is the same, whatever numbers it is."""
    arena = Arena(case, device, 5)
    arena.fill(*arena.pool, kind=case.contents, seed=6)
    gathered = arena.contents[arena.blocks]
    kernels = make(arena.regions)
    kernels.gather(arena.starts, case.shape, arena.address)
    arena.contents[arena.staging] = gathered
    arena.expect(arena.contents)
    arena.fill(*arena.pool, kind="any", seed=7)
    kernels.scatter(arena.address, arena.starts, case.shape)
    expected = arena.contents.copy()
    expected[arena.blocks] = gathered
    arena.expect(expected)


def whole_tensor(shape: BlockShape, blocks: Sequence[int], gap: int = 0) -> Case:
    """Blocks of one tensor: the numbers of the places that they are in, each as long as a block and a gap."""
    step = block_extent(shape) + gap
    return Case((step * (max(blocks) + 1),), tuple((0, block * step) for block in blocks), shape)


ODD_CASES = {
    "one byte": whole_tensor(BlockShape((), 1), [2, 0]),
    "two bytes": whole_tensor(BlockShape(((5, 7),), 2), [1, 0, 3], gap=3),
    "three bytes": whole_tensor(BlockShape(((3, 40), (4, 9)), 3), [4, 1], gap=1),
    "a prime number of bytes": whole_tensor(BlockShape(((7, 1500),), 1021), [0, 2]),
    "no block": Case((64,), (), BlockShape(((2, 16),), 8)),
    "all of a tensor": whole_tensor(BlockShape((), 4096), [0]),
    "seven loops": whole_tensor(
        BlockShape(((2, 3000), (2, 1400), (2, 600), (2, 250), (2, 120), (2, 50), (2, 24)), 16), [1, 0]
    ),
    "runs that touch": whole_tensor(BlockShape(((4, 32),), 32), [3, 1, 2]),
    "more runs than a tile": whole_tensor(BlockShape(((33, 24),), 8), [1, 0, 2]),
    "a run of several tiles": whole_tensor(BlockShape((), 1000), [2, 0]),
    "staging memory between tensors": Case(
        (4096, 4096), ((1, 0), (0, 64), (1, 1024), (0, 2048)), BlockShape(((4, 128),), 64), before=1
    ),
    "staging memory off by one": Case((4096,), ((0, 1024), (0, 0)), BlockShape(((4, 256),), 64), shift=1),
}
"""What goes wrong most easily. Every kernel must manage them."""
