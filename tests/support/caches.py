"""Models and engines of every kind that tests need, and the pools of their ranks."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from kvferry import (
    Axis,
    Component,
    Interval,
    RankCoordinates,
    RankLayout,
    Shard,
    ShardedComponent,
    TokenPartition,
    all_coordinates,
    attention_components,
    latent_component,
    packed_component,
    state_component,
)
from kvferry.layout import Entry, PageOrder, VirtualPools, even_stages, virtual_layout
from kvferry.testing import Pool

LATE = "-late"
"""Ends the name of the group of a rank's second half of layers, where these alias the first half's memory."""

WHOLE = TokenPartition()
"""No context parallelism."""


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
        partition: how context parallelism partitions tokens; its parts are the cp size.
        is_aliased: whether the second half of the layers lies in the first half's memory, in a group of its own.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    stages: tuple[int, ...] | None = None
    pages: int = 32
    heads_first: bool = False
    page_tokens: int | None = None
    partition: TokenPartition = WHOLE
    is_aliased: bool = False

    def coordinates(self) -> tuple[RankCoordinates, ...]:
        return all_coordinates(tp_size=self.tp, pp_size=self.pp, dp_size=self.dp, cp_size=self.partition.num_parts)


def pool(model: Model, shape: Shape, coordinates: RankCoordinates, *, seed: int = 0) -> Pool:
    """One rank's memory, every byte poisoned.

    Args:
        seed: of the order in which it gives pages.
    """
    tensors = model.tensors(shape.page_tokens or model.page_tokens)
    pools = VirtualPools(
        page_tokens=shape.page_tokens or model.page_tokens,
        num_pages=shape.pages,
        order=PageOrder.HND if shape.heads_first else PageOrder.NHD,
        beside=tuple(tuple(each.component.name for each in together) for together in tensors if len(together) > 1),
        partition=shape.partition,
        layers_per_stage=shape.stages or even_stages(model.layers, shape.pp),
    )
    layout = virtual_layout([each for together in tensors for each in together], coordinates, pools)
    return Pool.backed(aliased(layout) if shape.is_aliased else layout, coordinates, seed=seed)


def aliased(layout: RankLayout) -> RankLayout:
    """The same, but the second half of a shard's layers lies in the first half's memory, in a group of its own."""
    shards: list[Shard] = []
    for shard in layout.shards:
        first, *others = shard.box
        late = len(first) // 2
        if shard.component.entry is Entry.REQUEST or not late:
            shards.append(shard)
            continue
        middle = first.stop - late
        boxes = (Interval(first.start, middle), *others), (Interval(middle, first.stop), *others)
        shards.append(replace(shard, box=boxes[0], addresses=shard.addresses[: len(first) - late]))
        shards.append(replace(shard, box=boxes[1], addresses=shard.addresses[:late], group=shard.group + LATE))
    return replace(layout, shards=tuple(shards))
