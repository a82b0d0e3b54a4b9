"""What the plug-in builds on in SGLang, line by line.

`LOADING` is what makes kvferry a choice at all, checked when SGLang loads its plug-ins, in every process and whatever
backend it will use. `SERVING` is all the rest, checked in a process that is about to use kvferry. Where another version
differs it has lines of its own here, and what differs in the code belongs in one module for that version.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from kvferry.engines.contract import Contract, Inherits, Line, Members, Named, Signature, lines
from kvferry.engines.sglang import hooks
from kvferry.engines.sglang.hooks import where

TRIED = ("0.5.22", "0.5.23")
"""The versions of SGLang with which every line below was tried, by the tests in tests/real_engines/sglang."""


def engine_version() -> str:
    from sglang.version import __version__

    return str(__version__)


_BASE = "sglang.srt.disaggregation.base.conn"
_COMMON = "sglang.srt.disaggregation.common.conn"
_MANAGER = f"{_COMMON}:CommonKVManager"
_SENDER = f"{_COMMON}:CommonKVSender"
_RECEIVER = f"{_COMMON}:CommonKVReceiver"
_SERVER = f"{_COMMON}:CommonKVBootstrapServer"
_DECODE = "sglang.srt.disaggregation.decode"
_PREALLOC = f"{_DECODE}:DecodePreallocQueue"
_TRANSFERS = f"{_DECODE}:DecodeTransferQueue"
_PREFILL = "sglang.srt.disaggregation.prefill"
_BOOTSTRAP = f"{_PREFILL}:PrefillBootstrapQueue"
_MIXIN = f"{_PREFILL}:SchedulerDisaggregationPrefillMixin"
_SCHEDULER = "sglang.srt.managers.scheduler"
_POOLS = "sglang.srt.mem_cache.memory_pool"
_MODEL = "sglang.srt.configs.model_config"
_HOOKS = "sglang.srt.plugins.hook_registry"
_BATCH = "sglang.srt.managers.schedule_batch"
_TOKENIZER = "sglang.srt.managers.tokenizer_manager"
_IO = "sglang.srt.managers.io_struct"
_LORA = "sglang.srt.lora.lora_manager:LoRAManager"
_COMPRESSED = "sglang.srt.mem_cache.deepseek_v4_memory_pool:DeepSeekV4TokenToKVPool"
_POOLED = "sglang.srt.mem_cache.qsa_kv_pool:QSATokenToKVPool"
_UNIFIED = "sglang.srt.mem_cache.unified_memory_pool"

_LOADING = (
    Members(
        "sglang.srt.disaggregation.utils:KVClassType",
        {each.upper(): each for each in ("kvargs", "manager", "sender", "receiver", "bootstrap_server")},
        "we have a class for each of them",
        and_no_others=True,
    ),
    *lines(f"""
our hooks' kinds
    members {_HOOKS}:HookType: after around replace
we add our name to them, and may take over this one
    members {where(hooks.BACKENDS)}: nixl
our hooks go in by it
    takes {_HOOKS}:HookRegistry.register: cls, target, hook, hook_type=, *, source=
we check after it that our hooks are in effect
    call {_HOOKS}:HookRegistry.apply_hooks: 1
our hooks are applied there
    uses sglang.srt.plugins:load_plugins: HookRegistry apply_hooks
our hook on it gives SGLang our classes
    takes {where(hooks.KV_CLASS)}: transfer_backend, class_type
it makes our name one for --disaggregation-transfer-backend
    call sglang.srt.arg_groups.choices:add_disagg_transfer_backend_choices: 1
"""),
)

_SERVING = (
    *_LOADING,
    Inherits(_MANAGER, f"{_BASE}:BaseKVManager", "our manager extends it"),
    Members(
        f"{_BASE}:KVPoll",
        {"Failed": 0, "Bootstrapping": 1, "WaitingForInput": 2, "Transferring": 3, "Success": 4},
        "we report states so",
        and_no_others=True,
    ),
    *(
        Signature(where(each), "self, recv_req", "our hook on it tells peers that weights are replaced")
        for each in (*hooks.UPDATES, hooks.UPDATE_BEGINS, hooks.UPDATE_ENDS)
    ),
    *lines(f"""
the scheduler makes our manager so
    takes {_MANAGER}.__init__: self, args, disaggregation_mode, server_args, is_mla_backend=
the scheduler calls it, and ours stands in its place
    takes {_MANAGER}.try_ensure_parallel_info: self, bootstrap_addr
    takes {_MANAGER}.should_verify_kv_checksum: self, bootstrap_addr
    takes {_MANAGER}.is_abort_release_safe: self, bootstrap_room, required_acks
    takes {_MANAGER}.clear_deferred_abort_state: self, bootstrap_room
our senders and receivers call it
    call {_MANAGER}.check_status: 2
    call {_MANAGER}.update_status: 3
    call {_MANAGER}.record_failure: 3
a server may take the other role, since our manager has them
    attributes {_BASE}:BaseKVManager: supports_role_switch teardown
our endpoint is gone meanwhile
    uses {_BOOTSTRAP}.release_memory_occupation: kv_manager deregister_buffer_to_engine
    uses {_BOOTSTRAP}.resume_memory_occupation: kv_manager register_buffer_to_engine
    uses {_PREALLOC}.release_memory_occupation: kv_manager deregister_buffer_to_engine
    uses {_PREALLOC}.resume_memory_occupation: kv_manager register_buffer_to_engine
our manager reads what it sets
    uses {_MANAGER}.__init__: kv_args kv_cache_dtype_str kv_layout request_status failure_records prefill_info_table
        attn_tp_rank attn_tp_size pp_rank pp_size attn_dp_rank system_dp_rank system_dp_size attn_cp_rank attn_cp_size
        attn_dp_size kv_shard_rank kv_shard_size dist_init_addr bootstrap_host bootstrap_port
        enable_deferred_decode_kv_release _zmq_ctx server_socket
two servers are compared by them
    fields {_COMMON}:PrefillServerInfo: attn_tp_size attn_cp_size pp_size page_size kv_cache_dtype kv_layout
        decode_allocation_policy
our limits follow them, and some are refused
    attributes sglang.srt.environ:envs: SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT SGLANG_DISAGGREGATION_WAITING_TIMEOUT
        SGLANG_DISAGG_STAGING_BUFFER SGLANG_RUST_SERVER SGLANG_MM_SKIP_COMPUTE_HASH
        SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT
the model is read from it
    call {_MODEL}:ModelConfig.from_server_args: 1
the caches are described from them
    fields {_BASE}:KVArgs: kv_data_ptrs kv_data_lens kv_item_lens kv_layer_ids kv_layout page_size gpu_id aux_data_ptrs
        aux_item_lens num_draft_entries ib_device state_types state_data_ptrs state_data_lens state_item_lens
        state_layer_ids state_dim_per_tensor state_slice_outer_counts state_conv_shard_groups
what is cached beside keys and values is told apart so
    members {_BASE}:StateType: swa mamba dsa dsa_tail block_scale block_scale_swa
the order within a page of the index is named by them
    uses {_POOLS}:DSATokenToKVPool.__init__: index_kpool index_head_dim index_page_size
it lists the keys of all layers, then their scores
    uses {_POOLS}:DSATokenToKVPool.get_compress_tail_buf_infos: kpool_use_compress layer_num _compress_tail_k
        _compress_tail_score
it lists scales of keys, then of values
    uses {_POOLS}:MHATokenToKVPoolMXFP8.get_kv_scale_buf_infos: k_scale_buffer v_scale_buffer mxfp8_sf_interleaved
our hook on it remembers the pools, which SGLang does not hand to managers
    takes {where(hooks.STATE_ARGS)}: kv_args, token_to_kv_pool, draft_token_to_kv_pool=, total_kv_layers=,
        req_to_token_pool=
our hook on it takes the scheduler's window
    takes {where(hooks.PREFILL_MANAGER)}: self
    takes {where(hooks.DECODE_MANAGER)}: self
our hook on that is called there
    uses {where(hooks.PREFILL_MANAGER)}: setup_state_kv_args scheduler
    uses {where(hooks.DECODE_MANAGER)}: setup_state_kv_args scheduler
a window's pages begin so many tokens before the request's end
    uses {_SCHEDULER}:Scheduler.__init__: sliding_window_size
    uses {_MIXIN}._send_kv_chunk: sliding_window_size
    uses {_PREALLOC}.pop_preallocated: sliding_window_size
heads and the order within a page are read from the pool
    uses {_POOLS}:MHATokenToKVPool.__init__: head_num head_dim v_head_dim kv_cache_layout k_scale_buffer
each of its pools is described
    uses sglang.srt.mem_cache.swa_memory_pool:SWAKVPool.__init__: full_kv_pool swa_kv_pool
    uses {_POOLS}:HybridLinearKVPool.__init__: full_kv_pool mamba_pool
its convolutions are told apart from its heads
    uses {_POOLS}:MambaPool.__init__: mamba_cache
heads of the whole model are read by it
    takes {_MODEL}:ModelConfig.get_total_num_kv_heads: self
    takes {_MODEL}:ModelConfig.get_swa_num_kv_heads: self, tensor_parallel_size
a page's number says which rank has it by this
    takes sglang.srt.disaggregation.utils:filter_kv_indices_for_shard_rank: *, kv_indices, index_slice, shard_rank,
        shard_size
a draft model's heads are those of the first one that runs it
    takes sglang.srt.speculative.base_spec_worker:BaseSpecWorker._draft_model_runners: self
the blocks of convolutions are read from it
    call sglang.srt.configs.hybrid_arch:mambaish_config: 1
the blocks of convolutions are read from them
    fields sglang.srt.configs.mamba_utils:Mamba2StateShape: conv_dim intermediate_size num_heads state_size
all that the scheduler calls of a sender
    all {_SENDER}: abort clear failure_exception get_max_transfer_tokens get_transfer_metric init mark_prefill_complete
        poll poll_pp_consensus pop_decode_prefix_len send should_send_kv_chunk
the scheduler calls our sender so
    takes {_SENDER}.__init__: self, mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank=
    takes {_SENDER}.init: self, num_kv_indices, aux_index=
    takes {_SENDER}.send: self, kv_indices, state_indices=, num_kv_tokens=, indices_event=
    takes {_SENDER}.poll: self
    takes {_SENDER}.poll_pp_consensus: self
    takes {_SENDER}.abort: self
    takes {_SENDER}.clear: self
    takes {_SENDER}.get_transfer_metric: self
    takes {_SENDER}.pop_decode_prefix_len: self
it hands in what follows the decode side's prefix
    uses {_BOOTSTRAP}.finalize_bootstrap: pop_decode_prefix_len start_send_idx
SGLang's checksum begins behind the decode side's prefix
    mentions {_BOOTSTRAP}.finalize_bootstrap: disagg_decode_prefix_len
    mentions {_MIXIN}.send_kv_chunk: disagg_decode_prefix_len set_kv_checksum
our hook on it takes a request's conditions
    takes {where(hooks.CREATE_SENDER)}: self, req, num_kv_heads
our sender is made there
    uses {where(hooks.CREATE_SENDER)}: disagg_kv_sender bootstrap_room
all that the scheduler calls of a receiver
    all {_RECEIVER}: abort clear close_all_sockets disconnect_endpoint ensure_abort_notified failure_exception init
        invalidate_cached_bootstrap_infos is_abort_release_safe poll query_prefill_dp_ranks send_metadata
        supports_host_destination
other destinations are refused
    members {_BASE}:KVTransferDestination: device
the scheduler calls our receiver so
    takes {_RECEIVER}.__init__: self, mgr, bootstrap_addr, bootstrap_room=
    takes {_RECEIVER}.init: self, prefill_dp_rank
    takes {_RECEIVER}.send_metadata: self, kv_indices, aux_index=, state_indices=, decode_prefix_len=, destination=,
        device_kv_indices=
    takes {_RECEIVER}.ensure_abort_notified: self, *, force_arm=
    takes {_RECEIVER}.poll: self
    takes {_RECEIVER}.abort: self
    takes {_RECEIVER}.clear: self
    takes {_RECEIVER}.is_abort_release_safe: self
our hook on it takes a request's conditions
    takes {where(hooks.CREATE_RECEIVER)}: self, req, is_rebootstrap=
our receiver is made there
    uses {where(hooks.CREATE_RECEIVER)}: kv_receiver bootstrap_room
our hook on it keeps requests back
    takes {where(hooks.SERVERS_KNOWN)}: self, addr_to_reqs
our hook is called there
    uses {_PREALLOC}._resolve_pending_reqs: _ensure_prefill_info _prefill_dp_rank_queries
SGLang waits there for what our hook has seen to be answered, and for nothing else
    mentions {_PREALLOC}._resolve_pending_reqs: _resolve_prefill_dp_rank bootstrap_room result
it asks in the background
    mentions {_PREALLOC}.prefetch_prefill_dp_rank_queries: _prefill_dp_rank_queries pending_reqs submit
        query_prefill_dp_ranks
requests wait for the look-up of their server for as long as we say
    uses {where(hooks.SERVERS_KNOWN)}: _ensure_retry_interval _max_ensure_retries try_ensure_parallel_info
SGLang's checksum begins behind the decode side's prefix
    mentions {_DECODE}:SchedulerDisaggregationDecodeMixin._verify_kv_checksums: should_verify_kv_checksum
        cache_protected_len
our hook on it keeps pages until it is proven that nothing writes to them
    takes {where(hooks.TRANSFER_QUEUE)}: self, req_to_metadata_buffer_idx_allocator, metadata_buffers, scheduler,
        tree_cache
our hook takes away that limit
    uses {where(hooks.TRANSFER_QUEUE)}: deferred_kv_release_timeout
pages of a failed request are kept for so long
    uses {_TRANSFERS}._defer_release: deferred_kv_release_timeout
pages of a failed request come back by it
    uses {_TRANSFERS}.resolve_deferred_releases: is_abort_release_safe
ours in its place says which transfers have failed on a stage
    takes {where(hooks.STAGES_ENDED)}: self
our hook on it tells later stages of failed transfers
    takes {where(hooks.STAGE_TAKES)}: self, release_rids
our hook on it admits later what had no memory yet
    takes {where(hooks.STAGE_ADMITS)}: self, prealloc_rids
stages agree by it
    uses {where(hooks.STAGES_ENDED)}: pp_group get_rids _pp_recv_pyobj_from_prev_stage
    uses {where(hooks.STAGE_TAKES)}: disagg_decode_transfer_queue pop_transferred
    uses {where(hooks.STAGE_ADMITS)}: disagg_decode_prealloc_queue pop_preallocated
a request's conditions are read from them
    uses {_BATCH}:Req.__init__: origin_input_ids output_ids lora_id extra_key cache_salt input_embeds multimodal_inputs
images and the like are read from it
    fields {_BATCH}:MultimodalInputs: mm_items
images and the like are told apart by them
    fields {_BATCH}:MultimodalDataItem: modality hash offsets
files are read again at the revision that the server was started with
    mentions sglang.srt.model_loader.loader:DefaultModelLoader.Source.init_new: model_path revision
whether weights are a daemon's
    fields sglang.srt.arg_groups.fields.model:Model: weight_cache_mode
a draft model's weights are told from the model's by it
    fields {_IO}:BeginWeightUpdateReqInput: selector
    fields {_IO}:UpdateWeightsFromTensorReqInput: selector
    fields {_IO}:UpdateWeightsFromDistributedReqInput: selector
    fields {_IO}:CheckWeightsReqInput: selector
our hooks find the manager, and whether an update is whole, by them
    fields sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager: scheduler _session
        is_fully_idle memory_saver_adapter draft_worker
our hook on it hears that weights are lost
    takes {where(hooks.MEMORY_RELEASED)}: self, recv_req
whether they are is known by them
    uses {where(hooks.MEMORY_RELEASED)}: tags memory_saver_adapter pause
likewise
    attributes sglang.srt.constants: GPU_MEMORY_TYPE_WEIGHTS
    attributes sglang.srt.utils.torch_memory_saver_adapter:TorchMemorySaverAdapter: enabled
    fields sglang.srt.arg_groups.fields.exec_:ExecFeatures: enable_weights_cpu_backup
our hook on it hears that weights are drawn by chance
    takes {where(hooks.WEIGHTS_CHECKED)}: self, recv_req
it is known by the action
    uses sglang.srt.utils.weight_checker:WeightChecker.handle: action _reset_tensors
our hook on it hears what weights are called
    takes {where(hooks.WEIGHTS_NAMED)}: self, recv_req
images are embedded anew after an update
    uses sglang.srt.managers.mm_schedule:init_mm_embedding_cache: embedding_cache MultiModalStaticCache
likewise
    takes sglang.srt.mem_cache.multimodal_cache:MultiModalStaticCache.clear: self
    uses {_SCHEDULER}:Scheduler.__init__: decode_offload_manager
    attributes {_BATCH}:ReqKvInfo: holds_kv
    takes {_SCHEDULER}:Scheduler.is_fully_idle: self, for_health_check=, ignore_waiting=
our hook on it hears of what may be stored of those before
    takes {where(hooks.STORE_ATTACHED)}: self, recv_req
our hook hears that it was done
    uses {where(hooks.STORE_ATTACHED)}: AttachHiCacheStorageReqOutput success
our hook on it hears that nothing older is cached
    takes {where(hooks.CACHE_FLUSHED)}: self, empty_cache=
whether something older is cached is asked of them
    uses {where(hooks.CACHE_FLUSHED)}: is_fully_idle tree_cache
whether there is a store that a flush leaves is asked of it
    uses sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache.init_cache_linker: linker
whether sessions hold something older is asked by it
    takes sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.session_records: self
adapters are told apart by them
    fields sglang.srt.lora.lora_registry:LoRARef: lora_id lora_name lora_path
our hook on it says what was loaded
    takes {where(hooks.ADAPTER_LOADED)}: self, lora_ref
    takes {where(hooks.ADAPTER_OF_TENSORS)}: self, lora_ref, tensors, config_dict, added_tokens_config=
the hook is called there
    uses {_LORA}.init_lora_adapters: _load_lora_adapter
    uses {_LORA}.load_lora_adapter: _load_lora_adapter
    uses {_LORA}.load_lora_adapter_from_tensors: _load_lora_adapter_from_tensors
we report measurements so
    fields {_BASE}:KVTransferMetric: transfer_latency_s transfer_total_bytes
our bootstrap server is made so
    takes {_SERVER}.__init__: self, host, port
our route is added by it
    takes {_SERVER}._setup_routes: self
    uses {_SERVER}.__init__: app _setup_routes
our bootstrap server is closed so
    takes {_SERVER}.close: self
SGLang's server in Rust leaves the bootstrap server to us, since ours is none of SGLang's
    mentions sglang.srt.managers.disagg_service:rust_server_serves_kv_bootstrap: CommonKVBootstrapServer get_kv_class
"""),
)

_TOLD_APART = "what is cached beside keys, values and latents is told apart so"
_INDEXED = (
    Members(f"{_BASE}:StateType", {"DSV4_REQUEST_STATE": "c128_state"}, _TOLD_APART),
    *lines(f"""
{_TOLD_APART}
    members {_BASE}:StateType: swa_ring request_row qsa_pending qsa_compressed minimax_index_k minimax_dense_kv
where DeepSeek V4's windows are is read from the pool
    uses {_COMPRESSED}.__init__: request_window swa_kv_pool unified_kv_pool unified_swa_ring_size _unified_kv
        _unified_kv_fp8
it lists latents and their index, compression by compression
    uses {_COMPRESSED}.get_contiguous_buf_infos: kv_pools index_pools _stage_start _stage_end compression_ratios
it lists windows, then what is not compressed of latents and of their index
    uses {_COMPRESSED}.get_state_buf_infos: compress_state_pools indexer_compress_state_pools request_scoped ring_size
it lists the keys of all layers, then positions
    uses {_POOLED}.get_qsa_pending_state_buf_infos: qsa_key_state_buffer_pool qsa_rope_position_buffer
        qsa_compress_ratio
it lists the pooled keys of all layers
    uses {_POOLED}.get_qsa_compressed_state_buf_infos: qsa_compressed_k_buffer_pool
each of its pools is described, and which layers it has
    uses {_POOLS}:MiniMaxSparseKVPool.__init__: main_pool index_k_pool _dense_layer_ids sparse_layer_id_mapping
which layers MiniMax has is read from it
    call {_MODEL}:get_minimax_sparse_attention_config: 1
layers without sparse attention come before those with it
    call {_MODEL}:get_minimax_sparse_layer_ids: 1
our hook adds to it
    takes {where(hooks.UNIFIED_BACKENDS)}: self
our hook on it keeps pages of failed requests where they are
    takes {where(hooks.MOVE_GATE)}: scheduler
it lists unified memory as one buffer with pages of all layers
    uses {_UNIFIED}:UnifiedMHATokenToKVPool.get_contiguous_buf_infos: _raw active_allocation_bytes _page_bytes
it lists unified memory as one buffer with slots of all layers
    uses {_UNIFIED}:UnifiedMambaPool.get_contiguous_buf_infos: _raw entry_bytes
pages of failed requests are not moved while it has any
    attributes {_TRANSFERS}: has_pending_deferred_releases
where a row has keys, values and scales is read from the pool
    uses sglang.srt.mem_cache.minimax_m3_nvfp4_pool:MiniMaxM3Nvfp4MainKVPool.__init__: rows k_buffer v_buffer
        k_scale_buffer v_scale_buffer payload_bytes_per_head
"""),
)
"""What is needed of pools with an index, or with latents at several compressions. 0.5.22 was not tried with them."""

_NEW_IN_0_5_23 = {
    "should_verify_kv_checksum",
    "_verify_kv_checksums",  # of the whole prompt, on every rank: kvferry refuses that option there
    "poll_pp_consensus",
    "rust_server_serves_kv_bootstrap",
    "kv_layout",
    "k_scale_buffer",
    "disagg_decode_prefix_len",
    "indices_event=",
    "kv_shard_rank",
    "kv_shard_size",
    "filter_kv_indices_for_shard_rank",
    "_draft_model_runners",
    "device_kv_indices=",
}
"""Functions, parameters and names that SGLang 0.5.22 has not, or has otherwise; `versions.py` is what comes of it."""


def _in_0_5_22(newer: Iterable[Line]) -> Iterator[Line]:
    """Yields the lines as 0.5.22 has them."""
    for line in newer:
        if line.where.rpartition(":")[2].rpartition(".")[2] in _NEW_IN_0_5_23:
            continue
        match line:
            case Signature():
                parameters = [each for each in line.parameters.split(", ") if each not in _NEW_IN_0_5_23]
                yield replace(line, parameters=", ".join(parameters))
            case Named():
                yield replace(line, names=tuple(each for each in line.names if each not in _NEW_IN_0_5_23))
            case _:
                yield line


LAYERS = (
    Contract(
        "SGLang",
        ("0.5.23",),
        lines(f"""
our hook on it says what a step will compute
    takes {where(hooks.BEFORE_STEP)}: self, req, allow_send=
the hook is called there, before the model computes
    uses {_SCHEDULER}:Scheduler.run_batch: maybe_send_cached_prefix_chunk
the pages of a step are found as it finds them afterwards
    uses {_MIXIN}._send_kv_chunk: start_send_idx extend_end translate_kv_indices_for_transfer req_to_token req_pool_idx
ours takes the place of SGLang's counter
    takes {_POOLS}:KVCache.register_layer_transfer_counter: self, layer_transfer_counter
our counter is asked there
    uses {_POOLS}:MHATokenToKVPool.get_key_buffer: wait_until start_layer
    uses {_POOLS}:MLATokenToKVPool.get_key_buffer: wait_until start_layer
"""),
    ),
)
"""What KVFERRY_LAYER_RANGES builds on, checked where that is set."""

ENDING = Contract(
    "SGLang",
    TRIED,
    lines(f"""
our hook on it says at the registry that the engine drains
    takes {where(hooks.TERMINATED)}: self, signum=, frame=
our hook finds the server by it
    uses {_TOKENIZER}:SignalHandler.__init__: tokenizer_manager
our hook finds the registry by it
    uses {_TOKENIZER}:TokenizerManager.init_disaggregation: bootstrap_server
our hook on it closes a rank's endpoints
    takes {where(hooks.SCHEDULER_ENDS)}: self
a scheduler that ends calls it
    uses {_SCHEDULER}:run_scheduler_process: release_host_resources
our hook finds the endpoints by them
    uses {where(hooks.SCHEDULER_STARTS)}: disagg_prefill_bootstrap_queue disagg_decode_prealloc_queue
"""),
)
"""What `termination` builds on. A server without it serves, and its peers merely notice later that it has ended."""

LOADING = (Contract("SGLang", TRIED, _LOADING),)
SERVING = (
    Contract("SGLang", ("0.5.22",), tuple(_in_0_5_22(_SERVING))),
    Contract("SGLang", ("0.5.23",), (*_SERVING, *_INDEXED)),
)
