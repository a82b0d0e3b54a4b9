"""Where a rank stands under tensor, context, pipeline and data parallelism, and which part of an axis it holds.

The only arithmetic on parallel sizes in kvferry is here, and it only ever produces intervals. It never divides one
side's size by the other's.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvferry.errors import LayoutError
from kvferry.layout.interval import Interval, WireIndex


class RankCoordinates(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank stands in its engine.

    Ranks are numbered with tensor parallelism fastest, then context parallelism, pipeline stages, and data parallelism.
    A request lives in one data-parallel group: the ranks that share a `dp_rank`. Expert parallelism has no place here:
    it divides weights, and no cache.

    Attributes:
        tp_rank: which tensor-parallel rank it is.
        tp_size: of how many.
        pp_rank: which pipeline stage it is of.
        pp_size: of how many.
        dp_rank: which data-parallel group it is of.
        dp_size: of how many.
        cp_rank: which context-parallel rank it is.
        cp_size: of how many.

    Raises:
        LayoutError: if a size is not positive or a rank is outside its size.
    """

    tp_rank: WireIndex = 0
    tp_size: WireIndex = 1
    pp_rank: WireIndex = 0
    pp_size: WireIndex = 1
    dp_rank: WireIndex = 0
    dp_size: WireIndex = 1
    cp_rank: WireIndex = 0
    cp_size: WireIndex = 1

    def __post_init__(self) -> None:
        for axis in ("tp", "cp", "pp", "dp"):
            rank, size = getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")
            if size < 1:
                raise LayoutError(f"{axis}_size is {size}: a parallel size is at least 1")
            if not 0 <= rank < size:
                raise LayoutError(f"{axis}_rank is {rank}: it must lie in [0, {size}), the {axis}_size")

    @property
    def group_size(self) -> int:
        """How many ranks share one request."""
        return self.tp_size * self.cp_size * self.pp_size

    @property
    def group_rank(self) -> int:
        """This rank's number among the ranks that share a request."""
        return (self.pp_rank * self.cp_size + self.cp_rank) * self.tp_size + self.tp_rank

    @property
    def world_size(self) -> int:
        """How many ranks the engine has."""
        return self.dp_size * self.group_size

    @property
    def engine_rank(self) -> int:
        """This rank's number in the engine: unique, unlike any single coordinate."""
        return self.dp_rank * self.group_size + self.group_rank

    @property
    def is_aux_writer(self) -> bool:
        """Whether this rank sends its group's aux data: the first of the last pipeline stage, which has the token."""
        return self.tp_rank == 0 and self.cp_rank == 0 and self.pp_rank == self.pp_size - 1


def all_coordinates(
    *, tp_size: int = 1, pp_size: int = 1, dp_size: int = 1, cp_size: int = 1
) -> tuple[RankCoordinates, ...]:
    """Returns the coordinates of every rank of an engine, in the order of their engine ranks."""
    sizes = {"tp_size": tp_size, "cp_size": cp_size, "pp_size": pp_size, "dp_size": dp_size}
    for name, size in sizes.items():
        if size < 1:
            raise LayoutError(f"{name} is {size}: a parallel size is at least 1")
    return tuple(
        RankCoordinates(tp_rank=tp, cp_rank=cp, pp_rank=pp, dp_rank=dp, **sizes)
        for dp in range(dp_size)
        for pp in range(pp_size)
        for cp in range(cp_size)
        for tp in range(tp_size)
    )


def split(total: int, parts: int, index: int) -> Interval:
    """Returns the part of `total` indices that rank `index` of `parts` holds.

    Parts are in order, and as even as possible. With more parts than indices, neighbouring parts hold the same single
    index: this is how grouped-query attention replicates KV heads.

    Raises:
        LayoutError: if total or parts is not positive, or index is not below parts.
    """
    if total < 1:
        raise LayoutError(f"cannot split an axis of size {total}: it must have at least one index")
    if parts < 1:
        raise LayoutError(f"cannot split an axis into {parts} parts: a parallel size is at least 1")
    if not 0 <= index < parts:
        raise LayoutError(f"part {index} does not exist: there are {parts} parts")
    start = index * total // parts
    return Interval(start, max(start + 1, (index + 1) * total // parts))


def stage_layers(layers_per_stage: Sequence[int], stage: int) -> Interval:
    """Returns the layers of one pipeline stage, given how many layers every stage has.

    Raises:
        LayoutError: if the stage does not exist, or a stage has a negative number of layers.
    """
    if not 0 <= stage < len(layers_per_stage):
        raise LayoutError(f"pipeline stage {stage} does not exist: there are {len(layers_per_stage)}")
    if any(count < 0 for count in layers_per_stage):
        raise LayoutError(f"layers per stage {list(layers_per_stage)} must not be negative")
    start = sum(layers_per_stage[:stage])
    return Interval(start, start + layers_per_stage[stage])
