"""The model families that kvferry is tried with, as data: a tiny configuration of each, with what makes it special.

What becomes of each of them on every engine and shape is in `family_cells`; docs/families.md is made from both. Sizes
are such that four tensor-parallel ranks divide, or share, all that ranks divide in the real models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

_SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_EXPERTS: Final[Mapping[str, Any]] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LATENT: Final[Mapping[str, Any]] = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}
_INDEX: Final[Mapping[str, Any]] = {"index_n_heads": 4, "index_head_dim": 128, "index_topk": 32}
_GATED_DELTA: Final[Mapping[str, Any]] = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
}
_MAMBA2: Final[Mapping[str, Any]] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_d_state": 32,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 64,
}

_NO_CLASS: Final = "SGLang's registry of models has no class for it"


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models.

    Attributes:
        name: how it is called in tests and in docs/families.md.
        members: published models that are of it, in words.
        special: what its cache has that other families' do not have.
        model_type: of its configuration, as transformers calls it.
        architecture: the class that engines look it up by.
        changes: what is different from `_SIZES` in its configuration.
        sglang_around: the type and the class of the multimodal model that SGLang wants around it; None for none.
        sglang_backend: of attention, where SGLang does not take the one for CPUs.
        sglang_pools: who makes its pools in tests: SGLang's configurator, or the test itself of SGLang's classes, if
            the configurator wants a GPU.
        vllm, sglang: why the engine itself does not serve it; None where it does.
    """

    name: str
    members: str
    special: str
    model_type: str
    architecture: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    sglang_around: tuple[str, str] | None = None
    sglang_backend: str = "torch_native"
    sglang_pools: str = "configurator"
    vllm: str | None = None
    sglang: str | None = None

    @property
    def configuration(self) -> dict[str, Any]:
        """What stands in its config.json."""
        return {**_SIZES, **self.changes, "model_type": self.model_type, "architectures": [self.architecture]}

    @property
    def sglang_configuration(self) -> dict[str, Any]:
        """What stands there for SGLang."""
        if self.sglang_around is None:
            return self.configuration
        kind, architecture = self.sglang_around
        return {"model_type": kind, "architectures": [architecture], "text_config": self.configuration}


FAMILIES: Final[tuple[Family, ...]] = (
    Family("qwen3", "Qwen3", "keys and values of every token", "qwen3", "Qwen3ForCausalLM"),
    Family("qwen3-moe", "Qwen3-MoE", "experts, which cache nothing", "qwen3_moe", "Qwen3MoeForCausalLM", _EXPERTS),
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
    ),
    Family("deepseek-v3", "DeepSeek V3, Kimi K2", "latents", "deepseek_v3", "DeepseekV3ForCausalLM", _LATENT),
    Family(
        "deepseek-v3.2",
        "DeepSeek V3.2",
        "latents, and the keys of an index",
        "deepseek_v32",
        "DeepseekV32ForCausalLM",
        {**_LATENT, **_INDEX},
        sglang_pools="by hand",
    ),
    Family(
        "glm-5",
        "GLM-5",
        "latents, and the keys of an index that layers share",
        "glm_moe_dsa",
        "GlmMoeDsaForCausalLM",
        {**_LATENT, **_INDEX},
        sglang_pools="by hand",
    ),
    Family(
        "granite-4",
        "Granite 4",
        "Mamba 2 with one group for all heads",
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        {
            **_MAMBA2,
            "layer_types": ["mamba", "attention"] * 2,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 512,
            "position_embedding_type": "rope",
        },
    ),
    Family(
        "nemotron-h",
        "Nemotron-H, Nemotron 3",
        "Mamba 2 with several groups, and layers without a cache",
        "nemotron_h",
        "NemotronHForCausalLM",
        {
            "num_hidden_layers": 6,
            "layers_block_type": ["mamba", "mlp", "attention"] * 2,
            "mamba_num_heads": 8,
            "mamba_head_dim": 64,
            "ssm_state_size": 32,
            "n_groups": 4,
            "conv_kernel": 4,
            "chunk_size": 64,
            "use_mamba_kernels": False,
        },
    ),
    Family(
        "falcon-h1",
        "Falcon-H1",
        "attention and Mamba 2 in every layer",
        "falcon_h1",
        "FalconH1ForCausalLM",
        {**_MAMBA2, "mamba_d_ssm": 512, "mamba_n_groups": 4, "mamba_rms_norm": False},
    ),
    Family(
        "mamba-2",
        "Mamba 2",
        "no attention at all",
        "mamba2",
        "Mamba2ForCausalLM",
        {
            "num_heads": 8,
            "head_dim": 64,
            "state_size": 32,
            "n_groups": 4,
            "expand": 2,
            "conv_kernel": 4,
            "chunk_size": 64,
        },
    ),
    Family(
        "mamba-1",
        "Mamba, Falcon Mamba",
        "Mamba 1 alone",
        "mamba",
        "MambaForCausalLM",
        {
            "state_size": 16,
            "expand": 2,
            "conv_kernel": 4,
            "time_step_rank": 16,
            "use_bias": False,
            "use_conv_bias": True,
        },
    ),
    Family(
        "jamba",
        "Jamba",
        "Mamba 1 beside attention",
        "jamba",
        "JambaForCausalLM",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "use_mamba_kernels": False,
        },
        sglang=_NO_CLASS,
    ),
    Family(
        "bamba",
        "Bamba",
        "Mamba 2 beside attention",
        "bamba",
        "BambaForCausalLM",
        {
            **_MAMBA2,
            "attn_layer_indices": [1],
        },
        vllm="vLLM has it no more since 0.23 (`_PREVIOUSLY_SUPPORTED_MODELS`)",
        sglang=_NO_CLASS,
    ),
    Family(
        "lfm-2",
        "LFM2",
        "short convolutions",
        "lfm2",
        "Lfm2ForCausalLM",
        {
            "layer_types": ["conv", "full_attention"] * 2,
            "conv_L_cache": 3,
            "block_ff_dim": 512,
            "block_dim": 256,
            "conv_dim": 256,
            "conv_dim_out": 256,
            "conv_bias": False,
            "block_multiple_of": 64,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    Family(
        "qwen3-next",
        "Qwen3-Next",
        "gated delta nets",
        "qwen3_next",
        "Qwen3NextForCausalLM",
        {**_GATED_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 64},
    ),
    Family(
        "qwen3.5",
        "Qwen3.5",
        "gated delta nets, with projections of their own",
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        _GATED_DELTA,
    ),
    Family(
        "kimi-linear",
        "Kimi-Linear",
        "Kimi delta attention beside latents",
        "kimi_linear",
        "KimiLinearForCausalLM",
        {
            **_LATENT,
            "q_lora_rank": None,
            "first_k_dense_replace": 4,
            "linear_attn_config": {
                "head_dim": 64,
                "num_heads": 8,
                "short_conv_kernel_size": 4,
                "full_attn_layers": [2, 4],
                "kda_layers": [1, 3],
            },
            "num_experts": 4,
            "num_shared_experts": 1,
            "moe_layer_freq": 1,
            "num_expert_group": 1,
            "mla_use_nope": True,
            "num_experts_per_token": 2,
            "moe_router_activation_func": "sigmoid",
            "moe_renormalize": True,
            "use_grouped_topk": True,
            "routed_scaling_factor": 1.0,
            "hidden_act": "silu",
        },
    ),
    Family(
        "minimax-m1",
        "MiniMax-M1, MiniMax-Text-01",
        "linear (lightning) attention",
        "minimax",
        "MiniMaxM1ForCausalLM",
        {"num_local_experts": 2, "num_experts_per_tok": 1},
        vllm="vLLM has it no more since 0.23 (`_PREVIOUSLY_SUPPORTED_MODELS`)",
        sglang=_NO_CLASS,
    ),
    Family(
        "ling-2.5",
        "Ling 2.5, Ring 2.5",
        "linear attention beside latents",
        "bailing_hybrid",
        "BailingMoeV2_5ForCausalLM",
        {
            **_LATENT,
            **_EXPERTS,
            "layer_group_size": 2,
            "num_shared_experts": 1,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "use_qkv_bias": False,
            "use_bias": False,
            "rope_theta": 10000.0,
            "linear_silu": False,
            "use_linear_silu": False,
            "norm_topk_prob": True,
            "score_function": "sigmoid",
            "moe_shared_expert_intermediate_size": 64,
            "partial_rotary_factor": 0.5,
            "group_norm_size": 4,
            "moe_router_enable_expert_bias": True,
            "routed_scaling_factor": 1.0,
            "use_qk_norm": True,
        },
    ),
)
