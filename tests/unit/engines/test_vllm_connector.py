"""The class that vLLM loads hands on what vLLM asks, on modules made up here; tests/real_engines has the real ones."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvferry.engines.contract import Signature
from kvferry.engines.engine_code import Imported
from kvferry.engines.vllm.caches import CacheGroup
from kvferry.engines.vllm.contract_0_33 import since_0_33

MODULE = "kvferry.engines.vllm.connector"


class Status(Enum):
    FINISHED_STOPPED = 1
    FINISHED_LENGTH_CAPPED = 2
    FINISHED_ABORTED = 3


class Factory:
    """As vLLM's, which knows nobody yet."""

    known: dict[str, tuple[str, str]]

    @classmethod
    def get_connector_class_by_name(cls, name: str) -> Any:
        if name not in cls.known:
            raise ValueError(f"Connector {name} is not registered.")
        return cls.known[name]

    @classmethod
    def register_connector(cls, name: str, module: str, class_name: str) -> None:
        cls.known[name] = module, class_name


NAMES: dict[str, dict[str, Any]] = {
    "vllm": {},
    "vllm.distributed.kv_transfer.kv_connector.factory": {"KVConnectorFactory": Factory},
    "vllm.distributed.kv_transfer.kv_connector.v1.base": {
        name: type(name, (), {})
        for name in (
            "KVConnectorBase_V1",
            "KVConnectorMetadata",
            "KVConnectorRole",
            "KVConnectorTransferResults",
            "SupportsHMA",
        )
    },
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics": {
        name: type(name, (), {}) for name in ("KVConnectorPromMetrics", "KVConnectorStats")
    },
    "vllm.v1.metrics.utils": {"create_metric_per_engine": None},
    "vllm.model_executor.layers.mamba.mamba_utils": {"is_conv_state_dim_first": None},
    "vllm.platforms": {"current_platform": None},
    "vllm.v1.kv_cache_interface": {
        name: type(name, (), {})
        for name in ("ChunkedLocalAttentionSpec", "MambaSpec", "SlidingWindowSpec", "UniformTypeKVCacheSpecs")
    },
    "vllm.v1.request": {"RequestStatus": Status},
}
"""As much of vLLM as the connector imports."""


@pytest.fixture
def connector_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The connector's module, imported with those."""
    Factory.known = {}
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    for name, contents in NAMES.items():
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            package = ModuleType(".".join(parts[:count]))
            package.__path__ = []
            if package.__name__ not in sys.modules or count == len(parts):
                monkeypatch.setitem(sys.modules, package.__name__, package)
        vars(sys.modules[name]).update(contents)
    ours = (MODULE, "kvferry.engines.vllm.configuration", "kvferry.engines.vllm.metrics")
    for name in ours:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(MODULE)
    for name in ours:
        sys.modules.pop(name, None)


class Scheduler:
    """Writes down what it is asked; every request's blocks are to be kept."""

    def __init__(self) -> None:
        self.ended: list[tuple[str, bool]] = []

    def finished(self, request: Any, *, is_aborted: bool) -> tuple[bool, dict[str, Any]]:
        self.ended.append((request.request_id, is_aborted))
        return True, {"remote_request_id": request.request_id}


@pytest.mark.parametrize("status", Status)
def test_a_request_ends_alike_whichever_hook_is_called(connector_module: Any, status: Status):
    """Beside a connector without hybrid caches MultiConnector calls the one, vLLM and MultiConnector else the other."""
    connector = object.__new__(connector_module.KVFerryConnector)
    connector._scheduler = scheduler = Scheduler()
    connector.changes = SimpleNamespace(ended=lambda _: None, asked_about_no_more=lambda _: None)
    request = SimpleNamespace(request_id="r", status=status)
    answers = [connector.request_finished_all_groups(request, ([1, 2],)), connector.request_finished(request, [1, 2])]
    assert answers == [(True, {"remote_request_id": "r"})] * 2, "its blocks may be read until the workers say otherwise"
    assert scheduler.ended == [("r", status is Status.FINISHED_ABORTED)] * 2


def test_multi_connector_finds_it_by_its_name(connector_module: Any):
    """Where it looks up whose statistics it is given; before, that ended the decode engine."""
    assert Factory.known == {"KVFerryConnector": (MODULE, "KVFerryConnector")}
    connector_module.register()  # a second import


def test_it_answers_what_vllm_asks_of_sleep_since_0_33(connector_module: Any):
    assert connector_module.KVFerryConnector.supports_sleep_mode({})
    asked = [line for line in since_0_33() if isinstance(line, Signature)]
    assert len(asked) == 3
    for line in asked:
        ours = f"{MODULE}:KVFerryConnector.{line.where.rpartition('.')[2]}"
        assert replace(line, where=ours).difference(Imported()) is None


@pytest.mark.parametrize("stage", [0, 1])
def test_every_stage_is_compared_by_the_layers_of_all(
    connector_module: Any, monkeypatch: pytest.MonkeyPatch, stage: int
):
    """A stage that has no layers with windows, or no draft, is the same engine's as one that has."""
    stages = [({"a": ("full", "FLASH")}, ()), ({"b": ("window", "TRITON"), "c": ("full", "FLASH")}, ("c",))]
    told = [([("full", "FLASH")], []), ([("window", "TRITON")], [("full", "FLASH")])]
    compared: dict[str, Any] = {}

    def identity(_: Any, layers: Any, **more: Any) -> Any:
        compared.update(layers=layers, drafts=more["draft_layers"])
        return SimpleNamespace(fingerprint=dict)

    def of_all_stages(own: Any) -> list[Any]:
        assert own == told[stage]
        return told

    kept, drafts = stages[stage]
    monkeypatch.setattr(connector_module, "kept_by_layers", lambda *_: dict(kept))
    monkeypatch.setattr(connector_module, "cache_identity", identity)
    monkeypatch.setattr(connector_module, "of_all_stages", of_all_stages)
    monkeypatch.setattr(connector_module, "platform", lambda: None)
    monkeypatch.setattr(connector_module, "current_platform", SimpleNamespace(fp8_dtype=str))
    monkeypatch.setattr(connector_module.vllm, "__version__", "0", raising=False)
    connector = object.__new__(connector_module.KVFerryConnector)
    connector._vllm_config = connector._kv_cache_config = None
    connector._fingerprint(SimpleNamespace(drafts=drafts, packing=None))
    assert compared == {"layers": [("full", "FLASH"), ("window", "TRITON")], "drafts": [("full", "FLASH")]}


def test_graphs_come_in_pieces_where_layers_leave_one_by_one(connector_module: Any):
    connector = connector_module.KVFerryConnector
    assert not connector.requires_piecewise_for_cudagraph({})
    assert connector.requires_piecewise_for_cudagraph({"layer_ranges": 2})


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ({}, True),
        ({"window_tokens": 9}, False),
        ({"chunk_tokens": 16}, False),
        ({"is_prefix_cached": False}, False),
    ],
    ids=["full attention", "window", "chunks", "not in the prefix cache"],
)
def test_a_prefix_without_its_state_may_count_as_here_beside_full_attention_alone(
    connector_module: Any, others: dict[str, Any], expected: bool
):
    """Of a window, less than of full attention may be in the prefix cache, and none of it would be fetched."""
    state = CacheGroup("state", (), 1024, has_state=True)
    connector = object.__new__(connector_module.KVFerryConnector)
    connector._groups = (CacheGroup("attention", (), 16, **others), state)
    assert connector.supports_divergent_local_hybrid_hits is expected
    connector._groups += (CacheGroup("more", (), 16),)
    assert not connector.supports_divergent_local_hybrid_hits
