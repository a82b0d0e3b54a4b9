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

from kvferry.engines.sglang.caches import Attention, Buffers, Heads, Stage, Uncut
from kvferry.engines.sglang.layouts import INDEX_GROUP, KV_GROUP, PENDING_GROUP, TAIL_GROUP
from kvferry.engines.sglang.minimax import MINIMAX_POOLS
from kvferry.errors import LayoutError

_SPARSE = ("DSATokenToKVPool", "HiSparseDSATokenToKVPool")
_SCALED, _POOLED = "MHATokenToKVPoolMXFP8", "QSATokenToKVPool"


def check_listed(states: Sequence[Enum], target: Any, main: Any, windowed: Any, draft: Any) -> None:
    """Refuses pools of which SGLang does not list all that it keeps: what is not sent, the other side would lack.

    Args:
        states: what it lists beside keys and values.
        target: the model's pool.
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


def index_of(main: Any, draft: Any, addresses: list[int], lengths: list[int], items: list[int]) -> list[Uncut]:
    """Returns the index of sparse attention: layer by layer, a draft model's behind the model's own.

    Args:
        main: the model's DSATokenToKVPool.
        draft: a draft model's pool; None if there is none.
        addresses: of the buffers, as SGLang lists them.
        lengths: of each.
        items: the bytes of one page of each; 0 where a layer has none.

    Raises:
        LayoutError: if there are not as many as layers.
    """
    return [
        _uncut(("draft " if of_draft else "") + "index", pool, of_draft, _order(pool), addresses, lengths, items, first)
        for pool, of_draft, first in _parts(main, draft, "index", items, kinds=1)
    ]


def tails_of(main: Any, draft: Any, addresses: list[int], lengths: list[int], items: list[int]) -> list[Uncut]:
    """Returns what a pooled index has of a request's last tokens, which are no whole pool yet: keys, then scores.

    A request has a ring of them, in which every token's place follows from its position: it is the same on both sides.

    Args:
        main: as for `index_of`.
        draft: as for `index_of`.
        addresses: as for `index_of`.
        lengths: as for `index_of`.
        items: the bytes of one request's ring in each; 0 where a layer has none.

    Raises:
        LayoutError: as for `index_of`.
    """
    return [
        _uncut(
            f"{'draft ' if of_draft else ''}index tail {kind}",
            pool,
            of_draft,
            None,
            addresses,
            lengths,
            items,
            first + number * pool.layer_num,
        )
        for pool, of_draft, first in _parts(main, draft, "index tail", items, kinds=2)
        for number, kind in enumerate(("keys", "scores"))
    ]


def pending_keys_of(target: Any, draft: Any, given: Buffers) -> list[Uncut]:
    """Returns what QSA's index has of a request's last tokens, which are no whole pool yet: keys, and positions.

    A request has a ring of them, as long as a pool, in which every token's place follows from its position.

    Args:
        target: the model's QSATokenToKVPool.
        draft: a draft model's pool; None if there is none.
        given: the buffers, as SGLang lists them: a pool's keys, then its positions.

    Raises:
        LayoutError: if there are not as many as layers.
    """
    uncut = []
    for pool, prefix, begin in _pooled(target, draft, given, positions=1):
        layers = len(pool.qsa_key_state_buffer_pool)
        keys, positions = given[begin : begin + layers], given[begin + layers : begin + layers + 1]
        for what, count, buffers in (("keys", layers, keys), ("positions", 1, positions)):
            each = Uncut(
                f"{prefix}pending index {what}", tuple(range(count)), count, buffers, None, PENDING_GROUP, bool(prefix)
            )
            # Positions are the same for all layers: every stage has them.
            uncut.append(replace(each, stage=Stage()) if what == "positions" else each)
    return uncut


def pooled_keys_of(target: Any, draft: Any, given: Buffers) -> list[Uncut]:
    """Returns the pooled keys of QSA's index, by layer, in the pages of the tokens that they are pooled from.

    Args:
        target: as for `pending_keys_of`.
        draft: as for `pending_keys_of`.
        given: the buffers, as SGLang lists them.

    Raises:
        LayoutError: as for `pending_keys_of`.
    """
    uncut = []
    for pool, prefix, begin in _pooled(target, draft, given, positions=0):
        layers = len(pool.qsa_key_state_buffer_pool)
        dtype = str(pool.qsa_compressed_dtype).removeprefix("torch.")
        packing = f"SGLang's QSA keys of {pool.page_size} tokens, pooled by {pool.qsa_compress_ratio}, {dtype}"
        part = given[begin : begin + layers]
        uncut.append(Uncut(f"{prefix}index", tuple(range(layers)), layers, part, packing, KV_GROUP, bool(prefix)))
    return uncut


def scales_of(pool: Any, heads: Heads | None) -> Heads:
    """Returns what the scales of blocks are: bytes of a head and token, one for each block of its key and value.

    Args:
        pool: a MHATokenToKVPoolMXFP8.
        heads: its keys and values.
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


def _pooled(target: Any, draft: Any, given: Buffers, *, positions: int) -> list[tuple[Any, str, int]]:
    """Returns the pools that are listed, what their components' names begin with, and where each begins in the list."""
    listed = []
    begin = 0
    for pool, prefix in ((target, ""), (draft, "draft ")):
        if type(pool).__name__ == _POOLED:
            listed.append((pool, prefix, begin))
            begin += len(pool.qsa_key_state_buffer_pool) + positions
    if begin != len(given):
        raise LayoutError(
            f"SGLang lists {len(given)} buffers of QSA's index, and its pools have {begin}. Leave the draft model away"
        )
    return listed


def _order(pool: Any) -> str:
    """Names the order within a page of the index."""
    return (
        f"SGLang's index of {pool.index_page_size} keys of {pool.index_head_dim}, pooled by {pool.index_kpool}, for "
        f"{'ROCm' if torch.version.hip else 'CUDA'}"
    )


def _parts(main: Any, draft: Any, what: str, items: list[int], *, kinds: int) -> list[tuple[Any, bool, int]]:
    """Returns the pools that are listed, whether each is a draft's, and where it begins in the list."""
    drafts = draft.layer_num if type(draft).__name__ in _SPARSE else 0
    if len(items) != kinds * (main.layer_num + drafts):
        raise LayoutError(
            f"SGLang lists {len(items)} buffers of the {what} of {main.layer_num} layers and {drafts} of a draft "
            f"model: {kinds} for each were expected. Leave the draft model away"
        )
    if not any(items[: main.layer_num]):
        raise LayoutError(
            f"no layer on this rank has an {what} of its own: all take another layer's choice. Choose --pp-size so "
            "that every stage has one"
        )
    begin = kinds * main.layer_num
    return [(main, False, 0), *([(draft, True, begin)] if any(items[begin:]) else [])]


def _uncut(
    name: str,
    pool: Any,
    of_draft: bool,
    packing: str | None,
    addresses: list[int],
    lengths: list[int],
    items: list[int],
    first: int,
) -> Uncut:
    """Returns the layers of one pool, without those that share another layer's and have nothing of their own."""
    layers = tuple(layer for layer in range(pool.layer_num) if items[first + layer])
    buffers = Buffers(
        tuple(addresses[first + layer] for layer in layers),
        tuple(lengths[first + layer] for layer in layers),
        tuple(items[first + layer] for layer in layers),
    )
    group = TAIL_GROUP if packing is None else INDEX_GROUP
    return Uncut(name, layers, pool.layer_num, buffers, packing, group, of_draft)
