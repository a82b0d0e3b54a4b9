"""Caches in which a backend keeps keys, values and scales apart within a block, cut into what it keeps apart.

Each function follows the one in the backend that makes its kernels' views, of vLLM 0.32, and returns views of
(block, head, token, content). Heads can be told apart in all of them, so that ranks of any number exchange them; tokens
only where nothing says that a part's inner order is the kernel's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

_SIDES = ("keys", "values")


@dataclass(frozen=True, slots=True)
class CachePart:
    """One of the parts of a layer's cache.

    Attributes:
        name: what it is.
        view: returns it, given the layer's tensor.
        is_packed: whether its tokens cannot be told apart.
    """

    name: str
    view: Callable[[Any], Any]
    is_packed: bool

    @staticmethod
    def spread(tokens: int, cache: Any) -> Any:
        """Returns a view in which each of so many tokens has a part of the entry that they share.

        So entries are cut between tokens, in pages of any size. An entry of which not all tokens are there yet is one
        that the engine has not made, and makes when they are.
        """
        pages, heads, entries, content = cache.shape
        return cache.view(pages, heads, entries * tokens, content // tokens)

    @staticmethod
    def in_one_piece(cache: Any) -> Any:
        """Returns a view in which what lies together in a block is the content of its entries.

        A slot by itself where its tokens and content lie together, all slots as one otherwise.
        """
        pages, slots, entries, content = cache.shape
        if cache.stride()[2:] == (content, 1) or slots == 1:
            return cache
        return cache.permute(0, 2, 1, 3).view(pages, 1, entries, slots * content)


def quant_mode(spec: Any) -> str:
    """Returns how a cache's values are quantised, by the name that vLLM has for it; NONE if they are not."""
    return str(getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE"))


def parts_of(spec: Any, backend: str) -> tuple[CachePart, ...]:
    """Returns the parts of a layer's cache; none where the backend keeps nothing apart, or where is not known.

    Args:
        spec: what vLLM says of the cache, as the backend has changed it (an `AttentionSpec`).
        backend: its name.
    """
    heads, slots, mode = spec.num_kv_heads, spec.num_head_slots, quant_mode(spec)
    if slots == 2 * heads and mode == "NVFP4":
        if backend == "FLASHINFER":
            return tuple(_sides_with_scales_behind(heads))
        if backend in ("CUTLASS_MSA", "TRITON_MSA"):
            return (CachePart("keys and values", partial(_pairs_of_slots, heads), is_packed=True),)
    if slots == 2 and spec.state_content_bytes == heads * spec.head_size * spec.dtype.itemsize and mode != "NVFP4":
        if backend == "B12X":
            views = (partial(_side_by_token, side, heads) for side in range(2))
            return tuple(CachePart(name, view, is_packed=False) for name, view in zip(_SIDES, views, strict=True))
        if backend == "ROCM_ATTN":
            views = (partial(_side_by_head, side, heads) for side in range(2))
            return tuple(CachePart(name, view, is_packed=True) for name, view in zip(_SIDES, views, strict=True))
    return ()


def _sides_with_scales_behind(heads: int) -> Iterator[CachePart]:
    """[keys | scales of the keys | values | scales of the values], as `flashinfer._nvfp4_kv_views` has them."""
    for side, name in enumerate(_SIDES):
        yield CachePart(name, partial(_side_of_nvfp4, side, heads, are_scales=False), is_packed=True)
        yield CachePart(f"scales of {name}", partial(_side_of_nvfp4, side, heads, are_scales=True), is_packed=True)


def _side_of_nvfp4(side: int, heads: int, cache: Any, *, are_scales: bool) -> Any:
    pages, _, tokens, content = cache.shape
    values = content * 8 // 9  # a byte of scale for sixteen values of half a byte
    width = content - values if are_scales else values
    start = side * heads * tokens * content + (heads * tokens * values if are_scales else 0)
    has_heads_outside = heads == 1 or cache.stride(1) == tokens * content
    strides = (tokens * width, width, 1) if has_heads_outside else (width, heads * width, 1)
    shape = (pages, heads, tokens, width)
    return cache.as_strided(shape, (cache.stride(0), *strides), cache.storage_offset() + start)


def _pairs_of_slots(heads: int, cache: Any) -> Any:
    """A slot for a head's keys, then one for its values, each with scales behind (`nvfp4_kv_cache_views`)."""
    pages, _, tokens, content = cache.shape
    return cache.view(pages, heads, tokens, 2 * content)


def _side_by_token(side: int, heads: int, cache: Any) -> Any:
    """The heads of each token behind each other, as `B12xPagedAttentionImpl._kv_cache_views` has them."""
    return cache[:, side].unflatten(-1, (heads, -1)).transpose(1, 2)


def _side_by_head(side: int, heads: int, cache: Any) -> Any:
    """The tokens of each head together in an order of their own, as `PagedAttention.split_kv_cache` has them."""
    pages, _, tokens, content = cache.shape
    return cache[:, side].view(pages, heads, tokens, content // heads)
