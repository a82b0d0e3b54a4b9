"""What the connector builds on in vLLM, line by line; `kvferry.engines.contract` says how it is checked.

All of it is checked in every process of vLLM's before the connector is imported: a server whose vLLM has changed does
not start, and says what has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from kvferry.engines.contract import Call, Contract, Line, Members, Present, Signature, enforce, holds, lines
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
_LINEAR = "vllm.model_executor.layers.linear"
_MAMBA = "vllm.model_executor.layers.mamba"
_BLOCKS = "vllm.v1.core.kv_cache_manager"
_ENCODED = "vllm.v1.core.encoder_cache_manager:EncoderCacheManager"
_OFFLOADING = f"{_V1}.offloading.scheduler"
_ASYNC = "vllm.v1.engine.async_llm:AsyncLLM"
_CALLED = "vLLM calls ours so"


_NEW_IN_0_32 = frozenset({"get_loaded_kv_cache_group_ids"})
"""Which blocks a load overwrites, so that vLLM need not clear them: before, it left out all blocks of the load."""


def hook_lines(unknown: frozenset[str] = frozenset()) -> Iterator[Line]:
    """Yields what the plug-in needs of vLLM's hooks."""
    for name, parameters in _HOOKS.items():
        if name not in unknown:
            yield Signature(f"{_BASE}.{name}", parameters, _CALLED)
    yield Members(f"{_V1}.base:KVConnectorRole", {"SCHEDULER": 0, "WORKER": 1}, "ours is made for one of them")
    yield from lines(f"""
vLLM calls ours so
    takes {_V1}.base:SupportsHMA.request_finished_all_groups: self, request, block_ids
ours gets its step from it
    call {_BASE}._get_connector_metadata: 1
ours reads what it sets
    uses {_BASE}.__init__: _vllm_config _kv_transfer_config _kv_cache_config
ours reports so
    fields {_V1}.base:KVConnectorTransferResults: finished_sending finished_recving failed_recving
""")


_CALLERS = lines(f"""
a decode server asks ours so whether a cache is elsewhere
    uses {_SCHEDULER}.schedule: get_num_new_matched_tokens update_state_after_alloc
of hybrids no prefix of full attention is fetched again
    uses {_SCHEDULER}._get_local_prefix_cache_hit: supports_divergent_local_hybrid_hits
prompts with recurrent state are cut so
    uses {_SCHEDULER}.add_request: on_new_request
the workers learn so what leaves and comes
    uses {_SCHEDULER}._build_kv_connector_meta: build_connector_meta
blocks are kept so until they are sent
    uses {_SCHEDULER}._connector_finished: request_finished_all_groups
blocks are freed, and requests go on, so
    uses {_SCHEDULER}._update_from_kv_xfer_finished: update_connector_output finished_sending finished_recving
        _free_blocks
failures follow the policy
    mentions {_SCHEDULER}._handle_failed_recving: recompute_kv_load_failures
graphs are captured so
    mentions {_CORE}._initialize_kv_caches: compile_or_warm_up_model
workers call ours with every step
    uses {_WORKER}.kv_connector_model_runner_mixin:KVConnectorModelRunnerMixin._get_kv_connector_output: start_load_kv
        wait_for_save get_transfer_results failed_recving get_kv_connector_stats
workers call ours with every step, in the newer model runner
    uses {_WORKER}.gpu.kv_connector:ActiveKVConnector.post_forward: wait_for_save get_transfer_results failed_recving
        get_kv_connector_stats
    uses {_WORKER}.gpu.kv_connector:ActiveKVConnector._start_load_kv: start_load_kv
preempted blocks are dropped before they are reused
    uses {_WORKER}.gpu.kv_connector:ActiveKVConnector.pre_forward: handle_preemptions
""")
"""What vLLM does with the hooks: one that it does not call any more would be missed by no signature."""

_READ = (
    Members("vllm.v1.kv_cache_layout:KVCacheLayout", {"LBHNC": (0, 1, 2, 3, 4)}, "ours asks for it"),
    *lines(f"""
ours reads it
    uses {_REQUEST}.__init__: request_id arrival_time num_prompt_tokens num_computed_tokens kv_transfer_params
        prompt_token_ids prompt_embeds _all_token_ids max_tokens status
    attributes vllm.v1.request:RequestStatus: FINISHED_STOPPED FINISHED_LENGTH_CAPPED
    fields vllm.v1.core.sched.output:SchedulerOutput: num_scheduled_tokens preempted_req_ids kv_connector_metadata
        finished_req_ids
    fields {_BLOCKS}:KVCacheBlocks: blocks
    fields vllm.v1.core.kv_cache_utils:KVCacheBlock: block_id is_null
    fields vllm.v1.outputs:KVConnectorOutput: finished_sending finished_recving failed_recving
such prompts are computed where they are
    call {_REQUEST}.get_skip_reading_prefix_cache: 1
an adapter is loaded by then
    attributes {_REQUEST}: num_output_tokens
the choices of a request with n > 1 are told by their names, "0_<name>" and so on
    mentions vllm.v1.engine.parallel_sampling:ParentRequest.get_child_info: request_id _
ours calls it
    takes {_BLOCKS}:KVCacheManager.get_blocks: self, request_id
ours keeps blocks there
    uses {_BLOCKS}:KVCacheManager.__init__: block_pool
blocks that are being read are kept so
    call {_POOL}.touch: 2
blocks that were kept are given back so
    call {_POOL}.free_blocks: 2
what is held is given up where it is short
    call {_POOL}.get_num_free_blocks: 1
ours reads it
    fields {_SPECS}:KVCacheConfig: num_blocks kv_cache_groups
    fields {_SPECS}:KVCacheGroupSpec: layer_names kv_cache_spec host_resident
    fields {_SPECS}:UniformTypeKVCacheSpecs: kv_cache_specs
    attributes {_SPECS}:KVCacheConfig: transfer_groups transfer_group_ids select_transfer_block_ids
    attributes {_SPECS}:UniformTypeKVCacheSpecs: first_spec
ours clears what it loads where vLLM clears blocks
    attributes {_SPECS}:KVCacheConfig: needs_kv_cache_zeroing
caches are described by it
    fields {_SPECS}:FullAttentionSpec: block_size head_size dtype
    fields {_SPECS}:SlidingWindowSpec: block_size sliding_window
    fields {_SPECS}:ChunkedLocalAttentionSpec: block_size attention_chunk_size
caches of an indexer are refused
    members {_SPECS}:SparseCacheRole: sparse indexer
it tells how KV heads are kept
    fields {_SPECS}:AttentionSpec: num_kv_heads num_head_slots max_tp_shards tokens_per_state
attention layers are listed there
    fields vllm.config.compilation:CompilationConfig: static_forward_context
recurrent state is described by it
    fields {_SPECS}:MambaSpec: block_size shapes dtypes mamba_type tp_replicated
it tells how a convolution is divided
    attributes vllm.v1.attention.backends.registry:MambaAttentionBackendEnum: MAMBA1 MAMBA2 GDN_ATTN SHORT_CONV LINEAR
    uses {_MAMBA}.mamba_mixer2:MambaMixer2.__init__: intermediate_size n_groups ssm_state_size conv1d
where a convolution's channels are
    call {_MAMBA}.mamba_utils:is_conv_state_dim_first: 0
a layer has views of its states
    uses {_MAMBA}.abstract:MambaBase.bind_kv_cache: kv_cache get_state_shape
it knows how KV heads are divided
    uses {_LINEAR}:QKVParallelLinear.__init__: total_num_kv_heads num_kv_heads num_kv_head_replicas
    uses {_LINEAR}:ColumnParallelLinear.__init__: tp_rank tp_size
ranks that share a KV head are neighbours
    uses {_LINEAR}:QKVParallelLinear.weight_loader: tp_rank num_kv_head_replicas
ours reads it
    fields {_CONFIG}: model_config cache_config parallel_config compilation_config kv_transfer_config attention_config
        aux_output_config
    fields vllm.config.kv_transfer:KVTransferConfig: engine_id kv_buffer_device kv_connector_extra_config
    attributes vllm.config.kv_transfer:KVTransferConfig: is_kv_producer is_kv_consumer
as many tokens of a prompt are held back
    attributes {_CONFIG}: num_prefill_lookahead_tokens
ours refuses HiSparse
    fields vllm.config.attention:AttentionConfig: hisparse_config
ours refuses it
    fields vllm.config.aux_output:AuxOutputConfig: enable_return_routed_experts
    fields {_PARALLEL}: enable_elastic_ep
which ranks share tokens and layers
    fields {_PARALLEL}: decode_context_parallel_size prefill_context_parallel_size pipeline_parallel_size
layers leave one by one where a step is one part
    attributes {_PARALLEL}: use_ubatching
the model's shape
    call {_MODEL}.get_total_num_hidden_layers: 1
any order of blocks will do for latents
    attributes {_MODEL}: use_mla
a worker's place
    call {_RANKS}:get_tp_group: 0
    call {_RANKS}:get_pp_group: 0
    fields {_RANKS}:GroupCoordinator: rank_in_group world_size
pipeline stages tell each other what they have
    fields {_RANKS}:GroupCoordinator: cpu_group
"""),
)
"""What ours reads of requests, caches and configuration."""

_IDENTITY = lines(f"""
servers are compared by it
    fields {_CONFIG}: load_config compilation_config speculative_config
    fields {_MODEL}: model model_weights revision dtype quantization hf_text_config disable_sliding_window
        multimodal_config enable_sleep_mode
    fields vllm.config.cache:CacheConfig: cache_dtype kv_cache_dtype_skip_layers enable_prefix_caching
    fields vllm.config.load:LoadConfig: load_format download_dir
    fields {_PARALLEL}: tensor_parallel_size data_parallel_size enable_expert_parallel
    fields vllm.config.speculative:SpeculativeConfig: method draft_model_config
    fields vllm.config.multimodal:MultiModalConfig: mm_processor_cache_gb mm_hasher_algorithm
    fields {_SPECS}:AttentionSpec: num_kv_heads num_head_slots state_content_bytes
    fields vllm.multimodal.inputs:MultiModalFeatureSpec: identifier modality mm_position
    fields vllm.multimodal.inputs:PlaceholderRange: offset length
    fields vllm.lora.request:LoRARequest: lora_name lora_int_id lora_path load_inplace
    attributes {_MODEL}: architecture
adapters are read where vLLM reads them
    uses vllm.lora.worker_manager:WorkerLoRAManager._load_adapter: get_adapter_absolute_path
    uses vllm.lora.utils:get_adapter_absolute_path: isabs startswith expanduser exists snapshot_download
how a layer's cache is ordered follows from its backend
    call {_LAYER}.get_attn_backend: 1
requests are compared by it
    uses {_REQUEST}.__init__: prompt_embeds lora_request mm_features cache_salt
vLLM's own prefix cache tells requests apart by the same
    mentions vllm.v1.core.kv_cache_utils:generate_block_hash_extra_keys: lora_extra_keys mm_extra_keys cache_salt_keys
        prompt_embeds_keys
""")
"""What says what caches are beyond their layout, and what a request's cache depends on."""

_CHANGES = (
    Members(f"{_INTERFACE}:PauseState", {"UNPAUSED": 0}, "ours asks whether it is paused"),
    *lines(f"""
what replaces weights and adapters is noticed there
    takes {_CORE}.collective_rpc: self, method, timeout=, args=, kwargs=
    takes {_CORE}.add_request: self, request, request_wave=
    takes {_CORE}.set_weight_version: self, weight_version
    takes {_CORE}.add_lora: self, lora_request
    takes {_CORE}.remove_lora: self, lora_id
    takes {_EXECUTOR}.init_kv_output_aggregator: self, connector
    call {_CORE}.reset_prefix_cache: 1
    call {_CORE}.list_loras: 1
    call {_SCHEDULER}.get_kv_connector: 1
    uses {_CORE}.__init__: model_executor scheduler init_kv_output_aggregator
    uses {_ASYNC}.start_weight_update: collective_rpc start_weight_update
    uses {_ASYNC}.update_weights: collective_rpc update_weights
    uses {_ASYNC}.finish_weight_update: collective_rpc finish_weight_update
    uses {_SCHEDULER}._handle_blocked_waiting_request: finished_recving_kv_req_ids
memory is not given back that is registered
    takes {_CORE}.sleep: self, level=, mode=
    takes {_CORE}.wake_up: self, tags=
    takes {_CORE}.release_kv_cache_memory: self
    uses {_EXECUTOR}.__init__: sleeping_tags
a pause waits for nobody who is paused as well
    attributes {_SCHEDULER}: pause_state
workers are asked for their weights
    call {_EXECUTOR}.collective_rpc: 2
    call {_WORKER}.worker_base:WorkerBase.get_model: 1
a change of the caches' scales is a change of weights
    uses vllm.model_executor.layers.attention.attention:set_default_quant_scales: register_buffer _k_scale _v_scale
vLLM calls ours so
    takes {_BASE}.reset_cache: self
    uses {_SCHEDULER}.reset_connector_cache: reset_cache
"""),
)
"""What tells of weights and adapters that are replaced in place, and has nobody find what they computed."""

_KEPT = lines(f"""
nothing that old weights have computed is found again
    uses {_V1}.multi_connector:MultiConnector.__init__: _connectors
    uses {_V1}.multi_connector:MultiConnector.reset_cache: _connectors reset_cache
    uses {_V1}.offloading_connector:OffloadingConnector.__init__: connector_scheduler
    uses {_OFFLOADING}:OffloadingConnectorScheduler.__init__: manager _req_status _current_batch_allocated_block_ids
    uses {_OFFLOADING}:RequestOffloadState.update_offload_keys: block_hashes offload_keys
    uses vllm.v1.kv_offload.tiering.manager:TieringOffloadingManager.__init__: secondary_tiers
    uses {_POOL}.__init__: num_gpu_blocks
    uses {_SCHEDULER}.__init__: encoder_cache_manager ec_connector
    uses {_ENCODED}.__init__: cached num_freeable_slots
    uses {_ENCODED}.can_allocate: get_num_encoder_embeds freeable
    uses {_WORKER}.gpu_model_runner:GPUModelRunner.__init__: encoder_cache
    uses {_WORKER}.gpu.model_runner:GPUModelRunner.__init__: encoder_cache
    uses {_WORKER}.gpu.mm.encoder_cache:EncoderCache.__init__: encoder_outputs
    uses {_REQUEST}.__init__: block_hashes cache_salt
    fields {_OFFLOADING}:RequestOffloadState: group_states
    call {_POOL}.evict_blocks: 2
    call {_ENCODED}.can_allocate: 5
    call {_REQUEST}.update_block_hashes: 1
""")
"""What vLLM and connectors keep from before a change, and drop."""

_CONNECTORS_AND_METRICS = lines(f"""
ours is registered so
    takes vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory.register_connector: cls, name,
        module_path, class_name
MultiConnector finds ours so
    takes vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory.get_connector_class_by_name: cls,
        connector_name
MultiConnector finds the class of our statistics so
    mentions {_V1}.multi_connector:MultiConnector.build_kv_connector_stats: get_connector_class_by_name
        build_kv_connector_stats
vLLM calls ours so
    takes {_V1}.metrics:KVConnectorStats.reset: self
    takes {_V1}.metrics:KVConnectorStats.is_empty: self
    takes {_V1}.metrics:KVConnectorStats.aggregate: self, other
    takes {_V1}.metrics:KVConnectorStats.reduce: self
    takes {_V1}.metrics:KVConnectorPromMetrics.observe: self, transfer_stats_data, engine_idx=
figures are carried in it
    fields {_V1}.metrics:KVConnectorStats: data
ours calls it
    takes {_V1}.metrics:KVConnectorPromMetrics.__init__: self, vllm_config, metric_types, labelnames,
        per_engine_labelvalues
metrics have a label for the engine
    call vllm.v1.metrics.utils:create_metric_per_engine: 2
ours asks where it runs
    attributes vllm.platforms.interface:Platform: is_cpu is_cuda is_cuda_alike get_device_capability
    fields vllm.platforms.interface:Platform: device_name device_type
""")

_CONTEXT_PARALLELISM = lines(f"""
which tokens a rank keeps
    fields {_PARALLEL}: cp_kv_cache_interleave_size
    fields {_SPECS}:KVCacheSpec: dcp_sharded
    call {_RANKS}:get_pcp_group: 0
    call {_RANKS}:get_dcp_group: 0
for how many tokens a block stands
    uses vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.__init__: dcp_sharded dcp_world_size
        block_size
""")
"""What says which tokens a rank keeps. A vLLM without `dcp_sharded` does not start with any of it."""

_UNTIL_0_33 = lines(f"""
prefill ranks are found from then on, once graphs are captured
    mentions {_CORE}.__init__: _initialize_kv_caches get_kv_connector_handshake_metadata
""")
_IN_0_32 = lines("""
in which turns ranks take tokens is settled before ours reads it
    mentions vllm.distributed.kv_transfer.kv_transfer_state:ensure_kv_transfer_initialized:
        adjust_dcp_kv_cache_interleave_size
""")
_CACHE_HIT_SOURCE = lines(f"""
vLLM counts cached tokens by where they came from
    members vllm.v1.metrics.cache_hit_source:CacheHitSource: p2p
ours says so where they came from
    uses {_BASE}.get_external_cache_hit_sources: _cache_hit_source
""")
SINCE_0_33 = lines(f"""
vLLM calls ours so
    takes {_BASE}.supports_sleep_mode: cls, kv_transfer_config
    takes {_BASE}.unregister_kv_caches: self
    takes {_BASE}.restore_kv_caches: self
memory is not written to that is given back
    uses {_WORKER}.gpu_worker:Worker.sleep: unregister_kv_caches
    uses {_WORKER}.gpu_worker:Worker.discard: unregister_kv_caches
new memory is registered
    uses {_WORKER}.gpu_worker:Worker.wake_up: restore_kv_caches
prefill ranks are found from then on, once graphs are captured
    mentions {_CORE}.__init__: _initialize_kv_caches _set_kv_connector_handshake_metadata
    mentions {_CORE}._set_kv_connector_handshake_metadata: get_kv_connector_handshake_metadata
in which turns ranks take tokens is settled before ours reads it
    mentions {_CORE}._initialize_kv_caches: adjust_dcp_kv_cache_interleave_size set_kv_cache_layout
pages leave so where the newer model runner drafts
    uses {_WORKER}.gpu.kv_connector:ActiveKVConnector.finalize_step: wait_for_save
layers are a draft model's by it
    fields {_LAYER}: is_draft_layer
    uses vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.load_model: is_draft_layer
    uses {_WORKER}.gpu.spec_decode.speculator:DraftModelSpeculator.load_model: is_draft_layer
a cache is a draft's where its layer is marked
    mentions {_WORKER}.gpu_model_runner:GPUModelRunner.get_kv_cache_spec: is_draft_layer is_draft
    mentions {_WORKER}.gpu.attn_utils:get_kv_cache_spec: is_draft_layer is_draft
""")
"""What vLLM has, and calls, from 0.33 on; it marks layers that are a draft model's before it asks what they cache."""


def _contract(
    version: str, unknown: frozenset[str] = frozenset(), more: Iterable[Line] = (), *, is_tried: bool = True
) -> Contract:
    others = (*_CALLERS, *_READ, *_IDENTITY, *_CHANGES, *_KEPT, *_CONNECTORS_AND_METRICS)
    every = (*hook_lines(unknown), *others, *more)
    return Contract("vLLM", (version,) if is_tried else (), every, read=() if is_tried else (version,))


CONTRACTS = (
    _contract("0.31.0", _NEW_IN_0_32, _UNTIL_0_33),
    _contract("0.32.0", more=(*_UNTIL_0_33, *_CONTEXT_PARALLELISM, *_IN_0_32, *_CACHE_HIT_SOURCE)),
    _contract("0.33.0", more=(*SINCE_0_33, *_CONTEXT_PARALLELISM, *_CACHE_HIT_SOURCE), is_tried=False),
)
"""What holds wherever vLLM runs, in each version. There is no build of 0.33 for CPUs."""

_ORDERED = "the order within a block is the CPU kernel's, and named by it"
CPU_LINES: tuple[Line, ...] = (Call("vllm.v1.attention.backends.cpu_attn:_get_attn_isa", 4, (), _ORDERED),)
"""What holds besides where vLLM runs on a CPU."""

ENDING = Contract(
    "vLLM",
    ("0.31.0", "0.32.0"),
    lines(f"""
what is open after a SIGTERM is aborted in time
    fields {_CONFIG}: shutdown_timeout
ours is called before its handler
    uses vllm.v1.engine.core:EngineCoreProc.run_engine_core: signal_handler SIGTERM shutdown_timeout
it takes no new requests, and ends what it has
    uses vllm.v1.engine.core:EngineCoreProc._handle_shutdown: shutdown_timeout has_work
blocks that decode servers fetch are kept meanwhile
    uses vllm.v1.engine.core:EngineCoreProc.has_work: has_requests
    uses {_INTERFACE}:SchedulerInterface.has_requests: has_finished_requests
"""),
)
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
