"""What endpoints without hardware take for staged transfers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvferry.layout import Device, Region
from kvferry.plan.packing import PackedSide
from kvferry.staging import Kernels, StagingMemory
from kvferry.staging.resources import StagingResources


class MadeUpResources(StagingResources):
    """Memory of the process's own, whichever device it is asked for on, and copies whose speed is made up."""

    alignment = 64
    """Of the memory, in bytes."""

    def allocate(self, num_bytes: int, device: Device) -> StagingMemory:
        memory = np.zeros(num_bytes + self.alignment, np.uint8)
        address = memory.ctypes.data + -memory.ctypes.data % self.alignment
        return StagingMemory(Region(address, num_bytes), device, memory)

    def copy_bytes_per_s(self, kernels: Kernels, sides: Sequence[PackedSide], memory: StagingMemory) -> float:
        return 1e9

    def why_not_mapped(self, regions: Sequence[Region], device: Device) -> str:
        return ""
