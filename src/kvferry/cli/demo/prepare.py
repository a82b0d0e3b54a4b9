"""From the command line's values to checked options. Everything that is wrong is said here, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from kvferry.cli.demo.options import (
    DemoOptions,
    EngineShape,
    Request,
    check_positive,
    parse_order,
    parse_stages,
)
from kvferry.engines.reference.caches import cache_form
from kvferry.engines.reference.prompts import read_prompts
from kvferry.engines.reference.specification import ModelSpec
from kvferry.engines.reference.tokenizer import load_tokenizer
from kvferry.errors import SettingsError
from kvferry.transport.nixl import load_bindings

_FIRST_ROOM = 1000


class ShapeValues(NamedTuple):
    """What the command line says of one side's engines."""

    tp_size: int
    pp_size: int
    stages: str | None
    engines: int
    page_tokens: int
    order: str


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
        chunk_tokens=chunk_tokens,
        max_new_tokens=max_new_tokens,
    )
    if model_directory is None:
        model = ModelSpec.small(architecture, num_kv_heads=num_kv_heads, num_layers=num_layers, seed=seed)
    else:
        model = ModelSpec.from_directory(model_directory)
    form = cache_form(model)
    shapes = {
        side: _shape(values, form.num_layers, side) for side, values in (("prefill", prefill), ("decode", decode))
    }
    page_tokens = shapes["prefill"].page_tokens
    if chunk_tokens % page_tokens:
        raise SettingsError(
            f"--chunk-tokens {chunk_tokens} is not a whole number of the prefill side's pages of {page_tokens} tokens: "
            "give a multiple"
        )
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
        components=form.components,
        prefill=shapes["prefill"],
        decode=shapes["decode"],
        requests=tuple(numbered),
        chunk_tokens=chunk_tokens,
        max_new_tokens=max_new_tokens,
        in_flight=in_flight,
        seed=seed,
    )


def _shape(values: ShapeValues, num_layers: int, side: str) -> EngineShape:
    numbers = {"tp": values.tp_size, "engines": values.engines, "page_size": values.page_tokens}
    check_positive(**{f"{side}_{name}": value for name, value in numbers.items()})
    return EngineShape(
        tp_size=values.tp_size,
        stages=parse_stages(num_layers, values.pp_size, values.stages, flag=side),
        count=values.engines,
        page_tokens=values.page_tokens,
        order=parse_order(values.order, flag=side),
    )
