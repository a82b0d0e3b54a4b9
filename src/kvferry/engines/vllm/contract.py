"""What the connector builds on in vLLM, line by line; `kvferry.engines.contract` says how it is checked.

All of it is checked in every process of vLLM's before the connector is imported: a server whose vLLM has changed does
not start, and says what has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from kvferry.engines.contract import (
    Attributes,
    Call,
    Contract,
    Fields,
    Line,
    Members,
    Mentions,
    Present,
    Signature,
    Uses,
    enforce,
    holds,
    lines,
)
from kvferry.engines.engine_code import MissingError, find

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
_BASE = f"{_V1}.base:KVConnectorBase_V1"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"

_HOOKS = {
    "__init__": "self, vllm_config, role, kv_cache_config",
    "shutdown": "self",
    "register_kv_caches": "self, kv_caches",
    "get_handshake_metadata": "self",
    "handle_preemptions": "self, kv_connector_metadata",
    "start_load_kv": "self, forward_context, **kwargs",
    "wait_for_layer_load": "self, layer_name",
    "save_kv_layer": "self, layer_name, kv_layer, attn_metadata, **kwargs",
    "wait_for_save": "self",
    "get_transfer_results": "self, finished_req_ids",
    "get_kv_connector_stats": "self",
    "build_kv_connector_stats": "cls, data=",
    "get_required_kvcache_layout": "cls, vllm_config",
    "build_prom_metrics": "cls, vllm_config, metric_types, labelnames, per_engine_labelvalues",
    "bind_kv_cache_manager": "self, kv_cache_manager",
    "on_new_request": "self, request",
    "get_num_new_matched_tokens": "self, request, num_computed_tokens",
    "get_loaded_kv_cache_group_ids": "self, request",
    "update_state_after_alloc": "self, request, blocks, num_external_tokens",
    "build_connector_meta": "self, scheduler_output",
    "update_connector_output": "self, connector_output",
    "request_finished": "self, request, block_ids",
}

_CORE = "vllm.v1.engine.core:EngineCore"
_INTERFACE = "vllm.v1.core.sched.interface"
_EXECUTOR = "vllm.v1.executor.abstract:Executor"
_POOL = "vllm.v1.core.block_pool:BlockPool"
_REQUEST = "vllm.v1.request:Request"
_SPECS = "vllm.v1.kv_cache_interface"
_RANKS = "vllm.distributed.parallel_state"
_CONFIG = "vllm.config.vllm:VllmConfig"
_MODEL = "vllm.config.model:ModelConfig"
_PARALLEL = "vllm.config.parallel:ParallelConfig"
_LAYER = "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase"
_WORKER = "vllm.v1.worker"
_CALLED = "vLLM calls ours so"
_READ = "ours reads it"


_NEW_IN_0_32 = frozenset({"get_loaded_kv_cache_group_ids"})
"""Which blocks a load overwrites, so that vLLM need not clear them: before, it left out all blocks of the load."""


def hook_lines(unknown: frozenset[str] = frozenset()) -> Iterator[Line]:
    """Yields what the plug-in needs of vLLM's hooks."""
    for name, parameters in _HOOKS.items():
        if name not in unknown:
            yield Signature(f"{_BASE}.{name}", parameters, _CALLED)
    yield Signature(f"{_V1}.base:SupportsHMA.request_finished_all_groups", "self, request, block_ids", _CALLED)
    yield Call(f"{_BASE}._get_connector_metadata", 1, (), "ours gets its step from it")
    yield Uses(
        f"{_BASE}.__init__", ("_vllm_config", "_kv_transfer_config", "_kv_cache_config"), "ours reads what it sets"
    )
    yield Members(f"{_V1}.base:KVConnectorRole", {"SCHEDULER": 0, "WORKER": 1}, "ours is made for one of them")
    results = {f"{_V1}.base:KVConnectorTransferResults": "finished_sending finished_recving failed_recving"}
    yield from lines(Fields, "ours reports so", results)


def _callers() -> Iterator[Line]:
    """What vLLM does with the hooks: one that it does not call any more would be missed by no signature."""
    elsewhere = {f"{_SCHEDULER}.schedule": "get_num_new_matched_tokens update_state_after_alloc"}
    yield from lines(Uses, "a decode server asks ours so whether a cache is elsewhere", elsewhere)
    hybrids = {f"{_SCHEDULER}._get_local_prefix_cache_hit": "supports_divergent_local_hybrid_hits"}
    yield from lines(Uses, "of hybrids no prefix of full attention is fetched again", hybrids)
    yield Uses(f"{_SCHEDULER}.add_request", ("on_new_request",), "prompts with recurrent state are cut so")
    told = {f"{_SCHEDULER}._build_kv_connector_meta": "build_connector_meta"}
    yield from lines(Uses, "the workers learn so what leaves and comes", told)
    sent = {f"{_SCHEDULER}._connector_finished": "request_finished_all_groups"}
    yield from lines(Uses, "blocks are kept so until they are sent", sent)
    over = "update_connector_output finished_sending finished_recving _free_blocks"
    ended = {f"{_SCHEDULER}._update_from_kv_xfer_finished": over}
    yield from lines(Uses, "blocks are freed, and requests go on, so", ended)
    failed = f"{_SCHEDULER}._handle_failed_recving"
    yield Mentions(failed, ("recompute_kv_load_failures",), "failures follow the policy")
    yield Mentions(f"{_CORE}._initialize_kv_caches", ("compile_or_warm_up_model",), "graphs are captured so")
    worker = ("start_load_kv", "wait_for_save", "get_transfer_results", "failed_recving", "get_kv_connector_stats")
    runner, called = "vllm.v1.worker.kv_connector_model_runner_mixin", "workers call ours with every step"
    yield Uses(f"{runner}:KVConnectorModelRunnerMixin._get_kv_connector_output", worker, called)
    runner, called = "vllm.v1.worker.gpu.kv_connector:ActiveKVConnector", f"{called}, in the newer model runner"
    yield Uses(f"{runner}.post_forward", worker[1:], called)
    yield Uses(f"{runner}._start_load_kv", worker[:1], called)
    yield Uses(f"{runner}.pre_forward", ("handle_preemptions",), "preempted blocks are dropped before they are reused")


def _structures() -> Iterator[Line]:
    request = (
        "request_id arrival_time num_prompt_tokens num_computed_tokens kv_transfer_params prompt_token_ids "
        "prompt_embeds _all_token_ids max_tokens status"
    )
    yield from lines(Uses, _READ, {f"{_REQUEST}.__init__": request})
    yield Call(f"{_REQUEST}.get_skip_reading_prefix_cache", 1, (), "such prompts are computed where they are")
    yield Attributes(_REQUEST, ("num_output_tokens",), "an adapter is loaded by then")
    yield Attributes("vllm.v1.request:RequestStatus", ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"), _READ)
    yield Mentions(
        "vllm.v1.engine.parallel_sampling:ParentRequest.get_child_info",
        ("request_id", "_"),
        'the choices of a request with n > 1 are told by their names, "0_<name>" and so on',
    )
    fields = {
        "sched.output:SchedulerOutput": (
            "num_scheduled_tokens preempted_req_ids kv_connector_metadata finished_req_ids"
        ),
        "kv_cache_manager:KVCacheBlocks": "blocks",
        "kv_cache_utils:KVCacheBlock": "block_id is_null",
    }
    yield from lines(Fields, _READ, {f"vllm.v1.core.{where}": names for where, names in fields.items()})
    yield Fields("vllm.v1.outputs:KVConnectorOutput", ("finished_sending", "finished_recving", "failed_recving"), _READ)
    yield Signature("vllm.v1.core.kv_cache_manager:KVCacheManager.get_blocks", "self, request_id", "ours calls it")
    yield Uses("vllm.v1.core.kv_cache_manager:KVCacheManager.__init__", ("block_pool",), "ours keeps blocks there")
    yield Call(f"{_POOL}.touch", 2, (), "blocks that are being read are kept so")
    yield Call(f"{_POOL}.free_blocks", 2, (), "blocks that were kept are given back so")
    yield Call(f"{_POOL}.get_num_free_blocks", 1, (), "what is held is given up where it is short")


def _caches() -> Iterator[Line]:
    config = f"{_SPECS}:KVCacheConfig"
    fields = {
        config: "num_blocks kv_cache_groups",
        f"{_SPECS}:KVCacheGroupSpec": "layer_names kv_cache_spec host_resident",
        f"{_SPECS}:UniformTypeKVCacheSpecs": "kv_cache_specs",
    }
    yield from lines(Fields, _READ, fields)
    attributes = {
        config: "transfer_groups transfer_group_ids select_transfer_block_ids",
        f"{_SPECS}:UniformTypeKVCacheSpecs": "first_spec",
    }
    yield from lines(Attributes, _READ, attributes)
    yield Attributes(config, ("needs_kv_cache_zeroing",), "ours clears what it loads where vLLM clears blocks")
    described = {
        f"{_SPECS}:FullAttentionSpec": "block_size head_size dtype",
        f"{_SPECS}:SlidingWindowSpec": "block_size sliding_window",
        f"{_SPECS}:ChunkedLocalAttentionSpec": "block_size attention_chunk_size",
    }
    yield from lines(Fields, "caches are described by it", described)
    heads = {f"{_SPECS}:AttentionSpec": "num_kv_heads num_head_slots max_tp_shards tokens_per_state"}
    yield from lines(Fields, "it tells how KV heads are kept", heads)
    yield Members(
        f"{_SPECS}:SparseCacheRole", {"SPARSE": "sparse", "INDEXER": "indexer"}, "caches of an indexer are refused"
    )
    yield Members("vllm.v1.kv_cache_layout:KVCacheLayout", {"LBHNC": (0, 1, 2, 3, 4)}, "ours asks for it")
    yield Fields(
        "vllm.config.compilation:CompilationConfig", ("static_forward_context",), "attention layers are listed there"
    )


def _states() -> Iterator[Line]:
    mamba, divided = "vllm.model_executor.layers.mamba", "it tells how a convolution is divided"
    spec = {f"{_SPECS}:MambaSpec": "block_size shapes dtypes mamba_type tp_replicated"}
    yield from lines(Fields, "recurrent state is described by it", spec)
    kinds = {
        "vllm.v1.attention.backends.registry:MambaAttentionBackendEnum": "MAMBA1 MAMBA2 GDN_ATTN SHORT_CONV LINEAR"
    }
    yield from lines(Attributes, divided, kinds)
    yield Call(f"{mamba}.mamba_utils:is_conv_state_dim_first", 0, (), "where a convolution's channels are")
    bound = {f"{mamba}.abstract:MambaBase.bind_kv_cache": "kv_cache get_state_shape"}
    yield from lines(Uses, "a layer has views of its states", bound)
    mixer = {f"{mamba}.mamba_mixer2:MambaMixer2.__init__": "intermediate_size n_groups ssm_state_size conv1d"}
    yield from lines(Uses, divided, mixer)


def _projections() -> Iterator[Line]:
    linear = "vllm.model_executor.layers.linear"
    projections = {
        f"{linear}:QKVParallelLinear.__init__": "total_num_kv_heads num_kv_heads num_kv_head_replicas",
        f"{linear}:ColumnParallelLinear.__init__": "tp_rank tp_size",
    }
    yield from lines(Uses, "it knows how KV heads are divided", projections)
    loader = {f"{linear}:QKVParallelLinear.weight_loader": "tp_rank num_kv_head_replicas"}
    yield from lines(Uses, "ranks that share a KV head are neighbours", loader)


def _configuration() -> Iterator[Line]:
    transfer = "vllm.config.kv_transfer:KVTransferConfig"
    read = {
        _CONFIG: (
            "model_config cache_config parallel_config compilation_config kv_transfer_config attention_config "
            "aux_output_config"
        ),
        transfer: "engine_id kv_buffer_device kv_connector_extra_config",
    }
    yield from lines(Fields, _READ, read)
    yield Attributes(transfer, ("is_kv_producer", "is_kv_consumer"), _READ)
    yield Attributes(_CONFIG, ("num_prefill_lookahead_tokens",), "as many tokens of a prompt are held back")
    yield Fields("vllm.config.attention:AttentionConfig", ("hisparse_config",), "ours refuses HiSparse")
    refused = {
        "vllm.config.aux_output:AuxOutputConfig": "enable_return_routed_experts",
        _PARALLEL: "enable_elastic_ep",
    }
    yield from lines(Fields, "ours refuses it", refused)
    sizes = {_PARALLEL: "decode_context_parallel_size prefill_context_parallel_size pipeline_parallel_size"}
    yield from lines(Fields, "which ranks share tokens and layers", sizes)
    yield Attributes(_PARALLEL, ("use_ubatching",), "layers leave one by one where a step is one part")
    yield Call(f"{_MODEL}.get_total_num_hidden_layers", 1, (), "the model's shape")
    yield Attributes(_MODEL, ("use_mla",), "any order of blocks will do for latents")
    for name in ("get_tp_group", "get_pp_group"):
        yield Call(f"{_RANKS}:{name}", 0, (), "a worker's place")
    yield Fields(f"{_RANKS}:GroupCoordinator", ("rank_in_group", "world_size"), "a worker's place")
    yield Fields(f"{_RANKS}:GroupCoordinator", ("cpu_group",), "pipeline stages tell each other what they have")


def _context_parallelism() -> Iterator[Line]:
    """What says which tokens a rank keeps. A vLLM without `dcp_sharded` does not start with any of it."""
    needed_for = "which tokens a rank keeps"
    fields = {_PARALLEL: "cp_kv_cache_interleave_size", f"{_SPECS}:KVCacheSpec": "dcp_sharded"}
    yield from lines(Fields, needed_for, fields)
    for name in ("get_pcp_group", "get_dcp_group"):
        yield Call(f"{_RANKS}:{name}", 0, (), needed_for)
    yield Uses(
        "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.__init__",
        ("dcp_sharded", "dcp_world_size", "block_size"),
        "for how many tokens a block stands",
    )


_HANDSHAKE = "get_kv_connector_handshake_metadata"
_TURNS = "adjust_dcp_kv_cache_interleave_size"
_FOUND = "prefill ranks are found from then on, once graphs are captured"
_SETTLED = "in which turns ranks take tokens is settled before ours reads it"

_UNTIL_0_33 = Mentions(f"{_CORE}.__init__", ("_initialize_kv_caches", _HANDSHAKE), _FOUND)
_IN_0_32 = Mentions(
    "vllm.distributed.kv_transfer.kv_transfer_state:ensure_kv_transfer_initialized", (_TURNS,), _SETTLED
)


def _changes() -> Iterator[Line]:
    """What tells of weights and adapters that are replaced in place, and has nobody find what they computed."""
    needed_for = "what replaces weights and adapters is noticed there"
    asked = {
        f"{_CORE}.collective_rpc": "self, method, timeout=, args=, kwargs=",
        f"{_CORE}.add_request": "self, request, request_wave=",
        f"{_CORE}.set_weight_version": "self, weight_version",
        f"{_CORE}.add_lora": "self, lora_request",
        f"{_CORE}.remove_lora": "self, lora_id",
        f"{_EXECUTOR}.init_kv_output_aggregator": "self, connector",
    }
    yield from lines(Signature, needed_for, asked)
    yield Call(f"{_CORE}.reset_prefix_cache", 1, (), needed_for)
    yield Call(f"{_CORE}.list_loras", 1, (), needed_for)
    yield Call(f"{_SCHEDULER}.get_kv_connector", 1, (), needed_for)
    updates = ("start_weight_update", "update_weights", "finish_weight_update")
    noticed = {
        f"{_CORE}.__init__": "model_executor scheduler init_kv_output_aggregator",
        **{f"vllm.v1.engine.async_llm:AsyncLLM.{name}": f"collective_rpc {name}" for name in updates},
        f"{_SCHEDULER}._handle_blocked_waiting_request": "finished_recving_kv_req_ids",
    }
    yield from lines(Uses, needed_for, noticed)
    asleep = "memory is not given back that is registered"
    for name, parameters in {"sleep": ", level=, mode=", "wake_up": ", tags=", "release_kv_cache_memory": ""}.items():
        yield Signature(f"{_CORE}.{name}", f"self{parameters}", asleep)
    yield Uses(f"{_EXECUTOR}.__init__", ("sleeping_tags",), asleep)
    yield Attributes(_SCHEDULER, ("pause_state",), "a pause waits for nobody who is paused as well")
    yield Members(f"{_INTERFACE}:PauseState", {"UNPAUSED": 0}, "ours asks whether it is paused")
    yield Call(f"{_EXECUTOR}.collective_rpc", 2, (), "workers are asked for their weights")
    yield Call("vllm.v1.worker.worker_base:WorkerBase.get_model", 1, (), "workers are asked for their weights")
    yield Uses(
        "vllm.model_executor.layers.attention.attention:set_default_quant_scales",
        ("register_buffer", "_k_scale", "_v_scale"),
        "a change of the caches' scales is a change of weights",
    )
    yield Signature(f"{_BASE}.reset_cache", "self", _CALLED)
    yield Uses(f"{_SCHEDULER}.reset_connector_cache", ("reset_cache",), _CALLED)


def _kept() -> Iterator[Line]:
    """What vLLM and connectors keep from before a change, and drop."""
    found = "nothing that old weights have computed is found again"
    several, offloading = f"{_V1}.multi_connector:MultiConnector", f"{_V1}.offloading.scheduler"
    encoded, worker = "vllm.v1.core.encoder_cache_manager:EncoderCacheManager", "vllm.v1.worker"
    mentioned = {
        f"{several}.__init__": "_connectors",
        f"{several}.reset_cache": "_connectors reset_cache",
        f"{_V1}.offloading_connector:OffloadingConnector.__init__": "connector_scheduler",
        f"{offloading}:OffloadingConnectorScheduler.__init__": (
            "manager _req_status _current_batch_allocated_block_ids"
        ),
        f"{offloading}:RequestOffloadState.update_offload_keys": "block_hashes offload_keys",
        "vllm.v1.kv_offload.tiering.manager:TieringOffloadingManager.__init__": "secondary_tiers",
        f"{_POOL}.__init__": "num_gpu_blocks",
        f"{_SCHEDULER}.__init__": "encoder_cache_manager ec_connector",
        f"{encoded}.__init__": "cached num_freeable_slots",
        f"{encoded}.can_allocate": "get_num_encoder_embeds freeable",
        f"{worker}.gpu_model_runner:GPUModelRunner.__init__": "encoder_cache",
        f"{worker}.gpu.model_runner:GPUModelRunner.__init__": "encoder_cache",
        f"{worker}.gpu.mm.encoder_cache:EncoderCache.__init__": "encoder_outputs",
        f"{_REQUEST}.__init__": "block_hashes cache_salt",
    }
    yield from lines(Uses, found, mentioned)
    yield Fields(f"{offloading}:RequestOffloadState", ("group_states",), found)
    yield Call(f"{_POOL}.evict_blocks", 2, (), found)
    yield Call(f"{encoded}.can_allocate", 5, (), found)
    yield Call(f"{_REQUEST}.update_block_hashes", 1, (), found)


def _identity() -> Iterator[Line]:
    """What says what caches are beyond their layout, and what a request's cache depends on."""
    compared = "servers are compared by it"
    fields = {
        _CONFIG: "load_config compilation_config speculative_config",
        _MODEL: (
            "model model_weights revision dtype quantization hf_text_config disable_sliding_window multimodal_config "
            "enable_sleep_mode"
        ),
        "vllm.config.cache:CacheConfig": "cache_dtype kv_cache_dtype_skip_layers enable_prefix_caching",
        "vllm.config.load:LoadConfig": "load_format download_dir",
        _PARALLEL: "tensor_parallel_size data_parallel_size enable_expert_parallel",
        "vllm.config.speculative:SpeculativeConfig": "method draft_model_config",
        "vllm.config.multimodal:MultiModalConfig": "mm_processor_cache_gb mm_hasher_algorithm",
        f"{_SPECS}:AttentionSpec": "num_kv_heads num_head_slots state_content_bytes",
        "vllm.multimodal.inputs:MultiModalFeatureSpec": "identifier modality mm_position",
        "vllm.multimodal.inputs:PlaceholderRange": "offset length",
        "vllm.lora.request:LoRARequest": "lora_name lora_int_id lora_path load_inplace",
    }
    yield from lines(Fields, compared, fields)
    yield Attributes(_MODEL, ("architecture",), compared)
    adapters = {
        "vllm.lora.worker_manager:WorkerLoRAManager._load_adapter": "get_adapter_absolute_path",
        "vllm.lora.utils:get_adapter_absolute_path": "isabs startswith expanduser exists snapshot_download",
    }
    yield from lines(Uses, "adapters are read where vLLM reads them", adapters)
    yield Call(f"{_LAYER}.get_attn_backend", 1, (), "how a layer's cache is ordered follows from its backend")
    request = {f"{_REQUEST}.__init__": "prompt_embeds lora_request mm_features cache_salt"}
    yield from lines(Uses, "requests are compared by it", request)
    yield Mentions(
        "vllm.v1.core.kv_cache_utils:generate_block_hash_extra_keys",
        ("lora_extra_keys", "mm_extra_keys", "cache_salt_keys", "prompt_embeds_keys"),
        "vLLM's own prefix cache tells requests apart by the same",
    )


def _connectors_and_metrics() -> Iterator[Line]:
    factory = "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory"
    yield Signature(f"{factory}.register_connector", "cls, name, module_path, class_name", "ours is registered so")
    yield Signature(f"{factory}.get_connector_class_by_name", "cls, connector_name", "MultiConnector finds ours so")
    yield Mentions(
        f"{_V1}.multi_connector:MultiConnector.build_kv_connector_stats",
        ("get_connector_class_by_name", "build_kv_connector_stats"),
        "MultiConnector finds the class of our statistics so",
    )
    metrics = f"{_V1}.metrics"
    for name, more in {"reset": "", "is_empty": "", "aggregate": ", other", "reduce": ""}.items():
        yield Signature(f"{metrics}:KVConnectorStats.{name}", f"self{more}", _CALLED)
    yield Fields(f"{metrics}:KVConnectorStats", ("data",), "figures are carried in it")
    yield Signature(
        f"{metrics}:KVConnectorPromMetrics.__init__",
        "self, vllm_config, metric_types, labelnames, per_engine_labelvalues",
        "ours calls it",
    )
    yield Signature(f"{metrics}:KVConnectorPromMetrics.observe", "self, transfer_stats_data, engine_idx=", _CALLED)
    yield Call("vllm.v1.metrics.utils:create_metric_per_engine", 2, (), "metrics have a label for the engine")
    platform, asked = "vllm.platforms.interface:Platform", "ours asks where it runs"
    yield Attributes(platform, ("is_cpu", "is_cuda", "is_cuda_alike", "get_device_capability"), asked)
    yield Fields(platform, ("device_name", "device_type"), asked)


def _cache_hit_source() -> Iterator[Line]:
    source = "vllm.v1.metrics.cache_hit_source:CacheHitSource"
    yield Members(source, {"P2P": "p2p"}, "vLLM counts cached tokens by where they came from")
    yield Uses(f"{_BASE}.get_external_cache_hit_sources", ("_cache_hit_source",), "ours says so where they came from")


def since_0_33() -> Iterator[Line]:
    """Yields what vLLM has, and calls, from 0.33 on."""
    called = {
        f"{_BASE}.supports_sleep_mode": "cls, kv_transfer_config",
        f"{_BASE}.unregister_kv_caches": "self",
        f"{_BASE}.restore_kv_caches": "self",
    }
    yield from lines(Signature, _CALLED, called)
    worker = f"{_WORKER}.gpu_worker:Worker"
    for caller in ("sleep", "discard"):
        yield Uses(f"{worker}.{caller}", ("unregister_kv_caches",), "memory is not written to that is given back")
    yield Uses(f"{worker}.wake_up", ("restore_kv_caches",), "new memory is registered")
    calls = "_set_kv_connector_handshake_metadata"
    yield Mentions(f"{_CORE}.__init__", ("_initialize_kv_caches", calls), _FOUND)
    yield Mentions(f"{_CORE}.{calls}", (_HANDSHAKE,), _FOUND)
    yield Mentions(f"{_CORE}._initialize_kv_caches", (_TURNS, "set_kv_cache_layout"), _SETTLED)
    last = f"{_WORKER}.gpu.kv_connector:ActiveKVConnector.finalize_step"
    yield Uses(last, ("wait_for_save",), "pages leave so where the newer model runner drafts")
    yield from _drafts()


def _drafts() -> Iterator[Line]:
    """What says which layers are a draft model's: vLLM marks them before it asks what they cache."""
    marked = "layers are a draft model's by it"
    yield Fields(_LAYER, ("is_draft_layer",), marked)
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


def _contract(
    version: str, unknown: frozenset[str] = frozenset(), more: Iterable[Line] = (), *, is_tried: bool = True
) -> Contract:
    caches = (_caches, _states, _projections)
    parts = (_callers, _structures, *caches, _configuration, _identity, _changes, _kept, _connectors_and_metrics)
    others = (line for part in parts for line in part())
    every = (*hook_lines(unknown), *others, *more)
    return Contract("vLLM", (version,) if is_tried else (), every, read=() if is_tried else (version,))


CONTRACTS = (
    _contract("0.31.0", _NEW_IN_0_32, (_UNTIL_0_33,)),
    _contract("0.32.0", more=(_UNTIL_0_33, *_context_parallelism(), _IN_0_32, *_cache_hit_source())),
    _contract("0.33.0", more=(*since_0_33(), *_context_parallelism(), *_cache_hit_source()), is_tried=False),
)
"""What holds wherever vLLM runs, in each version. There is no build of 0.33 for CPUs."""

_ORDERED = "the order within a block is the CPU kernel's, and named by it"
CPU_LINES: tuple[Line, ...] = (Call("vllm.v1.attention.backends.cpu_attn:_get_attn_isa", 4, (), _ORDERED),)
"""What holds besides where vLLM runs on a CPU."""


def _ending() -> Iterator[Line]:
    core = f"{_CORE}Proc"
    yield Fields(_CONFIG, ("shutdown_timeout",), "what is open after a SIGTERM is aborted in time")
    handler = {f"{core}.run_engine_core": "signal_handler SIGTERM shutdown_timeout"}
    yield from lines(Uses, "ours is called before its handler", handler)
    ends = {f"{core}._handle_shutdown": "shutdown_timeout has_work"}
    yield from lines(Uses, "it takes no new requests, and ends what it has", ends)
    kept = {
        f"{core}.has_work": "has_requests",
        f"{_INTERFACE}:SchedulerInterface.has_requests": "has_finished_requests",
    }
    yield from lines(Uses, "blocks that decode servers fetch are kept meanwhile", kept)


ENDING = Contract("vLLM", ("0.31.0", "0.32.0"), tuple(_ending()))
"""What `termination` builds on. A server without it serves, and cannot be relied upon to drain on a SIGTERM."""


def check() -> None:
    """Checks the vLLM that is installed. Warns if its version was not tried.

    Raises:
        EngineContractError: if something that the connector builds on has changed; names all that has.
    """
    more: tuple[Line, ...] = ()
    try:
        if find("vllm.platforms:current_platform").is_cpu():
            more = CPU_LINES
    except (MissingError, AttributeError):
        more = (Present("vllm.platforms:current_platform.is_cpu", "ours asks where it runs"),)
    enforce([replace(contract, lines=contract.lines + more) for contract in CONTRACTS], version())
    holds(
        ENDING,
        version(),
        "A server that is told to end may not drain: run kvferry drain before the SIGTERM, see docs/drain.md",
    )


def version() -> str:
    """Returns the version of the vLLM that is installed, as it says; a question mark if it does not."""
    try:
        return str(find("vllm:__version__"))
    except MissingError:
        return "?"
