"""What a model caches, from its config.json or from a description by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvferry.errors import ModelError
from kvferry.models.cache import ModelCache
from kvferry.models.described import EXAMPLE, KEY, cache_from_description
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
