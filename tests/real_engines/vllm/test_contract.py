"""The vLLM that is installed has what the connector builds on; one that has changed stops the server, and is named."""

from __future__ import annotations

import enum
import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from examples.tiny_model import write
from proof.engine_contracts.page import Verdict
from tests.real_engines.contracts import checked, doctored, installed
from tests.real_engines.vllm.engine import EngineError, EngineProcess, Shape
from tests.support.engine_wheels import moved, renamed

from kvferry.engines.engine_code import find
from kvferry.engines.vllm.contract import version
from kvferry.engines.vllm.engine_names import engine_names
from kvferry.errors import EngineContractError

pytestmark = pytest.mark.timeout(300)

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


def rename_a_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    base = find(f"{BASE}:KVConnectorBase_V1")
    monkeypatch.setattr(base, "get_results", base.get_transfer_results, raising=False)
    monkeypatch.delattr(base, "get_transfer_results")


def change_a_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    def update_state_after_alloc(self: Any, request: Any, blocks: Any, num_external_tokens: int, tier: str) -> None: ...

    base = find(f"{BASE}:KVConnectorBase_V1")
    monkeypatch.setattr(base, "update_state_after_alloc", update_state_after_alloc)


def drop_a_member(monkeypatch: pytest.MonkeyPatch) -> None:
    class RequestStatus(enum.IntEnum):
        WAITING = 1
        FINISHED_STOPPED = 2

    monkeypatch.setattr(find("vllm.v1.request"), "RequestStatus", RequestStatus)


def stop_calling_a_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    def _update_from_kv_xfer_finished(self: Any, output: Any) -> None: ...

    scheduler = find("vllm.v1.core.sched.scheduler:Scheduler")
    monkeypatch.setattr(scheduler, "_update_from_kv_xfer_finished", _update_from_kv_xfer_finished)


def connector_class(name: str = "KVFerryConnector") -> Any:
    """Asks for the class as vLLM does when a server starts."""
    factory = find("vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory")
    transfer = find("vllm.config:KVTransferConfig")
    return factory.get_connector_class(
        transfer(kv_connector=name, kv_connector_module_path="kvferry.engines.vllm", kv_role="kv_both")
    )


def said_by_us(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What kvferry has logged; vLLM logs too while it is imported."""
    return [record.getMessage() for record in caplog.records if record.name.partition(".")[0] == "kvferry"]


def test_every_line_holds_and_the_version_was_tried(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "kvferry"):
        assert connector_class().__name__ == "KVFerryConnector"
    assert not said_by_us(caplog)


def test_by_the_name_of_vllms_own_connector_and_our_path_vllm_loads_ours():
    """For gateways that refuse other names, such as Dynamo's handler; alone, and within a MultiConnector."""
    factory = find("vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory")
    assert connector_class("NixlConnector") is connector_class()
    assert connector_class() is factory.get_connector_class_by_name("KVFerryConnector"), "its statistics are found so"
    assert connector_class() is not factory.get_connector_class_by_name("NixlConnector")


def test_engines_have_the_names_that_gateways_are_told():
    """As vLLM's own classes say it; those of data-parallel ranks are formed in `run_engine_core`."""
    parallel, transfer = find("vllm.config:ParallelConfig"), find("vllm.config:KVTransferConfig")
    (config, alone) = (
        SimpleNamespace(
            kv_transfer_config=transfer(kv_connector="X", kv_role="kv_producer", engine_id="prefill-0"),
            parallel_config=parallel(data_parallel_size=count, data_parallel_size_local=count),
        )
        for count in (2, 1)
    )
    assert engine_names(config) == {0: "prefill-0_dp0", 1: "prefill-0_dp1"}
    assert engine_names(alone) == {0: "prefill-0"}
    core = find("vllm.v1.engine.core:EngineCoreProc.run_engine_core")
    assert 'kv_transfer_config.engine_id}_dp{dp_rank}"' in inspect.getsource(core)


def test_a_version_that_was_not_tried_starts_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(find("vllm"), "__version__", "0.32.99")
    with caplog.at_level(logging.WARNING, "kvferry"):
        connector_class()
    (said,) = said_by_us(caplog)
    assert said.startswith("vLLM 0.32.99 is not among the versions that kvferry's plug-in was tried with")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (rename_a_hook, f"{BASE}:KVConnectorBase_V1.get_transfer_results is gone: there is no 'get_transfer_results'"),
        (
            change_a_signature,
            f"{BASE}:KVConnectorBase_V1.update_state_after_alloc takes (self, request, blocks, num_external_tokens, "
            "tier), and took (self, request, blocks, num_external_tokens)",
        ),
        (drop_a_member, "vllm.v1.request:RequestStatus: FINISHED_LENGTH_CAPPED is gone"),
        (
            stop_calling_a_hook,
            "Scheduler._update_from_kv_xfer_finished does not use update_connector_output, finished_sending, "
            "finished_recving, _free_blocks any more (blocks are freed, and requests go on, so)",
        ),
    ],
)
def test_a_vllm_that_has_changed_is_refused(
    change: Callable[[pytest.MonkeyPatch], None], said: str, monkeypatch: pytest.MonkeyPatch
):
    change(monkeypatch)
    with pytest.raises(EngineContractError) as caught:
        connector_class()
    assert said in str(caught.value)
    assert "refuses to serve with it" in str(caught.value)


def test_a_vllm_that_is_not_all_that_was_read_of_it_serves_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def _handle_failed_recving(self: Any, *_: Any) -> None: ...

    scheduler = find("vllm.v1.core.sched.scheduler:Scheduler")
    monkeypatch.setattr(scheduler, "_handle_failed_recving", _handle_failed_recving)
    with caplog.at_level(logging.WARNING, "kvferry"):
        assert connector_class().__name__ == "KVFerryConnector"
    (said,) = said_by_us(caplog)
    assert said.startswith(f"vLLM {version()} is not all that was read of it when kvferry's plug-in was written: ")
    assert (
        "Scheduler._handle_failed_recving does not use recompute_kv_load_failures any more (failures follow the policy)"
        in said
    )


def test_a_vllm_that_ends_otherwise_serves_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def run_engine_core(*_: Any, **__: Any) -> None: ...

    monkeypatch.setattr(find("vllm.v1.engine.core:EngineCoreProc"), "run_engine_core", staticmethod(run_engine_core))
    with caplog.at_level(logging.WARNING, "kvferry"):
        connector_class()
    (said,) = said_by_us(caplog)
    assert (
        "vllm.v1.engine.core:EngineCoreProc.run_engine_core does not use signal_handler, SIGTERM, shutdown_timeout any "
        "more (ours is called before its handler). A server that is told to end may not drain: run kvferry drain"
        in said
    )


def test_its_sources_say_what_it_says_when_it_is_imported():
    found = checked("vllm", version(), installed("vllm"))
    assert (found.broken, found.moved, found.lacking) == ((), (), ())
    assert found.verdict is Verdict.TRIED


def test_a_wheel_with_a_renamed_hook_stops_the_server(tmp_path: Path):
    hook = f"{BASE}:KVConnectorBase_V1.get_transfer_results"
    found = doctored("vllm", version(), {BASE: renamed("get_transfer_results", "get_results")}, tmp_path)
    assert found.broken == (f"{hook} is gone: there is no 'get_transfer_results' (vLLM calls ours so)",)
    assert found.verdict is Verdict.BROKEN


def test_a_wheel_in_which_something_has_moved_that_was_merely_read_warns(tmp_path: Path):
    core, method = "vllm.v1.engine.core", "_initialize_kv_caches"
    found = doctored("vllm", version(), {core: moved(method, "_make_caches")}, tmp_path)
    assert found.broken == ()
    assert found.moved == (
        f"{core}:EngineCore.{method} does not use compile_or_warm_up_model any more (graphs are captured so): now in "
        f"{core}:EngineCore._make_caches",
    )
    assert found.verdict is Verdict.TRIED


@pytest.mark.servers
def test_a_server_whose_vllm_has_changed_does_not_start(tmp_path: Path):
    shape = Shape(write("qwen3", tmp_path), role="kv_both", name="changed", lacks="get_transfer_results")
    engine = EngineProcess(shape)
    try:
        with pytest.raises(EngineError, match=r"refuses to serve with it: .*get_transfer_results is gone"):
            engine.started()
    finally:
        engine.close()
