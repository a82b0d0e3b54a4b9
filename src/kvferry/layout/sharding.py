"""Which part of a component each rank of an engine holds, by one rule for all ranks.

A rule names the model layers that a component stems from and the axis that tensor parallelism divides. Together with a
rank's coordinates it gives the rank's box; nothing here knows what kind of model it is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from kvferry.errors import LayoutError
from kvferry.layout.component import Component
from kvferry.layout.interval import Box, Interval
from kvferry.layout.parallel import RankCoordinates, split, stage_layers


class ShardedComponent(msgspec.Struct, frozen=True, kw_only=True):
    """A component and how an engine divides it.

    Attributes:
        component: the component, whose first axis counts `layers`.
        layers: the model layer behind each index of the first axis, ascending: a hybrid model has components that only
            some layers have.
        tp_axis: the axis that tensor parallelism divides; None gives every rank all of it.

    Raises:
        LayoutError: if the layers do not fit the component, or there is no such axis.
    """

    component: Component
    layers: tuple[int, ...]
    tp_axis: str | None = None

    def __post_init__(self) -> None:
        first, *others = self.component.axes
        if len(self.layers) != first.size or any(low >= high for low, high in pairwise(self.layers)):
            raise LayoutError(
                f"component {self.component.name!r} has {first}: that takes {first.size} ascending model layers, "
                f"not {list(self.layers)}"
            )
        if self.tp_axis is not None and self.tp_axis not in [axis.name for axis in others]:
            raise LayoutError(
                f"component {self.component.name!r} has no axis {self.tp_axis!r} to divide: its axes are "
                f"{[axis.name for axis in others]} besides {first.name!r}"
            )

    def held(self, coordinates: RankCoordinates, stage: Interval) -> Box:
        """Returns the part that a rank holds.

        Args:
            stage: the model layers of the rank's pipeline stage.
        """
        layers = Interval(bisect_left(self.layers, stage.start), bisect_left(self.layers, stage.stop))
        return (
            layers,
            *(
                split(axis.size, coordinates.tp_size, coordinates.tp_rank)
                if axis.name == self.tp_axis
                else Interval(0, axis.size)
                for axis in self.component.axes[1:]
            ),
        )


def even_stages(num_layers: int, stages: int) -> tuple[int, ...]:
    """Returns how many layers each pipeline stage has, as even as possible.

    Raises:
        LayoutError: if there are more stages than layers.
    """
    if not 1 <= stages <= num_layers:
        raise LayoutError(f"{num_layers} layers cannot be divided into {stages} pipeline stages")
    return tuple(len(split(num_layers, stages, stage)) for stage in range(stages))


def stage_of(coordinates: RankCoordinates, layers_per_stage: Sequence[int]) -> Interval:
    """Returns the model layers of a rank's pipeline stage.

    Raises:
        LayoutError: if there are not as many stages as the rank's engine has.
    """
    if len(layers_per_stage) != coordinates.pp_size:
        raise LayoutError(f"{len(layers_per_stage)} stages {list(layers_per_stage)} for pp_size {coordinates.pp_size}")
    return stage_layers(layers_per_stage, coordinates.pp_rank)
