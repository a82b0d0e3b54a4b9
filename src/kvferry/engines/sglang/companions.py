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

from kvferry.engines.sglang.caches import Buffers, Heads, Uncut
from kvferry.engines.sglang.layouts import KV_GROUP, TAIL_GROUP
from kvferry.errors import LayoutError

_SPARSE, _SCALED = "DSATokenToKVPool", "MHATokenToKVPoolMXFP8"


def check_listed(states: Sequence[Enum], main: Any, windowed: Any, draft: Any) -> None:
    """Refuses pools of which SGLang does not list all that it keeps: what is not sent, the other side would lack.

    Args:
        states: what it lists beside keys and values.
        main: the pool of full attention, or of latents.
        windowed: that of windows; None if there is none.
        draft: a draft model's; None if there is none.

    Raises:
        LayoutError: naming what is not listed.
    """
    listed = {each.value for each in states}
    is_sparse = type(main).__name__ == _SPARSE
    wanted = {
        "dsa": is_sparse,
        "dsa_tail": is_sparse and main.kpool_use_compress,
        "block_scale": type(main).__name__ == _SCALED,
        "block_scale_swa": type(windowed).__name__ == _SCALED,
    }
    if missing := [name for name, is_wanted in wanted.items() if is_wanted and name not in listed]:
        raise LayoutError(
            f"SGLang keeps a {type(main).__name__} for layers of this model, and does not list its {missing} for a "
            "transfer: the other side would compute without it. Choose another --kv-cache-dtype or model"
        )
    inner = getattr(draft, "full_kv_pool", draft)
    if type(inner).__name__ == _SCALED:
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


def _order(pool: Any) -> str:
    """Names the order within a page of the index."""
    return (
        f"SGLang's index of {pool.index_page_size} keys of {pool.index_head_dim}, pooled by {pool.index_kpool}, for "
        f"{'ROCm' if torch.version.hip else 'CUDA'}"
    )


def _parts(main: Any, draft: Any, what: str, items: list[int], *, kinds: int) -> list[tuple[Any, bool, int]]:
    """Returns the pools that are listed, whether each is a draft's, and where it begins in the list."""
    drafts = draft.layer_num if type(draft).__name__ == _SPARSE else 0
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
    group = TAIL_GROUP if packing is None else KV_GROUP
    return Uncut(name, layers, pool.layer_num, buffers, packing, group, of_draft)
