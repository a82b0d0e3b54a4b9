"""The kinds of cache that models are put together from, each for some of a model's layers."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.layout import (
    Axis,
    Component,
    ShardedComponent,
    attention_components,
    latent_component,
    state_component,
)
from kvferry.models.cache import Components, block_scaled
from kvferry.models.fields import Fields

INDEX_DTYPE, INDEX_SCALE_DTYPE, INDEX_BLOCK = "float8_e4m3fn", "float32", 128
"""How vLLM keeps the sparse-attention index keys of DeepSeek-V3.2 (head_dim and dtype of its DeepseekV32IndexerCache in
models/deepseek_v2.py): 8-bit elements, one 32-bit scale for every 128 of them. transformers does not quantise them."""

RECURRENT_DTYPE = "float32"
"""Recurrent states where the configuration says nothing: transformers and SGLang keep 32 bits. vLLM takes the weights'
type unless the configuration or --mamba-ssm-cache-dtype says another (MambaStateDtypeCalculator in mamba_utils.py), and
32 bits for Nemotron-H (NemotronHForCausalLMConfig in models/config.py)."""


def _sharded(component: Component, layers: Sequence[int], tp_axis: str | None) -> ShardedComponent:
    return ShardedComponent(component=component, layers=tuple(layers), tp_axis=tp_axis)


def _states(layers: Sequence[int], *described: tuple[str, tuple[Axis, ...], str]) -> Components:
    """Makes what is kept once per request and layer, each of a name, axes and a dtype; ranks divide the first axis."""
    return tuple(
        _sharded(state_component(name, num_layers=len(layers), axes=axes, dtype=dtype), layers, axes[0].name)
        for name, axes, dtype in described
    )


def attention(fields: Fields, layers: Sequence[int], *, window_tokens: int | None = None) -> Components:
    """Makes keys and values: "k" and "v", or "window_k" and "window_v" of layers that attend to a window alone."""
    if not layers:
        return ()
    components = attention_components(
        num_layers=len(layers),
        num_kv_heads=fields.num_kv_heads,
        head_dim=fields.head_dim,
        dtype=fields.cache_dtype,
        window_tokens=window_tokens,
        prefix="" if window_tokens is None else "window_",
    )
    return tuple(_sharded(component, layers, "head") for component in components)


def latents(fields: Fields, layers: Sequence[int]) -> Components:
    """Makes the latents of multi-head latent attention, which every rank has whole."""
    if not layers:
        return ()
    dim = fields.size("kv_lora_rank") + fields.size("qk_rope_head_dim")
    component = latent_component(num_layers=len(layers), latent_dim=dim, dtype=fields.cache_dtype)
    return (_sharded(component, layers, None),)


def index_keys(fields: Fields, layers: Sequence[int]) -> Components:
    """Makes the keys that sparse attention selects tokens by, with their scales. Every rank has them whole."""
    if not layers:
        return ()
    axes = (Axis("layer", len(layers)), Axis("dim", fields.size("index_head_dim")))
    component = Component(name="index_k", axes=axes, dtype=INDEX_DTYPE)
    return block_scaled((_sharded(component, layers, None),), block=INDEX_BLOCK, dtype=INDEX_SCALE_DTYPE)


def gated_delta_net(fields: Fields, layers: Sequence[int]) -> Components:
    """Makes the state of a gated delta net, and of the convolution before it, by kind of channel: query, key, value."""
    if not layers:
        return ()
    key_heads, key_dim = Axis("head", fields.size("linear_num_key_heads")), fields.size("linear_key_head_dim")
    value_heads, value_dim = Axis("head", fields.size("linear_num_value_heads")), fields.size("linear_value_head_dim")
    width = Axis("width", fields.conv_width("linear_conv_kernel_dim"))
    dtype, conv_dtype = fields.state_dtype(default=RECURRENT_DTYPE), fields.model_dtype
    return _states(
        layers,
        ("state", (value_heads, Axis("key_dim", key_dim), Axis("value_dim", value_dim)), dtype),
        ("conv_q", (key_heads, Axis("channel", key_dim), width), conv_dtype),
        ("conv_k", (key_heads, Axis("channel", key_dim), width), conv_dtype),
        ("conv_v", (value_heads, Axis("channel", value_dim), width), conv_dtype),
    )


def mamba2(
    fields: Fields, layers: Sequence[int], *, heads: int, head_dim: int, state_size: int, groups: int, width: int
) -> Components:
    """Makes the state of Mamba2, and of the convolution before it, by kind of channel: x, B, C.

    B and C belong to groups of heads. With more ranks than groups, neighbouring ranks have the same group.
    """
    if not layers:
        return ()
    dtype, conv_dtype = fields.state_dtype(default=RECURRENT_DTYPE), fields.model_dtype
    head, columns = Axis("head", heads), Axis("width", width)
    group_channels = (Axis("group", groups), Axis("channel", state_size), columns)
    return _states(
        layers,
        ("state", (head, Axis("head_dim", head_dim), Axis("state_size", state_size)), dtype),
        ("conv_x", (head, Axis("channel", head_dim), columns), conv_dtype),
        ("conv_b", group_channels, conv_dtype),
        ("conv_c", group_channels, conv_dtype),
    )


def mamba1(fields: Fields, layers: Sequence[int], *, channels: int, state_size: int, width: int) -> Components:
    """Makes the state of Mamba in its first version, and of the convolution before it, both by channel."""
    if not layers:
        return ()
    channel, dtype = Axis("channel", channels), fields.state_dtype(default=RECURRENT_DTYPE)
    return _states(
        layers,
        ("state", (channel, Axis("state_size", state_size)), dtype),
        ("conv", (channel, Axis("width", width)), fields.model_dtype),
    )


def lightning_attention(fields: Fields, layers: Sequence[int]) -> Components:
    """Makes the state of lightning attention: for every attention head, sums of outer products of keys and values.

    It has the weights' element type, in transformers as in vLLM (its linear_attention_state_dtype).
    """
    if not layers:
        return ()
    dim, head = fields.head_dim, Axis("head", fields.size("num_attention_heads"))
    dtype = fields.state_dtype(default=fields.model_dtype)
    return _states(layers, ("state", (head, Axis("key_dim", dim), Axis("value_dim", dim)), dtype))
