"""vLLM's second model runner on a CPU: it imports, and its half that calls a connector runs. The rest wants a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.v1.worker.cpu.model_runner import CPUModelRunner
from vllm.v1.worker.gpu.kv_connector import get_kv_connector
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from kvferry.engines.vllm.connector import KVFerryConnector, KVFerryMetadata
from kvferry.engines.vllm.steps import Step

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A connector that has what ours has, with its parameters, and notes what is called."""
    made = create_autospec(KVFerryConnector, instance=True)
    made.get_transfer_results.return_value = KVConnectorTransferResults(
        finished_sending={"sent"}, finished_recving={"received"}, failed_recving={"failed"}
    )
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", made)
    return made


def hooks(connector: Any) -> Sequence[str]:
    """What was called of that which is ours, and not vLLM's base class's."""
    return [name for name, _, _ in connector.method_calls if name in vars(KVFerryConnector)]


@pytest.mark.parametrize("computes", [True, False])
def test_a_step_calls_our_hooks_in_the_order_that_they_are_made_for(connector: Any, *, computes: bool):
    runner = get_kv_connector(VllmConfig(), {"layer": torch.zeros(1)})
    step: Any = SimpleNamespace(
        kv_connector_metadata=KVFerryMetadata(Step()), has_sync_kv_loads=False, finished_req_ids={"request"}
    )
    if computes:
        runner.pre_forward(step)
        runner.finish_forward()
        output = runner.post_forward(step.finished_req_ids)
    else:
        output = runner.no_forward(step).kv_connector_output
    assert hooks(connector) == [
        *("register_kv_caches", "handle_preemptions", "start_load_kv"),
        *("wait_for_save", "get_transfer_results", "get_kv_connector_stats"),
    ]
    connector.bind_connector_metadata.assert_called_once_with(step.kv_connector_metadata)
    connector.get_transfer_results.assert_called_once_with({"request"})
    assert output is not None
    assert (output.finished_sending, output.finished_recving, output.failed_recving) == (
        {"sent"},
        {"received"},
        {"failed"},
    )


def test_the_runner_itself_makes_a_stream_of_cuda_which_a_cpu_has_not():
    assert issubclass(CPUModelRunner, GPUModelRunner)
    assert "Stream" in GPUModelRunner.__init__.__code__.co_names
    with pytest.raises(RuntimeError, match="requires CUDA support"):
        torch.cuda.Stream(torch.device("cpu"))
