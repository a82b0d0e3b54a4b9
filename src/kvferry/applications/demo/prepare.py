"""From the command line's values to checked options. Everything that is wrong is said here, before anything starts."""

from __future__ import annotations

from typing import Any

from kvferry.applications.checks import TOKEN_ORDERS, check_at_least_one, one_of
from kvferry.applications.demo.arguments import DemoArguments
from kvferry.applications.demo.options import DemoOptions, EngineShape, Request, parse_stages
from kvferry.applications.demo.reference.caches import cache_form
from kvferry.applications.demo.reference.prompts import read_prompts
from kvferry.applications.demo.reference.specification import ModelSpec
from kvferry.applications.demo.reference.tokenizer import load_tokenizer
from kvferry.errors import SettingsError
from kvferry.settings import Settings
from kvferry.transport.chosen import available_transport_class

_FIRST_ROOM = 1000


def prepare(arguments: DemoArguments) -> DemoOptions:
    """Checks every value and tokenizes the prompts.

    Raises:
        SettingsError: naming the option and its value.
        ModelError: if the model cannot be used.
        TransportUnavailableError: if the transport is not installed.
    """
    settings = Settings() if arguments.transport is None else Settings(transport=arguments.transport)
    available_transport_class(settings.transport)
    check_at_least_one(arguments, "requests", "in_flight", "chunk_tokens", "max_new_tokens", "page_size")
    if arguments.model is None:
        model = ModelSpec.small(
            arguments.arch, num_kv_heads=arguments.kv_heads, num_layers=arguments.layers, seed=arguments.seed
        )
    else:
        model = ModelSpec.from_directory(arguments.model)
    form = cache_form(model)
    shapes = {side: _shape(arguments, form.num_layers, side) for side in ("prefill", "decode")}
    page_tokens = shapes["prefill"].page_tokens
    if arguments.chunk_tokens % page_tokens:
        raise SettingsError(
            f"--chunk-tokens {arguments.chunk_tokens} is not a whole number of the prefill side's pages of "
            f"{page_tokens} tokens: give a multiple"
        )
    tokenizer = load_tokenizer(arguments.model)
    prompts = read_prompts(arguments.prompt_file)
    numbered = []
    for index in range(arguments.requests):
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
        chunk_tokens=arguments.chunk_tokens,
        max_new_tokens=arguments.max_new_tokens,
        in_flight=arguments.in_flight,
        seed=arguments.seed,
        transport=settings.transport,
    )


def _shape(arguments: DemoArguments, num_layers: int, side: str) -> EngineShape:
    check_at_least_one(arguments, f"{side}_tp", f"{side}_engines", f"{side}_page_size")

    def given(name: str) -> Any:
        return getattr(arguments, f"{side}_{name}")

    return EngineShape(
        tp_size=given("tp"),
        stages=parse_stages(num_layers, given("pp"), given("stages"), flag=side),
        count=given("engines"),
        page_tokens=given("page_size") or arguments.page_size,
        order=one_of(TOKEN_ORDERS, given("layout"), option=f"--{side}-layout"),
    )
