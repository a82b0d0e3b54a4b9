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
_RANKS = "tests/real_engines/sglang/test_ranks.py::test_caches_arrive"
_ENGINES = "tests/real_engines/sglang/test_disaggregated.py::test_sixteen_prompts_at_once"
_WINDOWS = "tests/real_engines/sglang/test_heads_by_layer.py::test_tokens_are_those_of_the_undivided_engine"
_MIXER = f"{_POOLS}test_a_mixers_convolution_is_cut_into_x_b_and_c"

_DIVIDED = "tests/real_engines/sglang/test_divided_tokens.py::"
_COMPANIONS = "tests/real_engines/sglang/test_companions.py::"
_COMPRESSED = "tests/real_engines/sglang/test_compressed.py::"
_HISPARSE = "tests/real_engines/sglang/test_hisparse.py::"
_INDEXED = "tests/real_engines/sglang/test_indexed.py::"
_LATENTS = f"{_COMPRESSED}test_latents_at_several_compressions_arrive_with_their_windows"

_SHARDED = "SGLang itself shards their pages with --disaggregation-transfer-backend mooncake alone"
_UNIFIED = "tests/real_engines/sglang/test_unified.py::"
_FUSED = "SGLang itself can list them for no backend: leave --enable-unified-memory or the draft model away"
_PAGE_MAJOR = "SGLang itself makes and lists them for no backend: leave --enable-page-major-kv-layout away"
_HOST = "SGLang itself transfers them with its Mooncake backend alone: leave --enable-hisparse away"
_NPU = "only pools of cpu and cuda are"
_PART = "it is a part of another pool, and never a model's own"

SCALES = "MHATokenToKVPool with scales"
NATIVE_SCALES = "MHATokenToKVPool with native scales"
_LAYOUT = "MHATokenToKVPool with kv_cache_layout"

_REFUSED_POOLS = (
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
)

KINDS = CacheKinds(
    "SGLang 0.5.23",
    (
        CacheKind(
            "MHATokenToKVPool",
            "keys and values, tokens before heads",
            _ENGINES,
            transfer="any tensor-parallel size to any other where pool and configuration agree on the KV heads, else "
            "to the same",
        ),
        CacheKind(
            f"{_LAYOUT} vectorized_5d",
            "keys and values, heads before vectors of 16 bytes",
            f"{_POOLS}test_vectors_within_a_page_are_cut_by_head_only",
            transfer="as above, between pages of one size",
        ),
        CacheKind(
            "MLATokenToKVPool",
            "latents",
            _RANKS,
            transfer="once, from ranks that take turns: every rank has the same",
        ),
        CacheKind(
            "PageInterleaveMHATokenToKVPool",
            "keys and values, whose pages context-parallel ranks have by turns",
            f"{_DIVIDED}test_pages_that_go_round_arrive",
            transfer="each page from the rank that has it",
        ),
        CacheKind(
            "PageInterleaveMLATokenToKVPool",
            "latents, whose pages ranks have by turns",
            f"{_DIVIDED}test_pages_that_go_round_arrive",
            transfer="each page from the rank that has it",
        ),
        CacheKind(
            "SWAKVPool",
            "full attention, and windows in a pool of their own",
            _WINDOWS,
            transfer="each with its own number of KV heads",
        ),
        CacheKind(
            "HybridLinearKVPool",
            "full attention or latents, beside recurrent state",
            f"{_POOLS}test_blocks_that_sglang_names_are_taken",
            transfer="each as if it were alone",
        ),
        CacheKind(
            "MambaPool",
            "recurrent state and convolutions",
            _MIXER,
            transfer="any tensor-parallel size to any other where the blocks of the convolution are known (those that "
            "SGLang names; x, B and C of Nemotron-H, Granite 4, Falcon-H1 and Mamba 2; one block), else to the same",
        ),
        CacheKind(
            "StateType.SWA",
            "a sliding window in a pool of its own",
            _WINDOWS,
            transfer="the pages that the window meets",
        ),
        CacheKind("StateType.MAMBA", "recurrent state and convolutions", _RANKS, transfer="one slot a request"),
        CacheKind(
            "MHATokenToKVPoolMXFP8",
            "keys and values of 8 bits, and scales of blocks",
            f"{_COMPANIONS}test_scales_go_with_their_heads",
            transfer="as MHATokenToKVPool, the scales with their heads",
        ),
        CacheKind(
            "StateType.BLOCK_SCALE",
            "scales of blocks of keys and values",
            f"{_COMPANIONS}test_scales_go_with_their_heads",
            transfer="with their pages and heads",
        ),
        CacheKind(
            "StateType.BLOCK_SCALE_SWA",
            "scales of blocks of a window",
            f"{_COMPANIONS}test_scales_of_a_window_go_with_it",
            transfer="with the window's pages and heads",
        ),
        CacheKind(
            "DSATokenToKVPool",
            "latents and the index of DeepSeek's sparse attention",
            f"{_COMPANIONS}test_the_index_goes_with_its_latents",
            transfer="as MLATokenToKVPool, the index in the same pages, of one size on both sides",
        ),
        CacheKind(
            "HiSparseDSATokenToKVPool",
            "what HiSparse has of latents on a device, and their index",
            f"{_HISPARSE}test_latents_arrive_in_host_memory_and_their_index_on_the_device",
            transfer="latents to host memory, the index to the device; to decode ranks",
        ),
        CacheKind(
            "HiSparseMHAMainPool",
            "what HiSparse has of keys and values on a device",
            f"{_HISPARSE}test_keys_and_values_arrive_in_host_memory_and_all_else_on_the_device",
            transfer="keys and values to host memory, the index and other layers to the device; to decode ranks",
        ),
        CacheKind(
            "StateType.DSA",
            "the index of DeepSeek's sparse attention",
            f"{_COMPANIONS}test_the_index_goes_with_its_latents",
            transfer="with the pages of the latents",
        ),
        CacheKind(
            "StateType.DSA_TAIL",
            "what DeepSeek's index has not pooled yet",
            f"{_COMPANIONS}test_the_index_goes_with_its_latents",
            transfer="one ring a request",
        ),
        CacheKind(
            "DeepSeekV4TokenToKVPool",
            "DeepSeek V4's latents at several compressions, their index and windows",
            _LATENTS,
            transfer="once, from ranks that take turns: every rank has the same; in pages of one size on both sides",
        ),
        CacheKind(
            "StateType.DSV4_REQUEST_STATE",
            "what DeepSeek V4 has not compressed yet of a request",
            _LATENTS,
            transfer="one place a request, and none where nothing is left to be compressed",
        ),
        CacheKind(
            "StateType.SWA_RING",
            "DeepSeek V4's windows in a ring of the request, and what is not compressed yet in others",
            f"{_COMPRESSED}test_windows_in_rings_arrive_in_the_requests_own",
            transfer="the last tokens of the request, each by its position: rings may differ in length",
        ),
        CacheKind(
            "StateType.REQUEST_ROW",
            "where a window of DeepSeek V4's draft begins",
            f"{_COMPRESSED}test_a_drafts_windows_go_with_the_models",
            transfer="one place a request",
        ),
        *(
            CacheKind(name, meaning, f"{_INDEXED}{test}", transfer=transfer)
            for name, meaning, test, transfer in (
                (
                    "MiniMaxSparseKVPool",
                    "keys and values of MiniMax's layers with sparse attention, and of others",
                    "test_an_index_of_keys_goes_with_keys_and_values",
                    "as MHATokenToKVPool, the index in the same pages",
                ),
                (
                    "StateType.MINIMAX_INDEX_K",
                    "the keys of MiniMax's index",
                    "test_an_index_of_keys_goes_with_keys_and_values",
                    "with the pages of keys and values; once, since every rank has the same",
                ),
                (
                    "StateType.MINIMAX_DENSE_KV",
                    "keys and values of MiniMax's layers without sparse attention",
                    "test_an_index_of_keys_goes_with_keys_and_values",
                    "with the pages and heads of the others",
                ),
                (
                    "QSATokenToKVPool",
                    "keys and values with the index of QSA, beside recurrent state",
                    "test_a_pooled_index_goes_with_keys_and_values",
                    "as HybridLinearKVPool, the index in the same pages, of one size on both sides",
                ),
                (
                    "StateType.QSA_PENDING",
                    "what QSA's index has not pooled yet",
                    "test_a_pooled_index_goes_with_keys_and_values",
                    "one ring a request",
                ),
                (
                    "StateType.QSA_COMPRESSED",
                    "the pooled keys of QSA's index",
                    "test_a_pooled_index_goes_with_keys_and_values",
                    "with the pages of keys and values; once, since every rank has the same",
                ),
                (
                    "MiniMaxM3Nvfp4KVPool",
                    "MiniMax's sparse attention of 4 bits",
                    "test_rows_of_4_bits_are_cut_by_heads",
                    "any tensor-parallel size to any other, the scales with their heads, in pages of one size",
                ),
                (
                    "MiniMaxM3Nvfp4MainKVPool",
                    "MiniMax's keys and values of 4 bits",
                    "test_rows_of_4_bits_are_cut_by_heads",
                    "as a part of MiniMaxM3Nvfp4KVPool",
                ),
            )
        ),
        *(
            CacheKind(name, meaning, f"{_UNIFIED}{test}", transfer=transfer)
            for name, meaning, test, transfer in (
                (
                    "UnifiedMHATokenToKVPool",
                    "keys and values in unified memory",
                    "test_windows_in_unified_memory_arrive_with_the_rest",
                    "as MHATokenToKVPool, layer by layer, also to a side without unified memory",
                ),
                (
                    "UnifiedSWAKVPool",
                    "full attention and windows in unified memory",
                    "test_windows_in_unified_memory_arrive_with_the_rest",
                    "as SWAKVPool",
                ),
                (
                    "UnifiedMLATokenToKVPool",
                    "latents in unified memory",
                    "test_recurrent_state_in_unified_memory_arrives",
                    "as MLATokenToKVPool",
                ),
                (
                    "UnifiedHybridLinearKVPool",
                    "full attention or latents, beside recurrent state, in unified memory",
                    "test_recurrent_state_in_unified_memory_arrives",
                    "each as if it were alone",
                ),
                (
                    "UnifiedMambaPool",
                    "recurrent state of all layers in a slot of unified memory",
                    "test_recurrent_state_in_unified_memory_arrives",
                    "between as many tensor-parallel ranks, with unified memory on both sides",
                ),
            )
        ),
        CacheKind(
            SCALES,
            "keys and values of 4 bits, and scales",
            f"{_COMPANIONS}test_scales_that_sglang_does_not_list_go_with_their_heads",
            transfer="as MHATokenToKVPool, the scales with their heads: they are read from the pool, since SGLang does "
            "not list them",
        ),
        CacheKind(
            "MLATokenToKVPoolFP4",
            "latents of 4 bits, and scales",
            f"{_COMPANIONS}test_scales_of_latents_go_with_them",
            transfer="as MLATokenToKVPool, with the scales, which are read from the pool",
        ),
        CacheKind(
            NATIVE_SCALES,
            "keys and values of 4 bits, and scales in the order of a kernel",
            f"{_POOLS}test_scales_in_the_order_of_a_kernel_are_refused",
            refusal="SGLang itself refuses them with disaggregation, whatever the backend: choose another "
            "--attention-backend than trtllm_mha",
        ),
        CacheKind(
            "MHATokenToKVPoolFP4",
            "keys and values of 4 bits",
            f"{_COMPANIONS}test_a_pool_that_sglang_cannot_list_is_refused",
            refusal="SGLang can list it for no backend, and makes none: 4 bits are in a MHATokenToKVPool",
        ),
        *(
            CacheKind(
                f"{_LAYOUT} {name}",
                meaning,
                f"{_POOLS}test_an_order_that_cannot_be_described_is_refused",
                refusal=refusal,
            )
            for name, meaning, refusal in (
                (
                    "hnd",
                    "keys and values, heads before tokens",
                    "SGLang itself does not list them for any backend: leave SGLANG_USE_HND_KVCACHE away",
                ),
                ("page_major", "keys and values, all layers in a page", _PAGE_MAJOR),
                ("page_major_layer_major", "keys and values, all layers in a page", _PAGE_MAJOR),
            )
        ),
        *(
            CacheKind(name, meaning, f"{_POOLS}test_a_pool_that_is_not_transferred_is_refused", refusal=refusal)
            for name, meaning, refusal in _REFUSED_POOLS
        ),
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
