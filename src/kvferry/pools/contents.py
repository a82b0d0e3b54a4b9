"""What a request's cache holds, element by element, whatever rank has it where.

Elements are compared as bytes, so that they are unsigned numbers here, of as many bytes as the component's have.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvferry.layout import Component, Shard

Elements: TypeAlias = NDArray[np.unsignedinteger[Any]]
"""Elements as numbers."""

Positions: TypeAlias = NDArray[np.int64]
"""Of tokens in a request; of pages where pages are packed, and 0 for what a request has once."""

_MOST_TOKENS = 1 << 20


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

    An element follows from what it is: component, request, layer, position and index on every axis. Bytes that are
    right but in a wrong place therefore differ from those that belong there.
    """

    def __init__(self, request: int = 0) -> None:
        """Makes the contents of one request.

        Args:
            request: any number; another one makes other contents.
        """
        self._request = request

    def of(self, shard: Shard, layer: int, positions: Positions) -> Elements:
        component = shard.component
        number = zlib.crc32(component.name.encode()) % 1009
        first = ((number * 64 + layer) * 1_000_003 + self._request) * _MOST_TOKENS
        ids = np.uint64(first % 2**64) + positions.astype(np.uint64)
        for axis, interval in zip(component.axes[1:], shard.box[1:], strict=True):
            inner = np.arange(interval.start, interval.stop, dtype=np.uint64)
            ids = ids[..., None] * np.uint64(axis.size) + inner
        mixed: Elements = ((ids * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(33)).astype(element_type(component))
        return mixed


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
