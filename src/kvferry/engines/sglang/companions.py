"""What SGLang's pools keep beside keys, values and latents: the index of sparse attention, and scales of blocks.

Both lie in pages with the numbers of the pages that they belong to. A page of the index has the keys of all its tokens
first, and their scales behind them; every tensor-parallel rank has the same. Scales of blocks go with their heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

import torch

from kvferry.engines.sglang.caches import DRAFT, Attention, Buffers, Heads, Listed, Stage, Uncut
from kvferry.engines.sglang.layers import MINIMAX_POOLS
from kvferry.engines.sglang.layouts import INDEX_GROUP, KV_GROUP, PENDING_GROUP, TAIL_GROUP
from kvferry.errors import LayoutError

_SPARSE = ("DSATokenToKVPool", "HiSparseDSATokenToKVPool")
_SCALED, _POOLED = "MHATokenToKVPoolMXFP8", "QSATokenToKVPool"


def check_listed(states: Sequence[Enum], target: Any, main: Any, windowed: Any, draft: Any) -> None:
    """Refuses pools of which SGLang does not list all that it keeps: what is not sent, the other side would lack.

    Args:
        states: what it lists beside keys and values.
        main: what it has of full attention, or of latents.
        windowed: that of windows; None if there is none.
        draft: a draft model's; None if there is none.

    Raises:
        LayoutError: naming what is not listed.
    """
    listed = {each.value for each in states}
    is_sparse = type(main).__name__ in _SPARSE
    wanted = {
        "dsa": is_sparse,
        "dsa_tail": is_sparse and main.kpool_use_compress,
        "block_scale": type(main).__name__ == _SCALED,
        "block_scale_swa": type(windowed).__name__ == _SCALED,
        "qsa_pending": type(target).__name__ == _POOLED,
        "qsa_compressed": type(target).__name__ == _POOLED,
        "minimax_index_k": getattr(target, "index_k_pool", None) is not None,
        "minimax_dense_kv": bool(getattr(target, "_dense_layer_ids", None)),
    }
    if missing := [name for name, is_wanted in wanted.items() if is_wanted and name not in listed]:
        raise LayoutError(
            f"SGLang keeps a {type(main).__name__} for layers of this model, and does not list its {missing} for a "
            "transfer: the other side would compute without it. Choose another --kv-cache-dtype or model"
        )
    if type(draft).__name__ in MINIMAX_POOLS:  # SGLang lists a draft's keys and values alone
        raise LayoutError(
            f"SGLang does not list the index of a draft model in a {type(draft).__name__} for a transfer: leave the "
            "draft model away"
        )
    inner = getattr(draft, "full_kv_pool", draft)
    if type(inner).__name__ in (_SCALED, "MLATokenToKVPoolFP4") or getattr(inner, "k_scale_buffer", None) is not None:
        raise LayoutError(
            "SGLang does not list the scales of a draft model's blocks for a transfer: choose another --kv-cache-dtype "
            "for the draft model, or none"
        )


def sparse_of(main: Any, draft: Any, listed: Listed) -> list[Uncut]:
    """Returns the index of sparse attention, or what a pooled one has of a request's last tokens: no whole pool yet.

    It is listed layer by layer, a draft model's behind the model's own. Of last tokens a request has a ring, of keys
    and then of scores, in which every token's place follows from its position: it is the same on both sides.

    Args:
        draft: a draft model's pool; None if there is none.
        listed: the buffers, of a page or a ring; a layer that takes another one's choice has none.

    Raises:
        LayoutError: if there are not as many as layers.
    """
    is_tail = listed.name == "dsa_tail"
    what, kinds = ("index tail", (" keys", " scores")) if is_tail else ("index", ("",))
    drafts = draft.layer_num if type(draft).__name__ in _SPARSE else 0
    if len(listed.items) != len(kinds) * (main.layer_num + drafts):
        raise LayoutError(
            f"SGLang lists {len(listed.items)} buffers of the {what} of {main.layer_num} layers and {drafts} of a "
            f"draft model: {len(kinds)} for each were expected. Leave the draft model away"
        )
    if not any(listed.items[: main.layer_num]):
        raise LayoutError(
            f"no layer on this rank has an {what} of its own: all take another layer's choice. Choose --pp-size so "
            "that every stage has one"
        )
    has_drafts = any(listed.items[len(kinds) * main.layer_num :])
    uncut = []
    for pool, prefix in ((main, ""), *([(draft, DRAFT)] if has_drafts else [])):
        packing, group = (None, TAIL_GROUP) if is_tail else (_order(pool), INDEX_GROUP)
        for kind in kinds:
            layers, buffers = listed.take_layers(pool.layer_num)
            name = f"{prefix}{what}{kind}"
            uncut.append(Uncut(name, layers, pool.layer_num, buffers, packing, group))
    return uncut


def pooled_of(target: Any, draft: Any, listed: Listed) -> list[Uncut]:
    """Returns the pooled keys of QSA's index, or what it has of a request's last tokens: no whole pool yet.

    Pooled keys are in the pages of the tokens that they are pooled from. Of last tokens a request has a ring of keys,
    and then one of positions, as long as a pool, in which every token's place follows from its position.

    Args:
        draft: a draft model's pool; None if there is none.
        listed: the buffers, a draft model's behind the model's own.

    Raises:
        LayoutError: if there are not as many as layers.
    """
    is_pending = listed.name == "qsa_pending"
    pools = [(pool, prefix) for pool, prefix in ((target, ""), (draft, DRAFT)) if type(pool).__name__ == _POOLED]
    count = sum(len(pool.qsa_key_state_buffer_pool) + is_pending for pool, _ in pools)
    if count != len(listed.items):
        raise LayoutError(
            f"SGLang lists {len(listed.items)} buffers of QSA's index, and its pools have {count}. Leave the draft "
            "model away"
        )
    uncut = []
    for pool, prefix in pools:
        keys = listed.take(len(pool.qsa_key_state_buffer_pool))
        if is_pending:
            uncut.append(Uncut.of(f"{prefix}pending index keys", keys, None, PENDING_GROUP))
            # Positions are the same for all layers: every stage has them.
            name, positions = f"{prefix}pending index positions", listed.take(1)
            uncut.append(Uncut.of(name, positions, None, PENDING_GROUP, Stage()))
            continue
        dtype = str(pool.qsa_compressed_dtype).removeprefix("torch.")
        packing = f"SGLang's QSA keys of {pool.page_size} tokens, pooled by {pool.qsa_compress_ratio}, {dtype}"
        uncut.append(Uncut.of(f"{prefix}index", keys, packing, KV_GROUP))
    return uncut


def scales_of(pool: Any, heads: Heads | None) -> Heads:
    """Returns what the scales of blocks are: bytes of a head and token, one for each block of its key and value.

    Args:
        pool: a MHATokenToKVPoolMXFP8.
    """
    assert heads is not None
    block = pool.MXFP8_SCALE_BLOCK_SIZE
    packing = "SGLang's MXFP8_INTERLEAVED" if pool.mxfp8_sf_interleaved else None
    return replace(heads, key_bytes=pool.head_dim // block, value_bytes=pool.v_head_dim // block, packing=packing)


def own_scales_of(pool: Any, heads: Heads | None) -> Attention | None:
    """Returns the scales of blocks of 4 bits, which SGLang does not list; None if a pool has no such scales.

    They lie in pages with the numbers of keys and values, tokens first. A pool keeps them as long as these.

    Args:
        pool: of keys and values, or of latents.
        heads: its own; None for latents.
    """
    if type(pool).__name__ == "MLATokenToKVPoolFP4":
        return Attention(_of_tokens(pool.kv_scale_buffer, pool.page_size), None)
    keys = getattr(pool, "k_scale_buffer", None)
    if heads is None or keys is None or type(pool).__name__ != "MHATokenToKVPool":
        return None
    of_head = keys[0][0].nbytes // pool.head_num
    of_scales = replace(heads, key_bytes=of_head, value_bytes=pool.v_scale_buffer[0][0].nbytes // pool.head_num)
    return Attention(_of_tokens([*keys, *pool.v_scale_buffer], pool.page_size), of_scales)


def _of_tokens(tensors: Sequence[Any], page_tokens: int) -> Buffers:
    """Returns tensors of tokens as SGLang lists such that it transfers."""
    return Buffers(
        tuple(each.data_ptr() for each in tensors),
        tuple(each.nbytes for each in tensors),
        tuple(each[0].nbytes * page_tokens for each in tensors),
    )


def _order(pool: Any) -> str:
    """Names the order within a page of the index."""
    return (
        f"SGLang's index of {pool.index_page_size} keys of {pool.index_head_dim}, pooled by {pool.index_kpool}, for "
        f"{'ROCm' if torch.version.hip else 'CUDA'}"
    )
