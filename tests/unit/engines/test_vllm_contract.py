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
