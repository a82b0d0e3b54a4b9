"""What the benchmark runs, checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kvferry.applications.bench.arguments import Workload
from kvferry.layout import (
    Device,
    PageOrder,
    RankCoordinates,
    ShardedComponent,
    all_coordinates,
    default_group,
)


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


@dataclass(frozen=True, kw_only=True)
class BenchOptions(Workload):
    """One shape to be measured: everything that a rank's process needs to know.

    Attributes:
        variants: names of those that are measured.
        device: where the pools lie.
        is_scattered: whether a request's pages lie in random order, as in a pool in use, or side by side.
        transport: what moves the bytes, as the setting names it.
        compares_transports: whether other cases have another one.
        nixl_threads: threads that share a large direct write.
    """

    model: Model
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
