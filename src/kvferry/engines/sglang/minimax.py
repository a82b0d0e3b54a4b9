"""MiniMax in SGLang: keys and values of layers with sparse attention, of others, and keys of an index; also of 4 bits.

SGLang lists the three apart, all in pages of the same numbers. Of 4 bits every layer has a row for a page: keys, their
scales, values and their scales, in each of which a head's tokens lie together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvferry.engines.sglang.caches import NOTHING, Attention, Buffers, Heads, Uncut
from kvferry.engines.sglang.layouts import KV_GROUP

MINIMAX_POOLS = ("MiniMaxSparseKVPool", "MiniMaxM3Nvfp4KVPool")

INDEX, DENSE = "minimax_index_k", "minimax_dense_kv"
"""What SGLang lists apart, by the values of its StateType."""

_FOUR_BITS = "MiniMaxM3Nvfp4MainKVPool"


def is_of_rows(pool: Any) -> bool:
    """Whether a pool of keys and values has a row for each page, with the scales in it."""
    return type(pool).__name__ == _FOUR_BITS


def heads_of_rows(pool: Any, total: int | None) -> Heads:
    """Returns the heads of a pool of rows.

    Args:
        pool: a MiniMaxM3Nvfp4MainKVPool.
        total: how many the whole model has; None if nobody says it.
    """
    payload = pool.payload_bytes_per_head
    return Heads(pool.head_num, total, payload, payload, f"SGLang's rows of {pool.page_size} tokens of 4 bits")


def parts_of_rows(pool: Any, rows: Buffers, heads: Heads) -> tuple[Attention, Attention]:
    """Returns the keys and values in rows of pages, and their scales.

    Args:
        pool: a MiniMaxM3Nvfp4MainKVPool.
        rows: its buffers, as SGLang lists them: one for each layer.
        heads: as `heads_of_rows` has them.
    """
    of_scales = replace(heads, key_bytes=pool.scale_bytes_per_head, value_bytes=pool.scale_bytes_per_head)
    return (
        _part(pool, rows, (pool.k_buffer, pool.v_buffer), heads),
        _part(pool, rows, (pool.k_scale_buffer, pool.v_scale_buffer), of_scales),
    )


def index_of_rows(pool: Any, rows: Buffers) -> Uncut:
    """Returns the index of 4 bits: rows of keys and their scales.

    Args:
        pool: a MiniMaxM3Nvfp4IndexKPool.
        rows: its buffers, as SGLang lists them: one for each layer.
    """
    packing = f"SGLang's rows of {pool.page_size} index keys of 4 bits"
    return Uncut.of("index", rows, packing, KV_GROUP)


def layers_of_model(model: Any) -> tuple[list[int], list[int]]:
    """Returns the numbers of a model's layers without sparse attention, and of those with it.

    Args:
        model: a ModelConfig.
    """
    from sglang.srt.configs.model_config import get_minimax_sparse_attention_config, get_minimax_sparse_layer_ids

    dense, sparse = get_minimax_sparse_layer_ids(get_minimax_sparse_attention_config(model.hf_config))
    return [*dense], [*sparse]


def of_stage(apart: dict[str, Attention], full: Attention, model: Any) -> dict[str, Attention]:
    """Returns what a pipeline stage has of what SGLang lists apart; nothing where none of its layers have any.

    Args:
        apart: what SGLang lists of the stage.
        full: its keys and values of layers with sparse attention.
        model: the ModelConfig.
    """
    nothing = {INDEX: replace(NOTHING, pages=full.pages)}
    if layers_of_model(model)[0]:
        nothing[DENSE] = replace(NOTHING, heads=full.heads, pages=full.pages)
    return nothing | apart


def _part(pool: Any, rows: Buffers, kinds: Sequence[Sequence[Any]], heads: Heads) -> Attention:
    """Returns parts of rows, as far behind their begins as the pool's own views of them."""
    addresses = [
        address + views[0].data_ptr() - pool.rows[0].data_ptr() for views in kinds for address in rows.addresses
    ]
    buffers = Buffers(tuple(addresses), rows.lengths * len(kinds), rows.item_bytes * len(kinds))
    return Attention(buffers, heads, part_bytes=(pool.head_num * heads.key_bytes * pool.page_size,) * len(kinds))
