"""One rank's paged pools: a shard of every component, pages handed out in random order, poisoned before use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvferry.applications.demo.options import DemoOptions, EngineShape, slices
from kvferry.layout import Entry, Interval, RankCoordinates, Shard, VirtualPools, default_group
from kvferry.pools.places import TakenPages
from kvferry.pools.pool import Pool

if TYPE_CHECKING:
    import torch

PREFILL_POISON = 0x5A
DECODE_POISON = 0xA5


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """The raw bytes that a rank holds of one component of a request, in the order of the request.

    Attributes:
        start: position of the first entry.
        entries: [layer, entry, ..., bytes], empty if the rank holds nothing of the component.
    """

    start: int
    entries: NDArray[np.uint8]

    def cut(self, wanted: Interval) -> NDArray[np.uint8]:
        """The entries at the wanted positions."""
        return self.entries[:, wanted.start - self.start : wanted.stop - self.start]


class RankPool:
    """The cache memory of one rank.

    Attributes:
        layout: what it holds and where.
        paged: the memory.
    """

    def __init__(
        self, options: DemoOptions, shape: EngineShape, coordinates: RankCoordinates, *, poison: int, seed: str
    ) -> None:
        """Allocates the memory of a rank, each group's pages free and in random order.

        Args:
            poison: the byte that fills the pools.
            seed: of the page orders.
        """
        self._poison = poison
        pools = VirtualPools(
            page_tokens=shape.page_tokens,
            num_pages={group: _num_pages(options, shape, group) for group in options.groups},
            order=shape.order,
            beside=_convolutions(options),
            layers_per_stage=shape.stages,
        )
        self.paged = Pool.allocate(options.components, pools, coordinates, seed=seed)
        self.paged.wipe(poison)
        self.layout = self.paged.layout

    def allocate(self, num_tokens: int, *, window_only: bool) -> dict[str, TakenPages]:
        """Takes what a request needs out of the pools, in random order.

        Args:
            window_only: whether a group with a window gets pages for the window alone, not for the whole request.
        """
        return self.paged.pages_for(num_tokens, whole_windows=not window_only)

    def write(self, placed: Mapping[str, TakenPages], caches: Mapping[str, torch.Tensor], start: int) -> None:
        """Writes this rank's part of freshly computed caches into a request's pages.

        Args:
            caches: the whole model's arrays [layer, entry, ...], of some components.
            start: the position of the first token; a state has one entry, wherever the tokens begin.
        """
        import torch  # not above: the command reads `Contents`, and importing torch takes seconds

        for name, array in caches.items():
            (shard,) = self.layout.shards_of(name)
            first = 0 if shard.component.entry is Entry.REQUEST else start
            where = _places(shard, placed, Interval(first, first + array.shape[1]))
            for index, entries in enumerate(array[slices(shard.box)]):
                elements = self.paged.elements(shard, index)
                elements[where] = entries.contiguous().view(torch.uint8).numpy().view(elements.dtype)

    def read(self, placed: Mapping[str, TakenPages]) -> dict[str, Contents]:
        """What lies in the whole of a request's pages."""
        read = {}
        for shard in self.layout.shards:
            group, page_tokens = placed[shard.group], shard.paging.page_tokens
            positions = Interval(group.start * page_tokens, (group.start + len(group.pages)) * page_tokens)
            entries = np.empty((0,), np.uint8)
            if shard.addresses:
                where = _places(shard, placed, positions)
                layers = [self.paged.elements(shard, index)[where] for index in range(len(shard.addresses))]
                entries = np.stack(layers).view(np.uint8)
            read[shard.component.name] = Contents(positions.start, entries)
        return read

    def damaged_bytes(self) -> int:
        """Bytes outside of allocated pages that are not poison any more: nobody may have written there."""
        return self.paged.touched_bytes(self.paged.untaken(), self._poison)


def _places(
    shard: Shard, placed: Mapping[str, TakenPages], positions: Interval
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The page, and the place in it, of every position."""
    group = placed[shard.group]
    page, inside = np.divmod(np.arange(positions.start, positions.stop), shard.paging.page_tokens)
    return group.pages[page - group.start], inside


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
