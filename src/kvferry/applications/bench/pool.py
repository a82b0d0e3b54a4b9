"""One rank's memory in a case: where its bytes are, how much it takes, and which pages requests have in it.

Bytes lie in main memory, or in a GPU's with a copy in main memory to fill and to check. torch is imported for a GPU
alone. Cases share a rank's memory, one after the other, and each uses the first part of it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvferry.applications.bench.options import BenchOptions, Side
from kvferry.applications.plan.counting import PagePlacement, RoutedPiece, total
from kvferry.layout import (
    Device,
    Entry,
    MemoryKind,
    RankCoordinates,
    RankLayout,
    Region,
    Shard,
    ShardedComponent,
    VirtualPools,
    virtual_layout,
)
from kvferry.plan import pieces_for_receiver
from kvferry.pools import pool as pools
from kvferry.pools.pool import ALIGNMENT, POISON, Block, aligned_bytes, bytes_of, placed

if TYPE_CHECKING:
    import torch


class Storage:
    """Memory that transfers read or write.

    Attributes:
        device: where it is.
        host: its bytes as this process sees them: themselves, or a copy. See `push` and `fetch`.
        tensor: the memory, where torch has it; `host` is a copy of it then.
        address: of the first byte, aligned.
    """

    def __init__(self, num_bytes: int, device: Device, torch_device: str | None = None) -> None:
        """Allocates it.

        Args:
            torch_device: what torch calls the device; None for main memory.
        """
        self.device = device
        self.host = aligned_bytes(num_bytes)
        self.tensor: torch.Tensor | None = None
        self.address = self.host.ctypes.data
        if torch_device is not None:
            import torch

            self._copy = torch.from_numpy(self.host)
            whole = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8, device=torch_device)
            skipped = -whole.data_ptr() % ALIGNMENT
            self.tensor = whole[skipped : skipped + num_bytes]
            self.address = self.tensor.data_ptr()

    @property
    def region(self) -> Region:
        """All of it."""
        return Region(self.address, self.host.nbytes)

    def fill(self, value: int, num_bytes: int) -> None:
        """Overwrites so many bytes."""
        if self.tensor is None:
            self.host[:num_bytes].fill(value)
        else:
            self.tensor[:num_bytes].fill_(value)
            self._finish()

    def push(self, num_bytes: int) -> None:
        """Makes so many bytes of the memory what `host` has."""
        if self.tensor is not None:
            self.tensor[:num_bytes].copy_(self._copy[:num_bytes])
            self._finish()

    def fetch(self, num_bytes: int) -> None:
        """Makes so many bytes of `host` what the memory has."""
        if self.tensor is not None:
            self._copy[:num_bytes].copy_(self.tensor[:num_bytes])
            self._finish()

    def copy_seconds(self, num_bytes: int) -> float:
        """Seconds for each byte of a copy within the memory, of so many bytes or as many as half of it has."""
        memory: Any = self.host if self.tensor is None else self.tensor
        length = min(num_bytes, len(memory) // 2)
        self._finish()
        started = time.perf_counter()
        memory[len(memory) - length :] = memory[:length]
        self._finish()
        return (time.perf_counter() - started) / length

    def _finish(self) -> None:
        """Waits until a GPU has done what it was told: transfers do not queue up behind it."""
        if self.tensor is not None and self.tensor.is_cuda:
            import torch

            torch.cuda.synchronize(self.tensor.device)


def allocate(num_bytes: int, device: Device) -> Storage:
    """Memory on a device; its first byte is aligned."""
    return Storage(num_bytes, device, f"cuda:{device.index}" if device.kind is MemoryKind.VRAM else None)


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


def _virtual_layout(options: BenchOptions, side: Side, coordinates: RankCoordinates) -> RankLayout:
    """A rank's layout, in memory that nobody has allocated."""
    groups = options.groups.items()
    pools = VirtualPools(
        page_tokens=side.page_tokens,
        num_pages={name: _num_pages(options, extent_of(options, side, members)) for name, members in groups},
        order=side.order,
        layers_per_stage=(options.model.num_layers,),
    )
    return virtual_layout(options.model.components, coordinates, pools, device=options.device)


def pool_bytes(options: BenchOptions, side: Side, coordinates: RankCoordinates) -> int:
    """What a rank's pools take, allocating nothing; at least one byte, so that there is an address."""
    return bytes_of(_virtual_layout(options, side, coordinates)) or ALIGNMENT


def storage_bytes(planned: Sequence[BenchOptions], side_name: str, coordinates: RankCoordinates) -> int:
    """What a rank needs for all cases, one after the other."""
    return max(pool_bytes(options, options.side(side_name), coordinates) for options in planned)


def block_bytes(options: BenchOptions) -> float:
    """Bytes that lie together on both sides, on average, as pages lie in this case: of one descriptor."""
    layouts = {
        side.name: {
            coordinates.group_rank: _virtual_layout(options, side, coordinates) for coordinates in side.coordinates
        }
        for side in options.sides
    }
    sources, receivers = layouts["prefill"], layouts["decode"]
    travelling = total(
        RoutedPiece(piece, sources[piece.holders[0]], receiver).travelling(options.tokens)
        for receiver in receivers.values()
        for piece in pieces_for_receiver(sources, receiver)
    )
    lie = PagePlacement.SCATTERED if options.is_scattered else PagePlacement.ADJACENT
    return travelling.num_bytes / travelling.descriptors[lie]


class Pool(pools.Pool):
    """The memory of one rank in one case: the first part of what the rank has for all cases.

    Which pages a request has is decided here, since it is what a case is about: the same ones in every run, side by
    side or scattered.

    Attributes:
        storage: where its bytes are.
        num_bytes: how many of the storage's.
        extents: what a request takes, by group.
    """

    def __init__(self, options: BenchOptions, side: Side, coordinates: RankCoordinates, storage: Storage) -> None:
        """Touches everything: afterwards every byte is poison."""
        self.storage = storage
        self.num_bytes = pool_bytes(options, side, coordinates)
        layout = placed(_virtual_layout(options, side, coordinates), storage.address)
        super().__init__(layout, coordinates, blocks=[Block(storage.address, self.host)])
        self.poison()
        self.extents = {name: extent_of(options, side, members) for name, members in options.groups.items()}
        self._numbers = {
            name: _page_numbers(options, extent, seed=(len(side.name), coordinates.engine_rank, index))
            for index, (name, extent) in enumerate(self.extents.items())
        }

    @property
    def host(self) -> NDArray[np.uint8]:
        """Its bytes as this process sees them; see `Storage`."""
        return self.storage.host[: self.num_bytes]

    def poison(self) -> None:
        """Overwrites everything."""
        self.storage.fill(POISON, self.num_bytes)

    def push(self) -> None:
        """Makes the memory what `host` is."""
        self.storage.push(self.num_bytes)

    def fetch(self) -> None:
        """Makes `host` what the memory is."""
        self.storage.fetch(self.num_bytes)

    def pages(self, group: str, request: int) -> NDArray[np.int64]:
        """A request's page numbers, in the order of its tokens."""
        count = self.extents[group].pages
        return self._numbers[group][request * count : (request + 1) * count]

    def guard_pages(self, group: str, requests: int) -> NDArray[np.int64]:
        """Pages of no request."""
        return self._numbers[group][requests * self.extents[group].pages :]

    def layer(self, shard: Shard, index: int, lane_bytes: int) -> NDArray[np.unsignedinteger[Any]]:
        """The pages of one layer as numbers of so many bytes: an array [page, token, ..., number in the last axis]."""
        return self.elements(shard, index).view(f"u{lane_bytes}")


def _page_numbers(options: BenchOptions, extent: Extent, *, seed: tuple[int, ...]) -> NDArray[np.int64]:
    """All pages of a pool, those of the first request first."""
    count = _num_pages(options, extent)
    if options.is_scattered:
        return np.random.default_rng(seed).permutation(count).astype(np.int64)
    return np.arange(count, dtype=np.int64)
