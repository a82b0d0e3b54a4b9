"""What the demo runs, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.engines.reference.caches import CachedComponent
from kvferry.engines.reference.specification import ModelSpec
from kvferry.errors import SettingsError
from kvferry.layout import Axis, Component, Interval, RankCoordinates, all_coordinates, split, stage_layers


@dataclass(frozen=True, slots=True)
class EngineShape:
    """How an engine is divided.

    Attributes:
        tp_size: tensor-parallel ranks of every stage.
        stages: layers of every pipeline stage.
        count: how many such engines run side by side.
    """

    tp_size: int
    stages: tuple[int, ...]
    count: int

    @property
    def coordinates(self) -> tuple[RankCoordinates, ...]:
        """Every rank of one engine."""
        return all_coordinates(tp_size=self.tp_size, pp_size=len(self.stages))

    def held(self, component: Component, coordinates: RankCoordinates) -> dict[str, Interval]:
        """What a rank holds: its stage's layers, and of a head axis its share."""
        held = {"layer": stage_layers(self.stages, coordinates.pp_rank)}
        for axis in component.axes:
            if axis.name == "head":
                held["head"] = split(axis.size, self.tp_size, coordinates.tp_rank)
        return held


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt on its way from a prefill engine to a decode engine."""

    room: int
    prompt: str
    token_ids: tuple[int, ...]
    prefill_engine: int
    decode_engine: int

    def pages(self, page_tokens: int) -> int:
        """Pages that the prompt's cache takes."""
        return -(-len(self.token_ids) // page_tokens)


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Everything that a rank's process needs to know.

    Attributes:
        chunk_tokens: tokens that are prefilled, and sent, at a time: whole pages.
        in_flight: rooms that a decode rank keeps open at a time.
    """

    model: ModelSpec
    components: tuple[Component, ...]
    prefill: EngineShape
    decode: EngineShape
    requests: tuple[Request, ...]
    page_tokens: int
    chunk_tokens: int
    max_new_tokens: int
    in_flight: int
    seed: int

    def pool_pages(self) -> int:
        """Pages of every rank's pool: what the requests take, and half as much again that nobody may touch."""
        needed = sum(request.pages(self.page_tokens) for request in self.requests)
        return needed + needed // 2 + 8


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


def component_of(cached: CachedComponent) -> Component:
    """A component of the reference engine in kvferry's terms."""
    return Component(name=cached.name, axes=tuple(Axis(name, size) for name, size in cached.axes), dtype=cached.dtype)


def check_positive(**values: int) -> None:
    """Refuses numbers below 1, by the name of their option.

    Raises:
        SettingsError: naming the first.
    """
    for name, value in values.items():
        if value < 1:
            raise SettingsError(f"--{name.replace('_', '-')} {value}: it must be at least 1")
