"""Which layers of a step's pages may leave while the model computes the next ones.

Engines tell of every attention layer that the model has come to. Layers are in ranges here, and one may leave once a
layer behind it has been told of: by then all that its layers keep of a token is there, whichever cache it is in. What a
request has once, such as recurrent state, is final only after the step, and a draft model comes after the model: both
leave with the last range, which nobody tells of but the step's end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from kvferry import Component, Entry, Interval, RankLayout, split


@dataclass(frozen=True, slots=True)
class LayerRanges:
    """Ranges of the layers that a rank holds, in the order in which the model computes them.

    Attributes:
        bounds: the numbers of layers with which the second and each further range begin.
        in_turn: by component, how many layers the whole model has: of what is there once its layer is computed.
        at_the_end: likewise, of what leaves with the last range.
        held: the numbers of all layers that are computed in turn.
    """

    bounds: tuple[int, ...] = ()
    in_turn: Mapping[str, int] = field(default_factory=dict)
    at_the_end: Mapping[str, int] = field(default_factory=dict)
    held: tuple[int, ...] = ()

    @classmethod
    def of(cls, layout: RankLayout, most: int, *, apart_from: Collection[str] = ()) -> LayerRanges:
        """Divides a rank's layers.

        Args:
            most: how many ranges there are to be. There are no more than layers.
            apart_from: components whose pages are not handed in before the step's end, or whose layers come after it.
        """
        components = {shard.component.name: shard.component for shard in layout.shards}
        in_turn = {
            name for name, component in components.items() if name not in apart_from and _is_computed_in_turn(component)
        }
        held = sorted(
            {
                number
                for shard in layout.shards
                if shard.component.name in in_turn and all(shard.box)
                for number in range(shard.box[0].start, shard.box[0].stop)
            }
        )
        count = max(1, min(most, len(held)))
        totals = {name: component.axes[0].size for name, component in components.items()}
        return cls(
            tuple(held[split(len(held), count, index).start] for index in range(1, count)),
            {name: total for name, total in totals.items() if name in in_turn},
            {name: total for name, total in totals.items() if name not in in_turn},
            tuple(held),
        )

    @property
    def count(self) -> int:
        return len(self.bounds) + 1

    def before(self, number: int) -> int:
        """Returns how many ranges end before a layer, which the model is through with."""
        return bisect_right(self.bounds, number)

    def layers(self, first: int, stop: int) -> dict[str, Interval]:
        """Returns the layers of some ranges that follow each other, by component.

        Args:
            first: the index of the first range.
            stop: the index behind the last one.
        """
        edges = (0, *self.bounds)
        layers = {
            name: Interval(edges[first], total if stop == self.count else edges[stop])
            for name, total in self.in_turn.items()
        }
        if stop == self.count:
            layers |= {name: Interval(0, total) for name, total in self.at_the_end.items()}
        return layers


def _is_computed_in_turn(component: Component) -> bool:
    """Whether a layer's part is there once the model is through with the layer; drafts alone are optional here."""
    return component.entry is not Entry.REQUEST and not component.is_optional
