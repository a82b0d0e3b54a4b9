"""The kernels that suit a pool, and what maps other pools beside it; errors say what to install."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from kvferry.errors import TransportUnavailableError
from kvferry.layout import Device, MemoryKind, Region
from kvferry.loggers import logger_of
from kvferry.staging.accelerator import ThreadStreams
from kvferry.staging.host import HostKernels, fastest
from kvferry.staging.kernels import Kernels, Watch, unwatched
from kvferry.staging.sharing import CudaSharing, MappedCopies

log = logger_of(__name__)

_OR_ELSE = "or take KVFERRY_PATH=direct, which copies nothing"


def require_cuda(device: Device) -> None:
    """Checks that torch can use a GPU of NVIDIA's. One of AMD's has the same names in torch, and another driver.

    Raises:
        TransportUnavailableError: if torch is missing, or this GPU is, or it is not of that kind.
    """
    _require("torch", "pip install 'torch>=2.4'")
    import torch

    if torch.version.hip is not None:
        raise TransportUnavailableError(
            f"{device}: torch {torch.__version__} is for AMD's GPUs (ROCm {torch.version.hip}), and kvferry copies on "
            "NVIDIA's alone, by CUDA's driver: put the pool into CPU memory"
        )
    if not torch.cuda.is_available():
        raise TransportUnavailableError(
            f"{device}: a GPU asked for where there is none that torch {torch.__version__} can use (its CUDA version: "
            f"{torch.version.cuda}): put the pool into CPU memory, or install a driver and a CUDA build of torch"
        )
    if not 0 <= device.index < torch.cuda.device_count():
        raise TransportUnavailableError(
            f"{device}: torch sees {torch.cuda.device_count()} GPUs here, numbered from 0 (CUDA_VISIBLE_DEVICES hides "
            "others)"
        )


def require_triton() -> None:
    """Checks that Triton can be imported.

    Raises:
        TransportUnavailableError: saying how to install it.
    """
    _require("triton", "pip install 'triton>=3.4' (CUDA builds of torch bring it along)")


def _require(module: str, remedy: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise TransportUnavailableError(
            f"gathering into staging memory needs {module}, which cannot be imported ({error}): {remedy}, {_OR_ELSE}"
        ) from error


def kernels_for(regions: Sequence[Region], device: Device, watch: Watch = unwatched) -> Kernels:
    """Makes the kernels for a pool. On a GPU it compiles the most usual ones, so that the first chunk need not wait.

    Args:
        regions: the pool's memory, as `RankLayout.regions` gives it. It must outlive the kernels.
        device: where it is.
        watch: is put around what the kernels do without the interpreter's lock: compiled copies, and waits for a GPU.

    Raises:
        TransportUnavailableError: if torch, Triton or the GPU is missing, saying what to do.
    """
    if device.kind is MemoryKind.DRAM:
        copy, problem = fastest(watch=watch)
        if problem:
            log.warning("blocks are copied by the interpreter, which is slow (`kvferry doctor` has more): %s", problem)
        return HostKernels(regions, copy)
    require_cuda(device)
    require_triton()
    import torch

    from kvferry.staging.cuda import CudaAccelerator
    from kvferry.staging.gpu import GpuKernels

    kernels = GpuKernels(regions, CudaAccelerator(device.index, watch=watch))
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
