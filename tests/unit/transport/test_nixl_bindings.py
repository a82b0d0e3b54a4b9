"""Which of NIXL's wheels is loaded where several are installed."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest

from kvferry.transport.nixl import bindings


@pytest.mark.parametrize(
    ("cuda", "first"),
    [("12.8", "nixl_cu12._bindings"), ("13.0", "nixl_cu13._bindings"), (None, "nixl_cu13._bindings")],
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


def test_torch_is_not_imported_for_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert bindings.torch_cuda_major() is None
    assert bindings.in_order(None) == bindings.BINDINGS
    assert "torch" not in sys.modules


@pytest.mark.parametrize(
    ("loaded", "cuda", "is_other"),
    [
        ("nixl_cu13._bindings", "12.8", True),
        ("nixl_cu12._bindings", "13.0", True),
        ("nixl_cu13._bindings", "13.0", False),
        ("nixl._bindings", "12.8", False),
        ("nixl_cu13._bindings", None, False),
    ],
)
def test_a_wheel_for_another_cuda_than_torchs_is_said(
    monkeypatch: pytest.MonkeyPatch, loaded: str, cuda: str | None, is_other: bool
):
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(cuda=cuda)))
    said = bindings.why_other_cuda(loaded)
    assert bool(said) is is_other
    assert not said or f"CUDA {str(cuda)[:2]}" in said
