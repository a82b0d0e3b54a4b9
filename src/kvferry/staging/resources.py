"""What copying takes from the machine: memory, kernels, how fast these are, and what maps other processes' memory."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import cycle, islice

import numpy as np

from kvferry.errors import SettingsError
from kvferry.layout import Device, MemoryKind, Region
from kvferry.plan.packing import BlockShape, PackedSide, Starts
from kvferry.staging.choice import bind_thread, kernels_for, mapped_copies
from kvferry.staging.compiled_runs import CompiledRuns
from kvferry.staging.host import HostKernels
from kvferry.staging.kernels import Kernels, StartArray, Watch, unwatched
from kvferry.staging.memory import StagingMemory, allocate, why_not_mapped
from kvferry.staging.runs import Runs
from kvferry.staging.sharing import MappedCopies
from kvferry.transport import Transport

_BUDGET_S = 1e-3
_MOST_TIMES = 5
_GATHERED_BYTES = {MemoryKind.DRAM: 1 << 20, MemoryKind.VRAM: 64 << 20}
"""On a GPU anything less measures how long a launch takes."""

_SAMPLES = 3


def gather_speed(kernels: Kernels, samples: Sequence[StartArray], shape: BlockShape, memory: StagingMemory) -> float:
    """Measures how many bytes a second are gathered from blocks like these: the best of a few times.

    The first time does not count: it maps pages, and compiles on a GPU. The others take a millisecond or so. Every
    time takes the next sample: blocks that were gathered just now lie in a cache, where a request's do not.

    Args:
        kernels: the pool's kernels.
        samples: at least one set of blocks, as the byte address of every block's first run.
        shape: the shape of every block.
        memory: where the blocks are packed.

    Raises:
        SettingsError: if they do not fit there.
    """
    needed = max(len(starts) for starts in samples) * shape.num_bytes
    if needed > memory.num_bytes:
        raise SettingsError(f"{needed} bytes to gather do not fit into {memory.num_bytes} bytes of staging memory")
    kernels.gather(samples[0], shape, memory.address)
    best = 0.0
    # A CPU's kernels never wait: the thread's own time is what they take, also while others have its processor.
    clock = time.thread_time if memory.device.kind is MemoryKind.DRAM else time.perf_counter
    begin = clock()
    for starts in islice(cycle([*samples[1:], samples[0]]), _MOST_TIMES):
        before = clock()
        kernels.gather(starts, shape, memory.address)
        taken = max(clock() - before, 1e-9)  # of a clock that stands still between its ticks
        best = max(best, len(starts) * shape.num_bytes / taken)
        if clock() - begin + taken > _BUDGET_S:
            break
    return best


def copy_bytes_per_s(kernels: Kernels, sides: Sequence[PackedSide], memory: StagingMemory) -> float:
    """Measures how fast the largest of several pieces is gathered from its pages.

    The receiver measures the same instead of scattering, which would overwrite what its pages hold: that takes about as
    long for short runs (5.8 and 5.3 GB/s for slices of 1 KiB of scattered pages), and less for long ones (7.1 and 9.8
    for pages of 16 KiB).

    Args:
        sides: where one side has the blocks of every piece.
    """
    side = max(sides, key=lambda each: len(each.bases) * each.shape.num_bytes)
    blocks = min(_GATHERED_BYTES[memory.device.kind], memory.num_bytes) // side.shape.num_bytes
    samples = [sample_starts(side, max(1, blocks), sample) for sample in range(_SAMPLES)]
    return gather_speed(kernels, samples, side.shape, memory)


def sample_starts(side: PackedSide, count: int, sample: int = 0) -> Starts:
    """Returns where `count` blocks begin, spread over a pool like a request's pages; every sample has other ones."""
    step = max(1, side.num_pages // count)
    pages = np.arange(sample % step, side.num_pages, step, dtype=np.int64)[:count]
    bases = max(1, min(len(side.bases), count // len(pages)))
    return side.starts(0, bases, np.zeros_like(pages), pages)


class StagingResources(ABC):
    """Gives an endpoint memory and kernels for staging; the simulation has its own."""

    @abstractmethod
    def kernels(self, regions: Sequence[Region], device: Device) -> Kernels:
        """Makes kernels, as `choice.kernels_for`."""

    def runs(self, kernels: Kernels, transport: Transport, now: Callable[[], float]) -> Runs:
        """Makes what gathers and writes sub-chunks, given the time in seconds of a steady clock."""
        return Runs(kernels, transport, now)

    @abstractmethod
    def allocate(self, num_bytes: int, device: Device) -> StagingMemory:
        """Takes staging memory, as `memory.allocate`."""

    @abstractmethod
    def copy_bytes_per_s(self, kernels: Kernels, sides: Sequence[PackedSide], memory: StagingMemory) -> float:
        """Measures kernels, as `copy_bytes_per_s`."""

    @abstractmethod
    def why_not_mapped(self, regions: Sequence[Region], device: Device) -> str:
        """Returns why transports cannot map a pool into another process, as `memory.why_not_mapped`."""

    @abstractmethod
    def mapped_copies(self, device: Device) -> MappedCopies:
        """Makes what copies into other processes' memory, as `choice.mapped_copies`."""

    @abstractmethod
    def bind_thread(self, device: Device) -> None:
        """Gets the calling thread ready to look at a device's events, as `choice.bind_thread`."""

    @abstractmethod
    def epoch(self) -> int:
        """Draws a number for a ring that no other ring has, up to 2**63."""


class MachineResources(StagingResources):
    """The memory and kernels of this machine."""

    def __init__(self, watch: Watch = unwatched) -> None:
        """Takes nothing yet.

        Args:
            watch: as in `choice.kernels_for`.
        """
        self._watch: Watch = watch

    def kernels(self, regions: Sequence[Region], device: Device) -> Kernels:
        return kernels_for(regions, device, self._watch)

    def runs(self, kernels: Kernels, transport: Transport, now: Callable[[], float]) -> Runs:
        if not (isinstance(kernels, HostKernels) and kernels.is_compiled and transport.has_compiled_ways):
            return super().runs(kernels, transport, now)
        return CompiledRuns(kernels, transport, now, watch=self._watch)

    def allocate(self, num_bytes: int, device: Device) -> StagingMemory:
        return allocate(num_bytes, device)

    def copy_bytes_per_s(self, kernels: Kernels, sides: Sequence[PackedSide], memory: StagingMemory) -> float:
        return copy_bytes_per_s(kernels, sides, memory)

    def why_not_mapped(self, regions: Sequence[Region], device: Device) -> str:
        return why_not_mapped(regions, device)

    def mapped_copies(self, device: Device) -> MappedCopies:
        return mapped_copies(device)

    def bind_thread(self, device: Device) -> None:
        bind_thread(device)

    def epoch(self) -> int:
        return secrets.randbits(63)
