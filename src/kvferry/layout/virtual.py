"""Layouts of pools that nobody has allocated, to plan with: only the addresses are made up."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from math import prod

import msgspec

from kvferry.errors import LayoutError
from kvferry.layout.component import Axis, Component, Entry
from kvferry.layout.interval import Box
from kvferry.layout.parallel import RankCoordinates
from kvferry.layout.shard import Device, Paging, RankLayout, Shard
from kvferry.layout.sharding import ShardedComponent, stage_of
from kvferry.layout.tensors import default_group, empty_shard
from kvferry.layout.tokens import Dealing, TokenShare

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
        num_pages: pages in each pool, and slots of requests.
        order: of the tokens in a page.
        dealing: how context parallelism divides the tokens.
        layers_per_stage: how pipeline parallelism divides the layers.
    """

    page_tokens: int = 16
    num_pages: int = 1024
    order: PageOrder = PageOrder.NHD
    dealing: Dealing = Dealing()
    layers_per_stage: tuple[int, ...]


def virtual_layout(
    components: Sequence[ShardedComponent],
    coordinates: RankCoordinates,
    pools: VirtualPools,
    *,
    device: Device | None = None,
) -> RankLayout:
    """The layout of one rank: every layer of every component in memory of its own.

    Raises:
        LayoutError: if the stages or the dealing of tokens do not fit the coordinates, or there is no component.
    """
    if pools.dealing.num_parts != coordinates.cp_size:
        raise LayoutError(
            f"cp_size {coordinates.cp_size} and tokens dealt to {pools.dealing.num_parts} parts ({pools.dealing}): "
            "the two numbers must be equal"
        )
    stage = stage_of(coordinates, pools.layers_per_stage)
    address = _FIRST_ADDRESS
    shards = []
    for sharded in components:
        is_packed = pools.order is PageOrder.PACKED and sharded.component.entry is Entry.TOKEN
        stored = packed_pages(sharded, pools.page_tokens) if is_packed else sharded
        shard = _shard(stored.component, stored.held(coordinates, stage), pools, address, device or Device())
        address = max((region.stop for region in shard.regions()), default=address) + _ALIGNMENT
        shards.append(shard)
    return RankLayout(shards=tuple(shards), tokens=TokenShare(pools.dealing, coordinates.cp_rank))


def packed_pages(sharded: ShardedComponent, page_tokens: int) -> ShardedComponent:
    """The same cache in pages that can be cut along the axis that tensor parallelism divides, but not by token."""
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


def _shard(component: Component, box: Box, pools: VirtualPools, address: int, device: Device) -> Shard:
    page_tokens = 1 if component.entry is Entry.REQUEST else pools.page_tokens
    if not box[0]:
        return empty_shard(component, page_tokens=page_tokens, num_pages=pools.num_pages, device=device)
    axes = [(axis.name, len(interval)) for axis, interval in zip(component.axes[1:], box[1:], strict=True)]
    order = axes
    if component.entry is Entry.TOKEN:
        before = 1 if pools.order is PageOrder.HND and len(axes) > 1 else 0
        order = [*axes[:before], ("token", page_tokens), *axes[before:]]
    strides, step = {}, component.element_bytes
    for name, size in reversed(order):
        strides[name] = step
        step *= size
    layer_bytes = -(-step * pools.num_pages // _ALIGNMENT) * _ALIGNMENT
    return Shard(
        component=component,
        box=box,
        addresses=tuple(address + index * layer_bytes for index in range(len(box[0]))),
        strides=tuple(strides[name] for name, _ in axes),
        paging=Paging(
            page_tokens=page_tokens, num_pages=pools.num_pages, page_stride=step, token_stride=strides.get("token", 0)
        ),
        device=device,
        group=default_group(component),
    )
