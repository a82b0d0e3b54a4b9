"""The configuration of a model in transformers' terms: of a seeded one from its sizes, of a checkpoint from its file.

Nothing here imports transformers before a checkpoint's configuration is asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvferry.applications.demo.reference.specification import ModelSpec
from kvferry.applications.demo.reference.tokenizer import END_TOKEN, START_TOKEN
from kvferry.errors import ModelError

# transformers' usual 0.02 is for wide models: at a width of some hundreds attention adds so little to a token
# that the next one depends on the last one alone, and greedy decoding soon repeats one token for ever.
_WEIGHT_DEVIATION_AT_UNIT_WIDTH = 2.4

_LAYERS_TO_FULL_ATTENTION = 4


def check_packages() -> None:
    """Raise ModelError unless torch and transformers can be imported."""
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise ModelError(
            f"the reference engine needs {error.name}: pip install torch transformers tokenizers"
        ) from error


def checkpoint_configuration(directory: Path) -> Any:
    """transformers' configuration of a local checkpoint, its defaults filled in.

    Raises:
        ModelError: if transformers is missing or refuses the configuration.
    """
    check_packages()
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # any type, by the value that is wrong
        raise ModelError(
            f"transformers refuses {directory / 'config.json'} ({type(error).__name__}: {error}); "
            "correct that value, or install the version of transformers that wrote it"
        ) from error


def seeded_configuration(spec: ModelSpec) -> dict[str, Any]:
    """The configuration of a seeded model, as its config.json would have it."""
    values: dict[str, Any] = {
        "model_type": spec.model_type,
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocabulary_size,
        "initializer_range": _WEIGHT_DEVIATION_AT_UNIT_WIDTH / spec.hidden_size**0.5,
        "tie_word_embeddings": False,
        "bos_token_id": START_TOKEN,
        "eos_token_id": END_TOKEN,
    }
    if spec.model_type == "mamba2":
        return values | _mamba2(spec)
    values |= {
        "num_attention_heads": spec.num_attention_heads,
        "intermediate_size": 2 * spec.hidden_size,
        "max_position_embeddings": 32768,
    }
    if spec.uses_latent_attention:
        return values | _latent_attention(spec)
    values |= {"num_key_value_heads": spec.num_kv_heads, "head_dim": spec.head_dim}
    if spec.model_type == "qwen3_next":
        return values | _gated_delta_net(spec)
    if spec.model_type == "gemma3_text":
        return values | _sliding_window(spec)
    return values


def _latent_attention(spec: ModelSpec) -> dict[str, Any]:
    return {
        "num_key_value_heads": spec.num_attention_heads,
        "kv_lora_rank": spec.kv_lora_rank,
        "q_lora_rank": None,
        "qk_rope_head_dim": spec.qk_rope_head_dim,
        "qk_nope_head_dim": spec.qk_nope_head_dim,
        "v_head_dim": spec.v_head_dim,
        # The upper half of the layers are mixtures of experts, the lower half dense.
        "first_k_dense_replace": spec.num_layers // 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": spec.hidden_size // 2,
        "num_mtp_layers": 0,
    }


def _gated_delta_net(spec: ModelSpec) -> dict[str, Any]:
    return {
        "layer_types": _layer_types(spec, "linear_attention"),
        "linear_num_key_heads": spec.num_kv_heads,
        "linear_num_value_heads": 2 * spec.num_kv_heads,
        "linear_key_head_dim": spec.head_dim // 2,
        "linear_value_head_dim": spec.state_size,
        "linear_conv_kernel_dim": 4,
        # Every layer is dense: experts cache nothing.
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mlp_only_layers": list(range(spec.num_layers)),
    }


def _sliding_window(spec: ModelSpec) -> dict[str, Any]:
    return {
        "layer_types": _layer_types(spec, "sliding_attention"),
        "sliding_window": spec.sliding_window,
        "query_pre_attn_scalar": spec.head_dim,
        "pad_token_id": None,
    }


def _mamba2(spec: ModelSpec) -> dict[str, Any]:
    return {
        "num_heads": spec.num_attention_heads,
        "head_dim": spec.head_dim,
        "n_groups": spec.num_kv_heads,
        "state_size": spec.state_size,
        "expand": 2,
        "conv_kernel": 4,
        "chunk_size": 64,
        "pad_token_id": None,
    }


def _layer_types(spec: ModelSpec, others: str) -> list[str]:
    """One layer in four attends to every token, or the last one of a model with fewer."""
    period = min(_LAYERS_TO_FULL_ATTENTION, spec.num_layers)
    return ["full_attention" if (index + 1) % period == 0 else others for index in range(spec.num_layers)]
