"""The kernels that suit a pool, and what maps other pools beside it."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.errors import TransportUnavailableError
from kvferry.layout import Device, MemoryKind, Region
from kvferry.staging.accelerator import ThreadStreams
from kvferry.staging.kernels import Kernels
from kvferry.staging.requirements import require_cuda, require_torch, require_triton
from kvferry.staging.sharing import CudaSharing, MappedCopies


def kernels_for(regions: Sequence[Region], device: Device) -> Kernels:
    """Makes the kernels for a pool. On a GPU it compiles the most usual ones, so that the first chunk need not wait.

    Args:
        regions: the pool's memory, as `RankLayout.regions` gives it. It must outlive the kernels.
        device: where it is.

    Raises:
        TransportUnavailableError: if torch, Triton or the GPU is missing, saying what to do.
    """
    if device.kind is MemoryKind.DRAM:
        require_torch()
        from kvferry.staging.host import HostKernels

        return HostKernels(regions)
    require_cuda(device)
    require_triton()
    import torch

    from kvferry.staging.cuda import CudaAccelerator
    from kvferry.staging.gpu import GpuKernels

    kernels = GpuKernels(regions, CudaAccelerator(device.index))
    with torch.cuda.device(device.index):  # the caller's thread has the GPU afterwards that it had before
        kernels.compile()
    return kernels


def mapped_copies(device: Device) -> MappedCopies:
    """Makes what maps the memory of other processes beside a pool's, and copies into it.

    Args:
        device: where the pool is.

    Raises:
        TransportUnavailableError: if that is no GPU, or torch, Triton or the GPU is missing.
    """
    if device.kind is MemoryKind.DRAM:
        raise TransportUnavailableError(
            f"KVFERRY_PATH=mapped maps pools of GPUs, and this one is on {device}: take auto, direct or staged"
        )
    require_cuda(device)
    require_triton()
    from kvferry.staging.cuda import CudaAccelerator

    return MappedCopies(ThreadStreams(CudaAccelerator(device.index)), CudaSharing(device.index))


def bind_thread(device: Device) -> None:
    """Makes a GPU the calling thread's own, where its work is about one: before it looks at an event of that GPU."""
    if device.kind is not MemoryKind.DRAM:
        require_cuda(device)
        from kvferry.staging.cuda import bind_thread as bind

        bind(device.index)
