"""What the connector builds on in vLLM from 0.33 on, and what 0.33 does elsewhere than the versions before it."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.engines.contract import Fields, Line, Mentions, Signature, Uses

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"
_CORE = "vllm.v1.engine.core:EngineCore"
_WORKER = "vllm.v1.worker"


HANDSHAKE = "get_kv_connector_handshake_metadata"
TURNS = "adjust_dcp_kv_cache_interleave_size"
FOUND = "prefill ranks are found from then on, once graphs are captured"
SETTLED = "in which turns ranks take tokens is settled before ours reads it"


def since_0_33() -> Iterator[Line]:
    """Yields what vLLM has, and calls, from 0.33 on."""
    for name, parameters in {
        "supports_sleep_mode": "cls, kv_transfer_config",
        "unregister_kv_caches": "self",
        "restore_kv_caches": "self",
    }.items():
        yield Signature(f"{_BASE}.{name}", parameters, "vLLM calls ours so")
    worker = f"{_WORKER}.gpu_worker:Worker"
    for caller in ("sleep", "discard"):
        yield Uses(f"{worker}.{caller}", ("unregister_kv_caches",), "memory is not written to that is given back")
    yield Uses(f"{worker}.wake_up", ("restore_kv_caches",), "new memory is registered")
    calls = "_set_kv_connector_handshake_metadata"
    yield Mentions(f"{_CORE}.__init__", ("_initialize_kv_caches", calls), FOUND)
    yield Mentions(f"{_CORE}.{calls}", (HANDSHAKE,), FOUND)
    yield Mentions(f"{_CORE}._initialize_kv_caches", (TURNS, "set_kv_cache_layout"), SETTLED)
    last = f"{_WORKER}.gpu.kv_connector:ActiveKVConnector.finalize_step"
    yield Uses(last, ("wait_for_save",), "pages leave so where the newer model runner drafts")
    yield from _drafts()


def _drafts() -> Iterator[Line]:
    """What says which layers are a draft model's: vLLM marks them before it asks what they cache."""
    marked = "layers are a draft model's by it"
    layer = "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase"
    yield Fields(layer, ("is_draft_layer",), marked)
    for drafts in (
        "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.load_model",
        f"{_WORKER}.gpu.spec_decode.speculator:DraftModelSpeculator.load_model",
    ):
        yield Uses(drafts, ("is_draft_layer",), marked)
    for asks in (
        f"{_WORKER}.gpu_model_runner:GPUModelRunner.get_kv_cache_spec",
        f"{_WORKER}.gpu.attn_utils:get_kv_cache_spec",
    ):
        yield Mentions(asks, ("is_draft_layer", "is_draft"), "a cache is a draft's where its layer is marked")
