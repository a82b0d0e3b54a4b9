"""A model's cache described by hand, for architectures that kvferry does not know.

The description is an object under the key "kvferry", in a file of its own or in a config.json:

    {
      "kvferry": {
        "name": "my-model",
        "num_layers": 32,
        "components": [
          {"name": "k", "layers": "all", "axes": {"head": 8, "dim": 128}, "dtype": "bfloat16", "tp_axis": "head"},
          {"name": "v", "layers": "all", "axes": {"head": 8, "dim": 128}, "dtype": "bfloat16", "tp_axis": "head"}
        ]
      }
    }

`layers` is "all", a list of layer numbers, or {"start": 3, "stop": 32, "step": 4}. `axes` are those of one entry in one
layer, with their sizes over all ranks; both sides name them in the same order. `tp_axis` is the one that tensor
parallelism divides; without it every rank holds all. `entry` is "token" unless it is "request", for state with one slot
a request, or "page", whose inner format `packing` names. `window_tokens` keeps so many tokens at the end of a request.
Layers from `num_layers` on are a draft model's: a component has them alone, and is `"optional": true`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from kvferry.errors import LayoutError, ModelError
from kvferry.layout import Axis, Component, Entry, ShardedComponent
from kvferry.models.cache import ModelCache

KEY = "kvferry"
"""The key under which a file has its description."""

EXAMPLE = """{
  "kvferry": {
    "name": "my-model",
    "num_layers": 32,
    "components": [
      {"name": "k", "layers": "all", "axes": {"head": 8, "dim": 128}, "dtype": "bfloat16", "tp_axis": "head"},
      {"name": "v", "layers": "all", "axes": {"head": 8, "dim": 128}, "dtype": "bfloat16", "tp_axis": "head"}
    ]
  }
}"""
"""A short description that is valid, to show in errors."""

_Number = Annotated[int, msgspec.Meta(ge=0)]
_Size = Annotated[int, msgspec.Meta(ge=1)]


class _Range(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    start: _Number
    stop: _Number
    step: _Size = 1


class _Component(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    layers: Literal["all"] | tuple[_Number, ...] | _Range
    axes: dict[str, _Size]
    dtype: str
    tp_axis: str | None = None
    entry: Entry = Entry.TOKEN
    window_tokens: _Size | None = None
    packing: str | None = None
    optional: bool = False


class _Description(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    num_layers: _Size
    components: tuple[_Component, ...]


msgspec.json.Decoder(_Description)  # else two threads that are the first to convert one crash msgspec 0.22


def cache_from_description(description: Any, *, source: str) -> ModelCache:
    """Reads what a model caches from the object under "kvferry".

    Args:
        source: the file, for errors.

    Raises:
        ModelError: if a field is missing, unknown or impossible; names it, and the component.
    """
    try:
        described = msgspec.convert(description, _Description)
    except msgspec.ValidationError as error:
        raise ModelError(f"{source}: {KEY}: {error}. The form is:\n{EXAMPLE}") from error
    sharded = [_sharded(each, described.num_layers, source) for each in described.components]
    try:
        return ModelCache(
            name=described.name,
            num_layers=described.num_layers,
            components=tuple(each for each in sharded if each.layers[0] < described.num_layers),
            draft=tuple(each for each in sharded if each.layers[0] >= described.num_layers),
        )
    except ModelError as error:
        raise ModelError(f"{source}: {error}") from error


def _sharded(described: _Component, num_layers: int, source: str) -> ShardedComponent:
    layers = _layers(described.layers, num_layers)
    if not layers:
        raise ModelError(f"{source}: component {described.name!r} has no layers: leave it out, or name some")
    try:
        component = Component(
            name=described.name,
            axes=(Axis("layer", len(layers)), *(Axis(name, size) for name, size in described.axes.items())),
            dtype=described.dtype,
            entry=described.entry,
            window_tokens=described.window_tokens,
            packing=described.packing,
            is_optional=described.optional,
        )
        return ShardedComponent(component=component, layers=layers, tp_axis=described.tp_axis)
    except LayoutError as error:
        raise ModelError(f"{source}: {error}") from error


def _layers(described: str | tuple[int, ...] | _Range, num_layers: int) -> tuple[int, ...]:
    if isinstance(described, _Range):
        return tuple(range(described.start, described.stop, described.step))
    return tuple(range(num_layers)) if isinstance(described, str) else described
