"""One kind of cached state, described by its logical axes alone.

A component has one entry per token, per page or per request. What an entry looks like is its axes: attention keys have
a layer, a head and a dim axis, MLA latents a layer and a latent axis, recurrent state a layer and a head axis. How
ranks divide those axes and where the elements lie in memory is not said here: see `sharding` and `shard`.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, TypeAlias

import msgspec

from kvferry.errors import LayoutError
from kvferry.layout.interval import LARGEST_INDEX, Box, Interval, WireIndex

BYTES_PER_ELEMENT = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
}
"""The element types that caches are made of, by the name that torch and NumPy give them."""


def check_name(what: str, name: str) -> None:
    """Refuses a name that is too long to be sent.

    Raises:
        LayoutError: if it is too long.
    """
    if len(name) > LONGEST_NAME:
        raise LayoutError(f"{what} is called {name[:40]!r}... ({len(name)} characters): {LONGEST_NAME} at most")


class Entry(str, Enum):
    """How often a component has an entry: once per token, per page or per request.

    PAGE is for pages whose inner order only the engine knows: they are moved whole, or cut along their axes, but never
    between tokens.
    """

    TOKEN = "token"  # noqa: S105 - of text, not of access
    PAGE = "page"
    REQUEST = "request"


MOST_AXES = 8
LONGEST_NAME = 256

Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=LONGEST_NAME, description="its name")]
"""The name of a component, an axis or a group, in characters."""

_LARGEST_AXIS = 1 << 40  # products of a few sizes and strides stay far from what 64 bits hold


class Axis(msgspec.Struct, frozen=True, array_like=True):
    """A logical axis and its global size, over all ranks.

    Raises:
        LayoutError: if the size is not positive.
    """

    name: Name
    size: Annotated[int, msgspec.Meta(description="how many indices it has")]

    def __post_init__(self) -> None:
        check_name("an axis", self.name)
        if not 1 <= self.size <= _LARGEST_AXIS:
            raise LayoutError(
                f"axis {self.name!r} has size {self.size}: a cache needs at least one {self.name}, and at most "
                f"{_LARGEST_AXIS}"
            )

    def __str__(self) -> str:
        return f"{self.name} {self.size}"


class Component(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of cached state, as the whole model sees it.

    Attributes:
        name: distinguishes it from the engine's other components.
        axes: the axes of one entry, with their global sizes. The first is the one that engines spread over separate
            tensors, in practice the layer.
        dtype: the element type's name, as torch and NumPy print it.
        entry: how often it has an entry: attention once per token, recurrent state once per request.
        window_tokens: how many tokens at the end of a request are kept, and sent; None keeps all.
        packing: with one entry per page: the name of the page's inner format. Two sides must name the same.
        token_parts: with one entry per page: the parts that a page keeps one behind the other along its last axis, by
            how many elements each token has in each: (128, 4) are all tokens' keys, then all tokens' scales. Pages are
            moved whole where they can be, and cut by it where ranks of the two sides hold other tokens. Empty where
            only the engine knows.
        is_optional: whether the other side may lack it, as with layers of a draft model. It is not sent then.

    Raises:
        LayoutError: if there is no axis, an axis appears twice, the dtype is unknown, or the rest contradicts itself.
    """

    name: Name
    axes: Annotated[tuple[Axis, ...], msgspec.Meta(max_length=MOST_AXES)]
    dtype: Name
    entry: Entry = Entry.TOKEN
    window_tokens: Annotated[int, msgspec.Meta(le=LARGEST_INDEX)] | None = None
    packing: Name | None = None
    token_parts: Annotated[tuple[WireIndex, ...], msgspec.Meta(max_length=MOST_AXES)] = ()
    is_optional: bool = False

    def __post_init__(self) -> None:
        check_name("a component", self.name)
        check_name("a packing", self.packing or "")
        names = [axis.name for axis in self.axes]
        if not names or len(set(names)) != len(names) or {"token", "page", "slot"} & set(names):
            raise LayoutError(
                f"component {self.name!r} has axes {names}: it needs at least one, each name once; "
                "the token, page or slot axis goes without saying"
            )
        if len(names) > MOST_AXES:
            raise LayoutError(f"component {self.name!r} has {len(names)} axes: {MOST_AXES} at most")
        if self.dtype not in BYTES_PER_ELEMENT:
            raise LayoutError(
                f"component {self.name!r} has dtype {self.dtype!r}: known are {', '.join(BYTES_PER_ELEMENT)}"
            )
        if (self.packing is not None) != (self.entry is Entry.PAGE):
            raise LayoutError(
                f"component {self.name!r} with one entry per {self.entry.value} has packing {self.packing!r}: packed "
                "pages, and only they, name their inner format"
            )
        if self.token_parts and (self.packing is None or min(self.token_parts) < 1):
            raise LayoutError(
                f"component {self.name!r} with one entry per {self.entry.value} has token_parts {self.token_parts}: "
                "packed pages alone have parts, of at least 1 element for each token"
            )
        if self.window_tokens is not None and (self.window_tokens < 1 or self.entry is Entry.REQUEST):
            raise LayoutError(
                f"component {self.name!r} has window_tokens {self.window_tokens} and one entry per {self.entry.value}: "
                "a window is at least 1 token long, and state of a whole request has none"
            )

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return BYTES_PER_ELEMENT[self.dtype]

    @property
    def whole(self) -> Box:
        """The box of all elements."""
        return tuple(Interval(0, axis.size) for axis in self.axes)

    def describe(self, box: Box) -> str:
        """Describes a box in words, such as 'layer [0, 2) head [1, 2) dim [0, 64)'."""
        return " ".join(f"{axis.name} {interval}" for axis, interval in zip(self.axes, box, strict=True))


def attention_components(
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str,
    value_head_dim: int | None = None,
    window_tokens: int | None = None,
    prefix: str = "",
) -> tuple[Component, Component]:
    """Makes the components for keys and values of multi-head or grouped-query attention.

    Args:
        num_layers: layers that have this kind of attention.
        num_kv_heads: heads of the whole model, never of one rank.
        value_head_dim: the values' head_dim, where it differs from the keys'.
        window_tokens: the window of sliding-window attention; None where it attends to every token.
        prefix: stands before the names "k" and "v", where a model has several kinds of attention.
    """

    def component(name: str, dim: int) -> Component:
        axes = (Axis("layer", num_layers), Axis("head", num_kv_heads), Axis("dim", dim))
        return Component(name=prefix + name, axes=axes, dtype=dtype, window_tokens=window_tokens)

    return component("k", head_dim), component("v", head_dim if value_head_dim is None else value_head_dim)


def latent_component(*, num_layers: int, latent_dim: int, dtype: str) -> Component:
    """Makes the component for the latent of multi-head latent attention (MLA). `latent_dim` includes its rope part.

    Every tensor-parallel rank holds all of it.
    """
    return Component(name="latent", axes=(Axis("layer", num_layers), Axis("latent", latent_dim)), dtype=dtype)


def state_component(name: str, *, num_layers: int, axes: tuple[Axis, ...], dtype: str) -> Component:
    """Makes the component for state that a layer keeps once per request: of Mamba, gated delta nets, convolutions.

    Channels that are divided among ranks apart from each other (the query, key and value channels of a convolution)
    are components of their own.

    Args:
        axes: the axes of one layer's state.
    """
    return Component(name=name, axes=(Axis("layer", num_layers), *axes), dtype=dtype, entry=Entry.REQUEST)


def packed_component(
    name: str,
    *,
    num_layers: int,
    num_kv_heads: int,
    packed: int,
    dtype: str,
    packing: str,
    window_tokens: int | None = None,
) -> Component:
    """Makes the component for keys and values in pages whose inner order only the engine knows.

    It has one entry per page, layer and head.

    Args:
        packed: elements that a page has for each head.
        packing: the format's name, such as the engine's and the instruction set's.
    """
    return Component(
        name=name,
        axes=(Axis("layer", num_layers), Axis("head", num_kv_heads), Axis("packed", packed)),
        dtype=dtype,
        entry=Entry.PAGE,
        packing=packing,
        window_tokens=window_tokens,
    )
