"""Which token positions of a request a rank holds: all of them, or a share under context parallelism.

Positions are partitioned in blocks, block after block, in the order of a pattern of parts. One block a part and cycle
is token-interleaved (round-robin) context parallelism; one cycle over the whole request is the contiguous kind; a
pattern that runs forth and back is the zigzag that balances causal attention. Blocks have equally many tokens, or whole
pages, of which the first blocks may have one more than the others. A rank keeps the positions of its part in ascending
order: the first is its local position 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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


@dataclass(frozen=True, slots=True)
class BlockLength:
    """How long the blocks of a cycle are in one request.

    Attributes:
        tokens: of a block; at least 1.
        longer: how many blocks, from the first on, have more.
        more: how many tokens more these have.
    """

    tokens: int
    longer: int = 0
    more: int = 0

    def starts(self, blocks: Positions) -> Positions:
        """Returns how many tokens of the cycle come before each block, given by its number."""
        starts: Positions = blocks * self.tokens + np.minimum(blocks, self.longer) * self.more
        return starts

    def cycle(self, blocks: int) -> int:
        """Returns how many tokens a cycle of so many blocks has."""
        return blocks * self.tokens + min(blocks, self.longer) * self.more

    def numbers(self, positions: Positions) -> Positions:
        """Returns the number of the block that each position of a cycle is in."""
        if not self.longer:
            return positions // self.tokens
        behind = positions - self.longer * (self.tokens + self.more)
        numbers: Positions = np.where(
            behind < 0, positions // (self.tokens + self.more), self.longer + behind // self.tokens
        )
        return numbers


class TokenPartition(msgspec.Struct, frozen=True):
    """How the positions of every request are partitioned over the parts of an engine.

    A single part gets every position in blocks of any length: all such partitions are equal.

    Attributes:
        pattern: the part that gets each block of a cycle. Every part from 0 on appears.
        block_tokens: tokens of a block. None partitions every request in a single cycle, so that the block follows from
            the request's length.
        page_tokens: with a single cycle, gives out whole pages of so many tokens, as evenly as possible: where they do
            not divide evenly, the first blocks have a page more. None gives every block equally many tokens.

    Raises:
        LayoutError: if a part is missing from the pattern, the block or the page is empty, or both are given.
    """

    pattern: Annotated[tuple[int, ...], msgspec.Meta(max_length=_LONGEST_PATTERN)] = (0,)
    block_tokens: int | None = 1
    page_tokens: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.pattern) <= _LONGEST_PATTERN:
            raise LayoutError(f"a pattern has 1 to {_LONGEST_PATTERN} blocks, not {len(self.pattern)}")
        parts = set(self.pattern)
        if parts != set(range(len(parts))):
            raise LayoutError(f"pattern {list(self.pattern)} must name every part from 0 on at least once")
        if self.block_tokens is not None and not 1 <= self.block_tokens <= _LARGEST_BLOCK:
            raise LayoutError(f"block_tokens is {self.block_tokens}: a block has 1 to {_LARGEST_BLOCK} tokens")
        if self.page_tokens is not None and not 1 <= self.page_tokens <= _LARGEST_BLOCK:
            raise LayoutError(f"page_tokens is {self.page_tokens}: a page has 1 to {_LARGEST_BLOCK} tokens")
        if self.page_tokens is not None and self.block_tokens is not None:
            raise LayoutError(
                f"blocks of {self.block_tokens} tokens and whole pages of {self.page_tokens}: pages are given out in a "
                "single cycle (block_tokens=None)"
            )
        if self.is_whole:
            msgspec.structs.force_setattr(self, "pattern", (0,))
            msgspec.structs.force_setattr(self, "block_tokens", 1)
            msgspec.structs.force_setattr(self, "page_tokens", None)

    @property
    def num_parts(self) -> int:
        """How many parts the positions are divided among."""
        return max(self.pattern) + 1

    @property
    def is_whole(self) -> bool:
        """Whether one part holds every position."""
        return not any(self.pattern)

    @property
    def depends_on_length(self) -> bool:
        """Whether a position's part depends on the request's length."""
        return self.block_tokens is None and not self.is_whole

    @property
    def cut_tokens(self) -> int | None:
        """Blocks begin at multiples of so many tokens in every request; None where they may begin anywhere."""
        return self.page_tokens if self.block_tokens is None else self.block_tokens

    def block(self, request_tokens: int | None) -> BlockLength:
        """Returns how long the blocks are in a request of that length.

        Raises:
            UsageError: if the length is needed and None.
        """
        if self.block_tokens is not None:
            return BlockLength(self.block_tokens)
        if request_tokens is None:
            raise UsageError(
                "contiguous context parallelism divides a request by its length: say how many tokens it has"
            )
        blocks = len(self.pattern)
        if self.page_tokens is None:
            return BlockLength(max(1, -(-request_tokens // blocks)))
        # With fewer pages than blocks each block has one, and the last ones lie behind the request's end.
        pages, longer = divmod(max(-(-request_tokens // self.page_tokens), blocks), blocks)
        return BlockLength(pages * self.page_tokens, longer, self.page_tokens)

    def __str__(self) -> str:
        if self.is_whole:
            return "every token"
        if self.page_tokens is not None:
            return f"one cycle of whole pages of {self.page_tokens} tokens over parts {list(self.pattern)}"
        blocks = "one cycle" if self.block_tokens is None else f"blocks of {self.block_tokens} tokens"
        return f"{blocks} over parts {list(self.pattern)}"


def contiguous(size: int, page_tokens: int | None = None) -> TokenPartition:
    """Returns context parallelism that gives each of `size` parts one contiguous range of the request.

    Args:
        page_tokens: gives out whole pages of so many tokens, as evenly as possible, the first parts a page more: 10
            pages over 3 parts are [0, 4), [4, 7) and [7, 10). None divides by token: every part gets
            `ceil(tokens / size)`, and the last what is left. Engines do either, and `open` compares.
    """
    return TokenPartition(tuple(range(size)), None, page_tokens)


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

    def held_before(self, position: int, *, block: BlockLength) -> int:
        """Returns how many positions before `position` the rank holds: the local position of the next that it holds."""
        if self.partition.is_whole:
            return position
        return int(self.local(np.array([position], np.int64), block=block)[0])

    def local(self, positions: Positions, *, block: BlockLength) -> Positions:
        """Returns the local position of each position, or of the next that the rank holds where it does not hold it."""
        if self.partition.is_whole:
            return positions
        owned, own = self._owned(), self._own(block)
        cycles, within = np.divmod(positions, block.cycle(len(self.partition.pattern)))
        blocks = block.numbers(within)
        before = np.searchsorted(owned, blocks)  # how many of the rank's blocks come before each one
        is_held = owned[np.minimum(before, len(owned) - 1)] == blocks
        rest = np.where(is_held, within - block.starts(blocks), 0)
        local: Positions = cycles * own.cycle(len(owned)) + own.starts(before) + rest
        return local

    def holds(self, positions: Positions, *, block: BlockLength) -> NDArray[np.bool_]:
        """Returns whether the rank holds each position."""
        gets_block = np.zeros(len(self.partition.pattern), np.bool_)
        gets_block[self._owned()] = True
        held: NDArray[np.bool_] = gets_block[block.numbers(positions % block.cycle(len(gets_block)))]
        return held

    def position(self, local: int, *, block: BlockLength) -> int:
        """Returns the position in the request of the rank's `local`-th position."""
        owned, own = self._owned(), self._own(block)
        cycles, within = np.divmod(np.array([local], np.int64), own.cycle(len(owned)))
        index = own.numbers(within)
        first = cycles * block.cycle(len(self.partition.pattern)) + block.starts(owned[index])
        return int((first + within - own.starts(index))[0])

    def ranges(self, low: int, high: int, *, block: BlockLength) -> Ranges:
        """Returns where the rank's blocks start and stop within the positions [low, high), in ascending order."""
        if self.partition.is_whole:
            return np.array([low], np.int64), np.array([high], np.int64)
        cycle, owned = block.cycle(len(self.partition.pattern)), self._owned()
        cycles = np.arange(low // cycle * cycle, high, cycle, dtype=np.int64)
        starts, stops = (np.add.outer(cycles, block.starts(each)).ravel() for each in (owned, owned + 1))
        starts, stops = np.maximum(starts, low), np.minimum(stops, high)
        is_inside = starts < stops
        return starts[is_inside], stops[is_inside]

    def _own(self, block: BlockLength) -> BlockLength:
        """Returns how long the rank's own blocks of a cycle are."""
        return replace(block, longer=int(np.searchsorted(self._owned(), block.longer)))

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
    held = positions[share.holds(positions, block=BlockLength(ours // step))]
    owners = np.array(partition.pattern)[held // (theirs // step) % len(partition.pattern)]
    return tuple(np.unique(owners).tolist())
