"""How layers' caches are to be read, where a tensor of (block, head, entry, content) does not show it.

Three things are taken for granted of such a tensor that need not be so. A decoder layer may have several caches:
latents, and the keys of an indexer that chooses among them. An entry may stand for several tokens, or several for one.
And the bytes of a block may lie in another order than the dimensions say: all values of a block and then their scales,
for one, which only the kernel can tell token from token. What vLLM says of it, in specs and by the names of layers and
backends, is gathered here; nothing of vLLM is imported. Where it says nothing, the order is the backend's own.

Where a backend keeps keys, values and scales apart within a block, the cache is cut into these parts: heads can be told
apart in all of them, so that ranks of any number exchange them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

from kvferry import geometry
from kvferry.errors import LayoutError

ATTENTION = "kv"
"""What the cache of a layer's attention is called; any other is called by its name behind the layer's number."""

_BY_TOKEN = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
"""Types whose values and scales lie behind each other for each token, and the bytes of one; said in vLLM's
`mla/flashmla_sparse.py`. DeepSeek-V4's of the same names have other sizes, and a page's scales behind its values."""

_KEYS_THEN_SCALES = {("DEEPSEEK_V32_INDEXER", 132): (128, 4)}
"""By backend and bytes of a token, what a page on NVIDIA's GPUs has of each token in all keys and then in all scales;
said in vLLM's `_fp8_quant_and_cache_write` of `models/deepseek_v32/common/kernels.py`. AMD's kernels shuffle keys."""

_SIDES = ("keys", "values")


@dataclass(frozen=True, slots=True)
class CacheForm:
    """How a layer's cache, or a part of it, is to be read.

    Attributes:
        role: what it is beside the layer's other caches.
        tokens_per_entry: how many tokens an entry stands for; less than one where a token has several.
        packing: the name of the order within a block where only the kernel knows it; None where tokens can be told
            apart.
        has_heads: whether the second dimension are KV heads. If not, the cache is its rank's share of the layer.
        part: returns what is described of a layer's tensor, again as (block, head, entry, content); None for all.
        token_parts: where the order within a block has a name, how it can be cut between tokens all the same, as a
            component says it; empty where only the kernel can.
    """

    role: str = ATTENTION
    tokens_per_entry: Fraction = Fraction(1)
    packing: str | None = None
    has_heads: bool = True
    part: Callable[[Any], Any] | None = None
    token_parts: tuple[int, ...] = ()

    @property
    def entries_in_words(self) -> str:
        """How entries stand to tokens; empty where each token has one."""
        if self.tokens_per_entry > 1:
            return f"an entry for {self.tokens_per_entry} tokens"
        return "" if self.tokens_per_entry == 1 else f"{1 / self.tokens_per_entry} entries a token"


def forms_of(name: str, spec: Any, layer: Any, backend: str, *, is_nvidia: bool = False) -> tuple[CacheForm, ...]:
    """Returns how a layer's cache is to be read, part by part.

    Args:
        spec: what vLLM says of its cache, as its backend has changed it (an `AttentionSpec`).
        layer: its module, with its cache.
        backend: the name of the backend that reads and writes it.
        is_nvidia: whether kernels are those of NVIDIA's GPUs, whose order within a page is known for some caches.
    """
    role, per_entry = role_of(name, spec), Fraction(getattr(spec, "tokens_per_state", 1))
    order = f"vLLM's {backend}{_kernel_page(layer)}"
    if parts := parts_of(spec, backend):
        return tuple(
            CacheForm(f"{role}, {part.name}", per_entry, order if part.is_packed else None, part=part.view)
            for part in parts
        )
    if spec.num_head_slots is not None or _is_opaque(spec):
        has_heads = is_the_same_everywhere(spec)
        part = None if has_heads else CachePart.in_one_piece
        is_known = is_nvidia and per_entry == 1 and not _is_shuffled(layer)
        token_parts = _KEYS_THEN_SCALES.get((backend, _content(spec)), ()) if is_known else ()
        return (CacheForm(role, per_entry, order, has_heads, part, token_parts),)
    if per_entry > 1:
        tokens = int(per_entry)
        if _content(spec) % tokens:
            return (CacheForm(role, per_entry, order),)
        return (CacheForm(role, per_entry, part=partial(CachePart.spread, tokens)),)
    return (CacheForm(role, per_entry),)


def role_of(name: str, spec: Any) -> str:
    """Returns what a layer's cache is beside the others of the same decoder layer.

    It follows from the layer alone, so that ranks that hold other layers call it the same. vLLM names modules that are
    nothing but a cache so: `indexer.k_cache`, `swa_cache`, `compressor.state_cache`. LongCat-Flash has two attentions
    in a decoder layer, and a second number in their names.
    """
    numbered = re.search(r"(?:^|\.)\d+(?:\.(.+))?$", name)
    behind = name if numbered is None else numbered[1] or ""
    is_indexer = getattr(getattr(spec, "cache_role", None), "value", None) == "indexer"
    is_one_of_several = re.search(r"(?:^|\.)\d+(?:\.|$)", behind) is not None
    return behind if is_indexer or is_one_of_several or behind.endswith("cache") else ATTENTION


def is_the_same_everywhere(spec: Any) -> bool:
    """Whether every rank has all of a cache: one vector for a token (or group of tokens) and layer, or hidden states.

    vLLM's own NIXL connector takes caches of these specs so. Most say it themselves (`max_tp_shards`); the indexers of
    MiniMax-M3 and Qwen4 and the latents of DeepSeek-V4.1 do not, and are made by projections that are not divided.
    """
    kind = type(spec).__name__
    return ("MLA" in kind and spec.num_kv_heads == 1) or kind == "HiddenStateCacheSpec"


def _is_opaque(spec: Any) -> bool:
    """Whether the order of a block's bytes does not follow from its dimensions.

    It does where the content is plain numbers, and where each token's scales are known to lie in its own content.
    """
    content, mode = spec.state_content_bytes, quant_mode(spec)
    if content is None:
        return str(spec.dtype) == "torch.uint8" and mode == "NONE"  # values and scales, and nobody says which
    if mode.endswith("_PER_TOKEN_HEAD"):
        return False
    return bool(_BY_TOKEN.get(getattr(spec, "cache_dtype_str", None) or "") != content)


def _content(spec: Any) -> int:
    """Returns how many elements an entry has in a head."""
    content = spec.state_content_bytes
    return int(spec.head_size + spec.head_size_v if content is None else content // spec.dtype.itemsize)


def _kernel_page(layer: Any) -> str:
    """Names what else an order depends on: into what pages a kernel divides blocks, and whether it shuffles them."""
    bound: Any = getattr(layer, "kv_cache", None)
    page = f", in pages of {bound.shape[1]} entries" if getattr(bound, "ndim", 0) == 3 else ""
    return page + (", shuffled" if _is_shuffled(layer) else "")


def _is_shuffled(layer: Any) -> bool:
    return bool(getattr(layer, "uses_shuffled_layout", False))


def packed(cache: Any, layer: str) -> Any:
    """Returns a view of (page, head, everything else) of a cache of (page, head, entry, content).

    Raises:
        LayoutError: if entries and content do not lie behind each other.
    """
    try:
        return cache.view(*cache.shape[:2], -1)
    except RuntimeError as error:
        raise LayoutError(
            f"the cache of layer {layer!r} has strides {geometry(cache).strides}: the pages of this backend are "
            "packed, so that tokens and content must lie behind each other; leave VLLM_KV_CACHE_LAYOUT to kvferry"
        ) from error


# ---- parts that a backend keeps apart --------------------------------------------------------------------------------
#
# Each function follows the one in the backend that makes its kernels' views, of vLLM 0.32, and returns views of (block,
# head, token, content).


@dataclass(frozen=True, slots=True)
class CachePart:
    """One of the parts of a layer's cache.

    Attributes:
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
    """
    heads, slots, mode = spec.num_kv_heads, spec.num_head_slots, quant_mode(spec)
    if slots == 2 * heads and mode == "NVFP4":
        if backend == "FLASHINFER":
            return tuple(_sides_with_scales_behind(heads))
        if backend in ("CUTLASS_MSA", "TRITON_MSA"):
            return (CachePart("keys and values", partial(_pairs_of_slots, heads), is_packed=True),)
    if slots == 2 and spec.state_content_bytes == heads * spec.head_size * spec.dtype.itemsize and mode != "NVFP4":
        view = {"B12X": _side_by_token, "ROCM_ATTN": _side_by_head}.get(backend)
        if view is not None:
            is_packed = view is _side_by_head
            return tuple(CachePart(name, partial(view, side, heads), is_packed) for side, name in enumerate(_SIDES))
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
