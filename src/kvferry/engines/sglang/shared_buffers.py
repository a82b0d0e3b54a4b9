"""SGLang's buffers in which several caches lie together: in unified memory, and in MiniMax's rows of 4 bits.

Unified memory is one buffer for several pools, in which a token's layers lie together. SGLang lists it as a whole, with
pages of all layers. Each layer's keys and values are views of it, which say where it lies: so they are cut by layers
and heads, as others are, and a side without unified memory can have them. SGLang moves pages to make room. It does not
while pages are given to the other side, and must not while those of a failed request are kept either: see
`hooks.around_gate`.

Of MiniMax's keys and values of 4 bits every layer has a row for a page: keys, their scales, values and their scales, in
each of which a head's tokens lie together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvferry.engines.sglang.caches import Attention, Buffers, Heads, StateBuffer, Uncut
from kvferry.engines.sglang.layouts import KV_GROUP


def is_unified(pool: Any) -> bool:
    """Whether a pool of keys and values, or of latents, is a part of unified memory."""
    return type(pool).__name__ in ("UnifiedMHATokenToKVPool", "UnifiedMLATokenToKVPool")


def layers_of(pool: Any, listed: Buffers, heads: Heads | None) -> Attention:
    """Returns a pool's keys and values, or latents, layer by layer.

    Args:
        pool: in unified memory.
        listed: the buffer, as SGLang lists it: as long as it may be used, with the bytes of one page of all layers.
        heads: of keys and values; None for latents.
    """
    kinds: Sequence[Sequence[Any]] = [pool.kv_buffer] if heads is None else [pool.k_buffer, pool.v_buffer]
    views = [view for kind in kinds for view in kind]
    buffers = Buffers(
        tuple(view.data_ptr() for view in views), listed.lengths * len(views), listed.item_bytes * len(views)
    )
    return Attention(buffers, heads, part_bytes=tuple(kind[0][0].nbytes * pool.page_size for kind in kinds))


def state_of(pool: Any, listed: Buffers) -> tuple[StateBuffer, ...] | None:
    """Returns recurrent state in unified memory; None if it is not there.

    A slot has that of all layers, and SGLang does not say how ranks divide it: ranks exchange with ranks of the same
    number.
    """
    if type(pool).__name__ != "UnifiedMambaPool":
        return None
    return (StateBuffer(listed.addresses[0], listed.lengths[0], listed.item_bytes[0], layer=0, channels=1),)


def is_of_rows(pool: Any) -> bool:
    """Whether a pool of keys and values has a row for each page, with the scales in it."""
    return type(pool).__name__ == "MiniMaxM3Nvfp4MainKVPool"


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


def _part(pool: Any, rows: Buffers, kinds: Sequence[Sequence[Any]], heads: Heads) -> Attention:
    """Returns parts of rows, as far behind their begins as the pool's own views of them."""
    addresses = [
        address + views[0].data_ptr() - pool.rows[0].data_ptr() for views in kinds for address in rows.addresses
    ]
    buffers = Buffers(tuple(addresses), rows.lengths * len(kinds), rows.item_bytes * len(kinds))
    return Attention(buffers, heads, part_bytes=(pool.head_num * heads.key_bytes * pool.page_size,) * len(kinds))
