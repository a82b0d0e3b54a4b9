"""One rank's paged pools: a shard of every component, pages handed out in random order, poisoned before use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvferry.applications.demo.options import DemoOptions, EngineShape
from kvferry.layout import Entry, RankCoordinates, Shard, VirtualPools, default_group
from kvferry.pools.contents import Contents, Elements, Positions, element_type
from kvferry.pools.pool import Pool

if TYPE_CHECKING:
    import torch

PREFILL_POISON = 0x5A
DECODE_POISON = 0xA5


def rank_pool(
    options: DemoOptions, shape: EngineShape, coordinates: RankCoordinates, *, poison: int, seed: str
) -> Pool:
    """Allocates the memory of a rank, each group's pages free and in random order.

    Args:
        poison: the byte that fills the pools.
        seed: of the page orders.
    """
    pools = VirtualPools(
        page_tokens=shape.page_tokens,
        num_pages={group: _num_pages(options, shape, group) for group in options.groups},
        order=shape.order,
        beside=_convolutions(options),
        layers_per_stage=shape.stages,
    )
    pool = Pool.allocate(options.components, pools, coordinates, seed=seed)
    pool.wipe(poison)
    return pool


class Computed(Contents):
    """What a model has just computed of a request, to be written into pages."""

    def __init__(self, caches: Mapping[str, torch.Tensor], start: int) -> None:
        """Takes the whole model's arrays.

        Args:
            caches: [layer, entry, ...], of some components.
            start: the position of the first token; a state has one entry, wherever the tokens begin.
        """
        self._caches = caches
        self._start = start

    def of(self, shard: Shard, layer: int, positions: Positions) -> Elements:
        first = 0 if shard.component.entry is Entry.REQUEST else self._start
        entries = self._caches[shard.component.name][layer].numpy()[part_of(shard, positions - first)]
        elements: Elements = entries.view(element_type(shard.component))
        return elements


def part_of(shard: Shard, entries: Positions) -> tuple[Any, ...]:
    """Where a shard's part of some entries lies in an array [entry, ...] of whole ones."""
    return (entries, *(slice(part.start, part.stop) for part in shard.box[1:]))


def _convolutions(options: DemoOptions) -> tuple[tuple[str, ...], ...]:
    """The channels of a convolution that are divided apart lie side by side in one tensor, as engines have them."""
    channels: dict[tuple[int, ...], tuple[str, ...]] = {}
    for sharded in options.components:
        if sharded.component.axes[-1].name == "width":
            channels[sharded.layers] = (*channels.get(sharded.layers, ()), sharded.component.name)
    return tuple(channels.values())


def _num_pages(options: DemoOptions, shape: EngineShape, group: str) -> int:
    """What the requests take, and half as many pages again that nobody may touch."""
    has_slots = any(
        default_group(sharded.component) == group and sharded.component.entry is Entry.REQUEST
        for sharded in options.components
    )
    needed = sum(1 if has_slots else -(-len(request.token_ids) // shape.page_tokens) for request in options.requests)
    return needed + needed // 2 + 8
