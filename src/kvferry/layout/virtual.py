"""Layouts of pools that nobody has allocated, to plan with: only the addresses are made up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from math import prod

import msgspec

from kvferry.errors import LayoutError
from kvferry.layout.component import Axis, Component, Entry
from kvferry.layout.interval import Box, volume
from kvferry.layout.parallel import RankCoordinates
from kvferry.layout.shard import Device, Paging, RankLayout, Shard
from kvferry.layout.sharding import ShardedComponent, stage_of
from kvferry.layout.tensors import default_group, empty_shard
from kvferry.layout.tokens import TokenPartition, TokenShare

_FIRST_ADDRESS = 1 << 20
_ALIGNMENT = 256


class PageOrder(str, Enum):
    """What lies together in a page: a token's heads (NHD), a head's tokens (HND), or what only the engine knows."""

    NHD = "nhd"
    HND = "hnd"
    PACKED = "packed"


class VirtualPools(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine would allocate its pools.

    Attributes:
        page_tokens: tokens in a page.
        num_pages: pages in each pool, and slots of requests; or so many for every group, by its name.
        order: how the elements of a page are ordered.
        beside: names of components that share tensors: the page, or slot, of each lies beside those of the others.
            Engines do so with the channels of a convolution, and some with keys and values.
        partition: how context parallelism divides the tokens.
        layers_per_stage: how pipeline parallelism divides the layers.
    """

    page_tokens: int = 16
    num_pages: int | dict[str, int] = 1024
    order: PageOrder = PageOrder.NHD
    beside: tuple[tuple[str, ...], ...] = ()
    partition: TokenPartition = TokenPartition()
    layers_per_stage: tuple[int, ...]

    def pages_of(self, component: Component) -> int:
        """Pages, or slots, in the pools of a component's group.

        Raises:
            LayoutError: if nothing is said about the group.
        """
        if isinstance(self.num_pages, int):
            return self.num_pages
        group = default_group(component)
        if group not in self.num_pages:
            raise LayoutError(f"num_pages says nothing about group {group!r}, only about {sorted(self.num_pages)}")
        return self.num_pages[group]


def virtual_layout(
    components: Sequence[ShardedComponent],
    coordinates: RankCoordinates,
    pools: VirtualPools,
    *,
    device: Device | None = None,
) -> RankLayout:
    """Makes the layout of one rank: every layer in memory of its own, of each component or of those side by side.

    Raises:
        LayoutError: if the stages or the partition of tokens do not fit the coordinates, there is no component, or
            components that lie side by side are not alike.
    """
    if pools.partition.num_parts != coordinates.cp_size:
        raise LayoutError(
            f"cp_size {coordinates.cp_size} and tokens partitioned over {pools.partition.num_parts} parts "
            f"({pools.partition}): the two numbers must be equal"
        )
    stage = stage_of(coordinates, pools.layers_per_stage)
    address = _FIRST_ADDRESS
    shards: dict[str, Shard] = {}
    for sharers in _sharers(components, pools.beside):
        stored = [_stored(sharded, pools) for sharded in sharers]
        held = [(each.component, each.held(coordinates, stage)) for each in stored]
        made = _shards(held, pools, address, device or Device())
        regions = [region for shard in made for region in shard.regions()]
        address = max((region.stop for region in regions), default=address) + _ALIGNMENT
        shards |= {sharded.component.name: shard for sharded, shard in zip(sharers, made, strict=True)}
    in_order = tuple(shards[sharded.component.name] for sharded in components)
    return RankLayout(shards=in_order, tokens=TokenShare(pools.partition, coordinates.cp_rank))


def _sharers(
    components: Sequence[ShardedComponent], beside: Sequence[Sequence[str]]
) -> Iterator[Sequence[ShardedComponent]]:
    """The components, those together that share tensors."""
    by_name = {sharded.component.name: sharded for sharded in components}
    shared_with = {name: names for names in beside for name in names}
    if unknown := sorted(set(shared_with) - set(by_name)):
        raise LayoutError(f"there are no components {unknown} that others could lie beside: there are {list(by_name)}")
    for name, sharded in by_name.items():
        names = shared_with.get(name, (name,))
        if name != names[0]:
            continue
        sharers = [by_name[each] for each in names]
        for other in sharers:
            if _form(other) != _form(sharded):
                raise LayoutError(
                    f"{name!r} and {other.component.name!r} cannot lie beside each other: layers, element types, "
                    "windows and what has one entry must be the same"
                )
        yield sharers


def _form(sharded: ShardedComponent) -> tuple[object, ...]:
    component = sharded.component
    return sharded.layers, component.dtype, component.entry, component.window_tokens


def _stored(sharded: ShardedComponent, pools: VirtualPools) -> ShardedComponent:
    is_packed = pools.order is PageOrder.PACKED and sharded.component.entry is Entry.TOKEN
    return packed_pages(sharded, pools.page_tokens) if is_packed else sharded


def packed_pages(sharded: ShardedComponent, page_tokens: int) -> ShardedComponent:
    """Returns the same cache in pages that can be cut along the axis that tensor parallelism divides, not by token."""
    component = sharded.component
    kept = [axis for axis in component.axes[1:] if axis.name == sharded.tp_axis]
    packed = prod(axis.size for axis in component.axes[1:] if axis not in kept) * page_tokens
    return msgspec.structs.replace(
        sharded,
        component=msgspec.structs.replace(
            component,
            axes=(component.axes[0], *kept, Axis("packed", packed)),
            entry=Entry.PAGE,
            packing=f"pages of {page_tokens} tokens in an order of the engine's own",
        ),
    )


def _shards(held: Sequence[tuple[Component, Box]], pools: VirtualPools, address: int, device: Device) -> list[Shard]:
    """The shards of components whose pages lie side by side, in the memory from an address on."""
    strides = [_strides(component, box, pools) for component, box in held]
    page_bytes = [
        volume(box[1:]) * component.element_bytes * (pools.page_tokens if component.entry is Entry.TOKEN else 1)
        for component, box in held
    ]
    page_stride, shards = sum(page_bytes), []
    for (component, box), steps, num_bytes in zip(held, strides, page_bytes, strict=True):
        page_tokens, num_pages = 1 if component.entry is Entry.REQUEST else pools.page_tokens, pools.pages_of(component)
        if not box[0]:
            shards.append(empty_shard(component, page_tokens=page_tokens, num_pages=num_pages, device=device))
            continue
        layer_bytes = -(-page_stride * num_pages // _ALIGNMENT) * _ALIGNMENT
        shards.append(
            Shard(
                component=component,
                box=box,
                addresses=tuple(address + index * layer_bytes for index in range(len(box[0]))),
                strides=tuple(steps[axis.name] for axis in component.axes[1:]),
                paging=Paging(page_tokens, num_pages, page_stride, steps.get("token", 0)),
                device=device,
                group=default_group(component),
            )
        )
        address += num_bytes
    return shards


def _strides(component: Component, box: Box, pools: VirtualPools) -> dict[str, int]:
    """Bytes per step inside a page, by axis."""
    axes = [(axis.name, len(interval)) for axis, interval in zip(component.axes[1:], box[1:], strict=True)]
    order = axes
    if component.entry is Entry.TOKEN:
        before = 1 if pools.order is PageOrder.HND and len(axes) > 1 else 0
        order = [*axes[:before], ("token", pools.page_tokens), *axes[before:]]
    strides, step = {}, component.element_bytes
    for name, size in reversed(order):
        strides[name] = step
        step *= size
    return strides
