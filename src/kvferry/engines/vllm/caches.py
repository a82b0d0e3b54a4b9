"""What the plug-in needs of what vLLM has: requests and their blocks, groups of layers and their parts, the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvferry import Interval


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


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """The layers that share a block table.

    Attributes:
        name: what the group is called in layouts; no other group of the rank has the same.
        block_tokens: tokens in a block on one rank.
        window_tokens: how many of the last tokens the next one attends to, itself left out; None for all.
        chunk_tokens: the length of the chunks that the request is divided into, where a token attends to those of its
            own chunk alone; None where there are none.
        has_state: whether its layers keep recurrent state, or a ring: of a request only the block of its last token
            counts.
        is_prefix_cached: whether vLLM's prefix cache has blocks of it. If not, nothing of it is there when a request
            comes.
        token_ranks: how many ranks share a request's tokens; each of them has a block of every number.
    """

    name: str
    layer_names: tuple[str, ...]
    block_tokens: int
    window_tokens: int | None = None
    chunk_tokens: int | None = None
    has_state: bool = False
    is_prefix_cached: bool = True
    token_ranks: int = 1

    @property
    def table_tokens(self) -> int:
        """How many tokens of a request a number of the block table stands for, on all ranks that share them."""
        return self.block_tokens * self.token_ranks

    @property
    def gives_blocks_away(self) -> bool:
        """Whether vLLM takes blocks back from a request that is running, once no later token needs them."""
        return self.window_tokens is not None or self.chunk_tokens is not None or self.has_state

    def needed(self, prefix_tokens: int, tokens: int) -> tuple[int, int]:
        """Returns the first block of a request that is needed for its first so many tokens, and the one after the last.

        Args:
            prefix_tokens: how many of them are there already.
        """
        stop = -(-tokens // self.table_tokens)
        if self.has_state:
            return max(0, stop - 1), stop
        first = max(prefix_tokens if self.is_prefix_cached else 0, self.first_attended(tokens))
        return first // self.table_tokens, stop

    def first_attended(self, tokens: int) -> int:
        """Returns the position of the first token that the one behind so many tokens attends to.

        It is the number of tokens itself where that one begins a chunk: it attends to none of them.
        """
        if self.chunk_tokens is not None:
            return tokens - tokens % self.chunk_tokens
        return 0 if self.window_tokens is None else max(0, tokens - self.window_tokens)


def fetches_behind_attention(groups: Sequence[CacheGroup]) -> bool:
    """Whether all that is missing of a request is fetched where its prefix is here of full attention alone.

    Recurrent state is fetched whatever the prefix. Of several groups with entries for tokens, or of one that keeps few
    of them, less may be in the prefix cache than of full attention, and what is counted as here would not be fetched.
    """
    others = [group for group in groups if not group.has_state]
    return len(others) == 1 and not others[0].gives_blocks_away and others[0].is_prefix_cached


@dataclass(frozen=True, slots=True)
class HeldPart:
    """What a rank holds of a layer's KV heads, or of channels or heads of a state.

    Attributes:
        total: how many there are over all tensor-parallel ranks.
        held: those of this rank, in the order in which its cache has them.
    """

    total: int
    held: Interval

    @classmethod
    def whole(cls, total: int) -> HeldPart:
        """Returns all of them, as every rank has them. Of a latent and the like that is one head."""
        return cls(total, Interval(0, total))


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a single rank's caches do not show.

    Attributes:
        layers: how many the whole model has, over all pipeline stages, without those of a draft model.
        packing: the name of the order within a block and head where only the kernel knows it; None where tokens can be
            told apart.
        drafts: the names of a draft model's layers, in their order: their numbers say nothing.
    """

    layers: int
    packing: str | None = None
    drafts: tuple[str, ...] = ()
