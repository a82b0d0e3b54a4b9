"""One rank's memory: pools as an engine would have them, in one allocation, and which pages requests have in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.cli.bench.options import BenchOptions, Side
from kvferry.layout import Entry, RankCoordinates, RankLayout, Shard, ShardedComponent
from kvferry.layout.virtual import VirtualPools, virtual_layout

POISON = 0xA5

_ALIGNMENT = 4096
_GUARD = 8
"""One page more than this part of the pages belongs to no request: nobody may write there."""


@dataclass(frozen=True, slots=True)
class Extent:
    """What a request takes of a group on one side.

    Attributes:
        page_tokens: tokens in a page; 1 for slots.
        first: position of the first page among the request's pages.
        stop: the position after the last one.
        first_token: position of the first token that must arrive.
        tokens: the position after the last token; 1 for slots.
    """

    page_tokens: int
    first: int
    stop: int
    first_token: int
    tokens: int

    @property
    def pages(self) -> int:
        """How many pages."""
        return self.stop - self.first


def extent_of(options: BenchOptions, side: Side, members: tuple[ShardedComponent, ...]) -> Extent:
    """What a request takes of a group."""
    component = members[0].component
    if component.entry is Entry.REQUEST:
        return Extent(page_tokens=1, first=0, stop=1, first_token=0, tokens=1)
    window = options.tokens if component.window_tokens is None else component.window_tokens
    first_token = max(0, options.tokens - window)
    page_tokens = side.page_tokens
    stop = -(-options.tokens // page_tokens)
    return Extent(page_tokens, first_token // page_tokens, stop, first_token, options.tokens)


def _num_pages(options: BenchOptions, extent: Extent) -> int:
    used = options.requests * extent.pages
    return used + used // _GUARD + 1


def _virtual_shards(options: BenchOptions, side: Side, coordinates: RankCoordinates) -> list[tuple[Shard, ...]]:
    """The shards of every group, at addresses that begin anew with every group."""
    return [
        virtual_layout(
            members,
            coordinates,
            VirtualPools(
                page_tokens=side.page_tokens,
                num_pages=_num_pages(options, extent_of(options, side, members)),
                order=side.order,
                layers_per_stage=(options.model.num_layers,),
            ),
        ).shards
        for members in options.model.groups.values()
    ]


def _span(shards: tuple[Shard, ...]) -> tuple[int, int]:
    """Where the memory of shards begins, and how long it is up to a whole number of alignments."""
    regions = [region for shard in shards for region in shard.regions()]
    first = min((region.address for region in regions), default=0)
    length = max((region.stop for region in regions), default=0) - first
    return first, -(-length // _ALIGNMENT) * _ALIGNMENT


def pool_bytes(options: BenchOptions, side: Side, coordinates: RankCoordinates) -> int:
    """What a rank's pools take, allocating nothing."""
    return _ALIGNMENT + sum(_span(shards)[1] for shards in _virtual_shards(options, side, coordinates))


class Pool:
    """The memory of one rank.

    Attributes:
        layout: what it holds and where.
        memory: all of it, as bytes; its first byte is aligned.
        extents: what a request takes, by group.
    """

    def __init__(self, options: BenchOptions, side: Side, coordinates: RankCoordinates) -> None:
        """Allocates and touches everything: afterwards every byte is poison."""
        groups = _virtual_shards(options, side, coordinates)
        storage = np.empty(pool_bytes(options, side, coordinates), np.uint8)
        skipped = -storage.ctypes.data % _ALIGNMENT
        self.memory: NDArray[np.uint8] = storage[skipped : len(storage) - _ALIGNMENT + skipped]
        self.poison()
        address, placed = self.memory.ctypes.data, []
        for shards in groups:
            first, length = _span(shards)
            placed += [
                msgspec.structs.replace(shard, addresses=tuple(each - first + address for each in shard.addresses))
                for shard in shards
            ]
            address += length
        self.layout = RankLayout(shards=tuple(placed))
        self.extents = {name: extent_of(options, side, members) for name, members in options.model.groups.items()}
        self._numbers = {
            name: _page_numbers(options, extent, seed=(len(side.name), coordinates.engine_rank, index))
            for index, (name, extent) in enumerate(self.extents.items())
        }

    def poison(self) -> None:
        """Overwrites everything."""
        self.memory.fill(POISON)

    def pages(self, group: str, request: int) -> NDArray[np.int64]:
        """A request's page numbers, in the order of its tokens."""
        count = self.extents[group].pages
        return self._numbers[group][request * count : (request + 1) * count]

    def guard_pages(self, group: str, requests: int) -> NDArray[np.int64]:
        """Pages of no request."""
        return self._numbers[group][requests * self.extents[group].pages :]

    def layer(self, shard: Shard, index: int, lane_bytes: int) -> NDArray[np.unsignedinteger[Any]]:
        """The pages of one layer as numbers of so many bytes: an array [page, token, ..., number in the last axis]."""
        paging = shard.paging
        *outer, last = (len(interval) for interval in shard.box[1:])
        lanes = last * shard.component.element_bytes // lane_bytes
        start = shard.addresses[index] - self.memory.ctypes.data
        return np.lib.stride_tricks.as_strided(
            self.memory[start : start + lane_bytes].view(f"u{lane_bytes}"),
            (paging.num_pages, paging.page_tokens, *outer, lanes),
            (paging.page_stride, paging.token_stride, *shard.strides[:-1], lane_bytes),
        )


def _page_numbers(options: BenchOptions, extent: Extent, *, seed: tuple[int, ...]) -> NDArray[np.int64]:
    """All pages of a pool, those of the first request first."""
    count = _num_pages(options, extent)
    if options.is_scattered:
        return np.random.default_rng(seed).permutation(count).astype(np.int64)
    return np.arange(count, dtype=np.int64)
