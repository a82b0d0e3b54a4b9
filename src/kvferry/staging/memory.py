"""Staging memory: where blocks lie packed between a pool and the wire. Callers register it with a transport."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import SettingsError
from kvferry.layout import Device, MemoryKind, Region
from kvferry.staging.choice import require_cuda
from kvferry.staging.cuda_driver import NOT_SHARED, CudaDriver, CudaDriverError

_HUGE_PAGE_BYTES = 2 << 20

NOT_MAPPED = (
    "where nothing faster connects two GPUs of this machine, direct writes from and to it go through the network's "
    f"stack. Leave out {NOT_SHARED}, or take KVFERRY_PATH=staged, whose own memory can be shared"
)
_KEPT_FOR_GOOD: list[object] = []  # global, since only the process lives as long as a write may take


class StagingMemory:
    """A piece of memory on one device, until it is closed. Its contents are undefined at first.

    Attributes:
        region: where it is.
        device: what it is on.
    """

    __slots__ = ("_owner", "device", "region")

    def __init__(self, region: Region, device: Device, owner: object) -> None:
        """Takes over memory that was allocated.

        Args:
            region: where it is.
            device: what it is on.
            owner: keeps the memory for as long as it lives.
        """
        self.region = region
        self.device = device
        self._owner: object | None = owner

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return self.region.address

    @property
    def num_bytes(self) -> int:
        """How large it is."""
        return self.region.length

    @property
    def closed(self) -> bool:
        """Whether it was given back."""
        return self._owner is None

    def close(self) -> None:
        """Frees the memory. Its address must not be used any more, by no transport either. Later calls do nothing."""
        self._owner = None

    def keep_for_good(self) -> None:
        """Keeps the memory until the process ends: a write that nothing can stop would change what lies there next."""
        _KEPT_FOR_GOOD.append(self._owner)

    def __enter__(self) -> StagingMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"StagingMemory({self.num_bytes} bytes at {self.address:#x} on {self.device}{state})"


def allocate(num_bytes: int, device: Device) -> StagingMemory:
    """Takes staging memory. On a CPU it starts at a page of 4 KiB.

    From 2 MiB on it is made of huge pages where the kernel has them to give: transports that copy between processes
    look up every page of both sides each time. All of it is touched, so that no transfer waits until the kernel, or a
    hypervisor below it, has provided it.

    Raises:
        SettingsError: if there is not that much, naming how much was asked for.
        TransportUnavailableError: if the device's library or the device itself is missing.
    """
    if num_bytes < 1:
        raise SettingsError(f"{num_bytes} bytes of staging memory: at least 1 is needed")
    return _on_cpu(num_bytes, device) if device.kind is MemoryKind.DRAM else _on_gpu(num_bytes, device)


def _on_cpu(num_bytes: int, device: Device) -> StagingMemory:
    is_huge = num_bytes >= _HUGE_PAGE_BYTES
    try:
        # Private, so that a forked child shares no staging memory with its parent.
        pages = mmap.mmap(
            -1, num_bytes + (_HUGE_PAGE_BYTES if is_huge else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
    except (OSError, OverflowError, ValueError) as error:
        raise _too_much(num_bytes, device, error) from error
    memory: NDArray[np.uint8] = np.frombuffer(pages, np.uint8)  # keeps the mapping, which goes when the array does
    if is_huge:
        offset = -memory.ctypes.data % _HUGE_PAGE_BYTES
        memory = memory[offset : offset + num_bytes]
        with contextlib.suppress(OSError):  # a kernel without huge pages has small ones
            pages.madvise(mmap.MADV_HUGEPAGE)
    memory[:: mmap.PAGESIZE] = 0
    return StagingMemory(Region(memory.ctypes.data, num_bytes), device, memory)


def _on_gpu(num_bytes: int, device: Device) -> StagingMemory:
    require_cuda(device)
    try:
        # The driver's, and not torch's allocator's: that may be of a kind which transports cannot map elsewhere.
        memory = CudaDriver().allocate(num_bytes, device.index)
    except (CudaDriverError, OSError) as error:
        raise _too_much(num_bytes, device, error) from error
    return StagingMemory(Region(memory.address, num_bytes), device, memory)


def why_not_mapped(regions: Sequence[Region], device: Device, driver: CudaDriver | None = None) -> str:
    """Returns why transports cannot map a pool into another process, which makes direct writes slow; empty if they can.

    Args:
        regions: the pool's memory.
        device: where it is.
        driver: of the GPU; None loads it.
    """
    if device.kind is MemoryKind.DRAM:
        return ""
    try:
        found = (driver or CudaDriver()).first_unmapped(regions)
    except (CudaDriverError, OSError):  # whoever registers the memory says what is wrong with it
        return ""
    if found is None:
        return ""
    return (
        f"the pool's memory on {device} (at {found.address:#x}) is not of the kind that CUDA shares between processes "
        f"(cudaMalloc's): {NOT_MAPPED}"
    )


def _too_much(num_bytes: int, device: Device, error: Exception) -> SettingsError:
    return SettingsError(
        f"{num_bytes} bytes ({num_bytes / 2**30:.2f} GiB) of staging memory could not be had on {device} ({error}): "
        "lower staging_ring_mib (KVFERRY_STAGING_RING_MIB), or take KVFERRY_PATH=direct, which needs none"
    )
