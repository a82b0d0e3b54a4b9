"""From the command line's values to checked options. Everything that is wrong is said here, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from kvferry.cli.demo.options import (
    DemoOptions,
    EngineShape,
    Request,
    check_positive,
    component_of,
    parse_stages,
)
from kvferry.engines.reference.caches import cache_form
from kvferry.engines.reference.prompts import read_prompts
from kvferry.engines.reference.specification import ModelSpec
from kvferry.engines.reference.tokenizer import load_tokenizer
from kvferry.errors import SettingsError
from kvferry.transport.nixl import load_bindings

_FIRST_ROOM = 1000

ShapeValues: TypeAlias = tuple[int, int, str | None, int]
"""Tensor-parallel size, pipeline stages, layers per stage if given, number of engines."""


def prepare(
    *,
    prefill: ShapeValues,
    decode: ShapeValues,
    architecture: str,
    num_kv_heads: int,
    num_layers: int,
    model_directory: Path | None,
    prompt_file: Path | None,
    requests: int,
    in_flight: int,
    page_tokens: int,
    chunk_tokens: int,
    max_new_tokens: int,
    seed: int,
) -> DemoOptions:
    """Checks every value and tokenizes the prompts.

    Raises:
        SettingsError: naming the option and its value.
        ModelError: if the model cannot be used.
        TransportUnavailableError: if NIXL is not installed.
    """
    load_bindings()
    check_positive(
        requests=requests,
        in_flight=in_flight,
        page_size=page_tokens,
        chunk_tokens=chunk_tokens,
        max_new_tokens=max_new_tokens,
    )
    if chunk_tokens % page_tokens:
        raise SettingsError(
            f"--chunk-tokens {chunk_tokens} is not a whole number of pages of --page-size {page_tokens} tokens"
        )
    if model_directory is None:
        model = ModelSpec.small(architecture, num_kv_heads=num_kv_heads, num_layers=num_layers, seed=seed)
    else:
        model = ModelSpec.from_directory(model_directory)
    components = tuple(component_of(cached) for cached in cache_form(model).components)
    layers = components[0].axes[0].size
    shapes = {side: _shape(values, layers, side) for side, values in (("prefill", prefill), ("decode", decode))}
    tokenizer = load_tokenizer(model_directory)
    prompts = read_prompts(prompt_file)
    numbered = []
    for index in range(requests):
        prompt = prompts[index % len(prompts)]
        numbered.append(
            Request(
                room=_FIRST_ROOM + index,
                prompt=prompt,
                token_ids=tuple(tokenizer.tokenize(prompt)),
                prefill_engine=index % shapes["prefill"].count,
                # Every prefill engine meets every decode engine in turn.
                decode_engine=index // shapes["prefill"].count % shapes["decode"].count,
            )
        )
    return DemoOptions(
        model=model,
        components=components,
        prefill=shapes["prefill"],
        decode=shapes["decode"],
        requests=tuple(numbered),
        page_tokens=page_tokens,
        chunk_tokens=chunk_tokens,
        max_new_tokens=max_new_tokens,
        in_flight=in_flight,
        seed=seed,
    )


def _shape(values: ShapeValues, num_layers: int, side: str) -> EngineShape:
    tp_size, pp_size, stages, count = values
    check_positive(**{f"{side}_tp": tp_size, f"{side}_engines": count})
    return EngineShape(tp_size, parse_stages(num_layers, pp_size, stages, flag=side), count)
