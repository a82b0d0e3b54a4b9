"""What a model caches, from its config.json, or from a description by hand where kvferry does not know it.

A description by hand is an object under the key "kvferry", in a file of its own or in a config.json:

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

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from kvferry.errors import LayoutError, ModelError
from kvferry.layout import Axis, Component, Entry, ShardedComponent
from kvferry.models.cache import ModelCache
from kvferry.models.families import FAMILIES
from kvferry.models.fields import DTYPE_FIELDS, EngineChoices, Fields

CONFIG_FILE = "config.json"
"""The file in a model's directory that has its configuration."""

_NESTED = "text_config"
"""The field in which models of several modalities have their language model's configuration."""


def model_cache_from_config(
    config: Mapping[str, Any],
    *,
    cache_dtype: str | None = None,
    state_dtype: str | None = None,
    extra_conv_columns: int = 0,
    source: str = "the configuration",
) -> ModelCache:
    """Reads what a model caches from its configuration as Hugging Face has it, or from a description by hand.

    The three choices below are the engine's, not the model's. A description by hand has made them already.

    Args:
        cache_dtype: element type of keys, values and latents, such as "float8_e4m3fn"; None keeps the weights'.
        state_dtype: element type of recurrent states; None takes that of the configuration, or float32. Where the
            configuration names none, vLLM keeps them in the weights' type.
        extra_conv_columns: convolutions keep as many columns as their kernel has, less one, as in vLLM and SGLang, and
            this many more: 1 in transformers, with vLLM the number of tokens that it speculates.
        source: the file, for errors.

    Raises:
        ModelError: if the architecture is unknown, which shows how to describe it by hand, or a field is missing or
            impossible; names the field.
    """
    choices = EngineChoices(cache_dtype=cache_dtype, state_dtype=state_dtype, extra_conv_columns=extra_conv_columns)
    if KEY in config:
        if choices != EngineChoices():
            raise ModelError(f"{source} describes its cache by hand: write dtypes and widths into the description")
        return cache_from_description(config[KEY], source=source)
    fields = _language_model(config, source, choices)
    return FAMILIES[fields.model_type].read(fields)


def read_model_cache(
    path: Path | str,
    *,
    cache_dtype: str | None = None,
    state_dtype: str | None = None,
    extra_conv_columns: int = 0,
) -> ModelCache:
    """Reads what a model caches from a file, or from the config.json in a directory.

    The other arguments are those of `model_cache_from_config`.

    Raises:
        ModelError: if there is no such file, it has no JSON object, or it does not describe a cache; names the file.
    """
    path = Path(path)
    if path.is_dir():
        path = path / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(
            f"{path} does not exist: give a model's {CONFIG_FILE}, a directory that has one, or a file that describes "
            "a cache by hand"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path} as JSON ({error}); restore it from the checkpoint") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds a JSON {type(config).__name__}, not an object with a model's configuration")
    return model_cache_from_config(
        config,
        cache_dtype=cache_dtype,
        state_dtype=state_dtype,
        extra_conv_columns=extra_conv_columns,
        source=str(path),
    )


def _language_model(config: Mapping[str, Any], source: str, choices: EngineChoices) -> Fields:
    """Returns the fields of the language model: those of the whole configuration, unless it is nested."""
    nested = config.get(_NESTED)
    values, prefix = dict(config), ""
    if isinstance(nested, Mapping):
        values, prefix = dict(nested), f"{_NESTED}."
        if values.get("model_type") is None:
            values["model_type"] = config.get("model_type")
        if all(values.get(name) is None for name in DTYPE_FIELDS):
            values |= {name: config.get(name) for name in DTYPE_FIELDS}
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise _unknown(config, model_type, prefix, source)
    return Fields(
        values=values,
        model_type=model_type,
        defaults=FAMILIES[model_type].defaults,
        default_dtype=FAMILIES[model_type].default_dtype,
        source=source,
        prefix=prefix,
        choices=choices,
    )


def _unknown(config: Mapping[str, Any], model_type: Any, prefix: str, source: str) -> ModelError:
    architectures = config.get("architectures")
    named = f" and architectures {architectures!r}" if architectures else ""
    return ModelError(
        f"{source} has {prefix}model_type {model_type!r}{named}; known are {', '.join(sorted(FAMILIES))}. For another "
        f"architecture, describe its cache by hand in a file such as this one, and give that instead:\n{EXAMPLE}"
    )


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
