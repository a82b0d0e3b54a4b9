"""One rank's memory in a case: where its bytes are, how much it takes, and which pages requests have in it.

Bytes lie in main memory, or in a GPU's with a copy in main memory to fill and to check. torch is imported for a GPU
alone. Cases share a rank's memory, one after the other, and each uses the first part of it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvferry.applications.bench.options import BenchOptions, Side
from kvferry.applications.plan.counting import PagePlacement, RoutedPiece, total
from kvferry.layout import (
    Component,
    Device,
    Entry,
    MemoryKind,
    RankCoordinates,
    RankLayout,
    Region,
    VirtualPools,
    default_group,
    virtual_layout,
)
from kvferry.plan import pieces_for_receiver
from kvferry.pools import pool as pools
from kvferry.pools.places import entries_kept
from kvferry.pools.pool import ALIGNMENT, POISON, Block, aligned_bytes, bytes_of, placed

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Storage:
    """Memory that transfers read or write. See `allocate`.

    Attributes:
        device: where it is.
        host: its bytes as this process sees them: themselves, or a copy. See `push` and `fetch`.
        address: of the first byte, aligned.
        tensor: the memory, where torch has it; `host` is a copy of it then.
    """

    device: Device
    host: NDArray[np.uint8]
    address: int
    tensor: torch.Tensor | None = None

    @property
    def region(self) -> Region:
        """All of it."""
        return Region(self.address, self.host.nbytes)

    def first(self, num_bytes: int) -> Storage:
        """Its first part."""
        return replace(
            self, host=self.host[:num_bytes], tensor=None if self.tensor is None else self.tensor[:num_bytes]
        )

    def fill(self, value: int) -> None:
        """Overwrites all of it."""
        if self.tensor is None:
            self.host.fill(value)
        else:
            self.tensor.fill_(value)
            self._finish()

    def push(self) -> None:
        """Makes the memory what `host` is."""
        if self.tensor is not None:
            self.tensor.copy_(_as_tensor(self.host))
            self._finish()

    def fetch(self) -> None:
        """Makes `host` what the memory is."""
        if self.tensor is not None:
            _as_tensor(self.host).copy_(self.tensor)
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


def _as_tensor(host: NDArray[np.uint8]) -> torch.Tensor:
    import torch

    return torch.from_numpy(host)


def allocate(num_bytes: int, device: Device, torch_device: str | None = None) -> Storage:
    """Memory on a device; its first byte is aligned.

    Args:
        torch_device: what torch calls the device; None for a GPU that it calls cuda, and for main memory.
    """
    host = aligned_bytes(num_bytes)
    if torch_device is None and device.kind is not MemoryKind.VRAM:
        return Storage(device, host, host.ctypes.data)
    import torch

    whole = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8, device=torch_device or f"cuda:{device.index}")
    skipped = -whole.data_ptr() % ALIGNMENT
    tensor = whole[skipped : skipped + num_bytes]
    return Storage(device, host, tensor.data_ptr(), tensor)


_GUARD = 8
"""One page more than this part of the pages belongs to no request: nobody may write there."""


def _num_pages(options: BenchOptions, side: Side, component: Component) -> int:
    kept = entries_kept(component, options.tokens)
    page_tokens = 1 if component.entry is Entry.REQUEST else side.page_tokens
    used = options.requests * (-(-kept.stop // page_tokens) - kept.start // page_tokens)
    return used + used // _GUARD + 1


def _virtual_layout(options: BenchOptions, side: Side, coordinates: RankCoordinates) -> RankLayout:
    """A rank's layout, in memory that nobody has allocated."""
    components = options.model.components
    pools = VirtualPools(
        page_tokens=side.page_tokens,
        num_pages={default_group(each.component): _num_pages(options, side, each.component) for each in components},
        order=side.order,
        layers_per_stage=(options.model.num_layers,),
    )
    return virtual_layout(components, coordinates, pools, device=options.device)


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

    Which pages a request has is what a case is about: the same ones in every run, side by side or scattered.

    Attributes:
        storage: what the rank has.
        memory: the part of it that this is.
        requests: the pages that each has, by group.
    """

    def __init__(self, options: BenchOptions, side: Side, coordinates: RankCoordinates, storage: Storage) -> None:
        """Touches everything: afterwards every byte is poison."""
        self.storage = storage
        self.memory = storage.first(pool_bytes(options, side, coordinates))
        layout = placed(_virtual_layout(options, side, coordinates), storage.address)
        seed = f"{side.name} {coordinates.engine_rank}" if options.is_scattered else None
        super().__init__(layout, coordinates, blocks=[Block(storage.address, self.memory.host)], seed=seed)
        self.memory.fill(POISON)
        self.requests = [self.pages_for(options.tokens) for _ in range(options.requests)]
