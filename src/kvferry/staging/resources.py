"""What copying takes from the machine: memory, kernels, how fast these are, and what maps other processes' memory."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvferry.layout import Device, Region
from kvferry.plan.packing import PackedSide
from kvferry.staging.choice import bind_thread, kernels_for, mapped_copies
from kvferry.staging.copy_speed import copy_bytes_per_s
from kvferry.staging.kernels import Kernels
from kvferry.staging.memory import StagingMemory, allocate, why_not_mapped
from kvferry.staging.sharing import MappedCopies


class StagingResources(ABC):
    """Gives an endpoint memory and kernels for staging; the simulation has its own."""

    @abstractmethod
    def kernels(self, regions: Sequence[Region], device: Device) -> Kernels:
        """Makes kernels, as `choice.kernels_for`."""

    @abstractmethod
    def allocate(self, num_bytes: int, device: Device) -> StagingMemory:
        """Takes staging memory, as `memory.allocate`."""

    @abstractmethod
    def copy_bytes_per_s(self, kernels: Kernels, sides: Sequence[PackedSide], memory: StagingMemory) -> float:
        """Measures kernels, as `calibration.copy_bytes_per_s`."""

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

    def kernels(self, regions: Sequence[Region], device: Device) -> Kernels:
        return kernels_for(regions, device)

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
