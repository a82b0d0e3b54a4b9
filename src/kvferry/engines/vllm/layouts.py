"""vLLM's KV caches as a `RankLayout`.

Since 0.32, vLLM gives every attention layer's cache as a view of four dimensions, whatever lies behind it: block, head,
token, content. NHD and HND, layers that share an allocation, blocks that hold all layers: all of it is in the view's
strides. The content of one token and head is its K and V behind each other, or its latent.

Where the order of the elements within a block and head is the kernel's own, as on CPU and in many quantised caches,
pages are packed: they can be cut by head, if at all, and never by token. Which caches these are, and which have an
entry for something else than one token, `forms` says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry import (
    Axis,
    Component,
    Entry,
    Interval,
    RankCoordinates,
    RankLayout,
    TensorGeometry,
    TokenShare,
    geometry,
)
from kvferry.engines.vllm.caches import CacheGroup, HeldPart, ModelShape
from kvferry.engines.vllm.components import ComponentForm, Piece, by_form, named, shards_of, with_those_elsewhere
from kvferry.engines.vllm.forms import ATTENTION, CacheForm, packed
from kvferry.engines.vllm.states import SHARE, KeptStates, StateLayer, state_pieces
from kvferry.errors import LayoutError

_DIMENSIONS = "(block, head, token, content)"


@dataclass(frozen=True, slots=True)
class LayerPages:
    """What a layer keeps of tokens, or one of the parts of it.

    Attributes:
        pages: a view of (page, head, entry, content), or, packed, of (page, head, everything).
        page_tokens: tokens in a page.
        is_packed: whether tokens do not lie apart in a page.
        token_parts: elements of a token in each part of a packed page; empty where only the kernel can tell them apart.
    """

    component: str
    pages: Any
    page_tokens: int
    is_packed: bool
    token_parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DescribedCaches:
    """What a worker's caches are.

    Attributes:
        pages_per_block: by group, into how many pages a kernel divides a block of the block table.
        has_chunks: whether layers attend within chunks: how many tokens at a request's end are needed is not the same
            for every request then.
        pages: by group, the pages of its layers, as tensors.
    """

    layout: RankLayout
    pages_per_block: Mapping[str, int]
    has_chunks: bool = False
    pages: Mapping[str, Sequence[LayerPages]] = field(default_factory=dict)

    def kept(self, group: str, tokens: int) -> int:
        """Returns how many of a request's first tokens this rank keeps in a group."""
        share = self.layout.share_of(self.layout.group(group))
        return share.held_before(tokens, block=share.partition.block(tokens))


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's cache.

    Attributes:
        number: of the layer, in the whole model; of a draft model's, in that.
        heads: which KV heads the cache has; None where that is not known.
        packing: the name of the order within a page; None where tokens can be told apart.
        page_tokens: tokens in a page of the tensor.
    """

    number: int
    is_draft: bool
    name: str
    group: CacheGroup
    heads: HeldPart | None
    form: CacheForm
    packing: str | None
    page_tokens: int
    cache: Any
    view: TensorGeometry

    @property
    def pages(self) -> Any:
        """The cache of (page, head, entry, content); where tokens cannot be told apart, of (page, head, everything)."""
        return self.cache if self.packing is None else packed(self.cache, self.name)

    @property
    def content(self) -> int:
        """Elements that one entry has in one head."""
        return self.view.shape[3]

    @property
    def heads_in_words(self) -> str:
        """How many heads the layer has over all ranks, or at least on each."""
        return f"{self.view.shape[1]} heads on each rank" if self.heads is None else f"{self.heads.total} heads"


def layer_number(name: str) -> int:
    """Returns the number in a layer's name, such as 3 in 'model.layers.3.self_attn.attn'.

    A second one tells several of one decoder layer apart, as in 'model.layers.3.self_attn.1.attn'.

    Raises:
        LayoutError: if there are none, or more.
    """
    numbers = _numbers(name)
    if len(numbers) not in (1, 2):
        raise LayoutError(f"layer {name!r} has {len(numbers)} numbers in its name, so that its place cannot be told")
    return int(numbers[0])


def _numbers(name: str) -> list[str]:
    return re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)


def describe(
    caches: Mapping[str, Any],
    groups: Sequence[CacheGroup],
    model: ModelShape,
    coordinates: RankCoordinates,
    *,
    heads: Mapping[str, HeldPart | None],
    states: Mapping[str, KeptStates] | None = None,
    forms: Mapping[str, Sequence[CacheForm]] | None = None,
    num_blocks: int,
    tokens: TokenShare = TokenShare(),  # noqa: B008 - immutable
    everywhere: Callable[[list[ComponentForm]], Iterable[ComponentForm]] = lambda forms: forms,
) -> DescribedCaches:
    """Describes a worker's caches.

    Layers that keep the same for a token are one component; they may have several block tables. Two engines need not
    come to the same tables: vLLM groups layers as their sizes and number allow.

    Where it is not known which of a layer's heads a rank holds, its cache is the rank's share of the layer, which no
    other rank has: between engines of the same tensor-parallel size every rank sends to its like, all others refuse
    each other.

    Args:
        caches: by layer name, views of (block, head, token, content). Layers in no group use another one's.
        heads: by layer name, which of its KV heads this rank holds; None where that is not known.
        states: by layer name, what layers with recurrent state keep.
        forms: by layer name, how its cache is to be read, part by part; as one of attention where nothing is said.
        num_blocks: in every block table.
        tokens: which of a request's tokens this rank keeps.
        everywhere: returns what the layers of all pipeline stages keep, given what those of this one do.

    Raises:
        LayoutError: if a cache is something else, naming layer and shape; or if nothing of the kind is known here.
    """
    attention, recurrent = [[group for group in groups if group.has_state is has] for has in (False, True)]
    layers = sorted(
        (
            _layer(name, form, group, model, caches, heads.get(name), num_blocks)
            for group in attention
            for name in group.layer_names
            for form in (forms or {}).get(name, (CacheForm(),))
        ),
        key=lambda layer: (layer.is_draft, layer.number),
    )
    per_block = {layer.group.name: layer.view.shape[0] // num_blocks for layer in layers}
    per_block |= dict.fromkeys((group.name for group in recurrent if group.layer_names), 1)
    pieces = [_piece(layer, model, coordinates, tokens) for layer in layers]
    states_kept = state_pieces(_state_layers(recurrent, states or {}, model), model.layers, coordinates)
    kept = by_form([*pieces, *states_kept])
    components = named(everywhere([*kept]))
    if not components:
        raise LayoutError("this worker has no KV cache that could be transferred")
    shards = [shard for form, alike in kept.items() for shard in shards_of(components[form], alike)]
    pages: dict[str, list[LayerPages]] = {}
    for layer, piece in zip(layers, pieces, strict=True):
        name, is_packed = components[piece.form].name, layer.packing is not None
        its = LayerPages(name, layer.pages, layer.page_tokens, is_packed, layer.form.token_parts)
        pages.setdefault(layer.group.name, []).append(its)
    has_chunks = any(group.chunk_tokens is not None for group in attention)
    layout = RankLayout(shards=tuple(with_those_elsewhere(shards, components.values())), tokens=tokens)
    return DescribedCaches(layout, per_block, has_chunks, pages)


def numbers_in_turn(caches: Iterable[str], model: ModelShape) -> dict[str, int]:
    """Returns the numbers of the model's own layers, by name, if it computes them in that order.

    Where a name has two numbers a model may compute each layer several times, for several caches. Nothing is known of
    the order then.
    """
    own = [name for name in caches if name not in model.drafts]
    return {} if any(len(_numbers(name)) > 1 for name in own) else {name: layer_number(name) for name in own}


def _layer(
    name: str,
    form: CacheForm,
    group: CacheGroup,
    model: ModelShape,
    caches: Mapping[str, Any],
    heads: HeldPart | None,
    num_blocks: int,
) -> _Layer:
    cache = caches.get(name)
    if cache is None or isinstance(cache, (list, tuple)):
        found = "no cache" if cache is None else f"{len(cache)} tensors, as of recurrent state"
        raise LayoutError(f"layer {name!r} has {found}: what can be described is one tensor {_DIMENSIONS} a layer")
    view = geometry(cache)
    if len(view.shape) != 4 or view.shape[0] % num_blocks:
        raise LayoutError(
            f"the cache of layer {name!r} has shape {view.shape}: what can be described is {_DIMENSIONS} with a "
            f"multiple of {num_blocks} blocks"
        )
    pages_per_block = view.shape[0] // num_blocks
    if view.shape[2] * pages_per_block * form.tokens_per_entry != group.block_tokens:
        raise LayoutError(
            f"the cache of layer {name!r} has shape {view.shape}: {view.shape[2]} entries in each of {pages_per_block} "
            f"pages where a block has {group.block_tokens} tokens, with {form.entries_in_words or 'an entry for each'}"
        )
    if form.part is not None:
        cache = form.part(cache)
        view = geometry(cache)
    heads = heads if form.has_heads else None
    if heads is not None and view.shape[1] != len(heads.held):
        raise LayoutError(
            f"the cache of layer {name!r} has {view.shape[1]} heads where this rank holds {heads.held} of the layer's "
            f"{heads.total}"
        )
    number = _number(name, model)
    is_draft = name in model.drafts
    if not is_draft and number >= model.layers:
        raise LayoutError(
            f"layer {name!r} has a number behind those of the model's {model.layers} layers and is no draft model's by "
            "what vLLM has loaded: whose it is cannot be told"
        )
    return _Layer(
        number=number,
        is_draft=is_draft,
        name=name,
        group=group,
        heads=heads,
        form=form,
        packing=form.packing or model.packing,
        page_tokens=group.block_tokens // pages_per_block,
        cache=cache,
        view=view,
    )


def _number(name: str, model: ModelShape) -> int:
    return model.drafts.index(name) if name in model.drafts else layer_number(name)


def _state_layers(
    groups: Sequence[CacheGroup], states: Mapping[str, KeptStates], model: ModelShape
) -> list[StateLayer]:
    return sorted(
        (
            StateLayer(_number(name, model), name, group.name, states[name], len(model.drafts) * (name in model.drafts))
            for group in groups
            for name in group.layer_names
        ),
        key=lambda layer: (layer.drafts, layer.number),
    )


def _piece(layer: _Layer, model: ModelShape, coordinates: RankCoordinates, tokens: TokenShare) -> Piece:
    """Returns what a layer has of the component of all that keep the same."""
    kind = "draft" if layer.is_draft else layer.form.role
    if layer.is_draft and layer.form.role != ATTENTION:
        kind += f", {layer.form.role}"
    if entries := layer.form.entries_in_words:
        kind += f", {entries}"
    if layer.group.window_tokens is not None:
        kind += f", window {layer.group.window_tokens}"
    if layer.group.chunk_tokens is not None:
        kind += f", chunk {layer.group.chunk_tokens}"
    distinctions = layer.heads_in_words, f"{layer.content} a head", layer.view.dtype
    form = ComponentForm(kind, distinctions, _component(kind, layer, model, coordinates), layer.name)
    view, is_packed = layer.pages, layer.packing is not None
    dims: tuple[str, ...] = ("page", "head", "packed") if is_packed else ("page", "head", "token", "content")
    if not is_packed and _entries_of_token(layer) > 1:
        view = view.unflatten(2, (layer.page_tokens, -1))
        dims = ("page", "head", "token", "entry", "content")
    held = {}
    if layer.heads is None:
        held[SHARE] = Interval(coordinates.tp_rank, coordinates.tp_rank + 1)
        view, dims = view[:, None], ("page", SHARE, *dims[1:])
    else:
        held["head"] = layer.heads.held
    return Piece(
        form,
        layer.number,
        layer.group.name,
        view,
        dims,
        held,
        page_tokens=layer.page_tokens if is_packed else None,
        has_every_token=layer.group.token_ranks == 1 and not tokens.partition.is_whole,
    )


def _component(name: str, first: _Layer, model: ModelShape, coordinates: RankCoordinates) -> Component:
    """Returns the component of layers that are like the first of them."""
    heads: tuple[Axis, ...]
    if first.heads is None:
        heads = (Axis(SHARE, coordinates.tp_size), Axis("head", first.view.shape[1]))
    else:
        heads = (Axis("head", first.heads.total),)
    entries = (Axis("entry", _entries_of_token(first)),) if _entries_of_token(first) > 1 else ()
    content = (*entries, Axis("content", first.content))
    if first.packing is not None:
        content = (Axis("packed", first.content * first.view.shape[2]),)
    return Component(
        name=name,
        axes=(Axis("layer", len(model.drafts) if first.is_draft else model.layers), *heads, *content),
        dtype=first.view.dtype,
        entry=Entry.TOKEN if first.packing is None else Entry.PAGE,
        window_tokens=_most_needed(first.group),
        packing=None if first.packing is None else f"{first.packing}, {first.page_tokens} tokens a page",
        token_parts=first.form.token_parts,
        is_optional=first.is_draft,
    )


def _entries_of_token(layer: _Layer) -> int:
    """Returns how many entries a token has at most: 1 as well where an entry stands for several tokens."""
    return max(1, layer.view.shape[2] // layer.page_tokens)


def _most_needed(group: CacheGroup) -> int | None:
    """Returns how many tokens at a request's end are needed at most; None for all.

    Of a chunk that is all but one: with the last one the next token begins another chunk.
    """
    return group.window_tokens if group.chunk_tokens is None else max(1, group.chunk_tokens - 1)
