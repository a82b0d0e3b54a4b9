"""The kinds of cache that models are put together from, each for some of a model's layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    key_heads, key_dim = fields.size("linear_num_key_heads"), fields.size("linear_key_head_dim")
    value_heads, value_dim = fields.size("linear_num_value_heads"), fields.size("linear_value_head_dim")
    width = fields.conv_width("linear_conv_kernel_dim")
    dtype = fields.state_dtype(default=RECURRENT_DTYPE)
    matrix = (Axis("head", value_heads), Axis("key_dim", key_dim), Axis("value_dim", value_dim))
    key_channels = (Axis("head", key_heads), Axis("channel", key_dim), Axis("width", width))
    value_channels = (Axis("head", value_heads), Axis("channel", value_dim), Axis("width", width))
    count, conv_dtype = len(layers), fields.model_dtype
    return tuple(
        _sharded(component, layers, "head")
        for component in (
            state_component("state", num_layers=count, axes=matrix, dtype=dtype),
            state_component("conv_q", num_layers=count, axes=key_channels, dtype=conv_dtype),
            state_component("conv_k", num_layers=count, axes=key_channels, dtype=conv_dtype),
            state_component("conv_v", num_layers=count, axes=value_channels, dtype=conv_dtype),
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Sizes:
    """The sizes of a Mamba2 layer, which every architecture names its own way."""

    heads: int
    head_dim: int
    state_size: int
    groups: int
    width: int


def mamba2(fields: Fields, layers: Sequence[int], sizes: Mamba2Sizes) -> Components:
    """Makes the state of Mamba2, and of the convolution before it, by kind of channel: x, B, C.

    B and C belong to groups of heads. With more ranks than groups, neighbouring ranks have the same group.
    """
    if not layers:
        return ()
    dtype = fields.state_dtype(default=RECURRENT_DTYPE)
    head, group = Axis("head", sizes.heads), Axis("group", sizes.groups)
    width, state = Axis("width", sizes.width), sizes.state_size
    count, conv_dtype = len(layers), fields.model_dtype
    matrix = (head, Axis("head_dim", sizes.head_dim), Axis("state_size", state))
    x_channels = (head, Axis("channel", sizes.head_dim), width)
    group_channels = (group, Axis("channel", state), width)
    return (
        _sharded(state_component("state", num_layers=count, axes=matrix, dtype=dtype), layers, "head"),
        _sharded(state_component("conv_x", num_layers=count, axes=x_channels, dtype=conv_dtype), layers, "head"),
        _sharded(state_component("conv_b", num_layers=count, axes=group_channels, dtype=conv_dtype), layers, "group"),
        _sharded(state_component("conv_c", num_layers=count, axes=group_channels, dtype=conv_dtype), layers, "group"),
    )


def mamba1(fields: Fields, layers: Sequence[int], *, channels: int, state_size: int, width: int) -> Components:
    """Makes the state of Mamba in its first version, and of the convolution before it, both by channel."""
    if not layers:
        return ()
    dtype = fields.state_dtype(default=RECURRENT_DTYPE)
    channel, count = Axis("channel", channels), len(layers)
    matrix, columns = (channel, Axis("state_size", state_size)), (channel, Axis("width", width))
    return (
        _sharded(state_component("state", num_layers=count, axes=matrix, dtype=dtype), layers, "channel"),
        _sharded(state_component("conv", num_layers=count, axes=columns, dtype=fields.model_dtype), layers, "channel"),
    )


def lightning_attention(fields: Fields, layers: Sequence[int]) -> Components:
    """Makes the state of lightning attention: for every attention head, sums of outer products of keys and values.

    It has the weights' element type, in transformers as in vLLM (its linear_attention_state_dtype).
    """
    if not layers:
        return ()
    dim = fields.head_dim
    matrix = (Axis("head", fields.size("num_attention_heads")), Axis("key_dim", dim), Axis("value_dim", dim))
    dtype = fields.state_dtype(default=fields.model_dtype)
    return (_sharded(state_component("state", num_layers=len(layers), axes=matrix, dtype=dtype), layers, "head"),)
