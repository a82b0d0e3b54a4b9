"""What `kvferry.models` says a model caches is what transformers' caches hold."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.reference import cache_in

from kvferry.layout import Component, Entry
from kvferry.models import ModelCache, model_cache_from_config, read_model_cache


def transformers() -> Any:
    """The library, which takes a second: every process of a run imports this module, one uses it."""
    import transformers as library

    return library


CONFIGS = Path(__file__).parents[1] / "data" / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))
TOKENS, WINDOW = 6, 4

ATTENTION = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "intermediate_size": 64}
LATENT = ATTENTION | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 2,
}
DELTA_NET = ATTENTION | {
    "head_dim": 16,
    "num_hidden_layers": 5,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}

TINY: dict[str, dict[str, Any]] = {
    "llama": ATTENTION | {"num_hidden_layers": 2, "intermediate_size": 64},
    "mistral": ATTENTION | {"num_hidden_layers": 2, "intermediate_size": 64, "sliding_window": WINDOW},
    "qwen3": ATTENTION
    | {"num_hidden_layers": 3, "intermediate_size": 64, "head_dim": 24}
    | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3_moe": ATTENTION | EXPERTS | {"num_hidden_layers": 2, "head_dim": 24},
    "gpt_oss": ATTENTION
    | {"num_hidden_layers": 3, "intermediate_size": 64, "head_dim": 16, "sliding_window": WINDOW}
    | {"num_local_experts": 2, "num_experts_per_tok": 1},
    "gemma3_text": ATTENTION
    | {"num_hidden_layers": 7, "intermediate_size": 64, "head_dim": 24, "sliding_window": WINDOW},
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT | {"index_head_dim": 32, "index_n_heads": 2, "index_topk": 4},
    "qwen3_next": DELTA_NET | EXPERTS | {"shared_expert_intermediate_size": 32},
    "qwen3_5_text": DELTA_NET | {"intermediate_size": 64},
    "mamba2": {"vocab_size": 64, "hidden_size": 64, "num_heads": 8, "head_dim": 16, "state_size": 24, "n_groups": 2}
    | {"num_hidden_layers": 2},
    "nemotron_h": ATTENTION
    | {"head_dim": 24, "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"]}
    | {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 24, "n_groups": 2, "intermediate_size": 64},
    "jamba": ATTENTION | {"num_hidden_layers": 8, "intermediate_size": 64, "num_experts": 2},
    "minimax": ATTENTION
    | {"num_hidden_layers": 4, "intermediate_size": 64, "num_local_experts": 2}
    | {"layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"]},
    "minimax_m2": ATTENTION
    | {"num_hidden_layers": 2, "intermediate_size": 32, "head_dim": 24, "num_local_experts": 2}
    | {"num_experts_per_tok": 1},
}
"""Sizes that differ from each other, so that none can stand for another."""


def described(cache: ModelCache, layer: int) -> dict[str, Component]:
    """The components that a layer of the model has."""
    return {each.component.name: each.component for each in cache.components if layer in each.layers}


def shape(component: Component) -> tuple[int, ...]:
    """The axes of one entry in one layer."""
    return tuple(axis.size for axis in component.axes[1:])


def dtypes(*tensors: torch.Tensor) -> list[str]:
    return [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]


def states(layer: Any, name: str) -> list[torch.Tensor]:
    return [tensor for tensor in getattr(layer, name, {}).values() if tensor is not None]


def check_attention(components: dict[str, Component], keys: torch.Tensor, values: torch.Tensor) -> None:
    _, heads, tokens, dim = keys.shape
    if "latent" in components:
        # transformers keeps the latent and its rope part as keys and values of one head.
        assert shape(components["latent"]) == (dim + values.shape[3],)
        assert dtypes(keys, values) == [components["latent"].dtype] * 2
        return
    prefix = "window_" if "window_k" in components else ""
    k, v = components[f"{prefix}k"], components[f"{prefix}v"]
    assert shape(k) == (heads, dim)
    assert shape(v) == (heads, values.shape[3])
    assert dtypes(keys, values) == [k.dtype, v.dtype]
    # Of a window transformers keeps what the next token needs besides itself.
    assert tokens == (TOKENS if k.window_tokens is None else k.window_tokens - 1)


def check_states(components: dict[str, Component], recurrent: torch.Tensor, conv: torch.Tensor | None) -> None:
    state = components["state"]
    assert tuple(recurrent.shape[1:]) == shape(state)
    assert dtypes(recurrent) == [state.dtype]
    groups = [component for name, component in components.items() if name.startswith("conv")]
    if conv is None:
        assert not groups
        return
    *_, width = shape(groups[0])
    assert tuple(conv.shape[1:]) == (sum(prod(shape(group)[:-1]) for group in groups), width)
    assert {group.dtype for group in groups} == set(dtypes(conv))


@pytest.mark.parametrize("model_type", TINY)
def test_every_layer_caches_what_is_described(model_type: str):
    config = transformers().AutoConfig.for_model(model_type, **TINY[model_type], dtype="bfloat16")
    cache = model_cache_from_config(json.loads(config.to_json_string(use_diff=False)), extra_conv_columns=1)
    model = transformers().AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    with torch.no_grad():
        output = model(torch.arange(TOKENS)[None], use_cache=True)
    held = cache_in(output)
    lightning = getattr(held, "linear_cache", [])
    assert cache.num_layers == len(held.layers)
    for number, layer in enumerate(held.layers):
        components = described(cache, number)
        keys, recurrent, conv = (
            getattr(layer, "keys", None),
            states(layer, "recurrent_states"),
            states(layer, "conv_states"),
        )
        assert ({"k", "window_k", "latent"} & set(components) != set()) == (keys is not None)
        if keys is not None:
            check_attention(components, keys, layer.values)
        if number < len(lightning) and len(lightning[number]):
            recurrent = [lightning[number]]
        assert ("state" in components) == bool(recurrent)
        if recurrent:
            check_states(components, recurrent[0], conv[0] if conv else None)
        index = getattr(layer, "indexer_keys", None)
        assert ("index_k" in components) == (index is not None)
        if index is not None:
            # Not quantised in transformers, so that only the size can be compared.
            assert shape(components["index_k"]) == (index.shape[-1],)


@pytest.mark.parametrize("name", NAMES)
def test_published_configurations_are_read_as_transformers_reads_them(name: str):
    raw = json.loads((CONFIGS / f"{name}.json").read_text())
    if raw["model_type"] == "minimax_text_01":
        raw = raw | {"model_type": "minimax"}
        raw["layer_types"] = ["full_attention" if each else "linear_attention" for each in raw.pop("attn_type_list")]
    config = transformers().AutoConfig.for_model(**raw).get_text_config()
    cache = read_model_cache(CONFIGS / f"{name}.json")
    assert cache.num_layers == config.num_hidden_layers
    types = getattr(config, "layer_types", None)
    if types is None:
        window = getattr(config, "sliding_window", None)
        types = ["full_attention" if window is None else "sliding_attention"] * cache.num_layers
    names = {
        "full_attention": {"k", "v", "latent"},
        "indexed_attention": {"latent", "index_k", "index_k_scale"},
        "sliding_attention": {"window_k", "window_v"},
        "linear_attention": {"state", *(f"conv{suffix}" for suffix in ("", "_q", "_k", "_v", "_x", "_b", "_c"))},
        "mlp": set[str](),
        "moe": set[str](),
    }
    for layer, kind in enumerate(types):
        components = described(cache, layer)
        assert set(components) <= names[kind]
        assert bool(components) == bool(names[kind])
        for key in {"k", "window_k"} & set(components):
            head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            assert shape(components[key]) == (config.num_key_value_heads, head_dim)
    assert {each.component.entry for each in cache.components} <= {Entry.TOKEN, Entry.REQUEST}
