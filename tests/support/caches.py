"""Caches whose every element is known beforehand.

An element's value is a function of what it is (component, layer, request, token, head, dim), not of who holds it or
where. A pool that was filled for a request can therefore be checked on any rank of any engine without asking the side
that filled it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry import (
    Component,
    Interval,
    RankCoordinates,
    RankLayout,
    all_coordinates,
    attention_components,
    empty_shard,
    latent_component,
    shard_from_tensors,
    split,
    stage_layers,
)

UNTOUCHED = 0xA5
"""Fills every byte of a pool before anything is written to it."""

_MOST_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Model:
    """What is cached, as the whole model sees it. With a latent_dim it has MLA, otherwise keys and values."""

    layers: int = 4
    heads: int = 4
    head_dim: int = 8
    latent_dim: int = 0
    page_tokens: int = 4
    dtype: str = "int32"

    @property
    def components(self) -> tuple[Component, ...]:
        if self.latent_dim:
            return (latent_component(num_layers=self.layers, latent_dim=self.latent_dim, dtype=self.dtype),)
        return attention_components(
            num_layers=self.layers, num_kv_heads=self.heads, head_dim=self.head_dim, dtype=self.dtype
        )


@dataclass(frozen=True, slots=True)
class Shape:
    """How an engine divides a model, and how each rank lays out its pool."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    stages: tuple[int, ...] | None = None
    pages: int = 32
    heads_first: bool = False

    def coordinates(self) -> tuple[RankCoordinates, ...]:
        return all_coordinates(tp_size=self.tp, pp_size=self.pp, dp_size=self.dp)


@dataclass(slots=True, eq=False)
class Pool:
    """One rank's memory. Arrays by component, one array for every layer that the rank holds."""

    model: Model
    coordinates: RankCoordinates
    layout: RankLayout
    arrays: dict[str, list[NDArray[Any]]] = field(default_factory=dict)

    def fill(self, room: int, pages: NDArray[np.int64]) -> None:
        """Writes a request's values into its pages."""
        for array, page, values in self._by_page(room, pages):
            array[page] = values

    def wrong(self, room: int, pages: NDArray[np.int64], *, first_page: int = 0) -> int:
        """How many elements of a request's pages are not what they should be; the first is page first_page of it."""
        return sum(
            int(np.count_nonzero(array[page] != values))
            for array, page, values in self._by_page(room, pages, first_page)
        )

    def touched(self, pages: NDArray[np.int64]) -> int:
        """How many bytes of these pages are not as they were in the beginning."""
        return sum(
            int(np.count_nonzero(array[page].view(np.uint8) != UNTOUCHED))
            for arrays in self.arrays.values()
            for array in arrays
            for page in pages.tolist()
        )

    def wipe(self) -> None:
        """Makes everything untouched again."""
        for arrays in self.arrays.values():
            for array in arrays:
                array.view(np.uint8)[...] = UNTOUCHED

    def _by_page(self, room: int, pages: NDArray[np.int64], first_page: int = 0) -> Any:
        for number, shard in enumerate(self.layout.shards):
            for layer, array in enumerate(self.arrays[shard.component.name], shard.box[0].start):
                for position, page in enumerate(pages.tolist(), first_page):
                    values = self._values(number, layer, room, position, shard.component, shard.box[1:])
                    yield array, page, values if array.shape[1] == self.model.page_tokens else values.swapaxes(0, 1)

    def _values(
        self, number: int, layer: int, room: int, position: int, component: Component, box: tuple[Interval, ...]
    ) -> NDArray[Any]:
        tokens = np.arange(position * self.model.page_tokens, (position + 1) * self.model.page_tokens, dtype=np.uint64)
        seed = ((number * 64 + layer) * 1_000_003 + room) * _MOST_TOKENS % 2**64
        ids = np.uint64(seed) + tokens
        for axis, interval in zip(component.axes[1:], box, strict=True):
            inner = np.arange(interval.start, interval.stop, dtype=np.uint64)
            ids = ids[..., None] * np.uint64(axis.size) + inner
        mixed = (ids * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(33)
        values: NDArray[Any] = mixed.astype(component.dtype)
        return values


def pool(model: Model, shape: Shape, coordinates: RankCoordinates) -> Pool:
    """One rank's memory, and its layout."""
    stages = shape.stages or tuple(
        len(split(model.layers, shape.pp, stage)) for stage in range(shape.pp)
    )  # layers divide evenly unless told otherwise
    layers = stage_layers(stages, coordinates.pp_rank)
    heads = split(model.heads, shape.tp, coordinates.tp_rank)
    arrays: dict[str, list[NDArray[Any]]] = {}
    shards = []
    for component in model.components:
        dims: tuple[str, ...] = ("page", "token", *(axis.name for axis in component.axes[1:]))
        sizes = {"page": shape.pages, "token": model.page_tokens, "latent": model.latent_dim, "dim": model.head_dim}
        sizes["head"] = len(heads)
        if shape.heads_first and "head" in dims:
            dims = ("page", "head", "token", "dim")
        arrays[component.name] = [np.empty([sizes[dim] for dim in dims], component.dtype) for _ in range(len(layers))]
        held = {"layer": layers} | ({"head": heads} if "head" in dims else {})
        shards.append(
            shard_from_tensors(component, arrays[component.name], dims=dims, held=held)
            if layers
            else empty_shard(component, page_tokens=model.page_tokens, num_pages=shape.pages)
        )
    made = Pool(model, coordinates, RankLayout(shards=tuple(shards)), arrays)
    made.wipe()
    return made
