"""What the benchmark runs: its options as typed, and checked. All that is wrong is said before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer

from kvferry.applications.command_line import TOKEN_ORDERS, check_at_least_one, one_of
from kvferry.errors import ConfigurationError, SettingsError
from kvferry.layout import (
    Device,
    Entry,
    MemoryKind,
    PageOrder,
    RankCoordinates,
    ShardedComponent,
    all_coordinates,
    attention_components,
)
from kvferry.models import ModelCache, read_model_cache
from kvferry.settings import Settings
from kvferry.transport.chosen import transport_class


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Whose cache is moved, and between which pools."""

    preset: Annotated[str, typer.Option(help="Whose cache: small, qwen3-8b, qwen3-32b or llama-3.1-70b.")] = "qwen3-32b"
    config: Annotated[
        Path | None, typer.Option(help="A model's config.json, or a description by hand, instead of --preset.")
    ] = None
    device: Annotated[str, typer.Option(help="Where the caches lie: cpu, or cuda for one GPU, which needs torch.")] = (
        "cpu"
    )
    variants: Annotated[
        str,
        typer.Option(
            help="What is measured: some of synchronous, direct, staged, mapped (between GPUs) and auto, separated by "
            "commas."
        ),
    ] = "synchronous,direct,staged,auto"
    prefill_tp: Annotated[int, typer.Option(help="Tensor-parallel ranks of the prefill engine.")] = 1
    decode_tp: Annotated[int, typer.Option(help="Tensor-parallel ranks of the decode engine.")] = 1
    page_size: Annotated[str, typer.Option(help="Tokens in a page; several, such as 1,16,64, are a case each.")] = "16"
    decode_page_size: Annotated[int | None, typer.Option(help="Of the decode side; else --page-size.")] = None
    prefill_layout: Annotated[str, typer.Option(help="Order in a page of the prefill side: nhd or hnd.")] = "nhd"
    decode_layout: Annotated[str, typer.Option(help="Order in a page of the decode side: nhd or hnd.")] = "nhd"
    pages: Annotated[
        str, typer.Option(help="How a request's pages lie: scattered, contiguous, or both, a case each.")
    ] = "scattered"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """How much is moved, and how often. Every rank's process needs to know it as it is typed."""

    tokens: Annotated[int, typer.Option(help="Tokens of a request.")] = 2048
    chunks: Annotated[int, typer.Option(help="Chunks that a request is submitted in.")] = 1
    requests: Annotated[int, typer.Option(help="Requests with memory of their own.")] = 4
    passes: Annotated[
        int, typer.Option(help="How often a repetition goes over the memory of its requests: more, for a steady load.")
    ] = 1
    in_flight: Annotated[int, typer.Option(help="Requests submitted and not yet sent at a time.")] = 4
    repetitions: Annotated[int, typer.Option(help="Rounds, in each of which every variant has a turn.")] = 3
    seconds: Annotated[float, typer.Option(help="Begin further rounds for so long.")] = 0.0
    layer_time_ms: Annotated[
        float,
        typer.Option(
            help="Play a prefill that computes one request at a time, so long for each layer, and measure what of a "
            "transfer is left when it is through: sent whole, and layer by layer."
        ),
    ] = 0.0
    layer_ranges: Annotated[
        int, typer.Option(help="With --layer-time-ms, in how many ranges of layers a request is sent.")
    ] = 8
    plant_wrong_byte: Annotated[
        bool, typer.Option("--plant-wrong-byte", help="Change a byte that arrived, to see that the check finds it.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class BenchArguments(Workload, Shape):
    """What is measured. Two machines that measure together are given the same."""

    transport: Annotated[
        str | None,
        typer.Option(
            "--transport",
            "--transports",
            help="What moves the bytes: a name, or module:Class; several, such as nixl,mooncake, are a case each "
            "[KVFERRY_TRANSPORT].",
        ),
    ] = None
    nixl_threads: Annotated[
        int | None, typer.Option(help="Threads that share a large direct write [KVFERRY_NIXL_THREADS].")
    ] = None


PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "small": {"num_layers": 4, "num_kv_heads": 4, "head_dim": 64},
        "qwen3-8b": {"num_layers": 36, "num_kv_heads": 8, "head_dim": 128},
        "qwen3-32b": {"num_layers": 64, "num_kv_heads": 8, "head_dim": 128},
        "llama-3.1-70b": {"num_layers": 80, "num_kv_heads": 8, "head_dim": 128},
    }
)
"""Models' caches in numbers, all of bfloat16."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to move the bytes.

    Attributes:
        name: in tables, and of the engine whose endpoints go this way.
        settings: what these endpoints are told beside what all are told.
        is_by_layer: whether requests are handed in by ranges of layers, as they are computed.
        is_synchronous: whether whoever hands a chunk in waits until its bytes have moved.
    """

    name: str
    settings: Mapping[str, Any]
    is_by_layer: bool = False
    is_synchronous: bool = False

    @property
    def may_stage(self) -> bool:
        """Whether its endpoints may have staging memory."""
        return self.settings["path"] in ("auto", "staged")


BY_LAYER = ", by layer"
"""Ends the names of variants that send a request as its layers are computed."""

DIRECT = "direct"
"""The variant that the others are compared with."""

VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        variant.name: variant
        for variant in (
            Variant("synchronous", {"path": "direct"}, is_synchronous=True),
            Variant(DIRECT, {"path": "direct"}),
            Variant("staged", {"path": "staged"}),
            Variant("mapped", {"path": "mapped"}),
            Variant("auto", {"path": "auto"}),
        )
    }
)
"""Measured in turn, in one run. The last is what an endpoint does by itself."""


def variant_of(name: str) -> Variant:
    """The variant of that name, which may end with `BY_LAYER`."""
    if name.endswith(BY_LAYER):
        return Variant(name, VARIANTS[name.removesuffix(BY_LAYER)].settings, is_by_layer=True)
    return VARIANTS[name]


@dataclass(frozen=True, slots=True)
class Side:
    """How one side's engine is divided, and what its pages look like."""

    name: str
    tp_size: int
    page_tokens: int
    order: PageOrder

    @property
    def coordinates(self) -> tuple[RankCoordinates, ...]:
        """Every rank."""
        return all_coordinates(tp_size=self.tp_size)


@dataclass(frozen=True, kw_only=True)
class BenchOptions(Workload):
    """One shape to be measured: everything that a rank's process needs to know.

    Attributes:
        model: what is cached, every layer in one pipeline stage.
        variants: names of those that are measured.
        device: where the pools lie.
        is_scattered: whether a request's pages lie in random order, as in a pool in use, or side by side.
        transport: what moves the bytes, as the setting names it.
        compares_transports: whether other cases have another one.
        nixl_threads: threads that share a large direct write.
    """

    model: ModelCache
    prefill: Side
    decode: Side
    variants: tuple[str, ...]
    device: Device
    is_scattered: bool
    transport: str
    compares_transports: bool
    nixl_threads: int

    @property
    def sides(self) -> tuple[Side, Side]:
        """Prefill and decode."""
        return self.prefill, self.decode

    @property
    def at_a_time(self) -> int:
        """Requests on their way at a time: a prefill that computes layer by layer computes one."""
        return 1 if self.layer_time_ms else self.in_flight

    def side(self, name: str) -> Side:
        """The side of that name."""
        return self.prefill if name == self.prefill.name else self.decode

    def source_of(self, transfer: int) -> int:
        """The request whose pages a transfer is read from; those that it goes to are the next in turn.

        Another one in every pass, so that what the pass before left behind is not what belongs there.
        """
        return (transfer + transfer // self.requests) % self.requests

    @property
    def name(self) -> str:
        """The case in a few words."""
        prefill, decode = self.sides
        pages = str(prefill.page_tokens)
        if decode.page_tokens != prefill.page_tokens:
            pages += f"->{decode.page_tokens}"
        orders = "" if prefill.order is decode.order else f" {prefill.order.value}->{decode.order.value}"
        lie = "scattered" if self.is_scattered else "contiguous"
        over = f", {self.transport}" if self.compares_transports else ""
        return f"TP {prefill.tp_size}->{decode.tp_size}, {pages}-token pages{orders}, {lie}{over}"


def prepare(arguments: BenchArguments) -> list[BenchOptions]:
    """Checks every value; gives one set of options for every page size, way that pages lie, and transport.

    Raises:
        ConfigurationError: naming the option and its value.
    """
    device, variants = checked_device(arguments.device), parse_variants(arguments.variants)
    check_at_least_one(arguments, "prefill_tp", "decode_tp", "decode_page_size")
    check_at_least_one(arguments, "tokens", "chunks", "requests", "passes", "in_flight", "repetitions", "layer_ranges")
    if arguments.passes > 1 and arguments.requests <= arguments.in_flight:
        raise SettingsError(
            f"--passes {arguments.passes} with --requests {arguments.requests}: pages are used again while --in-flight "
            f"{arguments.in_flight} are on their way, which takes more requests than that"
        )
    if not 0 <= arguments.layer_time_ms < float("inf"):
        raise SettingsError(f"--layer-time-ms {arguments.layer_time_ms:g}: it must not be negative, and finite")
    if arguments.layer_time_ms:
        asynchronous = [name for name in variants if not VARIANTS[name].is_synchronous]
        variants = tuple(each for name in asynchronous for each in (name, name + BY_LAYER))
        if not variants:
            raise SettingsError(
                "--layer-time-ms with --variants synchronous: nothing is sent while layers are computed"
            )
    if not 0 <= arguments.seconds < float("inf"):
        raise SettingsError(f"--seconds {arguments.seconds:g}: it must not be negative, and finite")
    model = preset_model(arguments.preset) if arguments.config is None else configured_model(arguments.config)
    prefill_order = one_of(TOKEN_ORDERS, arguments.prefill_layout, option="--prefill-layout")
    decode_order = one_of(TOKEN_ORDERS, arguments.decode_layout, option="--decode-layout")
    settings = Settings() if arguments.nixl_threads is None else Settings(nixl_threads=arguments.nixl_threads)
    transports = parse_transports(arguments.transport or settings.transport)
    sizes, lies = parse_numbers(arguments.page_size, option="--page-size"), parse_pages(arguments.pages)
    for page_tokens in sizes:
        num_pages = -(-arguments.tokens // page_tokens)
        if arguments.chunks > num_pages:
            raise SettingsError(
                f"--chunks {arguments.chunks}: {arguments.tokens} tokens have only {num_pages} pages of {page_tokens} "
                "to divide"
            )
    load: dict[str, Any] = {field.name: getattr(arguments, field.name) for field in fields(Workload)}
    return [
        BenchOptions(
            model=model,
            prefill=Side("prefill", arguments.prefill_tp, page_tokens, prefill_order),
            decode=Side("decode", arguments.decode_tp, arguments.decode_page_size or page_tokens, decode_order),
            variants=variants,
            device=device,
            is_scattered=is_scattered,
            transport=transport,
            compares_transports=len(transports) > 1,
            nixl_threads=settings.nixl_threads,
            **load,
        )
        for page_tokens in sizes
        for is_scattered in lies
        for transport in transports
    ]


def preset_model(name: str) -> ModelCache:
    """The model of a preset.

    Raises:
        SettingsError: if there is none of that name.
    """
    if name not in PRESETS:
        raise SettingsError(f"--preset {name!r}: it is one of {', '.join(PRESETS)}; or give a model's --config")
    num_layers = PRESETS[name]["num_layers"]
    components = attention_components(**PRESETS[name], dtype="bfloat16")
    sharded = (
        ShardedComponent(component=component, layers=tuple(range(num_layers)), tp_axis="head")
        for component in components
    )
    return ModelCache(name=name, num_layers=num_layers, components=tuple(sharded))


def configured_model(config: Path) -> ModelCache:
    """The model of a config.json or of a description by hand; draft layers are not moved.

    Raises:
        ModelError: if it cannot be read.
        ConfigurationError: if its pages are packed.
    """
    cache = read_model_cache(config)
    for sharded in cache.components:
        if sharded.component.entry is Entry.PAGE:
            raise ConfigurationError(
                f"--config {config}: {sharded.component.name!r} has packed pages, which kvferry bench does not make: "
                "describe its tokens"
            )
    return cache


def parse_numbers(text: str, *, option: str) -> tuple[int, ...]:
    """Numbers from 1 on, separated by commas.

    Raises:
        SettingsError: if something else is written.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise SettingsError(f"{option} {text!r}: write a number from 1 on, or several such as 1,16,64")
    return tuple(dict.fromkeys(int(part) for part in parts))


def parse_transports(text: str) -> tuple[str, ...]:
    """Names of transports, separated by commas.

    Raises:
        SettingsError: if there is none of a name.
    """
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        transport_class(name)
    return names


def parse_pages(text: str) -> tuple[bool, ...]:
    """How pages lie: for every case, whether they are scattered.

    Raises:
        SettingsError: if it is written in no known way.
    """
    known = {"scattered": (True,), "contiguous": (False,), "both": (True, False)}
    if text not in known:
        raise SettingsError(f"--pages {text!r}: it is one of {', '.join(known)}")
    return known[text]


def parse_variants(text: str) -> tuple[str, ...]:
    """Names of variants, separated by commas, in the order of `VARIANTS`.

    Raises:
        SettingsError: if there is none of a name.
    """
    wanted = [part.strip() for part in text.split(",")]
    for name in wanted:
        if name not in VARIANTS:
            raise SettingsError(f"--variants {text!r}: {name!r} is none; there are {', '.join(VARIANTS)}")
    return tuple(name for name in VARIANTS if name in wanted)


def checked_device(name: str) -> Device:
    """Where pools lie.

    Raises:
        SettingsError: if there is no such kind of device.
        ConfigurationError: if it is a GPU, and none can be used here.
    """
    if name == "cpu":
        return Device()
    if name != "cuda":
        raise SettingsError(f"--device {name!r}: it is cpu or cuda")
    try:
        import torch
    except ImportError:
        raise ConfigurationError(
            "--device cuda: a GPU was asked for, and torch, which is needed to use one, is not installed; "
            "install it, or take --device cpu"
        ) from None
    if not torch.cuda.is_available():
        raise ConfigurationError(
            f"--device cuda: a GPU was asked for where there is none that torch {torch.__version__} can use; take "
            "--device cpu"
        )
    return Device(MemoryKind.VRAM)
