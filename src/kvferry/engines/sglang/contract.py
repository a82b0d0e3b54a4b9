"""What the plug-in builds on in SGLang, line by line.

`LOADING` is what makes kvferry a choice at all, checked when SGLang loads its plug-ins, in every process and whatever
backend it will use. `SERVING` is all the rest, checked in a process that is about to use kvferry. Where another version
differs it has lines of its own here, and what differs in the code belongs in one module for that version.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    Signature,
    Uses,
)
from kvferry.engines.sglang import hooks
from kvferry.engines.sglang.contract_pools import INDEXED
from kvferry.engines.sglang.contract_requests import REQUESTS
from kvferry.engines.sglang.hooks import where

TRIED = ("0.5.22", "0.5.23")
"""The versions of SGLang with which every line below was tried, by the tests in tests/real_engines/sglang."""


def engine_version() -> str:
    """Returns SGLang's version."""
    from sglang.version import __version__

    return str(__version__)


_BASE = "sglang.srt.disaggregation.base.conn"
_MANAGERS = "sglang.srt.managers"
_COMMON = "sglang.srt.disaggregation.common.conn"
_DECODE = "sglang.srt.disaggregation.decode"
_PREFILL = "sglang.srt.disaggregation.prefill"
_MIXIN = f"{_PREFILL}:SchedulerDisaggregationPrefillMixin"
_POOLS = "sglang.srt.mem_cache.memory_pool"
_SWA_POOL = "sglang.srt.mem_cache.swa_memory_pool"
_MODEL = "sglang.srt.configs.model_config"
_HOOKS = "sglang.srt.plugins.hook_registry"

_LOADING: tuple[Line, ...] = (
    Signature(f"{_HOOKS}:HookRegistry.register", "cls, target, hook, hook_type=, *, source=", "our hooks go in by it"),
    Call(f"{_HOOKS}:HookRegistry.apply_hooks", 1, (), "we check after it that our hooks are in effect"),
    Uses("sglang.srt.plugins:load_plugins", ("HookRegistry", "apply_hooks"), "our hooks are applied there"),
    Members(f"{_HOOKS}:HookType", {"AFTER": "after", "AROUND": "around", "REPLACE": "replace"}, "our hooks' kinds"),
    Members(where(hooks.BACKENDS), {"NIXL": "nixl"}, "we add our name to them, and may take over this one"),
    Members(
        "sglang.srt.disaggregation.utils:KVClassType",
        {
            "KVARGS": "kvargs",
            "MANAGER": "manager",
            "SENDER": "sender",
            "RECEIVER": "receiver",
            "BOOTSTRAP_SERVER": "bootstrap_server",
        },
        "we have a class for each of them",
        and_no_others=True,
    ),
    Signature(where(hooks.KV_CLASS), "transfer_backend, class_type", "our hook on it gives SGLang our classes"),
    Call(
        "sglang.srt.arg_groups.choices:add_disagg_transfer_backend_choices",
        1,
        (),
        "it makes our name one for --disaggregation-transfer-backend",
    ),
)

_MANAGER: tuple[Line, ...] = (
    Inherits(f"{_COMMON}:CommonKVManager", f"{_BASE}:BaseKVManager", "our manager extends it"),
    Signature(
        f"{_COMMON}:CommonKVManager.__init__",
        "self, args, disaggregation_mode, server_args, is_mla_backend=",
        "the scheduler makes our manager so",
    ),
    *(
        Signature(
            f"{_COMMON}:CommonKVManager.{name}", parameters, "the scheduler calls it, and ours stands in its place"
        )
        for name, parameters in {
            "try_ensure_parallel_info": "self, bootstrap_addr",
            "should_verify_kv_checksum": "self, bootstrap_addr",
            "is_abort_release_safe": "self, bootstrap_room, required_acks",
            "clear_deferred_abort_state": "self, bootstrap_room",
        }.items()
    ),
    *(
        Call(f"{_COMMON}:CommonKVManager.{name}", count, (), "our senders and receivers call it")
        for name, count in {
            "check_status": 2,
            "update_status": 3,
            "record_failure": 3,
        }.items()
    ),
    Attributes(
        f"{_BASE}:BaseKVManager",
        ("supports_role_switch", "teardown"),
        "a server may take the other role, since our manager has them",
    ),
    *(
        Uses(f"{queue}.{event}_memory_occupation", ("kv_manager", called), "our endpoint is gone meanwhile")
        for queue in (f"{_PREFILL}:PrefillBootstrapQueue", f"{_DECODE}:DecodePreallocQueue")
        for event, called in (("release", "deregister_buffer_to_engine"), ("resume", "register_buffer_to_engine"))
    ),
    Uses(
        f"{_COMMON}:CommonKVManager.__init__",
        (
            *("kv_args", "kv_cache_dtype_str", "kv_layout", "request_status", "failure_records", "prefill_info_table"),
            *("attn_tp_rank", "attn_tp_size", "pp_rank", "pp_size", "attn_dp_rank", "system_dp_rank", "system_dp_size"),
            *("attn_cp_rank", "attn_cp_size", "attn_dp_size", "kv_shard_rank", "kv_shard_size"),
            *("dist_init_addr", "bootstrap_host", "bootstrap_port", "enable_deferred_decode_kv_release", "_zmq_ctx"),
            "server_socket",
        ),
        "our manager reads what it sets",
    ),
    Fields(
        f"{_BASE}:KVArgs",
        (
            *("kv_data_ptrs", "kv_data_lens", "kv_item_lens", "kv_layer_ids", "kv_layout", "page_size", "gpu_id"),
            *("aux_data_ptrs", "aux_item_lens", "num_draft_entries", "ib_device"),
            *("state_types", "state_data_ptrs", "state_data_lens", "state_item_lens", "state_layer_ids"),
            *("state_dim_per_tensor", "state_slice_outer_counts", "state_conv_shard_groups"),
        ),
        "the caches are described from them",
    ),
    Members(
        f"{_BASE}:StateType",
        {
            "SWA": "swa",
            "MAMBA": "mamba",
            "DSA": "dsa",
            "DSA_TAIL": "dsa_tail",
            "BLOCK_SCALE": "block_scale",
            "BLOCK_SCALE_SWA": "block_scale_swa",
        },
        "what is cached beside keys and values is told apart so",
    ),
    Uses(
        f"{_POOLS}:DSATokenToKVPool.__init__",
        ("index_kpool", "index_head_dim", "index_page_size"),
        "the order within a page of the index is named by them",
    ),
    Uses(
        f"{_POOLS}:DSATokenToKVPool.get_compress_tail_buf_infos",
        ("kpool_use_compress", "layer_num", "_compress_tail_k", "_compress_tail_score"),
        "it lists the keys of all layers, then their scores",
    ),
    Uses(
        f"{_POOLS}:MHATokenToKVPoolMXFP8.get_kv_scale_buf_infos",
        ("k_scale_buffer", "v_scale_buffer", "mxfp8_sf_interleaved"),
        "it lists scales of keys, then of values",
    ),
    Signature(
        where(hooks.STATE_ARGS),
        "kv_args, token_to_kv_pool, draft_token_to_kv_pool=, total_kv_layers=, req_to_token_pool=",
        "our hook on it remembers the pools, which SGLang does not hand to managers",
    ),
    *(
        line
        for manager in (hooks.PREFILL_MANAGER, hooks.DECODE_MANAGER)
        for line in (
            Signature(where(manager), "self", "our hook on it takes the scheduler's window"),
            Uses(where(manager), ("setup_state_kv_args", "scheduler"), "our hook on that is called there"),
        )
    ),
    *(
        Uses(pages, ("sliding_window_size",), "a window's pages begin so many tokens before the request's end")
        for pages in (
            "sglang.srt.managers.scheduler:Scheduler.__init__",
            f"{_MIXIN}._send_kv_chunk",
            f"{_DECODE}:DecodePreallocQueue.pop_preallocated",
        )
    ),
    Uses(
        f"{_POOLS}:MHATokenToKVPool.__init__",
        ("head_num", "head_dim", "v_head_dim", "kv_cache_layout", "k_scale_buffer"),
        "heads and the order within a page are read from the pool",
    ),
    Uses(f"{_SWA_POOL}:SWAKVPool.__init__", ("full_kv_pool", "swa_kv_pool"), "each of its pools is described"),
    Uses(f"{_POOLS}:HybridLinearKVPool.__init__", ("full_kv_pool", "mamba_pool"), "each of its pools is described"),
    Uses(f"{_POOLS}:MambaPool.__init__", ("mamba_cache",), "its convolutions are told apart from its heads"),
    *(
        Signature(f"{_MODEL}:ModelConfig.{name}", parameters, "heads of the whole model are read by it")
        for name, parameters in {
            "get_total_num_kv_heads": "self",
            "get_swa_num_kv_heads": "self, tensor_parallel_size",
        }.items()
    ),
    Signature(
        "sglang.srt.disaggregation.utils:filter_kv_indices_for_shard_rank",
        "*, kv_indices, index_slice, shard_rank, shard_size",
        "a page's number says which rank has it by this",
    ),
    Signature(
        "sglang.srt.speculative.base_spec_worker:BaseSpecWorker._draft_model_runners",
        "self",
        "a draft model's heads are those of the first one that runs it",
    ),
    Call("sglang.srt.configs.hybrid_arch:mambaish_config", 1, (), "the blocks of convolutions are read from it"),
    Fields(
        "sglang.srt.configs.mamba_utils:Mamba2StateShape",
        ("conv_dim", "intermediate_size", "num_heads", "state_size"),
        "the blocks of convolutions are read from them",
    ),
    Fields(
        f"{_COMMON}:PrefillServerInfo",
        (
            *("attn_tp_size", "attn_cp_size", "pp_size", "page_size", "kv_cache_dtype", "kv_layout"),
            "decode_allocation_policy",
        ),
        "two servers are compared by them",
    ),
    Attributes(
        "sglang.srt.environ:envs",
        (
            *("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT"),
            *("SGLANG_DISAGG_STAGING_BUFFER", "SGLANG_RUST_SERVER", "SGLANG_MM_SKIP_COMPUTE_HASH"),
            "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT",
        ),
        "our limits follow them, and some are refused",
    ),
    Call(f"{_MODEL}:ModelConfig.from_server_args", 1, (), "the model is read from it"),
)

_SENDER: tuple[Line, ...] = (
    Attributes(
        f"{_COMMON}:CommonKVSender",
        (
            *("abort", "clear", "failure_exception", "get_max_transfer_tokens", "get_transfer_metric", "init"),
            *("mark_prefill_complete", "poll", "poll_pp_consensus", "pop_decode_prefix_len", "send"),
            "should_send_kv_chunk",
        ),
        "all that the scheduler calls of a sender",
        and_no_others=True,
    ),
    *(
        Signature(f"{_COMMON}:CommonKVSender.{name}", parameters, "the scheduler calls our sender so")
        for name, parameters in {
            "__init__": "self, mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank=",
            "init": "self, num_kv_indices, aux_index=",
            "send": "self, kv_indices, state_indices=, num_kv_tokens=, indices_event=",
            "poll": "self",
            "poll_pp_consensus": "self",
            "abort": "self",
            "clear": "self",
            "get_transfer_metric": "self",
            "pop_decode_prefix_len": "self",
        }.items()
    ),
    Uses(
        f"{_PREFILL}:PrefillBootstrapQueue.finalize_bootstrap",
        ("pop_decode_prefix_len", "start_send_idx"),
        "it hands in what follows the decode side's prefix",
    ),
    Mentions(
        f"{_PREFILL}:PrefillBootstrapQueue.finalize_bootstrap",
        ("disagg_decode_prefix_len",),
        "SGLang's checksum begins behind the decode side's prefix",
    ),
    Mentions(
        f"{_MIXIN}.send_kv_chunk",
        ("disagg_decode_prefix_len", "set_kv_checksum"),
        "SGLang's checksum begins behind the decode side's prefix",
    ),
    Signature(where(hooks.CREATE_SENDER), "self, req, num_kv_heads", "our hook on it takes a request's conditions"),
    Uses(where(hooks.CREATE_SENDER), ("disagg_kv_sender", "bootstrap_room"), "our sender is made there"),
)

_RECEIVER: tuple[Line, ...] = (
    Attributes(
        f"{_COMMON}:CommonKVReceiver",
        (
            *("abort", "clear", "close_all_sockets", "disconnect_endpoint", "ensure_abort_notified"),
            *("failure_exception", "init", "invalidate_cached_bootstrap_infos", "is_abort_release_safe", "poll"),
            *("query_prefill_dp_ranks", "send_metadata", "supports_host_destination"),
        ),
        "all that the scheduler calls of a receiver",
        and_no_others=True,
    ),
    *(
        Signature(f"{_COMMON}:CommonKVReceiver.{name}", parameters, "the scheduler calls our receiver so")
        for name, parameters in {
            "__init__": "self, mgr, bootstrap_addr, bootstrap_room=",
            "init": "self, prefill_dp_rank",
            "send_metadata": (
                "self, kv_indices, aux_index=, state_indices=, decode_prefix_len=, destination=, device_kv_indices="
            ),
            "poll": "self",
            "abort": "self",
            "ensure_abort_notified": "self, *, force_arm=",
            "clear": "self",
            "is_abort_release_safe": "self",
        }.items()
    ),
    Members(f"{_BASE}:KVTransferDestination", {"DEVICE": "device"}, "other destinations are refused"),
    Signature(
        where(hooks.CREATE_RECEIVER), "self, req, is_rebootstrap=", "our hook on it takes a request's conditions"
    ),
    Uses(where(hooks.CREATE_RECEIVER), ("kv_receiver", "bootstrap_room"), "our receiver is made there"),
    Signature(where(hooks.SERVERS_KNOWN), "self, addr_to_reqs", "our hook on it keeps requests back"),
    Uses(
        f"{_DECODE}:DecodePreallocQueue._resolve_pending_reqs",
        ("_ensure_prefill_info", "_prefill_dp_rank_queries"),
        "our hook is called there",
    ),
    Mentions(
        f"{_DECODE}:DecodePreallocQueue._resolve_pending_reqs",
        ("_resolve_prefill_dp_rank", "bootstrap_room", "result"),
        "SGLang waits there for what our hook has seen to be answered, and for nothing else",
    ),
    Mentions(
        f"{_DECODE}:DecodePreallocQueue.prefetch_prefill_dp_rank_queries",
        ("_prefill_dp_rank_queries", "pending_reqs", "submit", "query_prefill_dp_ranks"),
        "it asks in the background",
    ),
    Uses(
        where(hooks.SERVERS_KNOWN),
        ("_ensure_retry_interval", "_max_ensure_retries", "try_ensure_parallel_info"),
        "requests wait for the look-up of their server for as long as we say",
    ),
    Mentions(
        f"{_DECODE}:SchedulerDisaggregationDecodeMixin._verify_kv_checksums",
        ("should_verify_kv_checksum", "cache_protected_len"),
        "SGLang's checksum begins behind the decode side's prefix",
    ),
    Signature(
        where(hooks.TRANSFER_QUEUE),
        "self, req_to_metadata_buffer_idx_allocator, metadata_buffers, scheduler, tree_cache",
        "our hook on it keeps pages until it is proven that nothing writes to them",
    ),
    Uses(where(hooks.TRANSFER_QUEUE), ("deferred_kv_release_timeout",), "our hook takes away that limit"),
    Uses(
        f"{_DECODE}:DecodeTransferQueue._defer_release",
        ("deferred_kv_release_timeout",),
        "pages of a failed request are kept for so long",
    ),
    Uses(
        f"{_DECODE}:DecodeTransferQueue.resolve_deferred_releases",
        ("is_abort_release_safe",),
        "pages of a failed request come back by it",
    ),
)

_STAGES: tuple[Line, ...] = (
    Signature(where(hooks.STAGES_ENDED), "self", "ours in its place says which transfers have failed on a stage"),
    Signature(where(hooks.STAGE_TAKES), "self, release_rids", "our hook on it tells later stages of failed transfers"),
    Signature(where(hooks.STAGE_ADMITS), "self, prealloc_rids", "our hook on it admits later what had no memory yet"),
    *(
        Uses(where(hooked), used, "stages agree by it")
        for hooked, used in {
            hooks.STAGES_ENDED: ("pp_group", "get_rids", "_pp_recv_pyobj_from_prev_stage"),
            hooks.STAGE_TAKES: ("disagg_decode_transfer_queue", "pop_transferred"),
            hooks.STAGE_ADMITS: ("disagg_decode_prealloc_queue", "pop_preallocated"),
        }.items()
    ),
)

_BOTH: tuple[Line, ...] = (
    Members(
        f"{_BASE}:KVPoll",
        {"Failed": 0, "Bootstrapping": 1, "WaitingForInput": 2, "Transferring": 3, "Success": 4},
        "we report states so",
        and_no_others=True,
    ),
    Fields(f"{_BASE}:KVTransferMetric", ("transfer_latency_s", "transfer_total_bytes"), "we report measurements so"),
    Signature(f"{_COMMON}:CommonKVBootstrapServer.__init__", "self, host, port", "our bootstrap server is made so"),
    Signature(f"{_COMMON}:CommonKVBootstrapServer._setup_routes", "self", "our route is added by it"),
    Signature(f"{_COMMON}:CommonKVBootstrapServer.close", "self", "our bootstrap server is closed so"),
    Uses(f"{_COMMON}:CommonKVBootstrapServer.__init__", ("app", "_setup_routes"), "our route is added by it"),
    Mentions(
        "sglang.srt.managers.disagg_service:rust_server_serves_kv_bootstrap",
        ("CommonKVBootstrapServer", "get_kv_class"),
        "SGLang's server in Rust leaves the bootstrap server to us, since ours is none of SGLang's",
    ),
)

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


def _in_0_5_22(lines: tuple[Line, ...]) -> Iterator[Line]:
    """Yields the lines as 0.5.22 has them."""
    for line in lines:
        if line.where.rpartition(":")[2].rpartition(".")[2] in _NEW_IN_0_5_23:
            continue
        match line:
            case Signature():
                parameters = [each for each in line.parameters.split(", ") if each not in _NEW_IN_0_5_23]
                yield replace(line, parameters=", ".join(parameters))
            case Fields() | Attributes() | Uses() | Mentions():
                yield replace(line, names=tuple(each for each in line.names if each not in _NEW_IN_0_5_23))
            case _:
                yield line


_SERVING = (*_LOADING, *_MANAGER, *_SENDER, *_RECEIVER, *_STAGES, *REQUESTS, *_BOTH)

LAYERS = (
    Contract(
        "SGLang",
        ("0.5.23",),
        (
            Signature(
                where(hooks.BEFORE_STEP), "self, req, allow_send=", "our hook on it says what a step will compute"
            ),
            Uses(
                "sglang.srt.managers.scheduler:Scheduler.run_batch",
                ("maybe_send_cached_prefix_chunk",),
                "the hook is called there, before the model computes",
            ),
            Uses(
                f"{_MIXIN}._send_kv_chunk",
                ("start_send_idx", "extend_end", "translate_kv_indices_for_transfer", "req_to_token", "req_pool_idx"),
                "the pages of a step are found as it finds them afterwards",
            ),
            Signature(
                f"{_POOLS}:KVCache.register_layer_transfer_counter",
                "self, layer_transfer_counter",
                "ours takes the place of SGLang's counter",
            ),
            *(
                Uses(f"{_POOLS}:{pool}.get_key_buffer", ("wait_until", "start_layer"), "our counter is asked there")
                for pool in ("MHATokenToKVPool", "MLATokenToKVPool")
            ),
        ),
    ),
)
"""What KVFERRY_LAYER_RANGES builds on, checked where that is set."""

ENDING = Contract(
    "SGLang",
    TRIED,
    (
        Signature(
            where(hooks.TERMINATED),
            "self, signum=, frame=",
            "our hook on it says at the registry that the engine drains",
        ),
        Uses(
            f"{_MANAGERS}.tokenizer_manager:SignalHandler.__init__",
            ("tokenizer_manager",),
            "our hook finds the server by it",
        ),
        Uses(
            f"{_MANAGERS}.tokenizer_manager:TokenizerManager.init_disaggregation",
            ("bootstrap_server",),
            "our hook finds the registry by it",
        ),
        Signature(where(hooks.SCHEDULER_ENDS), "self", "our hook on it closes a rank's endpoints"),
        Uses(
            f"{_MANAGERS}.scheduler:run_scheduler_process",
            ("release_host_resources",),
            "a scheduler that ends calls it",
        ),
        Uses(
            f"{_MANAGERS}.scheduler:Scheduler.init_disaggregation",
            ("disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue"),
            "our hook finds the endpoints by them",
        ),
    ),
)
"""What `termination` builds on. A server without it serves, and its peers merely notice later that it has ended."""

LOADING = (Contract("SGLang", TRIED, _LOADING),)
SERVING = (
    Contract("SGLang", ("0.5.22",), tuple(_in_0_5_22(_SERVING))),
    Contract("SGLang", ("0.5.23",), (*_SERVING, *INDEXED)),
)
