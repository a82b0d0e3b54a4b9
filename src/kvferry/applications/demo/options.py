"""What the demo runs: its options as typed, and checked. All that is wrong is said before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvferry.applications.command_line import TOKEN_ORDERS, check_at_least_one, one_of
from kvferry.applications.demo.reference.caches import cache_form
from kvferry.applications.demo.reference.specification import ModelSpec
from kvferry.applications.demo.reference.tokenizer import load_tokenizer, read_prompts
from kvferry.errors import SettingsError
from kvferry.layout import (
    Box,
    PageOrder,
    RankCoordinates,
    ShardedComponent,
    all_coordinates,
    default_group,
    split,
    stage_of,
)
from kvferry.settings import Settings
from kvferry.transport.chosen import available_transport_class


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoArguments:
    """What runs, and what is asked of it."""

    prefill_tp: Annotated[int, typer.Option(help="Tensor-parallel ranks of a prefill engine.")] = 4
    decode_tp: Annotated[int, typer.Option(help="Tensor-parallel ranks of a decode engine.")] = 2
    prefill_pp: Annotated[int, typer.Option(help="Pipeline stages of a prefill engine.")] = 1
    decode_pp: Annotated[int, typer.Option(help="Pipeline stages of a decode engine.")] = 1
    prefill_stages: Annotated[
        str | None, typer.Option(help="Layers of every prefill stage, such as 3,1; instead of --prefill-pp.")
    ] = None
    decode_stages: Annotated[
        str | None, typer.Option(help="Layers of every decode stage, such as 1,3; instead of --decode-pp.")
    ] = None
    prefill_engines: Annotated[int, typer.Option(help="Prefill engines side by side.")] = 1
    decode_engines: Annotated[int, typer.Option(help="Decode engines side by side.")] = 1
    arch: Annotated[
        str,
        typer.Option(
            help="Architecture of a small model with seeded weights: qwen3, llama, deepseek_v3, or one of the hybrids "
            "qwen3_next (recurrent and convolution states), gemma3 (sliding windows) and mamba2."
        ),
    ] = "qwen3"
    kv_heads: Annotated[
        int, typer.Option(help="KV heads of the seeded model; also key heads of qwen3_next's states, groups of mamba2.")
    ] = 4
    layers: Annotated[int, typer.Option(help="Layers of the seeded model.")] = 4
    model: Annotated[
        Path | None, typer.Option(help="Directory of a local checkpoint to use instead, with its tokenizer.")
    ] = None
    prompt_file: Annotated[
        Path | None, typer.Option(help="Text file with one prompt a line; prompts come with kvferry.")
    ] = None
    requests: Annotated[int, typer.Option(help="How many requests.")] = 8
    in_flight: Annotated[int, typer.Option(help="Requests that a decode rank waits for at a time.")] = 4
    page_size: Annotated[int, typer.Option(help="Tokens in a page.")] = 16
    prefill_page_size: Annotated[
        int | None, typer.Option(help="Tokens in a page of the prefill side; else --page-size.")
    ] = None
    decode_page_size: Annotated[
        int | None, typer.Option(help="Tokens in a page of the decode side; else --page-size.")
    ] = None
    prefill_layout: Annotated[str, typer.Option(help="Order in a page of the prefill side: nhd or hnd.")] = "nhd"
    decode_layout: Annotated[str, typer.Option(help="Order in a page of the decode side: nhd or hnd.")] = "nhd"
    chunk_tokens: Annotated[int, typer.Option(help="Tokens prefilled and sent at a time; whole pages.")] = 64
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to decode for every request.")] = 24
    seed: Annotated[int, typer.Option(help="Seed of weights and page orders.")] = 0
    transport: Annotated[
        str | None, typer.Option(help="What moves the bytes: a name, or module:Class [KVFERRY_TRANSPORT].")
    ] = None


@dataclass(frozen=True, slots=True)
class EngineShape:
    """How an engine is divided, and what its pages look like.

    Attributes:
        tp_size: tensor-parallel ranks of every stage.
        stages: layers of every pipeline stage.
        count: how many such engines run side by side.
        page_tokens: tokens in a page.
        order: what lies together in a page.
    """

    tp_size: int
    stages: tuple[int, ...]
    count: int
    page_tokens: int
    order: PageOrder = PageOrder.NHD

    @property
    def coordinates(self) -> tuple[RankCoordinates, ...]:
        """Every rank of one engine."""
        return all_coordinates(tp_size=self.tp_size, pp_size=len(self.stages))

    def held(self, sharded: ShardedComponent, coordinates: RankCoordinates) -> Box:
        """The part of a component that a rank holds."""
        return sharded.held(coordinates, stage_of(coordinates, self.stages))


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt on its way from a prefill engine to a decode engine."""

    room: int
    prompt: str
    token_ids: tuple[int, ...]
    prefill_engine: int
    decode_engine: int


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Everything that a rank's process needs to know.

    Attributes:
        components: what the model caches.
        chunk_tokens: tokens that are prefilled, and sent, at a time: whole pages of the prefill side.
        in_flight: rooms that a decode rank keeps open at a time.
        transport: what moves the bytes, as the setting names it.
    """

    model: ModelSpec
    components: tuple[ShardedComponent, ...]
    prefill: EngineShape
    decode: EngineShape
    requests: tuple[Request, ...]
    chunk_tokens: int
    max_new_tokens: int
    in_flight: int
    seed: int
    transport: str

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of pools that share page numbers; on every rank the same."""
        return tuple(dict.fromkeys(default_group(sharded.component) for sharded in self.components))


def parse_stages(num_layers: int, pp_size: int, stages: str | None, *, flag: str) -> tuple[int, ...]:
    """Layers per pipeline stage, from a list such as "3,1" or as evenly as possible.

    Raises:
        SettingsError: if the list is malformed or does not add up to the model's layers.
    """
    if stages is None:
        if not 1 <= pp_size <= num_layers:
            raise SettingsError(f"--{flag}-pp {pp_size}: it must lie in [1, {num_layers}], the model's layers")
        return tuple(len(split(num_layers, pp_size, stage)) for stage in range(pp_size))
    try:
        layers = tuple(int(part) for part in stages.split(","))
    except ValueError:
        raise SettingsError(f"--{flag}-stages {stages!r}: write layers per stage, such as 3,1") from None
    if min(layers) < 0 or sum(layers) != num_layers:
        raise SettingsError(f"--{flag}-stages {stages!r} adds up to {sum(layers)} layers, the model has {num_layers}")
    return layers


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
