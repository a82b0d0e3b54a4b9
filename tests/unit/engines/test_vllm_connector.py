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
from kvferry.engines.vllm.contract import SINCE_0_33

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


class Base:
    """As vLLM's, which keeps what it is made with."""

    def __init__(self, vllm_config: Any, role: str, kv_cache_config: Any) -> None:
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._kv_transfer_config = vllm_config.kv_transfer_config


NAMES: dict[str, dict[str, Any]] = {
    "vllm": {},
    "vllm.distributed.kv_transfer.kv_connector.factory": {"KVConnectorFactory": Factory},
    "vllm.distributed.kv_transfer.kv_connector.v1.base": {
        "KVConnectorBase_V1": Base,
        "KVConnectorRole": SimpleNamespace(SCHEDULER="scheduler", WORKER="worker"),
        **{name: type(name, (), {}) for name in ("KVConnectorMetadata", "KVConnectorTransferResults", "SupportsHMA")},
    },
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics": {
        name: type(name, (), {}) for name in ("KVConnectorPromMetrics", "KVConnectorStats")
    },
    "vllm.v1.metrics.utils": {"create_metric_per_engine": None},
    "vllm.model_executor.layers.mamba.mamba_utils": {"is_conv_state_dim_first": None},
    "vllm.platforms": {"current_platform": SimpleNamespace(device_type="cpu", fp8_dtype=str)},
    "vllm.v1.engine.core": {"EngineCore": None},
    "vllm.v1.executor.abstract": {"Executor": None},
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

    def drain(self) -> None:
        pass

    def finished(self, request: Any, *, is_aborted: bool) -> tuple[bool, dict[str, Any]]:
        self.ended.append((request.request_id, is_aborted))
        return True, {"remote_request_id": request.request_id}


def made(
    module: Any, monkeypatch: pytest.MonkeyPatch, role: str, groups: tuple[CacheGroup, ...] = (), **stand_ins: Any
) -> Any:
    """A connector, made as vLLM makes it.

    Args:
        groups: what vLLM's configuration of its caches says.
        stand_ins: for what the connector's module calls by these names.
    """
    checks = ("refuse_what_would_be_wrong", "buffer_notice", "held_back_tokens", "compares_content", "watch")
    nothing = dict.fromkeys((*checks, "watch_for_termination"), lambda *_, **__: None)
    for name, instead in (nothing | {"groups_of": lambda *_: groups} | stand_ins).items():
        monkeypatch.setattr(module, name, instead)
    transfer = SimpleNamespace(
        engine_id="engine",
        is_kv_producer=True,
        is_kv_consumer=True,
        kv_buffer_device="cpu",
        kv_connector_extra_config={},
    )
    config = SimpleNamespace(
        kv_transfer_config=transfer, instance_id="start", parallel_config=SimpleNamespace(pipeline_parallel_size=1)
    )
    return module.KVFerryConnector(config, role, SimpleNamespace(num_blocks=1, needs_kv_cache_zeroing=False))


@pytest.mark.parametrize("status", Status)
def test_a_request_ends_alike_whichever_hook_is_called(
    connector_module: Any, monkeypatch: pytest.MonkeyPatch, status: Status
):
    """Beside a connector without hybrid caches MultiConnector calls the one, vLLM and MultiConnector else the other."""
    scheduler = Scheduler()
    changes = SimpleNamespace(ended=lambda _: None, asked_about_no_more=lambda _: None)
    connector = made(
        connector_module,
        monkeypatch,
        "scheduler",
        SchedulerSide=lambda *_, **__: scheduler,
        Changes=lambda *_, **__: changes,
    )
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
    asked = [line for line in SINCE_0_33 if isinstance(line, Signature)]
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
        return SimpleNamespace(fingerprint=lambda: {"layers": layers, "drafts": more["draft_layers"]})

    class Worker:
        def __init__(self, *_: Any, fingerprint: dict[str, str], **__: Any) -> None:
            compared.update(fingerprint)

    def of_all_stages(own: Any) -> list[Any]:
        assert own == told[stage]
        return told

    kept, drafts = stages[stage]
    monkeypatch.setattr(connector_module.vllm, "__version__", "0", raising=False)
    of_vllm = ("check_turns", "describe", "heads_of", "kept_states", "cache_forms", "platform", "drain_timeout_s")
    nothing: dict[str, Any] = dict.fromkeys(of_vllm, lambda *_, **__: None)
    connector = made(
        connector_module,
        monkeypatch,
        "worker",
        **nothing,
        worker_place=lambda _: SimpleNamespace(tokens=None, in_model=None, in_engine=None),
        model_shape=lambda *_: SimpleNamespace(drafts=drafts, packing=None),
        kept_by_layers=lambda *_: dict(kept),
        cache_identity=identity,
        of_all_stages=of_all_stages,
        WorkerSide=Worker,
    )
    connector.register_kv_caches({})
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
    connector_module: Any, monkeypatch: pytest.MonkeyPatch, others: dict[str, Any], expected: bool
):
    """Of a window, less than of full attention may be in the prefix cache, and none of it would be fetched."""
    state = CacheGroup("state", (), 1024, has_state=True)
    groups: tuple[CacheGroup, ...] = (CacheGroup("attention", (), 16, **others), state)
    assert made(connector_module, monkeypatch, "worker", groups).supports_divergent_local_hybrid_hits is expected
    groups += (CacheGroup("more", (), 16),)
    assert not made(connector_module, monkeypatch, "worker", groups).supports_divergent_local_hybrid_hits
