"""Unified memory in SGLang: one buffer for several pools, in which a token's layers lie together.

SGLang lists the buffer as a whole, with pages of all layers. Each layer's keys and values are views of it, which say
where it lies: so they are cut by layers and heads, as others are, and a side without unified memory can have them.
SGLang moves pages to make room. It does not while pages are given to the other side, and must not while those of a
failed request are kept either: see `around_gate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvferry.engines.sglang.caches import Attention, Buffers, Heads, StateBuffer

_HEADS, _LATENTS, _STATE = "UnifiedMHATokenToKVPool", "UnifiedMLATokenToKVPool", "UnifiedMambaPool"


def is_unified(pool: Any) -> bool:
    """Whether a pool of keys and values, or of latents, is a part of unified memory."""
    return type(pool).__name__ in (_HEADS, _LATENTS)


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
    if type(pool).__name__ != _STATE:
        return None
    return (
        StateBuffer(
            address=listed.addresses[0],
            length=listed.lengths[0],
            item_bytes=listed.item_bytes[0],
            layer=0,
            channels=1,
        ),
    )


def around_gate(original: Callable[[Any], Callable[[], bool]], scheduler: Any) -> Callable[[], bool]:
    """The hook around SGLang's own gate for moving pages: closes it as well while pages of failed requests are kept.

    A write to these may still be on its way, by the place that they had when the request was opened.

    Args:
        original: returns SGLang's own, which is True where pages may be moved.
    """
    gate = original(scheduler)

    def is_open() -> bool:
        queue = getattr(scheduler, "disagg_decode_transfer_queue", None)
        return gate() and not (queue is not None and queue.has_pending_deferred_releases())

    return is_open
