"""What the scheduler's side of the connector passes to the workers' side with every step of the engine.

vLLM carries it from the scheduler's process to the workers', pickled. Block numbers are the block table's.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """Blocks of a request in one group.

    Attributes:
        start: how many blocks of the request come before them.
        blocks: their numbers.
    """

    start: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlocksToSend:
    """Blocks of a request that are filled once the step is done.

    Attributes:
        request: vLLM's name for it.
        room: its number on both sides.
        tokens: how many tokens are sent in all.
        groups: its blocks, by group.
        is_last: whether these are the last ones.
    """

    request: str
    room: int
    tokens: int
    groups: dict[str, GroupBlocks]
    is_last: bool


@dataclass(frozen=True, slots=True)
class BlocksToReceive:
    """The blocks that a request's cache is received into.

    Attributes:
        request: vLLM's name for it.
        room: its number on both sides.
        engine: the prefill engine.
        prefix_tokens: tokens that are here already.
        tokens: how many there will be.
        groups: where they go, by group. Without any blocks the prefill engine only learns that none are needed.
        problem: why it cannot be received, if so.
    """

    request: str
    room: int
    engine: str
    prefix_tokens: int
    tokens: int
    groups: dict[str, GroupBlocks]
    problem: str = ""

    @property
    def is_wanted(self) -> bool:
        """Whether vLLM waits for anything to come."""
        return self.prefix_tokens < self.tokens


@dataclass(slots=True)
class Step:
    """One step of the engine.

    Attributes:
        send: blocks that leave, in order.
        receive: the caches that are requested.
        preempted: requests that have just lost their blocks. They come again from the start.
        give_up: requests that are not needed any more, and why.
        refuse: rooms that the other side knows and that will not be opened to send, and why.
    """

    send: list[BlocksToSend] = field(default_factory=list)
    receive: list[BlocksToReceive] = field(default_factory=list)
    preempted: set[str] = field(default_factory=set)
    give_up: dict[str, str] = field(default_factory=dict)
    refuse: dict[int, str] = field(default_factory=dict)
