"""The bytes of one rank: in main memory, or in a GPU's with a copy in main memory to fill and to check.

torch is imported for a GPU alone. Cases share a rank's memory, one after the other, and each uses the first part of it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvferry.layout import Device, MemoryKind, Region
from kvferry.pools.pool import ALIGNMENT, aligned_bytes

if TYPE_CHECKING:
    import torch


class Storage(ABC):
    """Memory that transfers read or write.

    Attributes:
        device: where it is.
        address: of the first byte, aligned.
        host: its bytes as this process sees them: themselves, or a copy. See `push` and `fetch`.
    """

    device: Device
    address: int
    host: NDArray[np.uint8]

    @property
    def region(self) -> Region:
        """All of it."""
        return Region(self.address, self.host.nbytes)

    @abstractmethod
    def fill(self, value: int, num_bytes: int) -> None:
        """Overwrites so many bytes."""

    @abstractmethod
    def push(self, num_bytes: int) -> None:
        """Makes so many bytes of the memory what `host` has."""

    @abstractmethod
    def fetch(self, num_bytes: int) -> None:
        """Makes so many bytes of `host` what the memory has."""

    @abstractmethod
    def copy_seconds(self, num_bytes: int) -> float:
        """Seconds for each byte of a copy within the memory, of so many bytes or as many as half of it has."""


class HostStorage(Storage):
    """Main memory."""

    def __init__(self, num_bytes: int) -> None:
        self.device = Device()
        self.host = aligned_bytes(num_bytes)
        self.address = self.host.ctypes.data

    def fill(self, value: int, num_bytes: int) -> None:
        self.host[:num_bytes].fill(value)

    def push(self, num_bytes: int) -> None:
        pass

    def fetch(self, num_bytes: int) -> None:
        pass

    def copy_seconds(self, num_bytes: int) -> float:
        length = min(num_bytes, len(self.host) // 2)
        started = time.perf_counter()
        np.copyto(self.host[len(self.host) - length :], self.host[:length])
        return (time.perf_counter() - started) / length


class TorchStorage(Storage):
    """Memory of a device that torch knows."""

    def __init__(self, num_bytes: int, device: Device, torch_device: str) -> None:
        import torch

        self.device = device
        self.host = aligned_bytes(num_bytes)
        self._copy = torch.from_numpy(self.host)
        whole = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8, device=torch_device)
        skipped = -whole.data_ptr() % ALIGNMENT
        self._tensor = whole[skipped : skipped + num_bytes]
        self.address = self._tensor.data_ptr()

    def fill(self, value: int, num_bytes: int) -> None:
        self._tensor[:num_bytes].fill_(value)
        _finish(self._tensor)

    def push(self, num_bytes: int) -> None:
        self._tensor[:num_bytes].copy_(self._copy[:num_bytes])
        _finish(self._tensor)

    def fetch(self, num_bytes: int) -> None:
        self._copy[:num_bytes].copy_(self._tensor[:num_bytes])
        _finish(self._tensor)

    def copy_seconds(self, num_bytes: int) -> float:
        tensor = self._tensor
        length = min(num_bytes, len(tensor) // 2)
        _finish(tensor)
        started = time.perf_counter()
        tensor[len(tensor) - length :].copy_(tensor[:length])
        _finish(tensor)
        return (time.perf_counter() - started) / length


def allocate(num_bytes: int, device: Device) -> Storage:
    """Memory on a device; its first byte is aligned."""
    if device.kind is MemoryKind.VRAM:
        return TorchStorage(num_bytes, device, f"cuda:{device.index}")
    return HostStorage(num_bytes)


def _finish(tensor: torch.Tensor) -> None:
    """Waits until a GPU has done what it was told: transfers do not queue up behind it."""
    if tensor.is_cuda:
        import torch

        torch.cuda.synchronize(tensor.device)
