"""One rank's memory in a case: where its bytes are, how much it takes and whether that fits, which pages requests have.

Bytes lie in main memory, or in a GPU's with a copy in main memory to fill and to check. torch is imported for a GPU
alone. Cases share a rank's memory, one after the other, and each uses the first part of it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvferry.applications.bench.options import BenchOptions, Side, variant_of
from kvferry.applications.plan.counting import PagePlacement, RoutedPiece, total
from kvferry.errors import SettingsError
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
from kvferry.settings import Settings
from kvferry.staging.sizes import StagingSettings, staging_sizes

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


PROCESS_BYTES = 200 << 20
"""What a rank's process takes beside its pool: the interpreter, the transport, and a little to check with."""

GPU_PROCESS_BYTES = 2 << 30
"""The same where it uses a GPU, with torch and CUDA's own."""

GPU_CONTEXT_BYTES = 600 << 20
"""What every process takes of a GPU's memory before it has allocated anything."""

_MEMORY_INFORMATION = Path("/proc/meminfo")
_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


@dataclass(frozen=True, slots=True)
class Amount:
    """Bytes of main memory, and of a GPU's."""

    main: int
    gpu: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.main + other.main, self.gpu + other.gpu)


def needed(options: BenchOptions, sides: Sequence[Side]) -> Amount:
    """What all ranks of some sides take together."""
    return sum((_needed_by_side(options, side) for side in sides), Amount(0))


def needed_bytes(options: BenchOptions) -> int:
    """What all ranks of both sides take of both kinds of memory together."""
    amount = needed(options, options.sides)
    return amount.main + amount.gpu


def _needed_by_side(options: BenchOptions, side: Side) -> Amount:
    pools = sum(pool_bytes(options, side, coordinates) for coordinates in side.coordinates)
    staging = side.tp_size * staging_bytes(options, side)
    if options.device.kind is MemoryKind.VRAM:  # with a copy in main memory, to fill and to check
        return Amount(
            main=pools + side.tp_size * GPU_PROCESS_BYTES, gpu=pools + staging + side.tp_size * GPU_CONTEXT_BYTES
        )
    return Amount(main=pools + staging + side.tp_size * PROCESS_BYTES)


def staging_bytes(options: BenchOptions, side: Side) -> int:
    """The most staging memory that the endpoints of one rank take: each variant that may stage has its own."""
    settings = Settings()
    sizes, most = staging_sizes(settings, options.device.kind), settings.of(StagingSettings).most_bytes
    if side is options.prefill:
        wanted = sum(sizes.of_sender(settings.gather_workers))
    else:
        wanted = options.prefill.tp_size * sizes.ring_bytes
    return sum(variant_of(name).may_stage for name in options.variants) * min(wanted, most)


def available_bytes() -> int | None:
    """What may still be allocated: free memory, or less if this process's group has a limit. None if nobody says."""
    found = [_free_bytes(), *(_left_in_group(limit, usage) for limit, usage in _CGROUPS)]
    return min((amount for amount in found if amount is not None), default=None)


def available_gpu_bytes(device: Device) -> int | None:
    """What is free of a GPU's memory. None for other devices."""
    if device.kind is not MemoryKind.VRAM:
        return None
    import torch

    free, _ = torch.cuda.mem_get_info(device.index)
    return int(free)


def check_fits(options: BenchOptions, sides: Sequence[Side], main: int | None, gpu: int | None = None) -> None:
    """Refuses a shape that does not fit.

    Args:
        sides: those that run on this machine.
        main: bytes that are available of main memory; None if nobody knows.
        gpu: the same of the GPU's memory.

    Raises:
        SettingsError: naming what is needed and what is available.
    """
    amount = needed(options, sides)
    for kind, wanted, available in (("", amount.main, main), (" of the GPU's memory", amount.gpu, gpu)):
        if available is not None and wanted > available:
            raise SettingsError(
                f"{options.requests} requests of {options.tokens} tokens of {options.model.name} need {in_gib(wanted)}"
                f"{kind} in {sum(side.tp_size for side in sides)} processes, and {in_gib(available)} is available: "
                "give fewer --requests, fewer --tokens, fewer --variants or a smaller --preset"
            )


def in_gib(amount: int) -> str:
    """Bytes in words."""
    return f"{amount / 2**30:.2f} GiB"


def _free_bytes() -> int | None:
    try:
        lines = _MEMORY_INFORMATION.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def _left_in_group(limit: Path, usage: Path) -> int | None:
    try:
        return int(limit.read_text(encoding="ascii")) - int(usage.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such group, or "max"
        return None
