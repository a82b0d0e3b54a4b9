"""Writes a tiny model with random weights, to try an engine without a download: `python examples/tiny_model.py DIR`.

Its vocabulary is w0 to w511, and no word of it means anything.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 512

_SIZES = {
    "vocab_size": VOCABULARY,
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
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}

MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "qwen3": ("qwen3", {}),
    "llama": ("llama", {}),
    "hybrid": (
        "gemma3_text",
        {
            "num_hidden_layers": 6,
            "sliding_window": 64,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "query_pre_attn_scalar": 64,
        },
    ),
    "gemma4": (
        "gemma4_text",
        {
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 2,
            "global_head_dim": 128,
            "hidden_size_per_layer_input": 0,
        },
    ),
    "granite4": (
        "granitemoehybrid",
        {
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 512,
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_d_state": 32,
            "mamba_n_groups": 1,
            "mamba_expand": 2,
            "mamba_d_conv": 4,
            "mamba_chunk_size": 64,
            "position_embedding_type": "rope",
        },
    ),
    "falcon-h1": (
        "falcon_h1",
        {
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_d_ssm": 512,
            "mamba_d_state": 32,
            "mamba_n_groups": 2,
            "mamba_d_conv": 4,
            "mamba_chunk_size": 64,
            "mamba_rms_norm": False,
        },
    ),
    "llama4": (
        "llama4_text",
        {
            "attention_chunk_size": 64,
            "no_rope_layers": [1, 1, 1, 0],
            "interleave_moe_layer_step": 2,
            "num_local_experts": 2,
            "intermediate_size_mlp": 512,
            "attn_temperature_tuning": False,
        },
    ),
    "nemotron-h": (
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 64,
            "ssm_state_size": 32,
            "n_groups": 2,
            "conv_kernel": 4,
            "chunk_size": 64,
            "use_mamba_kernels": False,
        },
    ),
    "mamba2": (
        "mamba2",
        {
            "num_heads": 8,
            "head_dim": 64,
            "state_size": 32,
            "n_groups": 2,
            "expand": 2,
            "conv_kernel": 4,
            "chunk_size": 64,
        },
    ),
    "qwen3-next": (
        "qwen3_next",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
    ),
}
"""Architecture, and what is different in its configuration. The hybrid attends to a window in five layers of six; the
other layers of gemma4 have two KV heads of twice the size, instead of four. Granite4 and nemotron-h have one layer with
attention and Mamba 2 in others, with one group for all heads and with two; falcon-h1 has both in every layer, mamba2
no attention at all, and qwen3-next gated delta nets in three layers of four. Llama4 attends within chunks of 64 tokens
in three layers of four."""

MIMO_V2 = "mimo-v2"
"""A model whose layers differ in their KV heads: two in those that attend to a window, one in the others."""
MIMO_V2_EVEN = "mimo-v2-even"
"""The same with twice the heads: two ranks divide those of every layer."""

_MIMO_V2: dict[str, object] = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_value_scale": None,
    "layernorm_epsilon": 1e-5,
    "v_head_dim": 64,
    "swa_num_attention_heads": 8,
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
}

_HEADS_OF_MIMO_V2 = {MIMO_V2: (1, 2), MIMO_V2_EVEN: (2, 4)}
NAMES = sorted([*MODELS, *_HEADS_OF_MIMO_V2])


def write(name: str, directory: Path, *, seed: int = 11, changes: Mapping[str, object] = MappingProxyType({})) -> Path:
    """Writes one of `NAMES` where an engine can load it; its weights are as the seed says.

    Args:
        changes: to the configuration of one of `MODELS`.
    """
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(directory)
    torch.manual_seed(seed)
    if name in _HEADS_OF_MIMO_V2:
        _write_mimo_v2(directory, *_HEADS_OF_MIMO_V2[name])
        return directory
    architecture, own = MODELS[name]
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **_SIZES | own | dict(changes)))
    network.to(torch.float32).save_pretrained(directory)
    return directory


def write_eagle3(directory: Path, *, seed: int = 11) -> Path:
    """Writes a draft of EAGLE3's kind, with one layer, for the models of Qwen3's and Llama's kinds."""
    directory.mkdir(parents=True, exist_ok=True)
    changes = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "num_hidden_layers": 1,
        "draft_vocab_size": VOCABULARY,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }
    (directory / "config.json").write_text(json.dumps(_SIZES | changes, indent=2))
    hidden, inner, queries, keys = 256, 512, 8 * 64, 4 * 64
    shapes = {
        "fc": (hidden, 3 * hidden),
        "lm_head": (VOCABULARY, hidden),
        "midlayer.self_attn.q_proj": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, queries),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
    }
    torch.manual_seed(seed)
    weights = {f"{name}.weight": 0.3 * torch.randn(shape) for name, shape in shapes.items()}
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
    weights |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _write_mimo_v2(directory: Path, full: int, window: int) -> None:
    """Writes what transformers cannot make: its model of that name has as many KV heads in every layer.

    Args:
        full, window: the KV heads of layers with full attention, and with a sliding window.
    """
    numbers = {"num_key_value_heads": full, "swa_num_key_value_heads": window}
    (directory / "config.json").write_text(json.dumps(_SIZES | _MIMO_V2 | numbers, indent=2))
    hidden, inner, heads, head_dim = 256, 512, 8, 64
    shapes = {"model.embed_tokens": (VOCABULARY, hidden), "lm_head": (VOCABULARY, hidden)}
    for layer, kv_heads in enumerate((full, window, window, full)):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        shapes |= {
            f"{attention}.q_proj": (heads * head_dim, hidden),
            f"{attention}.k_proj": (kv_heads * head_dim, hidden),
            f"{attention}.v_proj": (kv_heads * head_dim, hidden),
            f"{attention}.o_proj": (hidden, heads * head_dim),
            f"{mlp}.gate_proj": (inner, hidden),
            f"{mlp}.up_proj": (inner, hidden),
            f"{mlp}.down_proj": (hidden, inner),
        }
    weights = {f"{name}.weight": 0.3 * torch.randn(shape) for name, shape in shapes.items()}
    norms = [f"model.layers.{layer}.{norm}_layernorm" for layer in range(4) for norm in ("input", "post_attention")]
    weights |= {f"{name}.weight": torch.ones(hidden) for name in (*norms, "model.norm")}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", choices=NAMES, default="qwen3")
    chosen = parser.parse_args()
    print(f"wrote {write(chosen.model, chosen.directory)}")
