"""What a request's cache holds, element by element, whatever rank has it where.

Elements are compared as bytes, so that they are unsigned numbers here, of as many bytes as the component's have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from math import prod
from typing import Any, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvferry.layout import Axis, Box, Component, Shard

Elements: TypeAlias = NDArray[np.unsignedinteger[Any]]
"""Elements as numbers."""

Positions: TypeAlias = NDArray[np.int64]
"""Of tokens in a request; of pages where pages are packed, and 0 for what a request has once."""


class Contents(ABC):
    """What a request's cache holds."""

    @abstractmethod
    def of(self, shard: Shard, layer: int, positions: Positions) -> Elements:
        """What a shard should hold of some positions.

        Args:
            layer: the index on the component's first axis.

        Returns:
            An array [position, ...], with the shard's part of the component's further axes.
        """


class KnownContents(Contents):
    """Made-up contents, which any rank of any engine can be checked against without asking the side that has them.

    An element follows from what it is: component, request, layer, position and index on every axis. Eight bytes are the
    sum of two random numbers, for its layer and position and for its place in the entry, so that bytes that are right
    but in a wrong place differ from those that belong there.
    """

    def __init__(self, request: int = 0) -> None:
        """Makes the contents of one request.

        Args:
            request: any number; another one makes other contents.
        """
        self._request = request

    def of(self, shard: Shard, layer: int, positions: Positions) -> Elements:
        component = shard.component
        first = np.uint64(xxhash.xxh64_intdigest(f"{component.name} {layer} {self._request}".encode()))
        places, lane_bytes = _places(component.axes[1:], component.element_bytes, shard.box[1:])
        numbers = _random(positions.astype(np.uint64) + first).reshape(-1, *(1 for _ in places.shape)) + places
        if lane_bytes < 8:
            numbers = _random(numbers)  # in few bytes the sums of two tokens would often differ by nothing
        elements: Elements = numbers.astype(f"u{lane_bytes}", copy=False).view(element_type(component))
        held = shard.box[-1] if shard.box[1:] else None
        return elements[..., 0] if held is None else elements[..., held.start : held.stop]


@lru_cache(maxsize=256)
def _places(axes: tuple[Axis, ...], element_bytes: int, held: Box) -> tuple[NDArray[np.uint64], int]:
    """A random number for each place in an entry, in as many bytes as fit the last axis whole, on whatever rank.

    Args:
        axes: of an entry.
        held: the part of it that a rank has; of the last axis all is returned.
    """
    *outer, last = [axis.size for axis in axes] or [1]
    lane_bytes = next(size for size in (8, 4, 2, 1) if last * element_bytes % size == 0)
    shape = (*outer, last * element_bytes // lane_bytes)
    whole = _random(np.arange(prod(shape), dtype=np.uint64) + np.uint64(1 << 63)).reshape(shape)
    return whole[tuple(slice(part.start, part.stop) for part in held[:-1])], lane_bytes


def _random(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A random number for every number, always the same: the finaliser of SplitMix64."""
    numbers = numbers * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0xD1B54A32D192ED03)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    numbers ^= numbers >> np.uint64(31)
    return numbers


class CopiedContents(Contents):
    """What prefill ranks hold of a request, put together. See `copied_contents`.

    Attributes:
        tokens: how many the request has.
    """

    def __init__(self, tokens: int) -> None:
        """Begins with nothing known of the request.

        Args:
            tokens: how many the request has.
        """
        self.tokens = tokens
        self._whole: dict[str, tuple[Elements, NDArray[np.bool_]]] = {}  # by component, and what of it is known

    def add(self, shard: Shard, layer: int, positions: Positions, elements: Elements) -> None:
        """Adds what a rank holds of one layer.

        Raises:
            ValueError: if another rank holds the same part of the cache, and something else in it.
        """
        (whole, is_known), where = self._layer(shard, layer), _where(shard, positions)
        if bool((is_known[where] & (whole[where] != elements)).any()):
            raise ValueError(f"two ranks hold the same part of {_name(shard, layer)}, but differ in it")
        whole[where] = elements
        is_known[where] = True

    def of(self, shard: Shard, layer: int, positions: Positions) -> Elements:
        """Returns what was copied, as a rank with this shard must hold it.

        Raises:
            ValueError: if no rank holds that.
        """
        (whole, is_known), where = self._layer(shard, layer), _where(shard, positions)
        if not is_known[where].all():
            raise ValueError(f"no rank that was copied holds all of {_name(shard, layer)}")
        found: Elements = whole[where]
        return found

    def _layer(self, shard: Shard, layer: int) -> tuple[Elements, NDArray[np.bool_]]:
        component = shard.component
        if component.name not in self._whole:
            first, *axes = (axis.size for axis in component.axes)
            shape = (first, max(1, self.tokens), *axes)
            self._whole[component.name] = np.zeros(shape, element_type(component)), np.zeros(shape, np.bool_)
        whole, is_known = self._whole[component.name]
        return whole[layer], is_known[layer]


def _where(shard: Shard, positions: Positions) -> tuple[Any, ...]:
    return np.ix_(positions, *(np.arange(part.start, part.stop) for part in shard.box[1:]))


def _name(shard: Shard, layer: int) -> str:
    return f"{shard.component.axes[0].name} {layer} of {shard.component.name!r}"


def element_type(component: Component) -> np.dtype[np.unsignedinteger[Any]]:
    """The numbers that stand for a component's elements."""
    return np.dtype(f"u{component.element_bytes}")
