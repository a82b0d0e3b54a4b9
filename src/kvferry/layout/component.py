"""One kind of cached state, described by its logical axes alone.

A component has one entry per token of a request. What an entry looks like is its axes: attention keys have a layer, a
head and a dim axis, MLA latents a layer and a latent axis. How ranks divide those axes and where the elements lie in
memory is not said here: see `shard`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from kvferry.errors import LayoutError
from kvferry.layout.interval import Box, Interval

BYTES_PER_ELEMENT = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
}
"""The element types that caches are made of, by the name that torch and NumPy give them."""


class Axis(msgspec.Struct, frozen=True, array_like=True):
    """A logical axis and its global size, over all ranks.

    Raises:
        LayoutError: if the size is not positive.
    """

    name: str
    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise LayoutError(f"axis {self.name!r} has size {self.size}: a cache needs at least one {self.name}")

    def __str__(self) -> str:
        return f"{self.name} {self.size}"


class Component(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of cached state, as the whole model sees it.

    Attributes:
        name: distinguishes it from the engine's other components.
        axes: the axes of one token's entry, with their global sizes. The first is the one that engines spread over
            separate tensors, in practice the layer.
        dtype: the element type's name, as torch and NumPy print it.

    Raises:
        LayoutError: if there is no axis, an axis appears twice, or the dtype is unknown.
    """

    name: str
    axes: tuple[Axis, ...]
    dtype: str

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        if not names or len(set(names)) != len(names) or "token" in names:
            raise LayoutError(
                f"component {self.name!r} has axes {names}: it needs at least one, each name once; "
                "the token axis goes without saying"
            )
        if self.dtype not in BYTES_PER_ELEMENT:
            raise LayoutError(
                f"component {self.name!r} has dtype {self.dtype!r}: known are {', '.join(BYTES_PER_ELEMENT)}"
            )

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return BYTES_PER_ELEMENT[self.dtype]

    @property
    def whole(self) -> Box:
        """The box of all its elements."""
        return tuple(Interval(0, axis.size) for axis in self.axes)

    def describe(self, box: Box) -> str:
        """A box in words, such as 'layer [0, 2) head [1, 2) dim [0, 64)'."""
        return " ".join(f"{axis.name} {interval}" for axis, interval in zip(self.axes, box, strict=True))


def attention_components(
    *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: str, value_head_dim: int | None = None
) -> tuple[Component, Component]:
    """Keys and values of multi-head or grouped-query attention.

    Args:
        num_kv_heads: of the whole model, never of one rank.
        value_head_dim: where it differs from the keys' head_dim.
    """

    def component(name: str, dim: int) -> Component:
        axes = (Axis("layer", num_layers), Axis("head", num_kv_heads), Axis("dim", dim))
        return Component(name=name, axes=axes, dtype=dtype)

    return component("k", head_dim), component("v", head_dim if value_head_dim is None else value_head_dim)


def latent_component(*, num_layers: int, latent_dim: int, dtype: str) -> Component:
    """The latent of multi-head latent attention (MLA), its rope part included in `latent_dim`.

    Every tensor-parallel rank holds all of it.
    """
    return Component(name="latent", axes=(Axis("layer", num_layers), Axis("latent", latent_dim)), dtype=dtype)


def digest(components: Iterable[Component], page_tokens: int) -> str:
    """A short fingerprint of what all ranks of one engine must agree on: the components and the page size in tokens."""
    description = msgspec.json.encode([sorted(components, key=lambda component: component.name), page_tokens])
    return hashlib.sha256(description).hexdigest()[:16]
