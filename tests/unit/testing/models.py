"""A small model of every kind of cache."""

from __future__ import annotations

from typing import Any

from kvferry import (
    Axis,
    RankCoordinates,
    ShardedComponent,
    attention_components,
    packed_component,
    state_component,
)
from kvferry.layout import VirtualPools
from kvferry.testing import Pool

LAYERS = 3
_SIZES: dict[str, Any] = {"num_layers": LAYERS, "num_kv_heads": 4, "head_dim": 2, "dtype": "int16"}


def _state(name: str, *axes: Axis) -> ShardedComponent:
    component = state_component(name, num_layers=LAYERS, axes=axes, dtype="float32")
    return ShardedComponent(component=component, layers=tuple(range(LAYERS)), tp_axis=axes[0].name)


ATTENTION = tuple(
    ShardedComponent(component=each, layers=tuple(range(LAYERS)), tp_axis="head")
    for each in attention_components(**_SIZES)
)
WINDOW = tuple(
    ShardedComponent(component=each, layers=tuple(range(LAYERS)), tp_axis="head")
    for each in attention_components(**_SIZES, window_tokens=6, prefix="w_")
)
PACKED = (
    ShardedComponent(
        component=packed_component(
            "kv", num_layers=LAYERS, num_kv_heads=4, packed=16, dtype="int16", packing="an engine's"
        ),
        layers=tuple(range(LAYERS)),
        tp_axis="head",
    ),
)
STATES = (
    _state("conv_q", Axis("channel", 4), Axis("width", 3)),
    _state("conv_v", Axis("channel", 8), Axis("width", 3)),
)
EVERYTHING = (*ATTENTION, *WINDOW, *STATES)


def pool(
    components: tuple[ShardedComponent, ...] = ATTENTION, rank: RankCoordinates | None = None, **changes: Any
) -> Pool:
    """The pool of a rank, 16 pages of 4 tokens unless told otherwise."""
    seed = changes.pop("seed", 0)
    pools: dict[str, Any] = {"page_tokens": 4, "num_pages": 16, "layers_per_stage": (LAYERS,), **changes}
    return Pool.allocate(components, VirtualPools(**pools), rank, seed=seed)
