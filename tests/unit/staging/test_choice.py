"""Which kernels a pool gets, and what is said if something they need is missing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import ParamSpec, TypeVar

import pytest

from kvferry.errors import TransportUnavailableError
from kvferry.layout import Device, MemoryKind, Region
from kvferry.staging import allocate, kernels_for
from kvferry.staging.choice import bind_thread, mapped_copies
from kvferry.staging.host import HostKernels

P = ParamSpec("P")
Returned = TypeVar("Returned")

GPU = Device(MemoryKind.VRAM, 1)
REGIONS = [Region(4096, 4096)]


def test_a_pool_in_cpu_memory_gets_kernels_that_need_no_torch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert isinstance(kernels_for(REGIONS, Device()), HostKernels)


def test_without_torch_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        TransportUnavailableError, match=r"needs torch.*pip install 'torch.*KVFERRY_PATH=direct"
    ) as caught:
        kernels_for(REGIONS, GPU)
    assert isinstance(caught.value.__cause__, ImportError)


def test_without_a_gpu_the_error_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(TransportUnavailableError, match="VRAM:1: a GPU asked for where there is none"):
        kernels_for(REGIONS, GPU)


@pytest.mark.parametrize(
    "asks",
    [
        lambda: kernels_for(REGIONS, GPU),
        lambda: mapped_copies(GPU),
        lambda: bind_thread(GPU),
        lambda: allocate(1 << 20, GPU),
    ],
    ids=["kernels", "mapped", "bind", "memory"],
)
def test_a_gpu_of_amds_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch, asks: Callable[[], object]):
    """Its torch says that it has CUDA, and what is asked next would fail on a library of NVIDIA's."""
    monkeypatch.setattr("torch.version.hip", "6.4")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(TransportUnavailableError, match=r"^VRAM:1: .*\(ROCm 6\.4.*put the pool into CPU memory$"):
        asks()


def test_a_gpu_that_is_not_there_is_named_with_how_many_are(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(TransportUnavailableError, match=r"VRAM:1: torch sees 1 GPUs here.*CUDA_VISIBLE_DEVICES"):
        kernels_for(REGIONS, GPU)


def test_without_triton_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(TransportUnavailableError, match=r"needs triton.*pip install 'triton.*KVFERRY_PATH=direct"):
        kernels_for(REGIONS, GPU)


def test_a_wait_for_a_gpu_is_watched_which_spins_without_the_interpreters_lock(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton", reason="Triton has no wheels for this platform")
    from kvferry.staging.cuda import CudaAccelerator

    said: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: said.append("waited"))
    monkeypatch.setattr("torch.cuda.Stream", lambda *given, **named: stream)

    def watch(call: Callable[P, Returned], /) -> Callable[P, Returned]:
        def watched(*given: P.args, **named: P.kwargs) -> Returned:
            returned = call(*given, **named)
            said.append("watched")
            return returned

        return watched

    CudaAccelerator(0, watch=watch).stream().synchronize()
    assert said == ["waited", "watched"]
