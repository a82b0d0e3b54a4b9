"""Which token positions of a request a rank holds: all of them, or a share under context parallelism.

Positions are partitioned in blocks of equally many tokens, block after block, in the order of a pattern of parts. One
block a part and cycle is token-interleaved (round-robin) context parallelism; one cycle over the whole request is the
contiguous kind; a pattern that runs forth and back is the zigzag that balances causal attention. A rank keeps the
positions of its part in ascending order: the first is its local position 0.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd, lcm
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.errors import LayoutError, UsageError

Positions = NDArray[np.int64]
Ranges = tuple[Positions, Positions]

_MOST_BLOCKS_LOOKED_AT = 1 << 20
_LARGEST_BLOCK = 1 << 32  # tokens; arithmetic in 64 bits does not overflow
_LONGEST_PATTERN = 1 << 14


class TokenPartition(msgspec.Struct, frozen=True):
    """How the positions of every request are partitioned over the parts of an engine.

    A single part gets every position in blocks of any length: all such partitions are equal.

    Attributes:
        pattern: the part that gets each block of a cycle. Every part from 0 on appears.
        block_tokens: tokens of a block. None partitions every request in a single cycle, so that the block follows from
            the request's length.

    Raises:
        LayoutError: if a part is missing from the pattern, or the block is empty.
    """

    pattern: Annotated[tuple[int, ...], msgspec.Meta(max_length=_LONGEST_PATTERN)] = (0,)
    block_tokens: int | None = 1

    def __post_init__(self) -> None:
        if not 1 <= len(self.pattern) <= _LONGEST_PATTERN:
            raise LayoutError(f"a pattern has 1 to {_LONGEST_PATTERN} blocks, not {len(self.pattern)}")
        parts = set(self.pattern)
        if parts != set(range(len(parts))):
            raise LayoutError(f"pattern {list(self.pattern)} must name every part from 0 on at least once")
        if self.block_tokens is not None and not 1 <= self.block_tokens <= _LARGEST_BLOCK:
            raise LayoutError(f"block_tokens is {self.block_tokens}: a block has 1 to {_LARGEST_BLOCK} tokens")
        if self.is_whole:
            msgspec.structs.force_setattr(self, "pattern", (0,))
            msgspec.structs.force_setattr(self, "block_tokens", 1)

    @property
    def num_parts(self) -> int:
        """How many parts the positions are divided among."""
        return max(self.pattern) + 1

    @property
    def is_whole(self) -> bool:
        """Whether one part holds every position."""
        return self.num_parts == 1

    @property
    def depends_on_length(self) -> bool:
        """Whether a position's part depends on the request's length."""
        return self.block_tokens is None and not self.is_whole

    def block(self, request_tokens: int | None) -> int:
        """Returns how many tokens a block has in a request of that length.

        Raises:
            UsageError: if the length is needed and None.
        """
        if self.is_whole:
            return 1
        if self.block_tokens is not None:
            return self.block_tokens
        if request_tokens is None:
            raise UsageError(
                "contiguous context parallelism divides a request by its length: say how many tokens it has"
            )
        return max(1, -(-request_tokens // len(self.pattern)))

    def __str__(self) -> str:
        if self.is_whole:
            return "every token"
        blocks = "one cycle" if self.block_tokens is None else f"blocks of {self.block_tokens} tokens"
        return f"{blocks} over parts {list(self.pattern)}"


def contiguous(size: int) -> TokenPartition:
    """Returns context parallelism that gives each of `size` parts one contiguous range of the request."""
    return TokenPartition(tuple(range(size)), None)


def interleaved(size: int, block_tokens: int = 1) -> TokenPartition:
    """Returns context parallelism that assigns blocks of tokens round-robin to `size` parts."""
    return TokenPartition(tuple(range(size)), block_tokens)


def zigzag(size: int) -> TokenPartition:
    """Returns context parallelism that gives part i the i-th range from the start and the i-th from the end."""
    return TokenPartition((*range(size), *reversed(range(size))), None)


class TokenShare(msgspec.Struct, frozen=True):
    """The token positions that one rank holds.

    Attributes:
        partition: how the engine partitions positions.
        part: which part the rank has.

    Raises:
        LayoutError: if there is no such part.
    """

    partition: TokenPartition = TokenPartition()
    part: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.part < self.partition.num_parts:
            raise LayoutError(
                f"part {self.part} does not exist: positions are partitioned over {self.partition.num_parts} parts"
            )

    def held_before(self, position: int, *, block: int) -> int:
        """Returns how many positions before `position` the rank holds: the local position of the next that it holds."""
        return int(self.local(np.array([position], np.int64), block=block)[0])

    def local(self, positions: Positions, *, block: int) -> Positions:
        """Returns the local position of each position, or of the next that the rank holds where it does not hold it."""
        owned = self._owned()
        cycles, within = np.divmod(positions, block * len(self.partition.pattern))
        blocks, rest = np.divmod(within, block)
        before = np.searchsorted(owned, blocks)  # how many of the rank's blocks come before each one
        is_held = owned[np.minimum(before, len(owned) - 1)] == blocks
        local: Positions = (cycles * len(owned) + before) * block + np.where(is_held, rest, 0)
        return local

    def holds(self, positions: Positions, *, block: int) -> NDArray[np.bool_]:
        """Returns whether the rank holds each position."""
        gets_block = np.zeros(len(self.partition.pattern), np.bool_)
        gets_block[self._owned()] = True
        held: NDArray[np.bool_] = gets_block[positions // block % len(gets_block)]
        return held

    def position(self, local: int, *, block: int) -> int:
        """Returns the position in the request of the rank's `local`-th position."""
        owned = self._owned()
        cycles, within = divmod(local, block * len(owned))
        index, rest = divmod(within, block)
        return int(cycles * block * len(self.partition.pattern) + owned[index] * block + rest)

    def ranges(self, low: int, high: int, *, block: int) -> Ranges:
        """Returns where the rank's blocks start and stop within the positions [low, high), in ascending order."""
        if self.partition.is_whole:
            return np.array([low], np.int64), np.array([high], np.int64)
        cycle = block * len(self.partition.pattern)
        cycles = np.arange(low // cycle * cycle, high, cycle, dtype=np.int64)
        starts = np.add.outer(cycles, self._owned() * block).ravel()
        starts, stops = np.maximum(starts, low), np.minimum(starts + block, high)
        is_inside = starts < stops
        return starts[is_inside], stops[is_inside]

    def _owned(self) -> Positions:
        """Returns the blocks of a cycle that the rank gets."""
        return _blocks_of(self.partition.pattern, self.part)


@lru_cache(maxsize=1024)
def _blocks_of(pattern: tuple[int, ...], part: int) -> Positions:
    return np.flatnonzero(np.array(pattern) == part).astype(np.int64)


@lru_cache(maxsize=4096)
def parts_met(partition: TokenPartition, share: TokenShare) -> tuple[int, ...]:
    """Returns the parts of a partition that have a position of a share, in some request.

    Returns all parts where that depends on the request, or would take looking at very many blocks.
    """
    if partition == share.partition:
        return (share.part,)
    every = tuple(range(partition.num_parts))
    if (
        partition.is_whole
        or share.partition.is_whole
        or partition.block_tokens is None
        or share.partition.block_tokens is None
    ):
        return every
    theirs, ours = partition.block_tokens, share.partition.block_tokens
    step = gcd(theirs, ours)  # within so many tokens neither side changes
    steps = lcm(theirs * len(partition.pattern), ours * len(share.partition.pattern)) // step
    if steps > _MOST_BLOCKS_LOOKED_AT:
        return every
    positions = np.arange(steps, dtype=np.int64)
    held = positions[share.holds(positions, block=ours // step)]
    owners = np.array(partition.pattern)[held // (theirs // step) % len(partition.pattern)]
    return tuple(np.unique(owners).tolist())
