"""Which of NIXL's wheels is loaded where several are installed."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest

from kvferry.errors import TransportUnavailableError
from kvferry.transport.nixl import bindings
from kvferry.transport.nixl.nixl_posts import post_calls

CUDA_13, CUDA_12, WHICHEVER = bindings.BINDINGS


@pytest.mark.parametrize(
    ("cuda", "first"),
    [("12.8", CUDA_12), ("13.0", CUDA_13), (None, CUDA_13)],
)
def test_the_one_for_torchs_cuda_comes_first(monkeypatch: pytest.MonkeyPatch, cuda: str | None, first: str):
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(cuda=cuda)))
    asked: list[str] = []

    def load(name: str) -> ModuleType:
        asked.append(name)
        return sys

    monkeypatch.setattr(importlib, "import_module", load)
    bindings.load_bindings()
    assert asked == [first]
    assert set(bindings.in_order(bindings.torch_cuda_major())) == set(bindings.BINDINGS)


def test_the_c_interface_of_a_version_that_is_not_known_is_not_called(monkeypatch: pytest.MonkeyPatch):
    nixl = bindings.load_bindings()
    assert post_calls(nixl).post_xfer_req
    monkeypatch.setattr("kvferry.transport.nixl.nixl_posts.installed_version", lambda package: "1.6.0")
    with pytest.raises(TransportUnavailableError, match=r"1\.6\.0"):
        post_calls(nixl)


def test_torch_is_not_imported_for_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert bindings.torch_cuda_major() is None
    assert bindings.in_order(None) == bindings.BINDINGS
    assert "torch" not in sys.modules


@pytest.mark.parametrize(
    ("loaded", "cuda", "is_other"),
    [
        (CUDA_13, "12.8", True),
        (CUDA_12, "13.0", True),
        (CUDA_13, "13.0", False),
        (WHICHEVER, "12.8", False),
        (CUDA_13, None, False),
    ],
)
def test_a_wheel_for_another_cuda_than_torchs_is_said(
    monkeypatch: pytest.MonkeyPatch, loaded: str, cuda: str | None, is_other: bool
):
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(cuda=cuda)))
    said = bindings.why_other_cuda(loaded)
    assert bool(said) is is_other
    assert not said or f"CUDA {str(cuda)[:2]}" in said
