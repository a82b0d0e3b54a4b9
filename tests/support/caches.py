"""Caches whose every element is known beforehand.

An element's value is a function of what it is (component, layer, request, token, index on every axis), not of who holds
it or where. A pool that was filled for a request can therefore be checked on any rank of any engine without asking the
side that filled it. Which tokens a rank holds is counted out here one by one, without kvferry's arithmetic.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from kvferry import (
    Axis,
    Component,
    Dealing,
    Interval,
    RankCoordinates,
    RankLayout,
    Shard,
    ShardedComponent,
    TokenShare,
    all_coordinates,
    attention_components,
    empty_shard,
    latent_component,
    packed_component,
    shard_from_tensors,
    split,
    stage_layers,
    state_component,
)
from kvferry.layout import Entry, default_group

Pages: TypeAlias = NDArray[np.int64]

UNTOUCHED = 0xA5
"""Fills every byte of a pool before anything is written to it."""

LATE = "-late"
"""Ends the name of the group of a rank's second half of layers, where these alias the first half's memory."""

WHOLE = Dealing()
"""No context parallelism."""

_MOST_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Model:
    """What is cached, as the whole model sees it. With a latent_dim it has MLA, otherwise keys and values.

    Attributes:
        window_tokens: with one, every second layer has a sliding window of so many tokens.
        has_state: whether every layer has recurrent state as well, and a convolution of three channel groups.
        draft_layers: layers of a draft model, which the other side may lack.
        is_packed: whether keys and values lie in packed pages.
        has_attention: whether any layer has keys and values at all.
    """

    layers: int = 4
    heads: int = 4
    head_dim: int = 8
    latent_dim: int = 0
    page_tokens: int = 4
    dtype: str = "int32"
    window_tokens: int | None = None
    has_state: bool = False
    draft_layers: int = 0
    is_packed: bool = False
    has_attention: bool = True

    def tensors(self, page_tokens: int) -> list[tuple[ShardedComponent, ...]]:
        """The components, those together that are next to each other in one tensor for every layer."""
        layers = tuple(range(self.layers))
        if self.latent_dim:
            latent = latent_component(num_layers=self.layers, latent_dim=self.latent_dim, dtype=self.dtype)
            return [(ShardedComponent(component=latent, layers=layers),)]
        sliding = layers[1::2] if self.window_tokens else ()
        made: list[tuple[ShardedComponent, ...]] = []
        if self.has_attention:
            made += self._attention("", tuple(layer for layer in layers if layer not in sliding), None, page_tokens)
        if sliding:
            made += self._attention("window ", sliding, self.window_tokens, page_tokens)
        if self.has_state:
            made += self._states(layers)
        if self.draft_layers:
            made += [
                (optional(each[0]),)
                for each in self._attention("draft ", tuple(range(self.draft_layers)), None, page_tokens)
            ]
        return made

    def _attention(
        self, prefix: str, layers: tuple[int, ...], window_tokens: int | None, page_tokens: int
    ) -> list[tuple[ShardedComponent, ...]]:
        components: tuple[Component, ...]
        if self.is_packed:
            packed = packed_component(
                prefix + "kv",
                num_layers=len(layers),
                num_kv_heads=self.heads,
                packed=2 * self.head_dim * page_tokens,
                dtype=self.dtype,
                packing="test",
                window_tokens=window_tokens,
            )
            components = (packed,)
        else:
            components = attention_components(
                num_layers=len(layers),
                num_kv_heads=self.heads,
                head_dim=self.head_dim,
                dtype=self.dtype,
                prefix=prefix,
                window_tokens=window_tokens,
            )
        return [(ShardedComponent(component=each, layers=layers, tp_axis="head"),) for each in components]

    def _states(self, layers: tuple[int, ...]) -> list[tuple[ShardedComponent, ...]]:
        """Of the channel groups the query's has another size than the others', so that they divide otherwise."""

        def component(name: str, dtype: str, *axes: Axis) -> ShardedComponent:
            made = state_component(name, num_layers=self.layers, axes=axes, dtype=dtype)
            return ShardedComponent(component=made, layers=layers, tp_axis=axes[0].name)

        sizes = {"conv q": self.heads + 1, "conv k": self.heads, "conv v": 2 * self.heads}
        return [
            (component("state", "float32", Axis("head", self.heads), Axis("row", 3), Axis("column", 2)),),
            tuple(component(name, "float16", Axis("channel", size), Axis("width", 3)) for name, size in sizes.items()),
        ]


def optional(sharded: ShardedComponent) -> ShardedComponent:
    """The same, but the other side may lack it."""
    return replace(sharded, component=replace(sharded.component, is_optional=True))


@dataclass(frozen=True, slots=True)
class Shape:
    """How an engine divides a model, and how each rank lays out its pool.

    Attributes:
        page_tokens: of every group; the model's if None.
        dealing: how context parallelism deals out tokens; its parts are the cp size.
        is_aliased: whether the second half of the layers lies in the first half's memory, in a group of its own.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    stages: tuple[int, ...] | None = None
    pages: int = 32
    heads_first: bool = False
    page_tokens: int | None = None
    dealing: Dealing = WHOLE
    is_aliased: bool = False

    def coordinates(self) -> tuple[RankCoordinates, ...]:
        return all_coordinates(tp_size=self.tp, pp_size=self.pp, dp_size=self.dp, cp_size=self.dealing.num_parts)


def positions_of(share: TokenShare, tokens: int) -> list[int]:
    """The positions of a request that a rank holds, counted out one by one."""
    pattern, block = share.dealing.pattern, share.dealing.block_tokens
    if block is None:
        block = max(1, (tokens + len(pattern) - 1) // len(pattern))
    return [position for position in range(tokens) if pattern[position // block % len(pattern)] == share.part]


@dataclass(frozen=True, slots=True)
class Kept:
    """The pages in which a rank keeps a request's tokens of one group.

    Attributes:
        first_page: how many pages of the request come before them on the rank.
    """

    pages: Pages
    first_page: int = 0


@dataclass(slots=True, eq=False)
class Pool:
    """One rank's memory.

    Attributes:
        memory: what was allocated.
        views: by shard and layer, the elements as unsigned numbers: page and token first, then the further axes.
    """

    model: Model
    shape: Shape
    coordinates: RankCoordinates
    layout: RankLayout = field(init=False)
    memory: list[NDArray[Any]] = field(default_factory=list)
    views: list[list[NDArray[Any]]] = field(default_factory=list)

    @property
    def page_tokens(self) -> int:
        return self.shape.page_tokens or self.model.page_tokens

    @property
    def bytes_per_page(self) -> int:
        """Bytes that one page number stands for, over all shards."""
        return sum(shard.bytes_per_page for shard in self.layout.shards)

    def fill(self, room: int, pages: Pages | Mapping[str, Pages], *, tokens: int | None = None) -> None:
        """Writes a request's values into its pages, which begin with the request's first.

        Args:
            tokens: how many it has; None fills the pages.
        """
        kept = {name: Kept(each) for name, each in self._by_group(pages).items()}
        count = tokens if tokens is not None else max(len(each.pages) for each in kept.values()) * self.page_tokens
        for view, pool_indices, values in self._elements(room, kept, count, start=None):
            view[pool_indices] = values

    def wrong(self, room: int, pages: Pages, *, first_page: int = 0, prefix_tokens: int = 0) -> int:
        """How many elements of a request's pages are not what they should be; the first is page first_page of it.

        Args:
            prefix_tokens: the tokens before are not looked at.
        """
        kept = {name: Kept(each, first_page) for name, each in self._by_group(pages).items()}
        count = (first_page + len(pages)) * self.page_tokens
        return sum(
            int(np.count_nonzero(view[indices] != values))
            for view, indices, values in self._elements(room, kept, count, start=prefix_tokens)
        )

    def touched(self, pages: Pages) -> int:
        """How many bytes of these pages are not as they were in the beginning."""
        return sum(int(np.count_nonzero(_bytes(view[pages]) != UNTOUCHED)) for each in self.views for view in each)

    def wipe_pages(self, pages: Pages) -> None:
        """Makes these pages untouched again."""
        for views in self.views:
            for view in views:
                view[pages] = np.full(view.dtype.itemsize, UNTOUCHED, np.uint8).view(view.dtype)[0]

    def wipe(self) -> None:
        """Makes everything untouched again."""
        for array in self.memory:
            array.view(np.uint8)[...] = UNTOUCHED

    def check(
        self,
        room: int,
        kept: Mapping[str, Kept],
        *,
        tokens: int,
        prefix_tokens: int,
        absent: Sequence[str] = (),
    ) -> None:
        """Every byte of the pool: what was to arrive is right, and nothing else changed since it was wiped.

        In a request's own pages, and there only, what lies behind its last token and what lies before a window's first
        one is left open, as far as the rank did not hold it.

        Args:
            absent: components that the other side lacks.
        """
        expected = pool(self.model, self.shape, self.coordinates)
        for view, indices, values in expected._elements(room, kept, tokens, start=prefix_tokens, absent=absent):
            view[indices] = values
        is_open = pool(self.model, self.shape, self.coordinates)
        for array in is_open.memory:
            array.view(np.uint8)[...] = 0
        for view, pages, entries in is_open._left_open(kept, tokens, prefix_tokens, absent):
            view[pages, entries] = np.iinfo(view.dtype).max
        for found, right, mask in zip(self.memory, expected.memory, is_open.memory, strict=True):
            is_wrong = (_bytes(found) != _bytes(right)) & (_bytes(mask) == 0)
            was_to_change = _bytes(right) != UNTOUCHED
            missing = np.count_nonzero(is_wrong & was_to_change)
            changed = np.count_nonzero(is_wrong & ~was_to_change)
            assert missing == changed == 0, (
                f"{self.coordinates}: {missing} bytes are not what was to arrive, {changed} changed that must not"
            )

    def _by_group(self, pages: Pages | Mapping[str, Pages]) -> Mapping[str, Pages]:
        return pages if isinstance(pages, Mapping) else dict.fromkeys([g.name for g in self.layout.groups], pages)

    def first_needed(self, shard_or_group: Any, tokens: int, prefix_tokens: int) -> int:
        """The first position that a rank needs of a request."""
        window = shard_or_group.window_tokens
        return prefix_tokens if window is None else max(prefix_tokens, tokens - window)

    def _elements(
        self, room: int, kept: Mapping[str, Kept], tokens: int, *, start: int | None, absent: Sequence[str] = ()
    ) -> Iterator[tuple[NDArray[Any], Any, NDArray[Any]]]:
        """For every shard and layer: the view, an index, and the values that belong there.

        Args:
            start: the first position that is needed, windows apart; None asks for all that the pages hold.
        """
        for shard, views in zip(self.layout.shards, self.views, strict=True):
            where = kept[shard.group]
            if shard.component.name in absent or not len(where.pages):
                continue
            indices, positions = self._places(shard, where, tokens, start)
            for layer, view in enumerate(views, shard.box[0].start):
                yield view, indices, _values(shard, layer, room, positions)

    def _places(self, shard: Shard, where: Kept, tokens: int, start: int | None) -> tuple[Any, NDArray[np.uint64]]:
        """Which entries of the pages hold something, and the positions in the request for which they stand."""
        if shard.component.entry is Entry.REQUEST:
            return (where.pages[:1],), np.zeros(1, np.uint64)
        size, positions = shard.paging.page_tokens, positions_of(self.layout.tokens, tokens)
        low = 0 if start is None else self.first_needed(shard.component, tokens, start)
        front = where.first_page * size
        local = [
            index
            for index, position in enumerate(positions)
            if position >= low and front <= index < front + len(where.pages) * size
        ]
        numbers = np.array([positions[index] for index in local], np.uint64)
        order, within = np.divmod(np.array(local, np.int64), size)
        page = where.pages[order - where.first_page]
        if shard.component.entry is Entry.TOKEN:
            return (page, within), numbers
        firsts = [place for place, index in enumerate(local) if place == 0 or index % size == 0]
        return (page[firsts],), numbers[firsts] // np.uint64(size)

    def _left_open(
        self, kept: Mapping[str, Kept], tokens: int, prefix_tokens: int, absent: Sequence[str]
    ) -> Iterator[tuple[NDArray[Any], int, Any]]:
        """The entries that may change or not."""
        for shard, views in zip(self.layout.shards, self.views, strict=True):
            where, size = kept[shard.group], shard.paging.page_tokens
            if shard.component.name in absent or shard.component.entry is not Entry.TOKEN or not len(where.pages):
                continue
            positions = positions_of(self.layout.tokens, tokens)
            low = self.first_needed(shard.component, tokens, prefix_tokens)
            needed = [index for index, position in enumerate(positions) if position >= low]
            held = sum(position < prefix_tokens for position in positions)
            if not needed:
                continue
            before = range(max(held, needed[0] // size * size), needed[0])
            behind = range(len(positions), -(-len(positions) // size) * size)
            for index in (*before, *behind):
                for view in views:
                    yield view, int(where.pages[index // size - where.first_page]), index % size


def _bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).view(np.uint8)


def _values(shard: Shard, layer: int, room: int, positions: NDArray[np.uint64]) -> NDArray[Any]:
    """What the elements of one layer are at some positions of a request."""
    component = shard.component
    number = zlib.crc32(component.name.encode()) % 1009
    ids = np.uint64(((number * 64 + layer) * 1_000_003 + room) * _MOST_TOKENS % 2**64) + positions
    for axis, interval in zip(component.axes[1:], shard.box[1:], strict=True):
        inner = np.arange(interval.start, interval.stop, dtype=np.uint64)
        ids = ids[..., None] * np.uint64(axis.size) + inner
    mixed = (ids * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(33)
    values: NDArray[Any] = mixed.astype(f"uint{8 * component.element_bytes}")
    return values


def pool(model: Model, shape: Shape, coordinates: RankCoordinates) -> Pool:
    """One rank's memory, and its layout."""
    stages = shape.stages or tuple(
        len(split(model.layers, shape.pp, stage)) for stage in range(shape.pp)
    )  # layers divide evenly unless told otherwise
    stage = stage_layers(stages, coordinates.pp_rank)
    made = Pool(model, shape, coordinates)
    shards: list[Shard] = []
    for together in model.tensors(made.page_tokens):
        _allocate(made, together, stage, shards)
    made.layout = RankLayout(shards=tuple(shards), tokens=TokenShare(shape.dealing, coordinates.cp_rank))
    made.wipe()
    return made


def _allocate(made: Pool, together: Sequence[ShardedComponent], stage: Interval, shards: list[Shard]) -> None:
    """Adds the shards of components that lie next to each other in one tensor for every layer."""
    shape, boxes = made.shape, [each.held(made.coordinates, stage) for each in together]
    entry, layers = together[0].component.entry, boxes[0][0]
    aliased = len(layers) // 2 if shape.is_aliased and entry is not Entry.REQUEST else 0
    names = [axis.name for axis in together[0].component.axes[1:]]
    sizes = {"page": shape.pages, "slot": shape.pages, "token": made.page_tokens}
    sizes |= {name: len(interval) for name, interval in zip(names, boxes[0][1:], strict=True)}
    sizes[names[0]] = sum(len(box[1]) for box in boxes)
    dims = [*{Entry.TOKEN: ["page", "token"], Entry.PAGE: ["page"], Entry.REQUEST: ["slot"]}[entry], *names]
    if shape.heads_first and names[0] == "head" and entry is Entry.TOKEN:
        dims[1:3] = "head", "token"
    tensors = [
        np.empty([sizes[dim] for dim in dims], together[0].component.dtype) for _ in range(len(layers) - aliased)
    ]
    made.memory += tensors
    first = 0
    for sharded, box in zip(together, boxes, strict=True):
        inside = tuple(
            slice(first, first + len(box[1])) if dim == names[0] and len(together) > 1 else slice(None) for dim in dims
        )
        first += len(box[1])
        parts = [(box[0].start, tensors, ""), (box[0].stop - aliased, tensors[:aliased], LATE)]
        for start, own, suffix in parts if aliased else parts[:1]:
            _add(made, sharded.component, dims, box, start, [tensor[inside] for tensor in own], suffix, shards)


def _add(
    made: Pool,
    component: Component,
    dims: Sequence[str],
    box: tuple[Interval, ...],
    start: int,
    tensors: Sequence[NDArray[Any]],
    suffix: str,
    shards: list[Shard],
) -> None:
    """Adds one shard and its views."""
    names = [axis.name for axis in component.axes]
    group, is_packed = default_group(component) + suffix, component.entry is Entry.PAGE
    if not tensors:
        page_tokens = 1 if component.entry is Entry.REQUEST else made.page_tokens
        shards.append(empty_shard(component, page_tokens=page_tokens, num_pages=made.shape.pages, group=group))
    else:
        held = {names[0]: Interval(start, start + len(tensors))} | dict(zip(names[1:], box[1:], strict=True))
        shards.append(
            shard_from_tensors(
                component,
                tensors,
                dims=dims,
                held=held,
                group=group,
                page_tokens=made.page_tokens if is_packed else None,
            )
        )
    order = [dims.index(name) for name in dims if name in ("page", "slot")]
    order += [dims.index("token")] if "token" in dims else []
    order += [dims.index(name) for name in names[1:]]
    unsigned = f"uint{8 * component.element_bytes}"
    made.views.append([tensor.view(unsigned).transpose(order) for tensor in tensors])
