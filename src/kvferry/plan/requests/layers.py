"""Chunks of some layers alone: which layers are meant, and how far a request's layers have come.

A chunk may be handed in layer by layer, in ranges, as a model computes them: the same pages again and again, each time
for other layers, in any order. Pages count as handed in once all layers of their group are; the next pages come then.
"Layer" stands for an index of a component's first axis, whatever that is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from kvferry.errors import ChunkError
from kvferry.layout import Component, Interval, Shard

Layers: TypeAlias = "Interval | Mapping[str, Interval]"
"""Layers of all components, which have the same number of them; or of some components, by name."""


def layers_by_component(layers: Layers, components: Iterable[Component], *, where: str) -> dict[str, Interval]:
    """Says which layers of each component are meant.

    Args:
        components: those of the rank.

    Raises:
        ChunkError: if a component is unknown or has no such layer, or a single range is given for components of
            different numbers of layers.
    """
    totals = {component.name: component.axes[0].size for component in components}
    if not isinstance(layers, Mapping):
        if len(set(totals.values())) > 1:
            raise ChunkError(
                f"{where}: layers {layers} of components that have different numbers of them, {totals}: say which "
                "layers of each, by name"
            )
        layers = dict.fromkeys(totals, layers)
    for name, part in layers.items():
        if name not in totals:
            raise ChunkError(f"{where}: layers of {name!r}: this rank's components are {list(totals)}")
        if part.stop > totals[name]:
            raise ChunkError(f"{where}: layers {part} of {name!r}, which has {totals[name]}")
    return dict(layers)


@dataclass(frozen=True, slots=True)
class LayerProgress:
    """Which layers of one group's pages have been handed in, for pages that come layer by layer.

    Attributes:
        held: the layers that the group has on this rank, by component.
        begun: the first of the pages of which some layers have come, and the one after the last; None if there are
            none.
        missing: the layers of these pages that are still to come, by component.
    """

    held: Mapping[str, frozenset[int]]
    begun: tuple[int, int] | None = None
    missing: Mapping[str, frozenset[int]] = field(default_factory=dict)

    @classmethod
    def of_group(cls, group: str, shards: Iterable[Shard]) -> LayerProgress:
        """Begins with none.

        Args:
            group: the group's name.
            shards: those of the rank.
        """
        held: dict[str, frozenset[int]] = {}
        for shard in shards:
            if shard.group == group and all(shard.box):
                name = shard.component.name
                held[name] = held.get(name, frozenset()) | _indices(shard.box[0])
        return cls(held)

    def has_any(self, layers: Mapping[str, Interval]) -> bool:
        """Returns whether the group has any of these layers."""
        return any(self.held.get(name, frozenset()) & _indices(part) for name, part in layers.items())

    def after(self, layers: Mapping[str, Interval], start: int, stop: int, *, where: str) -> LayerProgress:
        """Returns how far they have come once layers of some pages are handed in.

        Args:
            start: the position of the first page.
            stop: the position after the last page.

        Raises:
            ChunkError: if some of these layers were handed in before, or layers of other pages are still missing.
        """
        if self.begun is not None and self.begun != (start, stop):
            raise ChunkError(
                f"{where}: pages {start} to {stop} of the request where {self.missing_in_words} come first"
            )
        missing = self.held if self.begun is None else self.missing
        rest: dict[str, frozenset[int]] = {}
        for name, held in self.held.items():
            taken = held & _indices(layers[name]) if name in layers else frozenset()
            if again := taken - missing.get(name, frozenset()):
                raise ChunkError(f"{where}: {_named(name, again)} of pages {start} to {stop} were handed in already")
            if left := missing.get(name, frozenset()) - taken:
                rest[name] = left
        return LayerProgress(self.held, (start, stop) if rest else None, rest)

    @property
    def missing_in_words(self) -> str:
        """What is still to come of the pages that were begun."""
        assert self.begun is not None
        layers = " and ".join(_named(name, rest) for name, rest in self.missing.items())
        return f"{layers} of pages {self.begun[0]} to {self.begun[1]}"


def _indices(part: Interval) -> frozenset[int]:
    return frozenset(range(part.start, part.stop))


def _named(component: str, layers: frozenset[int]) -> str:
    return f"layers {sorted(layers)} of {component!r}"
