"""vLLM's KV caches as a `RankLayout`.

Since 0.32, vLLM gives every attention layer's cache as a view of four dimensions, whatever lies behind it: block, head,
token, content. NHD and HND, layers that share an allocation, blocks that hold all layers: all of it is in the view's
strides. The content of one token and head is its K and V behind each other, or its latent.

On CPU that is true of sizes only: within a block and head the order of the elements is the kernel's own. Such pages are
packed: they can be cut by head, and never by token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvferry import (
    Axis,
    Component,
    Entry,
    Interval,
    RankCoordinates,
    RankLayout,
    Shard,
    TensorGeometry,
    TokenShare,
    geometry,
    shard_from_tensors,
)
from kvferry.engines.vllm.forms import Form, named, with_those_elsewhere
from kvferry.engines.vllm.states import SHARE, State, StateLayer, state_forms, state_shards
from kvferry.errors import LayoutError

_DIMENSIONS = "(block, head, token, content)"


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """The layers that share a block table.

    Attributes:
        name: what the group is called in layouts; no other group of the rank has the same.
        layer_names: as vLLM calls them.
        block_tokens: tokens in a block on one rank.
        window_tokens: how many of the last tokens the next one attends to, itself left out; None for all.
        chunk_tokens: the length of the chunks that the request is divided into, where a token attends to those of its
            own chunk alone; None where there are none.
        has_state: whether its layers keep recurrent state: of a request only the block of its last token counts.
        token_ranks: how many ranks share a request's tokens; each of them has a block of every number.
    """

    name: str
    layer_names: tuple[str, ...]
    block_tokens: int
    window_tokens: int | None = None
    chunk_tokens: int | None = None
    has_state: bool = False
    token_ranks: int = 1

    @property
    def table_tokens(self) -> int:
        """How many tokens of a request a number of the block table stands for, on all ranks that share them."""
        return self.block_tokens * self.token_ranks

    @property
    def gives_blocks_away(self) -> bool:
        """Whether vLLM takes blocks back from a request that is running, once no later token needs them."""
        return self.window_tokens is not None or self.chunk_tokens is not None or self.has_state

    def first_attended(self, tokens: int) -> int:
        """Returns the position of the first token that the one behind so many tokens attends to.

        It is the number of tokens itself where that one begins a chunk: it attends to none of them.
        """
        if self.chunk_tokens is not None:
            return tokens - tokens % self.chunk_tokens
        return 0 if self.window_tokens is None else max(0, tokens - self.window_tokens)


@dataclass(frozen=True, slots=True)
class HeldHeads:
    """The KV heads that a rank holds of a layer; what is the same on every rank, such as a latent, is one head.

    Attributes:
        total: how many the layer has, over all tensor-parallel ranks.
        held: those of this rank, in the order in which its cache has them.
    """

    total: int
    held: Interval


@dataclass(frozen=True, slots=True)
class KeptStates:
    """The recurrent state of a layer.

    Attributes:
        states: what it keeps of a request.
        tensors: of each state a view of (block, *shape).
    """

    states: tuple[State, ...]
    tensors: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a single rank's caches do not show.

    Attributes:
        layers: how many the whole model has, over all pipeline stages, without those of a draft model.
        packing: the name of the order within a block and head where only the kernel knows it; None where tokens can be
            told apart.
        drafts: the names of a draft model's layers, in their order: their numbers say nothing.
    """

    layers: int
    packing: str | None = None
    drafts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DescribedCaches:
    """What a worker's caches are.

    Attributes:
        layout: for kvferry.
        pages_per_block: by group, into how many pages a kernel divides a block of the block table.
        has_chunks: whether layers attend within chunks: how many tokens at a request's end are needed is not the same
            for every request then.
    """

    layout: RankLayout
    pages_per_block: Mapping[str, int]
    has_chunks: bool = False


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's cache.

    Attributes:
        number: of the layer, in the whole model; of a draft model's, in that.
        is_draft: whether it is a draft model's.
        heads: which KV heads the cache has; None where that is not known.
    """

    number: int
    is_draft: bool
    name: str
    group: CacheGroup
    heads: HeldHeads | None
    cache: Any
    view: TensorGeometry

    @property
    def page_tokens(self) -> int:
        return self.view.shape[2]

    @property
    def content(self) -> int:
        """Elements that one token has in one head."""
        return self.view.shape[3]

    @property
    def heads_in_words(self) -> str:
        """How many heads the layer has over all ranks, or at least on each."""
        return f"{self.view.shape[1]} heads on each rank" if self.heads is None else f"{self.heads.total} heads"


def layer_number(name: str) -> int:
    """Returns the number in a layer's name, such as 3 in 'model.layers.3.self_attn.attn'.

    Raises:
        LayoutError: if there is not exactly one.
    """
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)
    if len(numbers) != 1:
        raise LayoutError(f"layer {name!r} has {len(numbers)} numbers in its name, so that its place cannot be told")
    return int(numbers[0])


def describe(
    caches: Mapping[str, Any],
    groups: Sequence[CacheGroup],
    model: ModelShape,
    coordinates: RankCoordinates,
    *,
    heads: Mapping[str, HeldHeads | None],
    states: Mapping[str, KeptStates] | None = None,
    num_blocks: int,
    tokens: TokenShare = TokenShare(),  # noqa: B008 - immutable
    everywhere: Callable[[list[Form]], Iterable[Form]] = lambda forms: forms,
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
        num_blocks: in every block table.
        tokens: which of a request's tokens this rank keeps.
        everywhere: returns what the layers of all pipeline stages keep, given what those of this one do.

    Raises:
        LayoutError: if a cache is something else, naming layer and shape; or if nothing of the kind is known here.
    """
    attention, recurrent = [[group for group in groups if group.has_state is has] for has in (False, True)]
    layers = sorted(
        (
            _layer(name, group, model, caches, heads.get(name), num_blocks)
            for group in attention
            for name in group.layer_names
        ),
        key=lambda layer: (layer.is_draft, layer.number),
    )
    for low, high in pairwise(layers):
        if (low.is_draft, low.number) == (high.is_draft, high.number):
            raise LayoutError(f"layers {low.name!r} and {high.name!r} have the same number")
    per_block = {layer.group.name: layer.view.shape[0] // num_blocks for layer in layers}
    if drafts := [name for group in recurrent for name in group.layer_names if name in model.drafts]:
        raise LayoutError(
            f"layer {drafts[0]!r} of the draft model keeps recurrent state, which kvferry does not transfer: let "
            "this server draft without that model"
        )
    per_block |= dict.fromkeys((group.name for group in recurrent if group.layer_names), 1)
    forms = _forms(layers, model, coordinates)
    kept = state_forms(_state_layers(recurrent, states or {}), model.layers, coordinates)
    components = named(everywhere([*forms, *kept]))
    if not components:
        raise LayoutError("this worker has no KV cache that could be transferred")
    shards = [
        _shard(components[form], run, coordinates, tokens) for form, alike in forms.items() for run in _runs(alike)
    ]
    shards += [shard for form, pieces in kept.items() for shard in state_shards(components[form], pieces)]
    shards = list(with_those_elsewhere(shards, components.values()))
    has_chunks = any(group.chunk_tokens is not None for group in attention)
    return DescribedCaches(RankLayout(shards=tuple(shards), tokens=tokens), per_block, has_chunks)


def _layer(
    name: str,
    group: CacheGroup,
    model: ModelShape,
    caches: Mapping[str, Any],
    heads: HeldHeads | None,
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
    if view.shape[2] * pages_per_block != group.block_tokens:
        raise LayoutError(
            f"the cache of layer {name!r} has shape {view.shape}: {view.shape[2]} entries in each of {pages_per_block} "
            f"pages where a block has {group.block_tokens} tokens. Caches that keep one entry for several tokens "
            "cannot be described"
        )
    if heads is not None and view.shape[1] != len(heads.held):
        raise LayoutError(
            f"the cache of layer {name!r} has {view.shape[1]} heads where this rank holds {heads.held} of the layer's "
            f"{heads.total}"
        )
    is_draft = name in model.drafts
    number = model.drafts.index(name) if is_draft else layer_number(name)
    if not is_draft and number >= model.layers:
        raise LayoutError(
            f"layer {name!r} has a number behind those of the model's {model.layers} layers and is no draft model's by "
            "what vLLM has loaded: whose it is cannot be told"
        )
    return _Layer(number, is_draft, name, group, heads, cache, view)


def _state_layers(groups: Sequence[CacheGroup], states: Mapping[str, KeptStates]) -> list[StateLayer]:
    return sorted(
        (
            StateLayer(layer_number(name), name, group.name, states[name].states, states[name].tensors)
            for group in groups
            for name in group.layer_names
        ),
        key=lambda layer: layer.number,
    )


def _forms(layers: Sequence[_Layer], model: ModelShape, coordinates: RankCoordinates) -> dict[Form, list[_Layer]]:
    """Groups layers by what they keep."""
    forms: dict[Form, list[_Layer]] = {}
    for layer in layers:
        kind = "draft" if layer.is_draft else "kv"
        if layer.group.window_tokens is not None:
            kind += f", window {layer.group.window_tokens}"
        if layer.group.chunk_tokens is not None:
            kind += f", chunk {layer.group.chunk_tokens}"
        distinctions = layer.heads_in_words, f"{layer.content} a head"
        form = Form(kind, distinctions, _component(kind, layer, model, coordinates), layer.name)
        forms.setdefault(form, []).append(layer)
    return forms


def _component(name: str, first: _Layer, model: ModelShape, coordinates: RankCoordinates) -> Component:
    """Returns the component of layers that are like the first of them."""
    is_packed = model.packing is not None
    heads: tuple[Axis, ...]
    if first.heads is None:
        heads = (Axis(SHARE, coordinates.tp_size), Axis("head", first.view.shape[1]))
    else:
        heads = (Axis("head", first.heads.total),)
    return Component(
        name=name,
        axes=(
            Axis("layer", len(model.drafts) if first.is_draft else model.layers),
            *heads,
            Axis("packed", first.content * first.page_tokens) if is_packed else Axis("content", first.content),
        ),
        dtype=first.view.dtype,
        entry=Entry.PAGE if is_packed else Entry.TOKEN,
        window_tokens=_most_needed(first.group),
        packing=f"{model.packing}, {first.page_tokens} tokens a page" if is_packed else None,
        is_optional=first.is_draft,
    )


def _most_needed(group: CacheGroup) -> int | None:
    """Returns how many tokens at a request's end are needed at most; None for all.

    Of a chunk that is all but one: with the last one the next token begins another chunk.
    """
    return group.window_tokens if group.chunk_tokens is None else max(1, group.chunk_tokens - 1)


def _runs(layers: Sequence[_Layer]) -> Iterator[list[_Layer]]:
    """Yields runs of a component's layers that follow each other, with the same block table and the same heads."""
    run = [layers[0]]
    for low, high in pairwise(layers):
        if high.number != low.number + 1 or high.group is not low.group or high.heads != low.heads:
            yield run
            run = []
        run.append(high)
    yield run


def _shard(component: Component, layers: Sequence[_Layer], coordinates: RankCoordinates, tokens: TokenShare) -> Shard:
    first = layers[0]
    held = {"layer": Interval(first.number, first.number + len(layers))}
    is_packed = component.entry is Entry.PAGE
    views = [_packed(layer) if is_packed else layer.cache for layer in layers]
    dims: tuple[str, ...] = ("page", "head", "packed") if is_packed else ("page", "head", "token", "content")
    if first.heads is None:
        held[SHARE] = Interval(coordinates.tp_rank, coordinates.tp_rank + 1)
        views, dims = [view[:, None] for view in views], ("page", SHARE, *dims[1:])
    else:
        held["head"] = first.heads.held
    return shard_from_tensors(
        component,
        views,
        dims=dims,
        held=held,
        group=first.group.name,
        page_tokens=first.page_tokens if is_packed else None,
        has_every_token=first.group.token_ranks == 1 and not tokens.partition.is_whole,
    )


def _packed(layer: _Layer) -> Any:
    """Returns a view of (page, head, everything else)."""
    pages, heads, _, _ = layer.view.shape
    try:
        return layer.cache.view(pages, heads, -1)
    except RuntimeError as error:
        raise LayoutError(
            f"the cache of layer {layer.name!r} has strides {layer.view.strides}: the pages of this backend are "
            "packed, so that tokens and content must lie behind each other"
        ) from error
