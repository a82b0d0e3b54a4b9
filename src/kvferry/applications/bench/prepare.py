"""From the command line's values to checked options. Everything that is wrong is said here, before anything starts."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from kvferry.applications.bench.arguments import BenchArguments, Workload
from kvferry.applications.bench.options import BY_LAYER, PRESETS, VARIANTS, BenchOptions, Model, Side
from kvferry.applications.checks import TOKEN_ORDERS, check_at_least_one, one_of
from kvferry.errors import ConfigurationError, SettingsError
from kvferry.layout import Device, Entry, MemoryKind, ShardedComponent, attention_components
from kvferry.models import read_model_cache
from kvferry.settings import Settings
from kvferry.transport.chosen import transport_class


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


def preset_model(name: str) -> Model:
    """The model of a preset.

    Raises:
        SettingsError: if there is none of that name.
    """
    if name not in PRESETS:
        raise SettingsError(f"--preset {name!r}: it is one of {', '.join(PRESETS)}; or give a model's --config")
    preset = PRESETS[name]
    components = attention_components(
        num_layers=preset.num_layers,
        num_kv_heads=preset.num_kv_heads,
        head_dim=preset.head_dim,
        dtype=preset.dtype,
    )
    layers = tuple(range(preset.num_layers))
    return Model(
        name=name,
        num_layers=preset.num_layers,
        components=tuple(
            ShardedComponent(component=component, layers=layers, tp_axis="head") for component in components
        ),
    )


def configured_model(config: Path) -> Model:
    """The model of a config.json or of a description by hand, without draft layers.

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
    return Model(cache.name, cache.num_layers, cache.components)


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
