"""What the benchmark runs, checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

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
    default_group,
)
from kvferry.models import read_model_cache


@dataclass(frozen=True, slots=True)
class Preset:
    """A model's cache in numbers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "small": Preset(num_layers=4, num_kv_heads=4, head_dim=64),
        "qwen3-8b": Preset(num_layers=36, num_kv_heads=8, head_dim=128),
        "qwen3-32b": Preset(num_layers=64, num_kv_heads=8, head_dim=128),
        "llama-3.1-70b": Preset(num_layers=80, num_kv_heads=8, head_dim=128),
    }
)


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to move the bytes.

    Attributes:
        name: in tables, and of the engine whose endpoints go this way.
        settings: what these endpoints are told beside what all are told.
    """

    name: str
    settings: Mapping[str, Any]

    @property
    def may_stage(self) -> bool:
        """Whether its endpoints may have staging memory."""
        return bool(self.settings["path"] != "direct")


DIRECT = "direct"
"""The variant that the others are compared with."""

VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        variant.name: variant
        for variant in (
            Variant("synchronous", {"path": "direct", "synchronous": True}),
            Variant(DIRECT, {"path": "direct"}),
            Variant("staged", {"path": "staged"}),
            Variant("auto", {"path": "auto"}),
        )
    }
)
"""Measured in turn, in one run. The last is what an endpoint does by itself."""


@dataclass(frozen=True, slots=True)
class Model:
    """What is cached: every layer in one pipeline stage."""

    name: str
    num_layers: int
    components: tuple[ShardedComponent, ...]

    @property
    def groups(self) -> dict[str, tuple[ShardedComponent, ...]]:
        """The components whose pools share page numbers, by group."""
        groups: dict[str, list[ShardedComponent]] = {}
        for sharded in self.components:
            groups.setdefault(default_group(sharded.component), []).append(sharded)
        return {name: tuple(members) for name, members in groups.items()}


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


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """One shape to be measured: everything that a rank's process needs to know.

    Attributes:
        variants: names of those that are measured.
        device: where the pools lie.
        is_scattered: whether a request's pages lie in random order, as in a pool in use, or side by side.
        tokens: of every request.
        chunks: parts in which a request is submitted.
        requests: that have pages of their own, so that all of them can be checked afterwards.
        passes: how often a repetition goes over these pages.
        in_flight: how many requests a prefill rank has submitted, and not yet sent, at a time.
        repetitions: at least so many rounds of all variants.
        seconds: further rounds begin for so long.
        nixl_threads: NIXL's worker threads of every endpoint.
        plants_wrong_byte: whether one byte that arrived is changed before it is checked.
    """

    model: Model
    prefill: Side
    decode: Side
    variants: tuple[str, ...]
    device: Device
    is_scattered: bool
    tokens: int
    chunks: int
    requests: int
    passes: int
    in_flight: int
    repetitions: int
    seconds: float
    nixl_threads: int
    plants_wrong_byte: bool

    @property
    def sides(self) -> tuple[Side, Side]:
        """Prefill and decode."""
        return self.prefill, self.decode

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
        return f"TP {prefill.tp_size}->{decode.tp_size}, {pages}-token pages{orders}, {lie}"


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


def parse_pages(text: str) -> tuple[bool, ...]:
    """How pages lie: for every case, whether they are scattered.

    Raises:
        SettingsError: if it is written in no known way.
    """
    known = {"scattered": (True,), "contiguous": (False,), "both": (True, False)}
    if text not in known:
        raise SettingsError(f"--pages {text!r}: it is one of {', '.join(known)}")
    return known[text]


def check_at_least_one(**values: int) -> None:
    """Refuses numbers below 1, by the name of their option.

    Raises:
        SettingsError: naming the first.
    """
    for name, value in values.items():
        if value < 1:
            raise SettingsError(f"--{name.replace('_', '-')} {value}: it must be at least 1")


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
