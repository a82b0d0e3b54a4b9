"""Every kind of cache that SGLang 0.5.23 has, by the class of its pool or its `StateType`, and what becomes of it.

Nothing here imports SGLang.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from enum import Enum
from typing import Any

from kvferry.engines.cache_kinds import CacheKind, CacheKinds
from kvferry.errors import LayoutError

_POOLS = "tests/unit/engines/test_sglang_pools.py::"
_DIVIDED = "tests/real_engines/sglang/test_divided_tokens.py::"
_COMPANIONS = "tests/real_engines/sglang/test_companions.py::"
_COMPRESSED = "tests/real_engines/sglang/test_compressed.py::"
_HISPARSE = "tests/real_engines/sglang/test_hisparse.py::"
_INDEXED = "tests/real_engines/sglang/test_indexed.py::"
_UNIFIED = "tests/real_engines/sglang/test_unified.py::"

_SHARDED = "SGLang itself shards their pages with --disaggregation-transfer-backend mooncake alone"
_FUSED = "SGLang itself can list them for no backend: leave --enable-unified-memory or the draft model away"
_PAGE_MAJOR = "SGLang itself makes and lists them for no backend: leave --enable-page-major-kv-layout away"
_HOST = "SGLang itself transfers them with its Mooncake backend alone: leave --enable-hisparse away"
_NPU = "only pools of cpu and cuda are"
_PART = "it is a part of another pool, and never a model's own"

NATIVE_SCALES = "MHATokenToKVPool with native scales"
_LAYOUT = "MHATokenToKVPool with kv_cache_layout"

_TRANSFERRED = {
    "tests/real_engines/sglang/test_disaggregated.py::test_sixteen_prompts_at_once": (
        (
            "MHATokenToKVPool",
            "keys and values, tokens before heads",
            "any tensor-parallel size to any other where pool and configuration agree on the KV heads, else to the "
            "same",
        ),
    ),
    f"{_POOLS}test_vectors_within_a_page_are_cut_by_head_only": (
        (
            f"{_LAYOUT} vectorized_5d",
            "keys and values, heads before vectors of 16 bytes",
            "as above, between pages of one size",
        ),
    ),
    "tests/real_engines/sglang/test_ranks.py::test_caches_arrive": (
        ("MLATokenToKVPool", "latents", "once, from ranks that take turns: every rank has the same"),
        ("StateType.MAMBA", "recurrent state and convolutions", "one slot a request"),
    ),
    f"{_DIVIDED}test_pages_that_go_round_arrive": (
        (
            "PageInterleaveMHATokenToKVPool",
            "keys and values, whose pages context-parallel ranks have by turns",
            "each page from the rank that has it",
        ),
        (
            "PageInterleaveMLATokenToKVPool",
            "latents, whose pages ranks have by turns",
            "each page from the rank that has it",
        ),
    ),
    "tests/real_engines/sglang/test_heads_by_layer.py::test_tokens_are_those_of_the_undivided_engine": (
        ("SWAKVPool", "full attention, and windows in a pool of their own", "each with its own number of KV heads"),
        ("StateType.SWA", "a sliding window in a pool of its own", "the pages that the window meets"),
    ),
    f"{_POOLS}test_blocks_that_sglang_names_are_taken": (
        ("HybridLinearKVPool", "full attention or latents, beside recurrent state", "each as if it were alone"),
    ),
    f"{_POOLS}test_a_mixers_convolution_is_cut_into_x_b_and_c": (
        (
            "MambaPool",
            "recurrent state and convolutions",
            "any tensor-parallel size to any other where the blocks of the convolution are known (those that SGLang "
            "names; x, B and C of Nemotron-H, Granite 4, Falcon-H1 and Mamba 2; one block), else to the same",
        ),
    ),
    f"{_COMPANIONS}test_scales_go_with_their_heads": (
        (
            "MHATokenToKVPoolMXFP8",
            "keys and values of 8 bits, and scales of blocks",
            "as MHATokenToKVPool, the scales with their heads",
        ),
        ("StateType.BLOCK_SCALE", "scales of blocks of keys and values", "with their pages and heads"),
    ),
    f"{_COMPANIONS}test_scales_of_a_window_go_with_it": (
        ("StateType.BLOCK_SCALE_SWA", "scales of blocks of a window", "with the window's pages and heads"),
    ),
    f"{_COMPANIONS}test_the_index_goes_with_its_latents": (
        (
            "DSATokenToKVPool",
            "latents and the index of DeepSeek's sparse attention",
            "as MLATokenToKVPool, the index in the same pages, of one size on both sides",
        ),
        ("StateType.DSA", "the index of DeepSeek's sparse attention", "with the pages of the latents"),
        ("StateType.DSA_TAIL", "what DeepSeek's index has not pooled yet", "one ring a request"),
    ),
    f"{_HISPARSE}test_latents_arrive_in_host_memory_and_their_index_on_the_device": (
        (
            "HiSparseDSATokenToKVPool",
            "what HiSparse has of latents on a device, and their index",
            "latents to host memory, the index to the device; to decode ranks",
        ),
    ),
    f"{_HISPARSE}test_keys_and_values_arrive_in_host_memory_and_all_else_on_the_device": (
        (
            "HiSparseMHAMainPool",
            "what HiSparse has of keys and values on a device",
            "keys and values to host memory, the index and other layers to the device; to decode ranks",
        ),
    ),
    f"{_COMPRESSED}test_latents_at_several_compressions_arrive_with_their_windows": (
        (
            "DeepSeekV4TokenToKVPool",
            "DeepSeek V4's latents at several compressions, their index and windows",
            "once, from ranks that take turns: every rank has the same; in pages of one size on both sides",
        ),
        (
            "StateType.DSV4_REQUEST_STATE",
            "what DeepSeek V4 has not compressed yet of a request",
            "one place a request, and none where nothing is left to be compressed",
        ),
    ),
    f"{_COMPRESSED}test_windows_in_rings_arrive_in_the_requests_own": (
        (
            "StateType.SWA_RING",
            "DeepSeek V4's windows in a ring of the request, and what is not compressed yet in others",
            "the last tokens of the request, each by its position: rings may differ in length",
        ),
    ),
    f"{_COMPRESSED}test_a_drafts_windows_go_with_the_models": (
        ("StateType.REQUEST_ROW", "where a window of DeepSeek V4's draft begins", "one place a request"),
    ),
    f"{_INDEXED}test_an_index_of_keys_goes_with_keys_and_values": (
        (
            "MiniMaxSparseKVPool",
            "keys and values of MiniMax's layers with sparse attention, and of others",
            "as MHATokenToKVPool, the index in the same pages",
        ),
        (
            "StateType.MINIMAX_INDEX_K",
            "the keys of MiniMax's index",
            "with the pages of keys and values; once, since every rank has the same",
        ),
        (
            "StateType.MINIMAX_DENSE_KV",
            "keys and values of MiniMax's layers without sparse attention",
            "with the pages and heads of the others",
        ),
    ),
    f"{_INDEXED}test_a_pooled_index_goes_with_keys_and_values": (
        (
            "QSATokenToKVPool",
            "keys and values with the index of QSA, beside recurrent state",
            "as HybridLinearKVPool, the index in the same pages, of one size on both sides",
        ),
        ("StateType.QSA_PENDING", "what QSA's index has not pooled yet", "one ring a request"),
        (
            "StateType.QSA_COMPRESSED",
            "the pooled keys of QSA's index",
            "with the pages of keys and values; once, since every rank has the same",
        ),
    ),
    f"{_INDEXED}test_rows_of_4_bits_are_cut_by_heads": (
        (
            "MiniMaxM3Nvfp4KVPool",
            "MiniMax's sparse attention of 4 bits",
            "any tensor-parallel size to any other, the scales with their heads, in pages of one size",
        ),
        ("MiniMaxM3Nvfp4MainKVPool", "MiniMax's keys and values of 4 bits", "as a part of MiniMaxM3Nvfp4KVPool"),
    ),
    f"{_UNIFIED}test_windows_in_unified_memory_arrive_with_the_rest": (
        (
            "UnifiedMHATokenToKVPool",
            "keys and values in unified memory",
            "as MHATokenToKVPool, layer by layer, also to a side without unified memory",
        ),
        ("UnifiedSWAKVPool", "full attention and windows in unified memory", "as SWAKVPool"),
    ),
    f"{_UNIFIED}test_recurrent_state_in_unified_memory_arrives": (
        ("UnifiedMLATokenToKVPool", "latents in unified memory", "as MLATokenToKVPool"),
        (
            "UnifiedHybridLinearKVPool",
            "full attention or latents, beside recurrent state, in unified memory",
            "each as if it were alone",
        ),
        (
            "UnifiedMambaPool",
            "recurrent state of all layers in a slot of unified memory",
            "between as many tensor-parallel ranks, with unified memory on both sides",
        ),
    ),
    f"{_COMPANIONS}test_scales_that_sglang_does_not_list_go_with_their_heads": (
        (
            "MHATokenToKVPool with scales",
            "keys and values of 4 bits, and scales",
            "as MHATokenToKVPool, the scales with their heads: they are read from the pool, since SGLang does not list "
            "them",
        ),
    ),
    f"{_COMPANIONS}test_scales_of_latents_go_with_them": (
        (
            "MLATokenToKVPoolFP4",
            "latents of 4 bits, and scales",
            "as MLATokenToKVPool, with the scales, which are read from the pool",
        ),
    ),
}
"""By the test that shows them: what SGLang calls a kind, what it is, and how it is transferred."""

_REFUSED = {
    f"{_POOLS}test_scales_in_the_order_of_a_kernel_are_refused": (
        (
            NATIVE_SCALES,
            "keys and values of 4 bits, and scales in the order of a kernel",
            "SGLang itself refuses them with disaggregation, whatever the backend: choose another --attention-backend "
            "than trtllm_mha",
        ),
    ),
    f"{_COMPANIONS}test_a_pool_that_sglang_cannot_list_is_refused": (
        (
            "MHATokenToKVPoolFP4",
            "keys and values of 4 bits",
            "SGLang can list it for no backend, and makes none: 4 bits are in a MHATokenToKVPool",
        ),
    ),
    f"{_POOLS}test_an_order_that_cannot_be_described_is_refused": (
        (
            f"{_LAYOUT} hnd",
            "keys and values, heads before tokens",
            "SGLang itself does not list them for any backend: leave SGLANG_USE_HND_KVCACHE away",
        ),
        (f"{_LAYOUT} page_major", "keys and values, all layers in a page", _PAGE_MAJOR),
        (f"{_LAYOUT} page_major_layer_major", "keys and values, all layers in a page", _PAGE_MAJOR),
    ),
    f"{_POOLS}test_a_pool_that_is_not_transferred_is_refused": (
        ("NoOpMHATokenToKVPool", "nothing", "there is none: leave --prefill-only-disable-kv-cache away"),
        ("PageMajorMHATokenToKVPool", "keys and values, all layers in a page", _PAGE_MAJOR),
        ("PageInterleaveDSATokenToKVPool", "latents and an index, sharded by page", _SHARDED),
        ("UnifiedDraftKVPool", "a draft model's cache in unified memory", _FUSED),
        ("UnifiedDraftSWAKVPool", "a draft model's windows in unified memory", _FUSED),
        ("UnifiedDraftMambaPool", "a draft model's recurrent state in unified memory", _FUSED),
        (
            "LayerSplitDSATokenToKVPool",
            "latents and an index, layers divided by rank",
            "SGLang itself divides their layers with --disaggregation-transfer-backend mooncake alone: leave "
            "--enable-dsa-cache-layer-split away",
        ),
        ("MiniMaxM3Nvfp4IndexKPool", "MiniMax's index of 4 bits", _PART),
        ("MHATokenToKOnlyPool", "the keys of an index", _PART),
        ("DeepSeekV4SingleKVPool", "DeepSeek V4's latents at one compression", _PART),
        ("DeepSeekV4UniformFP8KVPool", "DeepSeek V4's latents of 8 bits", _PART),
        ("DeepSeekV4IndexerPool", "DeepSeek V4's index", _PART),
        ("HiSparseC4DevicePool", "what HiSparse has of DeepSeek V4 on a device", _HOST),
        ("NPUMHATokenToKVPool", "keys and values on an NPU", _NPU),
        ("NPUMHATokenToKOnlyPool", "the keys of an index on an NPU", _NPU),
        ("NPUMLATokenToKVPool", "latents on an NPU", _NPU),
        ("NPUMiniMaxSparseKVPool", "MiniMax's sparse attention on an NPU", _NPU),
        ("DSV4NPUTokenToKVPool", "DeepSeek V4 on an NPU", _NPU),
        ("NPUDeepSeekV4SingleKVPool", "DeepSeek V4's latents on an NPU", _NPU),
        ("NPUDeepSeekV4IndexerPool", "DeepSeek V4's index on an NPU", _NPU),
    ),
}
"""Likewise, and why it is not."""

KINDS = CacheKinds(
    "SGLang 0.5.23",
    tuple(
        CacheKind(name, meaning, test, **{fate: words})
        for fate, table in (("transfer", _TRANSFERRED), ("refusal", _REFUSED))
        for test, kinds in table.items()
        for name, meaning, words in kinds
    ),
)


def check_pool(pool: Any, layers: str) -> str:
    """Returns the name of a pool's class.

    Args:
        layers: those that it is for, in words.

    Raises:
        LayoutError: if kvferry does not transfer such pools, naming it and why.
    """
    name = type(pool).__name__
    KINDS.transferred(name, where=layers)
    return name


def check_order(pool: Any, layers: str) -> None:
    """Refuses a MHATokenToKVPool whose bytes kvferry cannot describe.

    Args:
        layers: those that it is for, in words.

    Raises:
        LayoutError: naming the order within its pages, or of its scales, and why.
    """
    if pool.kv_cache_layout != "nhd":
        KINDS.transferred(f"{_LAYOUT} {pool.kv_cache_layout}", where=layers)
    if getattr(pool, "native_k_scale_buffer", None) is not None:
        KINDS.transferred(NATIVE_SCALES, where=layers)


def check_states(states: Sequence[Enum], *, twice: Collection[str] = ()) -> None:
    """Refuses what SGLang would transfer beside keys and values, and kvferry does not.

    Args:
        states: members of its StateType, or of another enum of such.
        twice: the names of those that there may be two of.

    Raises:
        LayoutError: naming the first, and why; or if there are several of one kind.
    """
    names = [f"{type(each).__name__}.{each.name}" for each in states]
    for name in names:
        KINDS.transferred(name, where="layers of this model")
    counts = Counter(each.name for each in states)
    if any(count > (2 if name in twice else 1) for name, count in counts.items()):
        raise LayoutError(f"layers of this model keep several states of one kind: {', '.join(names)}")
