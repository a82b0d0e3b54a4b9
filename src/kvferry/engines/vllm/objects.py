"""What the scheduler's side needs of vLLM's objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol


class Block(Protocol):
    """A block of vLLM's; a null one stands for a block that is not kept."""

    block_id: int
    is_null: bool


class Request(Protocol):
    """What is needed of a request of vLLM's."""

    request_id: str
    arrival_time: float
    num_prompt_tokens: int
    num_computed_tokens: int
    kv_transfer_params: dict[str, Any] | None
    prompt_token_ids: list[int] | None
    prompt_embeds: Any
    max_tokens: int
    _all_token_ids: list[int]

    def get_skip_reading_prefix_cache(self) -> bool:
        """Whether all of its prompt is computed where it is, whatever is cached."""


BlockTables = Callable[[str], "Sequence[Sequence[Block]]"]
"""The blocks of a request, group by group."""


class BlockPool(Protocol):
    """What keeps blocks from being given to others."""

    num_gpu_blocks: int

    def touch(self, blocks: Sequence[Any]) -> None:
        """Adds a reference to each."""

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Drops a reference to each."""

    def get_num_free_blocks(self) -> int:
        """Returns how many can be given to requests."""

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Has nobody find these in the prefix cache."""
