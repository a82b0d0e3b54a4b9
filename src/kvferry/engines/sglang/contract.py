"""What the plug-in builds on in SGLang, line by line.

`LOADING` is what makes kvferry a choice at all, checked when SGLang loads its plug-ins, in every process and whatever
backend it will use. `SERVING` is all the rest, checked in a process that is about to use kvferry. Where another version
differs it has lines of its own here, and what differs in the code belongs in one module for that version.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from kvferry.engines.contract import (
    Attributes,
    Call,
    Contract,
    Fields,
    Inherits,
    Line,
    Members,
    Mentions,
    Named,
    Signature,
    Uses,
    lines,
)
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


def _loading() -> Iterator[Line]:
    registry = f"{_HOOKS}:HookRegistry"
    registered = {f"{registry}.register": "cls, target, hook, hook_type=, *, source="}
    yield from lines(Signature, "our hooks go in by it", registered)
    yield Call(f"{registry}.apply_hooks", 1, (), "we check after it that our hooks are in effect")
    yield Uses("sglang.srt.plugins:load_plugins", ("HookRegistry", "apply_hooks"), "our hooks are applied there")
    yield Members(f"{_HOOKS}:HookType", _values("after around replace"), "our hooks' kinds")
    yield Members(where(hooks.BACKENDS), _values("nixl"), "we add our name to them, and may take over this one")
    kinds, classes = "sglang.srt.disaggregation.utils:KVClassType", "kvargs manager sender receiver bootstrap_server"
    yield Members(kinds, _values(classes), "we have a class for each of them", and_no_others=True)
    yield Signature(where(hooks.KV_CLASS), "transfer_backend, class_type", "our hook on it gives SGLang our classes")
    choices = "sglang.srt.arg_groups.choices:add_disagg_transfer_backend_choices"
    yield Call(choices, 1, (), "it makes our name one for --disaggregation-transfer-backend")


def _values(names: str) -> dict[str, object]:
    """Returns the members of an enumeration whose values are called as they are."""
    return {each.upper(): each for each in names.split()}


def _manager() -> Iterator[Line]:
    yield Inherits(_MANAGER, f"{_BASE}:BaseKVManager", "our manager extends it")
    made = {f"{_MANAGER}.__init__": "self, args, disaggregation_mode, server_args, is_mla_backend="}
    yield from lines(Signature, "the scheduler makes our manager so", made)
    called = {
        f"{_MANAGER}.try_ensure_parallel_info": "self, bootstrap_addr",
        f"{_MANAGER}.should_verify_kv_checksum": "self, bootstrap_addr",
        f"{_MANAGER}.is_abort_release_safe": "self, bootstrap_room, required_acks",
        f"{_MANAGER}.clear_deferred_abort_state": "self, bootstrap_room",
    }
    yield from lines(Signature, "the scheduler calls it, and ours stands in its place", called)
    for name, count in {"check_status": 2, "update_status": 3, "record_failure": 3}.items():
        yield Call(f"{_MANAGER}.{name}", count, (), "our senders and receivers call it")
    switch = {f"{_BASE}:BaseKVManager": "supports_role_switch teardown"}
    yield from lines(Attributes, "a server may take the other role, since our manager has them", switch)
    for queue in (_BOOTSTRAP, _PREALLOC):
        memory = {
            f"{queue}.release_memory_occupation": "kv_manager deregister_buffer_to_engine",
            f"{queue}.resume_memory_occupation": "kv_manager register_buffer_to_engine",
        }
        yield from lines(Uses, "our endpoint is gone meanwhile", memory)
    set_there = (
        "kv_args kv_cache_dtype_str kv_layout request_status failure_records prefill_info_table attn_tp_rank "
        "attn_tp_size pp_rank pp_size attn_dp_rank system_dp_rank system_dp_size attn_cp_rank attn_cp_size "
        "attn_dp_size kv_shard_rank kv_shard_size dist_init_addr bootstrap_host bootstrap_port "
        "enable_deferred_decode_kv_release _zmq_ctx server_socket"
    )
    yield from lines(Uses, "our manager reads what it sets", {f"{_MANAGER}.__init__": set_there})
    compared = "attn_tp_size attn_cp_size pp_size page_size kv_cache_dtype kv_layout decode_allocation_policy"
    yield from lines(Fields, "two servers are compared by them", {f"{_COMMON}:PrefillServerInfo": compared})
    variables = (
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT SGLANG_DISAGGREGATION_WAITING_TIMEOUT SGLANG_DISAGG_STAGING_BUFFER "
        "SGLANG_RUST_SERVER SGLANG_MM_SKIP_COMPUTE_HASH SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT"
    )
    yield from lines(Attributes, "our limits follow them, and some are refused", {"sglang.srt.environ:envs": variables})
    yield Call(f"{_MODEL}:ModelConfig.from_server_args", 1, (), "the model is read from it")


def _caches() -> Iterator[Line]:
    listed = (
        "kv_data_ptrs kv_data_lens kv_item_lens kv_layer_ids kv_layout page_size gpu_id aux_data_ptrs aux_item_lens "
        "num_draft_entries ib_device state_types state_data_ptrs state_data_lens state_item_lens state_layer_ids "
        "state_dim_per_tensor state_slice_outer_counts state_conv_shard_groups"
    )
    yield from lines(Fields, "the caches are described from them", {f"{_BASE}:KVArgs": listed})
    states = _values("swa mamba dsa dsa_tail block_scale block_scale_swa")
    yield Members(f"{_BASE}:StateType", states, "what is cached beside keys and values is told apart so")
    index = {f"{_POOLS}:DSATokenToKVPool.__init__": "index_kpool index_head_dim index_page_size"}
    yield from lines(Uses, "the order within a page of the index is named by them", index)
    tails = "kpool_use_compress layer_num _compress_tail_k _compress_tail_score"
    tail = {f"{_POOLS}:DSATokenToKVPool.get_compress_tail_buf_infos": tails}
    yield from lines(Uses, "it lists the keys of all layers, then their scores", tail)
    scales = "k_scale_buffer v_scale_buffer mxfp8_sf_interleaved"
    scaled = {f"{_POOLS}:MHATokenToKVPoolMXFP8.get_kv_scale_buf_infos": scales}
    yield from lines(Uses, "it lists scales of keys, then of values", scaled)
    yield Signature(
        where(hooks.STATE_ARGS),
        "kv_args, token_to_kv_pool, draft_token_to_kv_pool=, total_kv_layers=, req_to_token_pool=",
        "our hook on it remembers the pools, which SGLang does not hand to managers",
    )
    for manager in (where(hooks.PREFILL_MANAGER), where(hooks.DECODE_MANAGER)):
        yield Signature(manager, "self", "our hook on it takes the scheduler's window")
        yield Uses(manager, ("setup_state_kv_args", "scheduler"), "our hook on that is called there")
    for pages in (f"{_SCHEDULER}:Scheduler.__init__", f"{_MIXIN}._send_kv_chunk", f"{_PREALLOC}.pop_preallocated"):
        yield Uses(pages, ("sliding_window_size",), "a window's pages begin so many tokens before the request's end")
    heads = {f"{_POOLS}:MHATokenToKVPool.__init__": "head_num head_dim v_head_dim kv_cache_layout k_scale_buffer"}
    yield from lines(Uses, "heads and the order within a page are read from the pool", heads)
    inner = {
        "sglang.srt.mem_cache.swa_memory_pool:SWAKVPool.__init__": "full_kv_pool swa_kv_pool",
        f"{_POOLS}:HybridLinearKVPool.__init__": "full_kv_pool mamba_pool",
    }
    yield from lines(Uses, "each of its pools is described", inner)
    yield Uses(f"{_POOLS}:MambaPool.__init__", ("mamba_cache",), "its convolutions are told apart from its heads")
    total = {
        f"{_MODEL}:ModelConfig.get_total_num_kv_heads": "self",
        f"{_MODEL}:ModelConfig.get_swa_num_kv_heads": "self, tensor_parallel_size",
    }
    yield from lines(Signature, "heads of the whole model are read by it", total)
    filtered = "sglang.srt.disaggregation.utils:filter_kv_indices_for_shard_rank"
    owner = {filtered: "*, kv_indices, index_slice, shard_rank, shard_size"}
    yield from lines(Signature, "a page's number says which rank has it by this", owner)
    runners = {"sglang.srt.speculative.base_spec_worker:BaseSpecWorker._draft_model_runners": "self"}
    yield from lines(Signature, "a draft model's heads are those of the first one that runs it", runners)
    blocks = "the blocks of convolutions are read from"
    yield Call("sglang.srt.configs.hybrid_arch:mambaish_config", 1, (), f"{blocks} it")
    shape = {"sglang.srt.configs.mamba_utils:Mamba2StateShape": "conv_dim intermediate_size num_heads state_size"}
    yield from lines(Fields, f"{blocks} them", shape)


_BEGINS = "SGLang's checksum begins behind the decode side's prefix"


def _sender() -> Iterator[Line]:
    called = (
        "abort clear failure_exception get_max_transfer_tokens get_transfer_metric init mark_prefill_complete poll "
        "poll_pp_consensus pop_decode_prefix_len send should_send_kv_chunk"
    )
    yield Attributes(_SENDER, tuple(called.split()), "all that the scheduler calls of a sender", and_no_others=True)
    given = {
        f"{_SENDER}.__init__": "self, mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank=",
        f"{_SENDER}.init": "self, num_kv_indices, aux_index=",
        f"{_SENDER}.send": "self, kv_indices, state_indices=, num_kv_tokens=, indices_event=",
        **{
            f"{_SENDER}.{name}": "self"
            for name in ["poll", "poll_pp_consensus", "abort", "clear", "get_transfer_metric", "pop_decode_prefix_len"]
        },
    }
    yield from lines(Signature, "the scheduler calls our sender so", given)
    finalized = f"{_BOOTSTRAP}.finalize_bootstrap"
    prefix = {finalized: "pop_decode_prefix_len start_send_idx"}
    yield from lines(Uses, "it hands in what follows the decode side's prefix", prefix)
    digested = {
        finalized: "disagg_decode_prefix_len",
        f"{_MIXIN}.send_kv_chunk": "disagg_decode_prefix_len set_kv_checksum",
    }
    yield from lines(Mentions, _BEGINS, digested)
    yield Signature(
        where(hooks.CREATE_SENDER), "self, req, num_kv_heads", "our hook on it takes a request's conditions"
    )
    yield Uses(where(hooks.CREATE_SENDER), ("disagg_kv_sender", "bootstrap_room"), "our sender is made there")


def _receiver() -> Iterator[Line]:
    called = (
        "abort clear close_all_sockets disconnect_endpoint ensure_abort_notified failure_exception init "
        "invalidate_cached_bootstrap_infos is_abort_release_safe poll query_prefill_dp_ranks send_metadata "
        "supports_host_destination"
    )
    yield Attributes(_RECEIVER, tuple(called.split()), "all that the scheduler calls of a receiver", and_no_others=True)
    given = {
        f"{_RECEIVER}.__init__": "self, mgr, bootstrap_addr, bootstrap_room=",
        f"{_RECEIVER}.init": "self, prefill_dp_rank",
        f"{_RECEIVER}.send_metadata": (
            "self, kv_indices, aux_index=, state_indices=, decode_prefix_len=, destination=, device_kv_indices="
        ),
        f"{_RECEIVER}.ensure_abort_notified": "self, *, force_arm=",
        **{f"{_RECEIVER}.{name}": "self" for name in ("poll", "abort", "clear", "is_abort_release_safe")},
    }
    yield from lines(Signature, "the scheduler calls our receiver so", given)
    yield Members(f"{_BASE}:KVTransferDestination", {"DEVICE": "device"}, "other destinations are refused")
    made, known, queue = where(hooks.CREATE_RECEIVER), where(hooks.SERVERS_KNOWN), where(hooks.TRANSFER_QUEUE)
    yield Signature(made, "self, req, is_rebootstrap=", "our hook on it takes a request's conditions")
    yield Uses(made, ("kv_receiver", "bootstrap_room"), "our receiver is made there")
    yield Signature(known, "self, addr_to_reqs", "our hook on it keeps requests back")
    resolves = f"{_PREALLOC}._resolve_pending_reqs"
    yield Uses(resolves, ("_ensure_prefill_info", "_prefill_dp_rank_queries"), "our hook is called there")
    waits = "SGLang waits there for what our hook has seen to be answered, and for nothing else"
    yield Mentions(resolves, ("_resolve_prefill_dp_rank", "bootstrap_room", "result"), waits)
    asks = "_prefill_dp_rank_queries pending_reqs submit query_prefill_dp_ranks"
    asked = {f"{_PREALLOC}.prefetch_prefill_dp_rank_queries": asks}
    yield from lines(Mentions, "it asks in the background", asked)
    looked_up = {known: "_ensure_retry_interval _max_ensure_retries try_ensure_parallel_info"}
    yield from lines(Uses, "requests wait for the look-up of their server for as long as we say", looked_up)
    verifies = f"{_DECODE}:SchedulerDisaggregationDecodeMixin._verify_kv_checksums"
    yield Mentions(verifies, ("should_verify_kv_checksum", "cache_protected_len"), _BEGINS)
    kept = "our hook on it keeps pages until it is proven that nothing writes to them"
    made_with = "self, req_to_metadata_buffer_idx_allocator, metadata_buffers, scheduler, tree_cache"
    yield from lines(Signature, kept, {queue: made_with})
    limit = ("deferred_kv_release_timeout",)
    yield Uses(queue, limit, "our hook takes away that limit")
    yield Uses(f"{_TRANSFERS}._defer_release", limit, "pages of a failed request are kept for so long")
    released = {f"{_TRANSFERS}.resolve_deferred_releases": "is_abort_release_safe"}
    yield from lines(Uses, "pages of a failed request come back by it", released)


def _stages() -> Iterator[Line]:
    ended, takes, admits = where(hooks.STAGES_ENDED), where(hooks.STAGE_TAKES), where(hooks.STAGE_ADMITS)
    yield Signature(ended, "self", "ours in its place says which transfers have failed on a stage")
    yield Signature(takes, "self, release_rids", "our hook on it tells later stages of failed transfers")
    yield Signature(admits, "self, prealloc_rids", "our hook on it admits later what had no memory yet")
    used = {
        ended: "pp_group get_rids _pp_recv_pyobj_from_prev_stage",
        takes: "disagg_decode_transfer_queue pop_transferred",
        admits: "disagg_decode_prealloc_queue pop_preallocated",
    }
    yield from lines(Uses, "stages agree by it", used)


_BATCH = "sglang.srt.managers.schedule_batch"
_LIKEWISE = "likewise"


def _requests() -> Iterator[Line]:
    conditions = "origin_input_ids output_ids lora_id extra_key cache_salt input_embeds multimodal_inputs"
    yield from lines(Uses, "a request's conditions are read from them", {f"{_BATCH}:Req.__init__": conditions})
    yield Fields(f"{_BATCH}:MultimodalInputs", ("mm_items",), "images and the like are read from it")
    items = {f"{_BATCH}:MultimodalDataItem": "modality hash offsets"}
    yield from lines(Fields, "images and the like are told apart by them", items)


def _weights() -> Iterator[Line]:
    for hooked in (*hooks.UPDATES, hooks.UPDATE_BEGINS, hooks.UPDATE_ENDS):
        yield Signature(where(hooked), "self, recv_req", "our hook on it tells peers that weights are replaced")
    files = {"sglang.srt.model_loader.loader:DefaultModelLoader.Source.init_new": "model_path revision"}
    yield from lines(Mentions, "files are read again at the revision that the server was started with", files)
    daemon = {"sglang.srt.arg_groups.fields.model:Model": "weight_cache_mode"}
    yield from lines(Fields, "whether weights are a daemon's", daemon)
    asked = (
        *("BeginWeightUpdateReqInput", "UpdateWeightsFromTensorReqInput", "UpdateWeightsFromDistributedReqInput"),
        "CheckWeightsReqInput",
    )
    drafts = {f"sglang.srt.managers.io_struct:{request}": "selector" for request in asked}
    yield from lines(Fields, "a draft model's weights are told from the model's by it", drafts)
    updater = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"
    manager = {updater: "scheduler _session is_fully_idle memory_saver_adapter draft_worker"}
    yield from lines(Fields, "our hooks find the manager, and whether an update is whole, by them", manager)
    released, checked = where(hooks.MEMORY_RELEASED), where(hooks.WEIGHTS_CHECKED)
    yield Signature(released, "self, recv_req", "our hook on it hears that weights are lost")
    yield Uses(released, ("tags", "memory_saver_adapter", "pause"), "whether they are is known by them")
    kept = {
        "sglang.srt.constants": "GPU_MEMORY_TYPE_WEIGHTS",
        "sglang.srt.utils.torch_memory_saver_adapter:TorchMemorySaverAdapter": "enabled",
    }
    yield from lines(Attributes, _LIKEWISE, kept)
    yield Fields("sglang.srt.arg_groups.fields.exec_:ExecFeatures", ("enable_weights_cpu_backup",), _LIKEWISE)
    yield Signature(checked, "self, recv_req", "our hook on it hears that weights are drawn by chance")
    action = {"sglang.srt.utils.weight_checker:WeightChecker.handle": "action _reset_tensors"}
    yield from lines(Uses, "it is known by the action", action)
    named = {f"{_SCHEDULER}:Scheduler.handle_update_weight_version": "self, recv_req"}
    yield from lines(Signature, "our hook on it hears what weights are called", named)


def _cached() -> Iterator[Line]:
    """Yields what is asked about what those before have computed."""
    images = {"sglang.srt.managers.mm_schedule:init_mm_embedding_cache": "embedding_cache MultiModalStaticCache"}
    yield from lines(Uses, "images are embedded anew after an update", images)
    yield Signature("sglang.srt.mem_cache.multimodal_cache:MultiModalStaticCache.clear", "self", _LIKEWISE)
    attached, flushed = where(hooks.STORE_ATTACHED), where(hooks.CACHE_FLUSHED)
    yield Signature(attached, "self, recv_req", "our hook on it hears of what may be stored of those before")
    yield Uses(attached, ("AttachHiCacheStorageReqOutput", "success"), "our hook hears that it was done")
    yield Signature(flushed, "self, empty_cache=", "our hook on it hears that nothing older is cached")
    yield Uses(flushed, ("is_fully_idle", "tree_cache"), "whether something older is cached is asked of them")
    store = {"sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache.init_cache_linker": "linker"}
    yield from lines(Uses, "whether there is a store that a flush leaves is asked of it", store)
    yield Uses(f"{_SCHEDULER}:Scheduler.__init__", ("decode_offload_manager",), _LIKEWISE)
    sessions = {"sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.session_records": "self"}
    yield from lines(Signature, "whether sessions hold something older is asked by it", sessions)
    yield Attributes(f"{_BATCH}:ReqKvInfo", ("holds_kv",), _LIKEWISE)
    yield Signature(f"{_SCHEDULER}:Scheduler.is_fully_idle", "self, for_health_check=, ignore_waiting=", _LIKEWISE)


def _adapters() -> Iterator[Line]:
    told_apart = {"sglang.srt.lora.lora_registry:LoRARef": "lora_id lora_name lora_path"}
    yield from lines(Fields, "adapters are told apart by them", told_apart)
    loaded = {
        where(hooks.ADAPTER_LOADED): "self, lora_ref",
        where(hooks.ADAPTER_OF_TENSORS): "self, lora_ref, tensors, config_dict, added_tokens_config=",
    }
    yield from lines(Signature, "our hook on it says what was loaded", loaded)
    adapters = "sglang.srt.lora.lora_manager:LoRAManager"
    called = {
        f"{adapters}.init_lora_adapters": "_load_lora_adapter",
        f"{adapters}.load_lora_adapter": "_load_lora_adapter",
        f"{adapters}.load_lora_adapter_from_tensors": "_load_lora_adapter_from_tensors",
    }
    yield from lines(Uses, "the hook is called there", called)


def _both() -> Iterator[Line]:
    yield Members(
        f"{_BASE}:KVPoll",
        {"Failed": 0, "Bootstrapping": 1, "WaitingForInput": 2, "Transferring": 3, "Success": 4},
        "we report states so",
        and_no_others=True,
    )
    measured = {f"{_BASE}:KVTransferMetric": "transfer_latency_s transfer_total_bytes"}
    yield from lines(Fields, "we report measurements so", measured)
    route = "our route is added by it"
    yield Signature(f"{_SERVER}.__init__", "self, host, port", "our bootstrap server is made so")
    yield Signature(f"{_SERVER}._setup_routes", "self", route)
    yield Signature(f"{_SERVER}.close", "self", "our bootstrap server is closed so")
    yield Uses(f"{_SERVER}.__init__", ("app", "_setup_routes"), route)
    leaves = "SGLang's server in Rust leaves the bootstrap server to us, since ours is none of SGLang's"
    serves = "sglang.srt.managers.disagg_service:rust_server_serves_kv_bootstrap"
    yield Mentions(serves, ("CommonKVBootstrapServer", "get_kv_class"), leaves)


_COMPRESSED = "sglang.srt.mem_cache.deepseek_v4_memory_pool:DeepSeekV4TokenToKVPool"
_POOLED = "sglang.srt.mem_cache.qsa_kv_pool:QSATokenToKVPool"
_UNIFIED = "sglang.srt.mem_cache.unified_memory_pool"


def _indexed() -> Iterator[Line]:
    """Yields what is needed of pools with an index, or with latents at several compressions.

    0.5.22 was not tried with them: it has no such lines.
    """
    states = _values("swa_ring request_row qsa_pending qsa_compressed minimax_index_k minimax_dense_kv")
    told_apart = "what is cached beside keys, values and latents is told apart so"
    yield Members(f"{_BASE}:StateType", {**states, "DSV4_REQUEST_STATE": "c128_state"}, told_apart)
    windows = "request_window swa_kv_pool unified_kv_pool unified_swa_ring_size _unified_kv _unified_kv_fp8"
    yield from lines(
        Uses, "where DeepSeek V4's windows are is read from the pool", {f"{_COMPRESSED}.__init__": windows}
    )
    latents = "kv_pools index_pools _stage_start _stage_end compression_ratios"
    by_ratio = {f"{_COMPRESSED}.get_contiguous_buf_infos": latents}
    yield from lines(Uses, "it lists latents and their index, compression by compression", by_ratio)
    pending = "compress_state_pools indexer_compress_state_pools request_scoped ring_size"
    of_states = {f"{_COMPRESSED}.get_state_buf_infos": pending}
    yield from lines(Uses, "it lists windows, then what is not compressed of latents and of their index", of_states)
    pending = "qsa_key_state_buffer_pool qsa_rope_position_buffer qsa_compress_ratio"
    of_pending = {f"{_POOLED}.get_qsa_pending_state_buf_infos": pending}
    yield from lines(Uses, "it lists the keys of all layers, then positions", of_pending)
    pooled = {f"{_POOLED}.get_qsa_compressed_state_buf_infos": "qsa_compressed_k_buffer_pool"}
    yield from lines(Uses, "it lists the pooled keys of all layers", pooled)
    sparse = "main_pool index_k_pool _dense_layer_ids sparse_layer_id_mapping"
    of_sparse = {f"{_POOLS}:MiniMaxSparseKVPool.__init__": sparse}
    yield from lines(Uses, "each of its pools is described, and which layers it has", of_sparse)
    yield Call(f"{_MODEL}:get_minimax_sparse_attention_config", 1, (), "which layers MiniMax has is read from it")
    before = "layers without sparse attention come before those with it"
    yield Call(f"{_MODEL}:get_minimax_sparse_layer_ids", 1, (), before)
    yield Signature(where(hooks.UNIFIED_BACKENDS), "self", "our hook adds to it")
    yield Signature(where(hooks.MOVE_GATE), "scheduler", "our hook on it keeps pages of failed requests where they are")
    unified = {
        f"{_UNIFIED}:UnifiedMHATokenToKVPool.get_contiguous_buf_infos": "_raw active_allocation_bytes _page_bytes"
    }
    yield from lines(Uses, "it lists unified memory as one buffer with pages of all layers", unified)
    slots = {f"{_UNIFIED}:UnifiedMambaPool.get_contiguous_buf_infos": "_raw entry_bytes"}
    yield from lines(Uses, "it lists unified memory as one buffer with slots of all layers", slots)
    failed = {_TRANSFERS: "has_pending_deferred_releases"}
    yield from lines(Attributes, "pages of failed requests are not moved while it has any", failed)
    rows = "rows k_buffer v_buffer k_scale_buffer v_scale_buffer payload_bytes_per_head"
    of_rows = {"sglang.srt.mem_cache.minimax_m3_nvfp4_pool:MiniMaxM3Nvfp4MainKVPool.__init__": rows}
    yield from lines(Uses, "where a row has keys, values and scales is read from the pool", of_rows)


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


def _layers() -> Iterator[Line]:
    step = where(hooks.BEFORE_STEP)
    yield Signature(step, "self, req, allow_send=", "our hook on it says what a step will compute")
    runs = {f"{_SCHEDULER}:Scheduler.run_batch": "maybe_send_cached_prefix_chunk"}
    yield from lines(Uses, "the hook is called there, before the model computes", runs)
    found = "start_send_idx extend_end translate_kv_indices_for_transfer req_to_token req_pool_idx"
    pages = {f"{_MIXIN}._send_kv_chunk": found}
    yield from lines(Uses, "the pages of a step are found as it finds them afterwards", pages)
    counter = {f"{_POOLS}:KVCache.register_layer_transfer_counter": "self, layer_transfer_counter"}
    yield from lines(Signature, "ours takes the place of SGLang's counter", counter)
    for pool in ("MHATokenToKVPool", "MLATokenToKVPool"):
        asks = f"{_POOLS}:{pool}.get_key_buffer"
        yield Uses(asks, ("wait_until", "start_layer"), "our counter is asked there")


def _ending() -> Iterator[Line]:
    tokenizer = "sglang.srt.managers.tokenizer_manager"
    drains = {where(hooks.TERMINATED): "self, signum=, frame="}
    yield from lines(Signature, "our hook on it says at the registry that the engine drains", drains)
    yield Uses(f"{tokenizer}:SignalHandler.__init__", ("tokenizer_manager",), "our hook finds the server by it")
    registry = {f"{tokenizer}:TokenizerManager.init_disaggregation": "bootstrap_server"}
    yield from lines(Uses, "our hook finds the registry by it", registry)
    yield Signature(where(hooks.SCHEDULER_ENDS), "self", "our hook on it closes a rank's endpoints")
    ends = {f"{_SCHEDULER}:run_scheduler_process": "release_host_resources"}
    yield from lines(Uses, "a scheduler that ends calls it", ends)
    queues = "disagg_prefill_bootstrap_queue disagg_decode_prealloc_queue"
    endpoints = {f"{_SCHEDULER}:Scheduler.init_disaggregation": queues}
    yield from lines(Uses, "our hook finds the endpoints by them", endpoints)


_PARTS = (_loading, _manager, _caches, _sender, _receiver, _stages, _requests, _weights, _cached, _adapters, _both)
_SERVING = tuple(line for part in _PARTS for line in part())

LAYERS = (Contract("SGLang", ("0.5.23",), tuple(_layers())),)
"""What KVFERRY_LAYER_RANGES builds on, checked where that is set."""

ENDING = Contract("SGLang", TRIED, tuple(_ending()))
"""What `termination` builds on. A server without it serves, and its peers merely notice later that it has ended."""

LOADING = (Contract("SGLang", TRIED, tuple(_loading())),)
SERVING = (
    Contract("SGLang", ("0.5.22",), tuple(_in_0_5_22(_SERVING))),
    Contract("SGLang", ("0.5.23",), (*_SERVING, *_indexed())),
)
