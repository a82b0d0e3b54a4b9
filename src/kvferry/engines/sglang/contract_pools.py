"""What the plug-in builds on in SGLang's pools with an index, or with latents at several compressions.

0.5.22 was not tried with them: it has no such lines.
"""

from __future__ import annotations

from kvferry.engines.contract import Attributes, Call, Line, Members, Signature, Uses
from kvferry.engines.sglang.hooks import MOVE_GATE, where

_MODEL = "sglang.srt.configs.model_config"
_POOLS = "sglang.srt.mem_cache.memory_pool"
_COMPRESSED = "sglang.srt.mem_cache.deepseek_v4_memory_pool:DeepSeekV4TokenToKVPool"
_POOLED = "sglang.srt.mem_cache.qsa_kv_pool:QSATokenToKVPool"
_UNIFIED = "sglang.srt.mem_cache.unified_memory_pool"
_FOUR_BITS = "sglang.srt.mem_cache.minimax_m3_nvfp4_pool:MiniMaxM3Nvfp4MainKVPool"

INDEXED: tuple[Line, ...] = (
    Members(
        "sglang.srt.disaggregation.base.conn:StateType",
        {
            "SWA_RING": "swa_ring",
            "DSV4_REQUEST_STATE": "c128_state",
            "REQUEST_ROW": "request_row",
            "QSA_PENDING": "qsa_pending",
            "QSA_COMPRESSED": "qsa_compressed",
            "MINIMAX_INDEX_K": "minimax_index_k",
            "MINIMAX_DENSE_KV": "minimax_dense_kv",
        },
        "what is cached beside keys, values and latents is told apart so",
    ),
    Uses(
        f"{_COMPRESSED}.__init__",
        ("request_window", "swa_kv_pool", "unified_kv_pool", "unified_swa_ring_size", "_unified_kv", "_unified_kv_fp8"),
        "where DeepSeek V4's windows are is read from the pool",
    ),
    Uses(
        f"{_COMPRESSED}.get_contiguous_buf_infos",
        ("kv_pools", "index_pools", "_stage_start", "_stage_end", "compression_ratios"),
        "it lists latents and their index, compression by compression",
    ),
    Uses(
        f"{_COMPRESSED}.get_state_buf_infos",
        ("compress_state_pools", "indexer_compress_state_pools", "request_scoped", "ring_size"),
        "it lists windows, then what is not compressed of latents and of their index",
    ),
    Uses(
        f"{_POOLED}.get_qsa_pending_state_buf_infos",
        ("qsa_key_state_buffer_pool", "qsa_rope_position_buffer", "qsa_compress_ratio"),
        "it lists the keys of all layers, then positions",
    ),
    Uses(
        f"{_POOLED}.get_qsa_compressed_state_buf_infos",
        ("qsa_compressed_k_buffer_pool",),
        "it lists the pooled keys of all layers",
    ),
    Uses(
        f"{_POOLS}:MiniMaxSparseKVPool.__init__",
        ("main_pool", "index_k_pool", "_dense_layer_ids", "sparse_layer_id_mapping"),
        "each of its pools is described, and which layers it has",
    ),
    Call(f"{_MODEL}:get_minimax_sparse_attention_config", 1, (), "which layers MiniMax has is read from it"),
    Call(f"{_MODEL}:get_minimax_sparse_layer_ids", 1, (), "layers without sparse attention come before those with it"),
    Signature("sglang.srt.server_args:ServerArgs._unified_memory_pd_transfer_backends", "self", "our hook adds to it"),
    Signature(where(MOVE_GATE), "scheduler", "our hook on it keeps pages of failed requests where they are"),
    Uses(
        f"{_UNIFIED}:UnifiedMHATokenToKVPool.get_contiguous_buf_infos",
        ("_raw", "active_allocation_bytes", "_page_bytes"),
        "it lists unified memory as one buffer with pages of all layers",
    ),
    Uses(
        f"{_UNIFIED}:UnifiedMambaPool.get_contiguous_buf_infos",
        ("_raw", "entry_bytes"),
        "it lists unified memory as one buffer with slots of all layers",
    ),
    Attributes(
        "sglang.srt.disaggregation.decode:DecodeTransferQueue",
        ("has_pending_deferred_releases",),
        "pages of failed requests are not moved while it has any",
    ),
    Uses(
        f"{_FOUR_BITS}.__init__",
        ("rows", "k_buffer", "v_buffer", "k_scale_buffer", "v_scale_buffer", "payload_bytes_per_head"),
        "where a row has keys, values and scales is read from the pool",
    ),
)
