"""How the runs of one unit lie in one side's memory, for copying them to staging memory or back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Nested strided runs, which lie one after the other, without gaps, once they are packed.

    Attributes:
        loops: (count, stride in bytes) of every nesting, the slowest first.
        length: bytes of each run.
    """

    loops: tuple[tuple[int, int], ...]
    length: int

    @property
    def num_runs(self) -> int:
        """Runs of a block."""
        count = 1
        for times, _ in self.loops:
            count *= times
        return count

    @property
    def num_bytes(self) -> int:
        """Bytes of a packed block."""
        return self.num_runs * self.length


def block_shape(loops: Iterable[tuple[int, int]], length: int) -> BlockShape:
    """Describes the same bytes in the same order, with as few loops as one side's strides allow.

    Args:
        loops: (count, stride in bytes), the slowest first.
        length: bytes of each run.
    """
    melted: list[tuple[int, int]] = []  # the fastest first
    for count, stride in reversed(list(loops)):
        if count == 1:
            continue
        if not melted and stride == length:
            length *= count
        elif melted and stride == melted[-1][0] * melted[-1][1]:
            melted[-1] = (melted[-1][0] * count, melted[-1][1])
        else:
            melted.append((count, stride))
    return BlockShape(tuple(reversed(melted)), length)
