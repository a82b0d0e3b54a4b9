"""One rank's paged pools: a shard of every component, pages handed out in random order, poisoned before use."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.cli.demo.options import DemoOptions, EngineShape, slices
from kvferry.layout import (
    Box,
    Entry,
    Interval,
    PageOrder,
    RankCoordinates,
    RankLayout,
    Shard,
    ShardedComponent,
    default_group,
    empty_shard,
    shard_from_tensors,
)

PREFILL_POISON = 0x5A
DECODE_POISON = 0xA5


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Where a request's entries of one group lie.

    Attributes:
        first: the position of the first page among all pages of the request.
        pages: page numbers, or the number of a slot.
    """

    first: int
    pages: NDArray[np.int64]

    @property
    def stop(self) -> int:
        """The position after the last page."""
        return self.first + len(self.pages)


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


@dataclass(frozen=True, slots=True, eq=False)
class _Member:
    """A component in a pool. Each tensor is one layer's, as [page, entry in page, ...], however that lies in memory."""

    sharded: ShardedComponent
    box: Box
    tensors: tuple[torch.Tensor, ...]
    shard: Shard


class RankPool:
    """The cache memory of one rank.

    Attributes:
        layout: what it holds and where.
    """

    def __init__(
        self, options: DemoOptions, shape: EngineShape, coordinates: RankCoordinates, *, poison: int, seed: str
    ) -> None:
        """Args:
        poison: the byte that fills the pools.
        seed: of the page orders.
        """
        self._shape = shape
        self._poison = poison
        self._storages: list[tuple[str, torch.Tensor]] = []
        self._sizes = {group: _pool_size(options, shape, group) for group in options.groups}
        self._free: dict[str, list[int]] = {}
        for group, (_, num_pages) in self._sizes.items():
            self._free[group] = list(range(num_pages))
            random.Random(f"{seed} {group}").shuffle(self._free[group])  # noqa: S311 - an order, not a secret
        boxes = {sharded.component.name: shape.held(sharded, coordinates) for sharded in options.components}
        tensors = self._allocate_tensors(options.components, boxes)
        self._members = {
            name: self._member(sharded, boxes[name], tensors[name])
            for sharded in options.components
            for name in (sharded.component.name,)
        }
        self.layout = RankLayout(shards=tuple(member.shard for member in self._members.values()))

    def allocate(self, num_tokens: int, *, window_only: bool) -> dict[str, Placed]:
        """Takes what a request needs out of the pools, in random order.

        Args:
            window_only: whether a group with a window gets pages for the window alone, not for the whole request.
        """
        placed = {}
        for group in self.layout.groups:
            if group.has_slots:
                first, stop = 0, 1
            else:
                window = num_tokens if group.window_tokens is None or not window_only else group.window_tokens
                first = max(0, num_tokens - window) // group.page_tokens
                stop = -(-num_tokens // group.page_tokens)
            free = self._free[group.name]
            taken, self._free[group.name] = free[: stop - first], free[stop - first :]
            assert len(taken) == stop - first, "the pools were sized for every request"
            placed[group.name] = Placed(first, np.array(taken, np.int64))
        return placed

    def write(self, placed: Mapping[str, Placed], caches: Mapping[str, torch.Tensor], start: int) -> None:
        """Writes this rank's part of freshly computed caches into a request's pages.

        Args:
            caches: the whole model's arrays [layer, entry, ...], of some components.
            start: the position of the first token; a state has one entry, wherever the tokens begin.
        """
        for name, array in caches.items():
            member = self._members[name]
            first = 0 if member.sharded.component.entry is Entry.REQUEST else start
            mine = array[slices(member.box)]
            pages, inside = self._find(member, placed, Interval(first, first + array.shape[1]))
            for tensor, entries in zip(member.tensors, mine, strict=True):
                tensor[pages, inside] = entries

    def read(self, placed: Mapping[str, Placed]) -> dict[str, Contents]:
        """What lies in the whole of a request's pages."""
        read = {}
        for name, member in self._members.items():
            group = placed[member.shard.group]
            page_tokens = member.shard.paging.page_tokens
            positions = Interval(group.first * page_tokens, group.stop * page_tokens)
            entries = np.empty((0,), np.uint8)
            if member.tensors:
                pages, inside = self._find(member, placed, positions)
                layers = [tensor[pages, inside].contiguous().view(torch.uint8) for tensor in member.tensors]
                entries = torch.stack(layers).numpy()
            read[name] = Contents(positions.start, entries)
        return read

    def damaged_bytes(self) -> int:
        """Bytes outside of allocated pages that are not poison any more: nobody may have written there."""
        return sum(
            int((storage[torch.tensor(self._free[group], dtype=torch.int64)].view(torch.uint8) != self._poison).sum())
            for group, storage in self._storages
        )

    def _find(
        self, member: _Member, placed: Mapping[str, Placed], positions: Interval
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The page, and the place in it, of every position."""
        group = placed[member.shard.group]
        page, inside = np.divmod(np.arange(positions.start, positions.stop), member.shard.paging.page_tokens)
        return torch.from_numpy(group.pages[page - group.first]), torch.from_numpy(inside)

    def _allocate_tensors(
        self, components: tuple[ShardedComponent, ...], boxes: Mapping[str, Box]
    ) -> dict[str, list[torch.Tensor]]:
        """Tensors in the order of memory, for every component one a layer.

        The channels of a convolution that are divided apart lie side by side in one tensor, as engines have them.
        """
        tensors: dict[str, list[torch.Tensor]] = {}
        channels: dict[tuple[int, ...], list[ShardedComponent]] = {}
        for sharded in components:
            if sharded.component.axes[-1].name == "width":
                channels.setdefault(sharded.layers, []).append(sharded)
                continue
            component, box = sharded.component, boxes[sharded.component.name]
            sizes = [len(part) for part in box[1:]]
            if component.entry is Entry.TOKEN:
                sizes.insert(_axes_before_token(sharded, self._shape), self._sizes[default_group(component)][0])
            tensors[component.name] = [self._poisoned(component.dtype, sharded, sizes) for _ in range(len(box[0]))]
        for together in channels.values():
            tensors |= self._convolution_tensors(together, boxes)
        return tensors

    def _convolution_tensors(
        self, together: list[ShardedComponent], boxes: Mapping[str, Box]
    ) -> dict[str, list[torch.Tensor]]:
        sizes = {each.component.name: [len(part) for part in boxes[each.component.name][1:]] for each in together}
        counts = [prod(size[:-1]) for size in sizes.values()]
        width = together[0].component.axes[-1].size
        tensors: dict[str, list[torch.Tensor]] = {name: [] for name in sizes}
        for _ in range(len(boxes[together[0].component.name][0])):
            whole = self._poisoned(together[0].component.dtype, together[0], [sum(counts), width])
            for (name, size), part in zip(sizes.items(), torch.split(whole, counts, dim=1), strict=True):
                tensors[name].append(part.view(len(part), *size))
        return tensors

    def _poisoned(self, dtype: str, sharded: ShardedComponent, sizes: list[int]) -> torch.Tensor:
        group = default_group(sharded.component)
        tensor = torch.empty((self._sizes[group][1], *sizes), dtype=getattr(torch, dtype))
        tensor.view(torch.uint8).fill_(self._poison)
        self._storages.append((group, tensor))
        return tensor

    def _member(self, sharded: ShardedComponent, box: Box, tensors: list[torch.Tensor]) -> _Member:
        component = sharded.component
        if not tensors:
            page_tokens, num_pages = self._sizes[default_group(component)]
            shard = empty_shard(component, page_tokens=page_tokens, num_pages=num_pages)
            return _Member(sharded, box, (), shard)
        names = [axis.name for axis in component.axes]
        dims, token_dim = ["slot", *names[1:]], 0
        if component.entry is Entry.TOKEN:
            before = _axes_before_token(sharded, self._shape)
            dims, token_dim = ["page", *names[1:]], 1 + before
            dims.insert(token_dim, "token")
        shard = shard_from_tensors(component, tensors, dims=dims, held=dict(zip(names, box, strict=True)))
        views = [tensor.movedim(token_dim, 1) if token_dim else tensor[:, None] for tensor in tensors]
        return _Member(sharded, box, tuple(views), shard)


def _axes_before_token(sharded: ShardedComponent, shape: EngineShape) -> int:
    """Axes that lie outside of the tokens in a page: the heads in HND, if there are any."""
    return 1 if shape.order is PageOrder.HND and len(sharded.component.axes) > 2 else 0


def _pool_size(options: DemoOptions, shape: EngineShape, group: str) -> tuple[int, int]:
    """Tokens in a page, and pages: what the requests take, and half as much again that nobody may touch."""
    has_slots = any(
        default_group(sharded.component) == group and sharded.component.entry is Entry.REQUEST
        for sharded in options.components
    )
    page_tokens = 1 if has_slots else shape.page_tokens
    needed = sum(1 if has_slots else -(-len(request.token_ids) // page_tokens) for request in options.requests)
    return page_tokens, needed + needed // 2 + 8
