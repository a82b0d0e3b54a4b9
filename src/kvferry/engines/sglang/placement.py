"""Where a rank of SGLang's stands: which part it has of each thing that SGLang divides, and of a request's tokens.

SGLang divides KV heads, recurrent state and a draft model's heads among different groups of ranks. With attention
context parallelism every rank of the prefill side computes other tokens, and then all keep the same: they are replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry import RankCoordinates, TokenShare, interleaved
from kvferry.errors import EngineContractError

_EVERY_TOKEN = TokenShare()


@dataclass(frozen=True, slots=True)
class Part:
    """One of the parts that something is divided into."""

    index: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True)
class Kept:
    """Which of a request's pages a rank has.

    Attributes:
        pages: their numbers in its own pool.
        start: how many pages of the request on this rank come before them; None if as many as were handed in before.
        token_part: which part of the tokens they hold; None for that of the layout.
    """

    pages: NDArray[Any]
    start: int | None
    token_part: int | None


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a rank stands.

    Attributes:
        coordinates: as it is registered. Ranks that hold the same are tensor-parallel ranks there, and those that hold
            other tokens of a request context-parallel ones.
        heads: its part of the KV heads.
        states: its part of recurrent state.
        drafts: its part of a draft model's KV heads.
        tokens: which tokens of a request it keeps in its pages.
        page_tokens: tokens of a page, as SGLang's allocator counts them over all ranks that divide the tokens.
        goes_round: whether a page's number says which rank has it: each rank has another part in every request.
    """

    coordinates: RankCoordinates
    heads: Part
    states: Part
    drafts: Part
    tokens: TokenShare = _EVERY_TOKEN
    page_tokens: int = 1
    goes_round: bool = False

    @property
    def tp_rank(self) -> int:
        """Which part of the KV heads it has."""
        return self.heads.index

    @property
    def tp_size(self) -> int:
        """Among how many parts KV heads are divided."""
        return self.heads.count

    @property
    def pp_size(self) -> int:
        """How many pipeline stages there are."""
        return self.coordinates.pp_size

    @property
    def token_parts(self) -> int:
        """Among how many ranks the tokens of a request are divided."""
        return self.tokens.partition.num_parts

    def kept(self, pages: NDArray[Any], *, first: int, tokens: int) -> Kept:
        """Returns which of a request's pages this rank has something of.

        Args:
            pages: page numbers as SGLang gives them, the same on all ranks that divide the tokens.
            first: how many pages of the request come before them.

        Raises:
            EngineContractError: if pages do not go round as SGLang says they do.
        """
        if self.token_parts == 1:
            return Kept(pages, first, None)
        if not self.goes_round:
            # Every rank has a part of each page, of the same number; but of the last one perhaps nothing.
            block = self.tokens.partition.block(None)
            last = -(-self.tokens.held_before(tokens, block=block) // (self.page_tokens // self.token_parts))
            return Kept(pages[: max(0, last - first)], first, None)
        if not len(pages):
            return Kept(pages, None, None)
        owners = pages % self.token_parts
        begin = int(owners[0]) - first
        if not np.array_equal(owners, (begin + first + np.arange(len(pages))) % self.token_parts):
            raise EngineContractError(
                f"SGLang's pages {pages[:8].tolist()}... do not go round {self.token_parts} ranks: which of them has "
                "which page is not known, and so the request is not exchanged"
            )
        part = (self.tokens.part - begin) % self.token_parts
        mine = owners == self.tokens.part
        return Kept(pages[mine] // self.token_parts, -(-(first - part) // self.token_parts), part)


def placed(where: Placement | RankCoordinates) -> Placement:
    """Returns a rank's placement; coordinates alone are one where all is divided among tensor-parallel ranks."""
    if isinstance(where, Placement):
        return where
    part = Part(where.tp_rank, where.tp_size)
    return Placement(where, part, part, part)


def placement_of(manager: Any, parallel: Any) -> Placement:
    """Returns where a rank stands.

    Args:
        manager: SGLang's CommonKVManager of the rank.
        parallel: SGLang's parallel settings there.
    """
    tp = Part(manager.attn_tp_rank, manager.attn_tp_size)
    cp = Part(manager.attn_cp_rank, manager.attn_cp_size)
    dcp = Part(parallel.attn_dcp_rank, parallel.attn_dcp_size) if parallel.attn_dcp_size > 1 else Part()
    shard = Part(getattr(manager, "kv_shard_rank", 0), getattr(manager, "kv_shard_size", 1))
    heads, replica, tokens = tp, cp, TokenShare()
    page_tokens: int = manager.kv_args.page_size
    if shard.count > 1:
        # Pages go round the context-parallel group; without one, round the tensor-parallel ranks of latents.
        tokens = TokenShare(interleaved(shard.count, page_tokens), shard.index)
        heads, replica = (tp, Part()) if cp.count > 1 else (Part(), Part())
    elif dcp.count > 1:
        # Neighbouring tensor-parallel ranks have the same heads, and take tokens by turns.
        tokens = TokenShare(interleaved(dcp.count), dcp.index)
        heads = Part(tp.index // dcp.count, tp.count // dcp.count)
    # As SGLang's bootstrap server numbers data-parallel groups.
    is_system_wide = manager.system_dp_size > 1
    return Placement(
        RankCoordinates(
            tp_rank=replica.index * heads.count + heads.index,
            tp_size=replica.count * heads.count,
            cp_rank=tokens.part,
            cp_size=tokens.partition.num_parts,
            pp_rank=manager.pp_rank,
            pp_size=manager.pp_size,
            dp_rank=manager.system_dp_rank if is_system_wide else manager.attn_dp_rank,
            dp_size=manager.system_dp_size if is_system_wide else manager.attn_dp_size,
        ),
        heads=heads,
        # With CP-TP group sharing a context-parallel rank has the state that tensor parallelism would give it.
        states=cp if getattr(parallel, "enable_cp_tp_group_sharing", False) else tp,
        # A draft model knows no context parallelism: there its heads are divided among all ranks of a request.
        drafts=Part(parallel.tp_rank, parallel.tp_size) if cp.count > 1 and manager.attn_dp_size == 1 else tp,
        tokens=tokens,
        page_tokens=page_tokens * (dcp.count if shard.count == 1 else 1),
        goes_round=shard.count > 1,
    )
