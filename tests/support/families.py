"""The model families that kvferry is tried with, as data: a tiny configuration of each, with what makes it special.

What becomes of each of them on every engine and shape is in `family_cells`; docs/design/families.md is made from both.
Sizes are such that four tensor-parallel ranks divide, or share, all that ranks divide in the real models, and that
each of two pipeline stages has layers of every kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tests.support.model_family import EXPERTS, LATENT, Family
from tests.support.recurrent_families import RECURRENT

_INDEX: Final[Mapping[str, Any]] = {"index_n_heads": 4, "index_head_dim": 128, "index_topk": 32}

ATTENTION: Final[tuple[Family, ...]] = (
    Family("qwen3", "Qwen3", "keys and values of every token", "qwen3", "Qwen3ForCausalLM"),
    Family("qwen3-moe", "Qwen3-MoE", "experts, which cache nothing", "qwen3_moe", "Qwen3MoeForCausalLM", EXPERTS),
    Family("llama-3", "Llama 3", "fewer KV heads than ranks", "llama", "LlamaForCausalLM", {"num_key_value_heads": 2}),
    Family(
        "llama-4",
        "Llama 4",
        "chunked local attention",
        "llama4_text",
        "Llama4ForCausalLM",
        {
            "attention_chunk_size": 64,
            "no_rope_layers": [1, 0, 1, 0],
            "interleave_moe_layer_step": 2,
            "num_local_experts": 2,
            "intermediate_size_mlp": 512,
            "attn_temperature_tuning": False,
        },
    ),
    Family(
        "gemma-3",
        "Gemma 3",
        "windows in most layers",
        "gemma3_text",
        "Gemma3ForCausalLM",
        {
            "num_hidden_layers": 6,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 64,
        },
    ),
    Family(
        "gemma-4",
        "Gemma 4",
        "windows, and heads of another number and size in other layers",
        "gemma4_text",
        "Gemma4ForCausalLM",
        {
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 2,
            "global_head_dim": 128,
            "hidden_size_per_layer_input": 0,
        },
        sglang_around=("gemma4", "Gemma4ForConditionalGeneration"),
        sglang_backend="triton",
    ),
    Family(
        "gpt-oss",
        "gpt-oss",
        "sinks, and windows in every other layer",
        "gpt_oss",
        "GptOssForCausalLM",
        {
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        sglang_backend="triton",
    ),
    Family(
        "mimo-v2",
        "MiMo-V2",
        "twice the KV heads in layers with windows",
        "mimo_v2_flash",
        "MiMoV2FlashForCausalLM",
        {
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_value_scale": None,
            "layernorm_epsilon": 1e-5,
            "num_key_value_heads": 2,
            "v_head_dim": 64,
            "swa_num_attention_heads": 8,
            "swa_num_key_value_heads": 4,
            "swa_head_dim": 64,
            "swa_v_head_dim": 64,
            "hybrid_layer_pattern": [0, 1, 1, 0],
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "moe_layer_freq": [0, 0, 0, 0],
            "mlp_layer_types": ["dense"] * 4,
            "sliding_window": 64,
            "sliding_window_size": 64,
            "add_swa_attention_sink_bias": False,
            "add_full_attention_sink_bias": False,
            "partial_rotary_factor": 1.0,
            "rope_theta": 10000.0,
            "swa_rope_theta": 10000.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    Family("mistral", "Mistral", "a window in every layer", "mistral", "MistralForCausalLM", {"sliding_window": 64}),
    Family(
        "minimax-m2",
        "MiniMax-M2",
        "rotary embeddings of a part of a head",
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rotary_dim": 32,
            "attn_type_list": [1, 1, 1, 1],
            "use_qk_norm": True,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
        },
    ),
    Family(
        "glm-4.5",
        "GLM-4.5",
        "a layer that drafts (MTP)",
        "glm4_moe",
        "Glm4MoeForCausalLM",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "num_nextn_predict_layers": 1,
        },
        drafts={"method": "mtp", "num_speculative_tokens": 1},
    ),
    Family("deepseek-v3", "DeepSeek V3, Kimi K2", "latents", "deepseek_v3", "DeepseekV3ForCausalLM", LATENT),
    Family(
        "deepseek-v3.2",
        "DeepSeek V3.2",
        "latents, and the keys of an index",
        "deepseek_v32",
        "DeepseekV32ForCausalLM",
        {**LATENT, **_INDEX},
        sglang_pools="by hand",
    ),
    Family(
        "glm-5",
        "GLM-5",
        "latents, and the keys of an index that layers share",
        "glm_moe_dsa",
        "GlmMoeDsaForCausalLM",
        {**LATENT, **_INDEX},
        sglang_pools="by hand",
    ),
    Family(
        "eagle-3",
        "Models with an EAGLE3 draft",
        "a layer of a draft model",
        "qwen3",
        "Qwen3ForCausalLM",
        drafts={"method": "eagle3", "num_speculative_tokens": 3},
        draft={
            "model_type": "llama",
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "draft_vocab_size": 512,
            "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        },
    ),
)

FAMILIES: Final = ATTENTION + RECURRENT


def family_of(name: str) -> Family:
    """The family of a name."""
    (family,) = (each for each in FAMILIES if each.name == name)
    return family
