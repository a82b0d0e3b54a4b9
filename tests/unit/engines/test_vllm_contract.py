"""What the connector builds on in vLLM, against a vLLM that is made up: the real one is tests/real_engines'."""

from __future__ import annotations

import sys
from enum import Enum
from types import ModuleType
from typing import Any

import pytest

from kvferry.engines.contract import Contract
from kvferry.engines.vllm import contract
from kvferry.errors import EngineContractError

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


class KVConnectorRole(Enum):
    SCHEDULER = 0
    WORKER = 1


class OnlySchedulers(Enum):
    SCHEDULER = 0


def made(source: str) -> Any:
    """What the source calls `it`."""
    names: dict[str, Any] = {}
    exec(source, names)
    return names["it"]


MARKS = "lambda self, layer: setattr(layer, 'is_draft_layer', True)"
ASKS = "lambda layer: replace(layer.spec, is_draft=layer.is_draft_layer)"
NEW_IN_0_33 = {
    f"{BASE}:KVConnectorBase_V1.supports_sleep_mode": "classmethod(lambda cls, kv_transfer_config: True)",
    f"{BASE}:KVConnectorBase_V1.unregister_kv_caches": "lambda self: None",
    f"{BASE}:KVConnectorBase_V1.restore_kv_caches": "lambda self: None",
    "vllm.v1.worker.gpu_worker:Worker.sleep": "lambda self, level=1: transfer().unregister_kv_caches()",
    "vllm.v1.worker.gpu_worker:Worker.discard": "lambda self, tags: transfer().unregister_kv_caches()",
    "vllm.v1.worker.gpu_worker:Worker.wake_up": "lambda self, tags=None: transfer().restore_kv_caches()",
    "vllm.v1.engine.core:EngineCore.__init__": (
        "lambda self, config: self._initialize_kv_caches(config) or self._set_kv_connector_handshake_metadata()"
    ),
    "vllm.v1.engine.core:EngineCore._set_kv_connector_handshake_metadata": (
        "lambda self: self.model_executor.get_kv_connector_handshake_metadata()"
    ),
    "vllm.v1.engine.core:EngineCore._initialize_kv_caches": (
        "lambda self, config: self.set_kv_cache_layout(config.adjust_dcp_kv_cache_interleave_size())"
    ),
    "vllm.v1.worker.gpu.kv_connector:ActiveKVConnector.finalize_step": "lambda self: self.kv_connector.wait_for_save()",
    "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase.__annotations__": "{'is_draft_layer': bool}",
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.load_model": MARKS,
    "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.load_model": MARKS,
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_kv_cache_spec": ASKS,
    "vllm.v1.worker.gpu.attn_utils:get_kv_cache_spec": ASKS,
}
"""What vLLM 0.33 has that 0.32 has not, as far as ours builds on it."""


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's module with the interface of connectors, as far as ours builds on it, and no other module of vLLM's."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    parts = BASE.split(".")
    for count in range(1, len(parts) + 1):
        package = ModuleType(".".join(parts[:count]))
        package.__path__ = []
        monkeypatch.setitem(sys.modules, package.__name__, package)
    module: Any = sys.modules[BASE]
    hooks = {
        name: parameters.replace("=", "=None") for name, parameters in contract._HOOKS.items() if name != "__init__"
    }
    body = "\n".join(f"    def {name}({parameters}): ..." for name, parameters in hooks.items())
    source = f"""
class it:
    def __init__(self, vllm_config, role, kv_cache_config):
        self._vllm_config, self._kv_transfer_config, self._kv_cache_config = vllm_config, role, kv_cache_config
    def _get_connector_metadata(self): ...
{body}
"""
    module.KVConnectorBase_V1 = made(source)
    hybrid = "class it:\n    def request_finished_all_groups(self, request, block_ids): ..."
    results = "class it:\n    finished_sending: int\n    finished_recving: int\n    failed_recving: int"
    module.SupportsHMA = made(hybrid)
    module.KVConnectorTransferResults = made(results)
    module.KVConnectorRole = KVConnectorRole
    return module


def broken() -> tuple[str, ...]:
    return Contract("vLLM", (), tuple(contract.hook_lines())).broken()


def test_a_connector_interface_as_it_was(base: Any):
    assert broken() == ()


def test_a_renamed_hook_is_named(base: Any):
    del base.KVConnectorBase_V1.get_transfer_results
    assert broken() == (
        f"{BASE}:KVConnectorBase_V1.get_transfer_results is gone: there is no 'get_transfer_results' "
        "(vLLM calls ours so)",
    )


def test_a_changed_signature_is_named(base: Any):
    base.KVConnectorBase_V1.update_state_after_alloc = made("def it(self, request, blocks, tokens, *, tier=None): ...")
    assert broken() == (
        f"{BASE}:KVConnectorBase_V1.update_state_after_alloc takes (self, request, blocks, tokens, *, tier=), and took "
        "(self, request, blocks, num_external_tokens) (vLLM calls ours so)",
    )


def test_a_missing_member_is_named(base: Any):
    base.KVConnectorRole = OnlySchedulers
    assert broken() == (f"{BASE}:KVConnectorRole: WORKER is gone (ours is made for one of them)",)


@pytest.fixture
def newer(base: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives vLLM what is new in 0.33; returns what gives a function another source."""

    def give(where: str, source: str) -> None:
        name, _, inside = where.partition(":")
        of, _, function = inside.partition(".")
        if name not in sys.modules:
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        module = sys.modules[name]
        if not function:
            setattr(module, of, eval(source))
            return
        if not hasattr(module, of):
            setattr(module, of, type(of, (), {}))
        setattr(getattr(module, of), function, eval(source))

    for where, source in NEW_IN_0_33.items():
        give(where, source)
    return give


IN_0_33 = Contract("vLLM", (), (*contract.hook_lines(), *contract.SINCE_0_33))


def test_what_is_new_in_0_33_as_it_is(newer: Any):
    assert IN_0_33.broken() == IN_0_33.moved() == ()


@pytest.mark.parametrize(
    ("where", "source", "said"),
    [
        (
            f"{BASE}:KVConnectorBase_V1.restore_kv_caches",
            "lambda self, kv_caches: None",
            "takes (self, kv_caches), and took (self) (vLLM calls ours so)",
        ),
        (
            f"{BASE}:KVConnectorBase_V1.supports_sleep_mode",
            "classmethod(lambda cls: True)",
            "takes (cls), and took (cls, kv_transfer_config) (vLLM calls ours so)",
        ),
        (
            "vllm.v1.worker.gpu_worker:Worker.discard",
            "lambda self, tags: None",
            "does not use unregister_kv_caches any more (memory is not written to that is given back)",
        ),
        (
            "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.load_model",
            "lambda self, layer: None",
            "does not use is_draft_layer any more (layers are a draft model's by it)",
        ),
    ],
    ids=["restore", "supports", "discard", "drafts"],
)
def test_what_is_new_in_0_33_and_has_changed_is_named(newer: Any, where: str, source: str, said: str):
    newer(where, source)
    assert IN_0_33.broken() == (f"{where} {said}",)


def test_what_was_merely_read_of_0_33_and_has_moved_stops_nothing(newer: Any):
    where = "vllm.v1.engine.core:EngineCore._set_kv_connector_handshake_metadata"
    newer(where, "lambda self: None")
    assert IN_0_33.broken() == ()
    assert IN_0_33.moved() == (
        f"{where} does not use get_kv_connector_handshake_metadata any more (prefill ranks are found from then on, "
        "once graphs are captured)",
    )


def test_a_vllm_with_nothing_of_it_stops_the_server(base: Any, monkeypatch: pytest.MonkeyPatch):
    """What vLLM asks for is the class: it is not to be had, and nothing of vLLM's is imported for it."""
    vllm: Any = sys.modules["vllm"]
    vllm.__version__ = "0.50.0"
    import kvferry.engines.vllm

    with pytest.raises(EngineContractError) as caught:
        kvferry.engines.vllm.KVFerryConnector  # noqa: B018
    said = str(caught.value)
    assert said.startswith("kvferry's plug-in does not fit vLLM 0.50.0, and refuses to serve with it: vllm.v1.core.")
    assert "vllm.platforms cannot be imported" in said
    assert said.endswith("install one of these, or a kvferry that knows vLLM 0.50.0")


def test_without_vllm_its_version_is_unknown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert contract.version() == "?"


def test_every_line_says_what_it_is_for():
    for line in (*contract.CONTRACTS[-1].lines, *contract.CPU_LINES):
        assert line.where.startswith("vllm.")
        assert line.needed_for
