"""What probes share: memory on either kind of device, options, and how times are told."""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from kvferry.layout import Device, MemoryKind, Region

FOLDER = "GPU_CONTACT_FOLDER"
"""The variable that names the folder for a probe's own files, which the archive brings along."""

MIB = 1 << 20
DeviceName = Literal["cpu", "cuda"]

_LEGACY_IPC_CAPABLE = 10
"""CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE of CUDA's driver interface."""


class Memory(ABC):
    """Bytes on a device.

    Attributes:
        address: of the first.
        num_bytes: how many.
        device: where they are.
    """

    address: int
    num_bytes: int
    device: Device

    @property
    def region(self) -> Region:
        """All of it."""
        return Region(self.address, self.num_bytes)

    @abstractmethod
    def put(self, content: NDArray[np.uint8]) -> None:
        """Makes the first bytes these, and waits until they are."""

    @abstractmethod
    def get(self) -> NDArray[np.uint8]:
        """Returns a copy in main memory."""


class HostMemory(Memory):
    """Main memory."""

    def __init__(self, num_bytes: int) -> None:
        self.array = np.zeros(num_bytes, np.uint8)
        self.address, self.num_bytes, self.device = self.array.ctypes.data, num_bytes, Device()

    def put(self, content: NDArray[np.uint8]) -> None:
        self.array[: len(content)] = content

    def get(self) -> NDArray[np.uint8]:
        copied: NDArray[np.uint8] = self.array.copy()
        return copied


class CudaMemory(Memory):
    """A tensor of bytes on the first GPU, from torch's allocator as an engine's pools are."""

    def __init__(self, num_bytes: int) -> None:
        import torch

        self.tensor = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda:0")
        torch.cuda.synchronize()
        self.address, self.num_bytes, self.device = self.tensor.data_ptr(), num_bytes, Device(MemoryKind.VRAM, 0)

    def put(self, content: NDArray[np.uint8]) -> None:
        import torch

        self.tensor[: len(content)].copy_(torch.from_numpy(content))
        torch.cuda.synchronize()

    def get(self) -> NDArray[np.uint8]:
        copied: NDArray[np.uint8] = self.tensor.cpu().numpy()
        return copied


def memory(num_bytes: int, device: DeviceName) -> Memory:
    """Takes memory on a device, zeroed."""
    return CudaMemory(num_bytes) if device == "cuda" else HostMemory(num_bytes)


def synchronize(device: DeviceName) -> None:
    """Waits until a GPU has done all it was told."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def pattern(num_bytes: int, seed: int = 0) -> NDArray[np.uint8]:
    """Bytes that are wrong anywhere else."""
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


def is_legacy_ipc_capable(memory: Memory) -> bool | None:
    """Asks CUDA's driver whether other processes can map memory by the older CUDA IPC; None where there is no GPU."""
    if memory.device.kind is MemoryKind.DRAM:
        return None
    answer = ctypes.c_int(0)
    driver = ctypes.CDLL("libcuda.so.1")
    status = driver.cuPointerGetAttribute(
        ctypes.byref(answer), ctypes.c_int(_LEGACY_IPC_CAPABLE), ctypes.c_uint64(memory.address)
    )
    return bool(answer.value) if status == 0 else None


def seconds_of(call: Callable[[], object], rounds: int) -> list[float]:
    """Seconds of every round, after one that is not counted."""
    call()
    taken = []
    for _ in range(rounds):
        before = time.perf_counter()
        call()
        taken.append(time.perf_counter() - before)
    return taken


def percentiles_us(seconds: Sequence[float]) -> dict[str, float]:
    """The median, the 99th percentile and the least, in microseconds."""
    p50, p99 = np.percentile(seconds, [50, 99])
    return {"p50": float(p50) * 1e6, "p99": float(p99) * 1e6, "least": min(seconds) * 1e6}


def parser(document: str | None) -> argparse.ArgumentParser:
    """The options that every probe has."""
    made = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    made.add_argument("--tiny", action="store_true", help="sizes for a test, of which the figures mean nothing")
    made.add_argument("--seconds", type=float, default=30.0, help="begin nothing further after so long")
    return made


class Clock:
    """How much of a probe's time is left, and what was left out for want of it."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.left_out: list[str] = []

    def has_time_for(self, what: str) -> bool:
        """Returns whether there is time for something further, and remembers what there was not."""
        if time.monotonic() < self._end:
            return True
        self.left_out.append(what)
        return False


def tell(result: dict[str, Any]) -> None:
    """Prints what was found as a line of its own."""
    print("\n" + json.dumps(result), flush=True)


def tell_and_exit(result: dict[str, Any]) -> NoReturn:
    """Prints what was found, and ends with 0 if every byte was right."""
    tell(result)
    sys.exit(not result["exact"])
