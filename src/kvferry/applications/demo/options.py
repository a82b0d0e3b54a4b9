"""What the demo runs, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.applications.demo.reference.specification import ModelSpec
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


def slices(box: Box) -> tuple[slice, ...]:
    """Where a part lies in an array [layer, entry, ...] of the whole component."""
    layers, *others = (slice(part.start, part.stop) for part in box)
    return (layers, slice(None), *others)


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
