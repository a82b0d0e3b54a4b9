"""What the scheduler's side of the connector passes to the workers' side with every step of the engine.

vLLM carries it from the scheduler's process to the workers', pickled. Block numbers are the block table's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvferry.engines.vllm.caches import Block, CacheGroup


@dataclass(frozen=True, slots=True, eq=False)
class GroupBlocks:
    """Blocks of a request in one group.

    Attributes:
        start: how many blocks of the request come before them.
        blocks: their numbers. As an array they are pickled, and turned into pages, without a look at each.
        held_tokens: how many of the request's first tokens are in this group already; None for as many as in others.
    """

    start: int
    blocks: NDArray[np.int64] | Sequence[int]
    held_tokens: int | None = None

    @classmethod
    def of(cls, group: CacheGroup, first: int, blocks: Sequence[Block]) -> GroupBlocks:
        """Returns blocks of a request by number, without those that vLLM does not keep.

        Args:
            first: the position of the first of them. The block with a request's state is the only one.
        """
        numbers = np.array([block.block_id for block in blocks if not block.is_null], np.int64)
        return cls(0 if group.has_state else first, numbers)

    def __eq__(self, other: object) -> bool:
        """Whether the other has the same numbers, in whichever form."""
        if not isinstance(other, GroupBlocks):
            return NotImplemented
        is_like = (self.start, self.held_tokens) == (other.start, other.held_tokens)
        return is_like and np.array_equal(self.blocks, other.blocks)

    __hash__ = None  # type: ignore[assignment]

    def pages(self, per_block: int) -> NDArray[np.int64]:
        """Returns the numbers of their pages, where a kernel divides each into so many."""
        return (np.asarray(self.blocks, np.int64)[:, np.newaxis] * per_block + np.arange(per_block)).reshape(-1)


@dataclass(frozen=True, slots=True)
class BlocksToSend:
    """Blocks of a request that are filled once the step is done.

    Attributes:
        room: its number on both sides.
        tokens: how many tokens are sent in all.
        groups: its blocks, by group.
        depends_on: digests of what the request's cache depends on.
    """

    request: str
    room: int
    tokens: int
    groups: dict[str, GroupBlocks]
    is_last: bool
    depends_on: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BlocksToReceive:
    """The blocks that a request's cache is received into.

    Attributes:
        room: its number on both sides.
        prefix_tokens: tokens that are here already.
        tokens: how many there will be.
        groups: where they go, by group. Without any blocks the prefill engine only learns that none are needed.
        problem: why it cannot be received, if so.
        copied_from: by group, the blocks of another choice of the same request that has them already, in the order of
            those that they are copied to. Nothing is asked of the prefill engine then, and nothing said to it.
        depends_on: digests of what the request's cache depends on.
        instance: the start of the prefill engine that has the request; None where nobody says.
    """

    request: str
    room: int
    engine: str
    prefix_tokens: int
    tokens: int
    groups: dict[str, GroupBlocks]
    problem: str = ""
    copied_from: dict[str, GroupBlocks] = field(default_factory=dict)
    depends_on: dict[str, bytes] = field(default_factory=dict)
    instance: str | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether vLLM waits for anything to come."""
        return self.prefix_tokens < self.tokens


@dataclass(slots=True)
class Step:
    """One step of the engine.

    Attributes:
        send: blocks that leave, in order.
        preempted: requests that have just lost their blocks. They come again from the start.
        give_up: requests that are not needed any more, and why.
        needed: requests whose blocks vLLM needs for others, unless somebody is fetching them.
        expect: by room, the prefill engines of requests that wait until they can be received.
        fail: requests that every worker has reported as received, and whose caches are not to be used: they are to be
            reported once more.
        refuse: rooms that the other side knows and that will not be opened to send, and why.
        drains: whether the engine takes no new requests any more, and ends with those that it has.
    """

    send: list[BlocksToSend] = field(default_factory=list)
    receive: list[BlocksToReceive] = field(default_factory=list)
    preempted: set[str] = field(default_factory=set)
    give_up: dict[str, str] = field(default_factory=dict)
    fail: set[str] = field(default_factory=set)
    refuse: dict[int, str] = field(default_factory=dict)
    needed: list[str] = field(default_factory=list)
    expect: dict[int, str] = field(default_factory=dict)
    drains: bool = False
