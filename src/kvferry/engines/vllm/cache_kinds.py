"""Every kind of cache that vLLM 0.32 has, by the class of its spec, and what becomes of it."""

from __future__ import annotations

from typing import Any

from kvferry.engines.cache_kinds import CacheKind, CacheKinds

_UNIT = "tests/unit/engines/test_vllm_layouts.py::"
_KINDS = "tests/unit/engines/test_vllm_cache_kinds.py::"
_REAL = "tests/real_engines/vllm/"
_REFUSED = f"{_KINDS}test_a_kind_that_is_not_transferred_is_refused_in_words"

COMPRESSED = "AttentionSpec with tokens_per_state"
SLOTS = "AttentionSpec with num_head_slots"
INDEXER = "MLAAttentionSpec with cache_role indexer"
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
            SLOTS,
            "keys and values that a backend keeps apart, such as all keys and then all values",
            f"{_UNIT}test_heads_that_nobody_knows_go_to_the_like_rank_alone",
            transfer="between engines of the same tensor-parallel size",
        ),
        CacheKind(
            COMPRESSED,
            "one entry for several tokens, or several entries for one",
            f"{_KINDS}test_variants_are_told_apart",
            refusal="blocks of other sizes cannot be cut between tokens",
        ),
        CacheKind(
            INDEXER,
            "keys of a sparse indexer",
            f"{_KINDS}test_variants_are_told_apart",
            refusal="layers have two caches of one number, and only one is described",
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
                ("CrossAttentionSpec", "keys and values of an encoder", "they belong to no token of the prompt"),
                ("EncoderOnlyAttentionSpec", "nothing between steps", "there is nothing to transfer"),
                (
                    "SinkFullAttentionSpec",
                    "keys and values beside learned sinks",
                    "sinks in blocks are not described yet",
                ),
                ("SlidingWindowMLASpec", "latents of the last tokens", "only DeepSeek-V4 has them, in packed pages"),
                ("HiddenStateCacheSpec", "hidden states", "they are written to be read by another connector"),
                ("RSWASpec", "a prompt and the last tokens after it", "blocks between them are not described yet"),
                ("CircularBufferSpec", "keys that are still being compressed", "rings are not described yet"),
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
        layer: the layer's name.

    Raises:
        LayoutError: if it is of a kind that is refused or not known, naming kind and layer.
    """
    where = f"layers such as {layer!r}"
    name = type(spec).__name__
    KINDS.transferred(name, where=where)
    if name != "MambaSpec" and getattr(spec, "tokens_per_state", 1) != 1:
        KINDS.transferred(COMPRESSED, where=where)
    if getattr(getattr(spec, "cache_role", None), "value", None) == "indexer":
        KINDS.transferred(INDEXER, where=where)


def check_on_device(group: Any) -> None:
    """Refuses a group of layers (a KVCacheGroupSpec) whose caches are in host memory.

    Raises:
        LayoutError: if they are, naming a layer.
    """
    if group.host_resident:
        KINDS.transferred(HOST, where=f"layers such as {group.layer_names[0]!r}")
