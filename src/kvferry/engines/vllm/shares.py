"""Where a worker of vLLM's stands, and which tokens of a request it keeps: context parallelism.

vLLM knows two kinds. Decode context parallelism (DCP) makes no ranks of its own: those of tensor parallelism that would
hold the same heads share the tokens among them instead, in turns of `cp_kv_cache_interleave_size` tokens. A number of
the block table then stands for a block on each of them, and so for as many times the tokens. Prefill context
parallelism (PCP) divides the computing of a prompt alone and does make ranks: each of them gathers what the others have
computed, so that without DCP all have the same, and DCP goes over them first and over tensor parallelism then.

How heads and states are divided follows from the place among tensor-parallel ranks, which context parallelism leaves as
it is. Only towards other engines the ranks that share tokens are context-parallel ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvferry import RankCoordinates, TokenShare, interleaved
from kvferry.engines.vllm.caches import CacheGroup
from kvferry.errors import LayoutError, SettingsError
from kvferry.loggers import logger_of

log = logger_of(__name__)


@dataclass(frozen=True, slots=True)
class GroupRank:
    """A rank in one of vLLM's groups of ranks."""

    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker stands.

    Attributes:
        in_model: its place among the ranks that divide the model: vLLM's own.
        in_engine: its place among the ranks that share a request, by which other engines know it.
        tokens: which tokens of a request it keeps.
    """

    in_model: RankCoordinates
    in_engine: RankCoordinates
    tokens: TokenShare


def worker_place(parallel_config: Any) -> Place:
    """Returns where this process stands. Each engine of a data-parallel deployment is one of its own, with a name.

    Args:
        parallel_config: vLLM's `ParallelConfig`, once its workers have settled in which turns ranks take tokens.

    Raises:
        LayoutError: if vLLM numbers the ranks that share tokens in another way than it is known to.
    """
    from vllm.distributed import parallel_state

    shares_tokens = parallel_config.decode_context_parallel_size > 1
    alone = GroupRank(0, 1)
    return place_of(
        _rank_in(parallel_state.get_tp_group()),
        _rank_in(parallel_state.get_pp_group()),
        _rank_in(parallel_state.get_pcp_group()) if parallel_config.prefill_context_parallel_size > 1 else alone,
        _rank_in(parallel_state.get_dcp_group()) if shares_tokens else alone,
        parallel_config.cp_kv_cache_interleave_size if shares_tokens else 1,
    )


def _rank_in(group: Any) -> GroupRank:
    return GroupRank(group.rank_in_group, group.world_size)


def place_of(
    tensor: GroupRank, pipeline: GroupRank, prefill_context: GroupRank, decode_context: GroupRank, interleave: int
) -> Place:
    """Returns where a worker stands.

    Args:
        tensor: its rank under tensor parallelism; and so for the others.
        interleave: how many tokens in a row a rank keeps under decode context parallelism.

    Raises:
        LayoutError: if vLLM numbers the ranks that share tokens in another way than it is known to.
    """
    number = tensor.rank * prefill_context.size + prefill_context.rank
    replicas, part = divmod(number, decode_context.size)
    if part != decode_context.rank:
        raise LayoutError(
            f"rank {tensor.rank} of {tensor.size} under tensor and {prefill_context.rank} of {prefill_context.size} "
            f"under prefill context parallelism is rank {decode_context.rank} of {decode_context.size} under decode "
            f"context parallelism, where kvferry knows vLLM to make it rank {part}: which tokens it keeps is not clear"
        )
    stage = {"pp_rank": pipeline.rank, "pp_size": pipeline.size}
    return Place(
        in_model=RankCoordinates(tp_rank=tensor.rank, tp_size=tensor.size, **stage),
        in_engine=RankCoordinates(
            tp_rank=replicas,
            tp_size=tensor.size * prefill_context.size // decode_context.size,
            cp_rank=part,
            cp_size=decode_context.size,
            **stage,
        ),
        tokens=TokenShare(interleaved(decode_context.size, interleave), part),
    )


def sharing_ranks(spec: Any, parallel_config: Any) -> int:
    """Returns how many ranks share the tokens of a group.

    Args:
        spec: what its layers keep (a `KVCacheSpec`).

    Raises:
        SettingsError: if there is context parallelism and vLLM does not say of its caches whether ranks share them.
    """
    sizes = parallel_config.decode_context_parallel_size, parallel_config.prefill_context_parallel_size
    if max(sizes) == 1:
        return 1
    is_shared = getattr(spec, "dcp_sharded", None)
    if is_shared is None:
        raise SettingsError(
            f"--decode-context-parallel-size is {sizes[0]} and --prefill-context-parallel-size {sizes[1]}, but this "
            f"vLLM does not say of its caches ({type(spec).__name__}) whether ranks share their tokens: leave both "
            "sizes at 1, or use vLLM 0.32, which says it"
        )
    return sizes[0] if is_shared else 1


def check_turns(groups: Sequence[CacheGroup], tokens: TokenShare) -> None:
    """Refuses turns that do not divide blocks: vLLM begins with the first rank again in every block then.

    Warns of turns that are shorter than a block, since as much as lies together travels in one piece.

    vLLM asserts the same of the block size that is configured (`VllmConfig.validate_block_size`); groups may have
    others, and `dcp_kv_cache_interleave_size` takes effect after it has.

    Raises:
        LayoutError: if a block has no whole number of turns, naming both.
    """
    turn, shared = tokens.partition.block_tokens, [group for group in groups if group.token_ranks > 1]
    if shared and turn is not None and turn < min(group.block_tokens for group in shared):
        log.warning(
            "ranks take %d tokens in turns, and no more travel in one piece: with --cp-kv-cache-interleave-size %d, "
            "the size of a block, whole blocks would",
            turn,
            shared[0].block_tokens,
        )
    for group in shared:
        if turn is not None and group.block_tokens % turn:
            raise LayoutError(
                f"ranks take {turn} tokens in turns (--cp-kv-cache-interleave-size), which does not divide the blocks "
                f"of {group.block_tokens} tokens in {group.name}: choose a size that does, such as the blocks' own"
            )
