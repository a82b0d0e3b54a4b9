"""Every kind of cache that vLLM 0.32 has, by the class of its spec, and what becomes of it."""

from __future__ import annotations

from typing import Any

from kvferry.engines.cache_kinds import CacheKind, CacheKinds

_UNIT = "tests/unit/engines/test_vllm_layouts.py::"
_KINDS = "tests/unit/engines/test_vllm_cache_kinds.py::"
_REAL = "tests/real_engines/vllm/"
_REFUSED = f"{_KINDS}test_a_kind_that_is_not_transferred_is_refused_in_words"
_FORMS = f"{_REAL}test_cache_forms.py::"

HOST = "KVCacheGroupSpec with host_resident"

KINDS = CacheKinds(
    "vLLM 0.32",
    (
        CacheKind(
            "FullAttentionSpec",
            "keys and values of every token",
            f"{_REAL}test_disaggregated.py::test_sixteen_prompts_at_once",
            transfer="any tensor-parallel size to any other where the layer's KV heads are known, else to the same",
        ),
        CacheKind(
            "SlidingWindowSpec",
            "keys and values of the last tokens",
            f"{_REAL}test_hybrid.py::test_only_the_window_travels_and_tokens_are_the_same",
            transfer="what the next token attends to; heads as with full attention",
        ),
        CacheKind(
            "ChunkedLocalAttentionSpec",
            "keys and values of the current chunk",
            f"{_REAL}test_chunks.py::test_only_the_current_chunk_travels_and_tokens_are_the_same",
            transfer="the tokens of the chunk that the next token is in; heads as with full attention",
        ),
        CacheKind(
            "MLAAttentionSpec",
            "latents",
            f"{_UNIT}test_latents_are_the_same_on_every_rank",
            transfer="once, from ranks that take turns: every rank has the same",
        ),
        CacheKind(
            "UniformTypeKVCacheSpecs",
            "layers of several sizes with one block table",
            f"{_UNIT}test_layers_of_several_sizes_are_components_of_their_own",
            transfer="each layer by its own size",
        ),
        CacheKind(
            "MambaSpec",
            "recurrent state and convolutions",
            f"{_REAL}test_recurrent.py::test_state_and_pages_arrive_together",
            transfer="the state after the last token that is sent, beside attention; any tensor-parallel size to any "
            "other where the layer says how ranks divide it (Mamba 1 and 2, gated delta nets, short convolutions, "
            "linear attention), else to the same",
        ),
        CacheKind(
            "AttentionSpec with num_head_slots",
            "keys and values that a backend keeps apart, such as all keys and then all values",
            f"{_UNIT}test_heads_that_nobody_knows_go_to_the_like_rank_alone",
            transfer="any tensor-parallel size to any other where the order is known (B12X, ROCM_ATTN), else pages of "
            "one size between engines of the same tensor-parallel size",
        ),
        CacheKind(
            "AttentionSpec with kv_quant_mode",
            "values of few bits with their scales",
            "tests/unit/engines/test_vllm_parts.py::test_every_byte_of_a_page_belongs_to_one_part",
            transfer="as keys and values where each token's scales lie in its own entry (per-token-head scales, "
            "fp8_ds_mla and nvfp4_ds_mla of DeepSeek-V3.2); in pages of one size where a page has its scales behind "
            "its values, cut by head (nvfp4 of FLASHINFER and of MiniMax-M3) or the same on every rank (DeepSeek-V4); "
            "else in pages of one size between engines of the same tensor-parallel size (turboquant, ultraquant)",
        ),
        CacheKind(
            "AttentionSpec with tokens_per_state",
            "one entry for several tokens, or several entries for one",
            f"{_FORMS}test_what_a_model_keeps_arrives",
            transfer="as keys and values are, between pages of any size; of one size where they are quantised as above",
        ),
        CacheKind(
            "MLAAttentionSpec with cache_role indexer",
            "keys of a sparse indexer",
            f"{_FORMS}test_what_a_model_keeps_arrives",
            transfer="beside the latents, once; in pages of one size where they are quantised",
        ),
        CacheKind(
            "SlidingWindowMLASpec",
            "latents of the last tokens, and what a compressor has not compressed yet (DeepSeek-V4)",
            f"{_FORMS}test_what_a_model_keeps_arrives",
            transfer="as latents, what the next token attends to",
        ),
        CacheKind(
            "CircularBufferSpec",
            "keys that are still being compressed (DeepSeek-V4.1, GLM-5, Qwen4)",
            f"{_FORMS}test_what_a_model_keeps_arrives",
            transfer="one ring a request, of one size on both sides; the prompt ends on the prefill server as with "
            "recurrent state",
        ),
        CacheKind(
            "HiddenStateCacheSpec",
            "hidden states that another connector reads (`extract_hidden_states`)",
            f"{_REAL}test_cache_kinds.py::test_hidden_states_are_a_drafts_and_the_same_on_every_rank",
            transfer="as a draft model's, once: every rank has the same",
        ),
        CacheKind(
            "RSWASpec",
            "a prompt, and the last tokens after it",
            f"{_REAL}test_cache_kinds.py::test_vllm_gives_away_no_block_of_a_prompt_that_is_attended_to_as_a_whole",
            transfer="the prompt, as with full attention",
        ),
        CacheKind(
            HOST,
            "caches in host memory (HiSparse)",
            f"{_KINDS}test_caches_in_host_memory_are_refused",
            refusal="they have a pool and block numbers of their own",
        ),
        *(
            CacheKind(name, meaning, _REFUSED, refusal=refusal)
            for name, meaning, refusal in (
                (
                    "CrossAttentionSpec",
                    "keys and values of an encoder",
                    "vLLM serves no encoder-decoder model with any connector: its scheduler asserts so",
                ),
                (
                    "EncoderOnlyAttentionSpec",
                    "nothing between steps",
                    "vLLM keeps no blocks for them, so that there is nothing to transfer",
                ),
                (
                    "SinkFullAttentionSpec",
                    "keys and values beside learned sinks",
                    "vLLM 0.32 cannot make the manager of such caches, with a connector or without: its "
                    "SinkFullAttentionManager takes no needs_kv_cache_zeroing",
                ),
                ("HiSparseHotSpec", "a request's hot part of a sparse cache", "it is made anew from the host's cache"),
                (
                    "HiSparseResidentSpec",
                    "reclaimable pages of a sparse cache",
                    "they are made anew from the host's cache",
                ),
            )
        ),
    ),
)


def check_transferred(spec: Any, layer: str) -> None:
    """Refuses what kvferry does not transfer.

    Args:
        spec: what vLLM says of a layer's cache (a KVCacheSpec).

    Raises:
        LayoutError: if it is of a kind that is refused or not known, naming kind and layer.
    """
    KINDS.transferred(type(spec).__name__, where=f"layers such as {layer!r}")


def check_on_device(group: Any) -> None:
    """Refuses a group of layers (a KVCacheGroupSpec) whose caches are in host memory.

    Raises:
        LayoutError: if they are, naming a layer.
    """
    if group.host_resident:
        KINDS.transferred(HOST, where=f"layers such as {group.layer_names[0]!r}")
