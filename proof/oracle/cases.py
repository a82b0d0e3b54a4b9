"""What is drawn for the oracle: models, engines that divide and store them, and requests. Data only.

The first choice of every field is the simplest, so that a counter-example shrinks to plain attention on one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import lcm

from hypothesis import strategies as st

from kvferry.layout import (
    Axis,
    Component,
    Entry,
    ShardedComponent,
    TokenPartition,
    attention_components,
    contiguous,
    interleaved,
    latent_component,
    packed_component,
    state_component,
    zigzag,
)

MOST_RANKS = 12
KINDS = ("attention", "window", "latent", "scaled", "sparse", "delta", "packed", "packed window")


@dataclass(frozen=True)
class Family:
    """Components that an engine may store together: they have the same layers and the same names of axes."""

    name: str
    caches: tuple[ShardedComponent, ...]

    @property
    def entry(self) -> Entry:
        return self.caches[0].component.entry

    @property
    def window(self) -> int | None:
        return self.caches[0].component.window_tokens

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.caches[0].component.axes[1:])

    @property
    def joints(self) -> tuple[str | None, ...]:
        """How the components may share a tensor: not at all, along an axis of their own, end to end, or in a page."""
        if len(self.caches) == 1:
            return (None,)
        shapes = {(cache.component.axes, cache.component.dtype) for cache in self.caches}
        return (None, *(("component",) if len(shapes) < len(self.caches) else ()), "bytes", *self.axes)


@dataclass(frozen=True)
class Arrangement:
    """How an engine stores a family.

    Attributes:
        order: of the dimensions in memory, outermost first. Entries without tokens have no "token".
        joined: the dimension along which components of equal other dimensions lie in one tensor; "component" is one
            of its own, "bytes" puts blocks of any size one after the other in a page.
        joint: where in the order "component" is.
        stacked: where in the order the layers are, if they lie in one tensor.
        padded: a dimension that is one longer than it is used.
        page_tokens: of a group of the family's own; None shares the engine's.
        divided: bit i says that layer i is in the family's second group.
    """

    order: tuple[str, ...]
    joined: str | None = None
    joint: int = 0
    stacked: int | None = None
    padded: str | None = None
    page_tokens: int | None = None
    divided: int = 0


@dataclass(frozen=True)
class Context:
    """How context parallelism partitions tokens."""

    size: int = 1
    kind: str = "interleaved"
    block: int = 1

    @property
    def needs_length(self) -> bool:
        return self.size > 1 and self.kind != "interleaved"

    @property
    def cuts_anywhere(self) -> bool:
        return self.needs_length and self.kind != "whole pages"

    @property
    def partition(self) -> TokenPartition:
        match self.kind:
            case "interleaved":
                return interleaved(self.size, self.block)
            case "contiguous":
                return contiguous(self.size)
            case "whole pages":
                return contiguous(self.size, self.block)
            case _:
                return zigzag(self.size)


@dataclass(frozen=True)
class Side:
    """One engine.

    Attributes:
        stages: layers of every pipeline stage.
        arrangements: of the families that the engine has, by name.
        spare_pages: pages of every pool that no room gets.
        seed: of the order of page numbers; 0 leaves them in order.
        aliases: whether groups lie in the same tensors, in different pages, where their tensors are alike.
    """

    arrangements: dict[str, Arrangement]
    tp: int = 1
    stages: tuple[int, ...] = (1,)
    context: Context = Context()
    page_tokens: int = 1
    spare_pages: int = 0
    seed: int = 0
    aliases: bool = False

    def page_tokens_of(self, family: Family) -> int:
        if family.entry is Entry.REQUEST:
            return 1
        own = self.arrangements[family.name].page_tokens
        return self.page_tokens if own is None else own

    def group_of(self, family: Family, layer: int) -> str:
        """The group of one layer of a family, by its index in the component."""
        arrangement = self.arrangements[family.name]
        if arrangement.page_tokens is not None:
            name = f"own {family.name}"
        elif family.entry is Entry.REQUEST:
            name = "state"
        else:
            name = "kv" if family.window is None else f"window {family.window}"
        return f"{name} (second)" if arrangement.divided >> layer & 1 else name


@dataclass(frozen=True)
class Room:
    """One request.

    Attributes:
        number: elects the writers.
        tokens: how long it is.
        prefix: how many tokens the decode side has.
        says_length: whether it tells how many tokens there are.
        cuts: where chunks end; every group makes its own of them.
        begins_late: whether the prefill side hands in only pages from the first that is needed.
        begins_early: whether the decode side gives its pages from the request's first on.
        wants_state: whether the decode side has a slot for the state.
        leaves_out_unused: whether a decode rank says nothing of groups of which it holds nothing.
        layer_cuts: where ranges of layers end, in which every chunk is handed in; every component makes its own of
            them. None hands all layers in together.
        last_layers_first: whether the ranges come in reverse.
    """

    number: int = 0
    tokens: int = 1
    prefix: int = 0
    says_length: bool = True
    cuts: tuple[int, ...] = ()
    begins_late: bool = False
    begins_early: bool = False
    wants_state: bool = True
    leaves_out_unused: bool = False
    layer_cuts: tuple[int, ...] | None = None
    last_layers_first: bool = False


@dataclass(frozen=True)
class Case:
    families: tuple[Family, ...]
    source: Side
    destination: Side
    rooms: tuple[Room, ...] = (Room(),)

    def families_of(self, side: Side) -> tuple[Family, ...]:
        return tuple(family for family in self.families if family.name in side.arrangements)


# --- models


@dataclass(frozen=True)
class Sizes:
    heads: int = 1
    dim: int = 1
    value_dim: int = 1
    dtype: str = "uint8"
    window: int = 1
    channels: tuple[int, int, int] = (1, 1, 1)


def families_of_kind(kind: str, layers: tuple[int, ...], sizes: Sizes) -> tuple[Family, ...]:
    """What layers of a kind cache.

    Args:
        layers: the model layers of that kind.
    """
    count, heads, dim = len(layers), sizes.heads, sizes.dim

    def attention(
        prefix: str, dims: tuple[int, int], dtype: str, window: int | None = None
    ) -> tuple[ShardedComponent, ...]:
        components = attention_components(
            num_layers=count,
            num_kv_heads=heads,
            head_dim=dims[0],
            value_head_dim=dims[1],
            dtype=dtype,
            window_tokens=window,
            prefix=prefix,
        )
        return tuple(ShardedComponent(component=each, layers=layers, tp_axis="head") for each in components)

    def whole(component: Component, tp_axis: str | None = None) -> ShardedComponent:
        return ShardedComponent(component=component, layers=layers, tp_axis=tp_axis)

    def per_token(name: str, last: int, dtype: str) -> ShardedComponent:
        return whole(Component(name=name, axes=(Axis("layer", count), Axis("dim", last)), dtype=dtype))

    def packed(prefix: str, window: int | None) -> tuple[ShardedComponent, ...]:
        return tuple(
            whole(
                packed_component(
                    prefix + name,
                    num_layers=count,
                    num_kv_heads=heads,
                    packed=dim,
                    dtype=sizes.dtype,
                    packing="an order that only the engine knows",
                    window_tokens=window,
                ),
                "head",
            )
            for name in ("k", "v")
        )

    match kind:
        case "attention":
            return (Family("attention", attention("", (dim, sizes.value_dim), sizes.dtype)),)
        case "window":
            return (Family("window", attention("window.", (dim, sizes.value_dim), sizes.dtype, sizes.window)),)
        case "latent":
            latent = latent_component(num_layers=count, latent_dim=dim + sizes.value_dim, dtype=sizes.dtype)
            return (Family("latent", (whole(latent),)),)
        case "scaled":
            values = attention("scaled.", (dim, dim), "uint8")
            return (Family("scaled", (*values, *attention("scale.", (1, 1), "float16"))),)
        case "sparse":
            keys = per_token("sparse.latent", dim, sizes.dtype)
            index = per_token("index.key", dim, "uint8"), per_token("index.scale", 1, "float32")
            return Family("sparse", (keys,)), Family("index", index)
        case "delta":
            axes = (Axis("head", heads), Axis("row", dim), Axis("column", sizes.value_dim))
            state = whole(state_component("state", num_layers=count, axes=axes, dtype="float32"), "head")
            convolution = tuple(
                whole(
                    state_component(
                        f"convolution.{name}",
                        num_layers=count,
                        axes=(Axis("channel", channels), Axis("width", dim)),
                        dtype=sizes.dtype,
                    ),
                    "channel",
                )
                for name, channels in zip("qkv", sizes.channels, strict=True)
            )
            return Family("state", (state,)), Family("convolution", convolution)
        case "packed":
            return (Family("packed", packed("packed.", None)),)
        case "packed window":
            return (Family("packed window", packed("packed-window.", sizes.window)),)
        case _:
            caches = attention("draft.", (dim, dim), sizes.dtype)
            return (
                Family(
                    "draft",
                    tuple(
                        ShardedComponent(
                            component=Component(
                                name=each.component.name,
                                axes=each.component.axes,
                                dtype=each.component.dtype,
                                is_optional=True,
                            ),
                            layers=layers,
                            tp_axis="head",
                        )
                        for each in caches
                    ),
                ),
            )


def families_of_model(kinds: Sequence[str], sizes: Sizes) -> tuple[Family, ...]:
    """The families of a model, given the kind of every layer."""
    families: list[Family] = []
    for kind in dict.fromkeys(kinds):
        layers = tuple(layer for layer, each in enumerate(kinds) if each == kind)
        families += families_of_kind(kind, layers, sizes)
    return tuple(families)


# --- strategies

_sizes = st.builds(
    Sizes,
    heads=st.integers(1, 6),
    dim=st.integers(1, 3),
    value_dim=st.integers(1, 3),
    dtype=st.sampled_from(["uint8", "float16", "float32", "int64"]),
    window=st.integers(1, 12),
    channels=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)),
)
_contexts = st.builds(
    Context,
    size=st.sampled_from([1, 1, 2, 3]),
    kind=st.sampled_from(["interleaved", "contiguous", "whole pages", "zigzag"]),
    block=st.integers(1, 5),
)


def dimensions(family: Family) -> tuple[str, ...]:
    """The names of a family's dimensions, in the order of NHD."""
    return ("page", "token", *family.axes) if family.entry is Entry.TOKEN else ("page", *family.axes)


def plain(family: Family) -> Arrangement:
    """NHD, every layer and component in a tensor of its own; channel groups of a convolution in one."""
    return Arrangement(dimensions(family), "channel" if "channel" in family.axes else None)


@st.composite
def arrangements(draw: st.DrawFn, family: Family) -> Arrangement:
    if draw(st.booleans()):
        return plain(family)
    order = draw(st.permutations(dimensions(family)))
    joined = draw(st.sampled_from(family.joints))
    if "channel" in family.axes and joined is None:
        joined = "channel"
    is_own = family.entry is not Entry.REQUEST and draw(st.booleans())
    return Arrangement(
        order=tuple(order),
        joined=joined,
        joint=draw(st.integers(0, len(order) - 1)),
        stacked=draw(st.none() | st.integers(0, len(order) - 1)),
        padded=draw(st.none() | st.sampled_from(order)),
        page_tokens=draw(st.integers(1, 6)) if is_own else None,
        divided=draw(st.integers(0, 15)),
    )


@st.composite
def sides(draw: st.DrawFn, families: tuple[Family, ...], layers: int) -> Side:
    tp = draw(st.integers(1, 6))
    context = draw(_contexts)
    if tp * context.size > MOST_RANKS:
        context = replace(context, size=2)
    cuts = sorted(draw(st.lists(st.integers(0, layers), max_size=min(3, MOST_RANKS // (tp * context.size)) - 1)))
    return Side(
        arrangements={family.name: draw(arrangements(family)) for family in families},
        tp=tp,
        stages=tuple(stop - start for start, stop in pairwise([0, *cuts, layers])),
        context=context,
        page_tokens=draw(st.integers(1, 6)),
        spare_pages=draw(st.integers(0, 2)),
        seed=draw(st.integers(0, 50)),
        aliases=draw(st.booleans()),
    )


@st.composite
def rooms(draw: st.DrawFn, most_tokens: int, can_hide_length: bool) -> Room:
    tokens = draw(st.integers(1, most_tokens))
    return Room(
        number=draw(st.integers(0, 8) | st.integers(0, 2**63 - 1)),
        tokens=tokens,
        prefix=draw(st.just(0) | st.integers(0, tokens)),
        says_length=not (can_hide_length and draw(st.booleans())),
        cuts=tuple(draw(st.lists(st.integers(0, 12), max_size=3))),
        begins_late=draw(st.booleans()),
        begins_early=draw(st.booleans()),
        wants_state=draw(st.integers(0, 4)) != 4,
        leaves_out_unused=draw(st.booleans()),
        layer_cuts=draw(st.none() | st.lists(st.integers(0, 40), max_size=3).map(tuple)),
        last_layers_first=draw(st.booleans()),
    )


def with_packed_pages_alike(source: Side, destination: Side, families: tuple[Family, ...]) -> tuple[Side, Side]:
    """Gives both sides packed pages of the same tokens, as they need."""
    packed = [family.name for family in families if family.entry is Entry.PAGE]
    if not packed:
        return source, destination
    sizes = {family.name: source.page_tokens_of(family) for family in families if family.entry is Entry.PAGE}
    arranged = dict(destination.arrangements)
    for name, page_tokens in sizes.items():
        arranged[name] = replace(arranged[name], page_tokens=page_tokens)
    destination = replace(destination, arrangements=arranged)
    contexts = source.context, destination.context
    if contexts[0] == contexts[1]:
        return source, destination
    if any(context.cuts_anywhere for context in contexts):
        size = min(contexts[0].size, MOST_RANKS // (destination.tp * len(destination.stages)))
        alike = replace(contexts[0], size=max(1, size))
        return replace(source, context=alike), replace(destination, context=alike)
    # Blocks of whole pages of every size that there is.
    block = 1
    for page_tokens in set(sizes.values()):
        block *= page_tokens
    return tuple(  # type: ignore[return-value]
        replace(side, context=replace(side.context, block=block * min(2, side.context.block)))
        for side in (source, destination)
    )


def with_whole_pages(side: Side) -> Side:
    """Gives out pages of which those of every pool are parts, where whole pages are given out."""
    if side.context.kind != "whole pages":
        return side
    pages = lcm(side.page_tokens, *(each.page_tokens or 1 for each in side.arrangements.values()))
    return replace(side, context=replace(side.context, block=pages * min(2, side.context.block)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    different = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3, unique=True))
    kinds = draw(st.lists(st.sampled_from(different), min_size=1, max_size=5))
    sizes = draw(_sizes)
    families = families_of_model(kinds, sizes)
    layers = len(kinds)
    drafted = draw(st.sampled_from(["neither", "neither", "both", "source", "destination"]))
    draft = families_of_kind("draft", (layers,), sizes)
    mine, theirs = (
        (families + draft, layers + 1) if drafted in ("both", side) else (families, layers)
        for side in ("source", "destination")
    )
    alike = with_packed_pages_alike(draw(sides(*mine)), draw(sides(*theirs)), families)
    source, destination = map(with_whole_pages, alike)
    can_hide_length = destination.context.size == 1 and not source.context.needs_length
    most_tokens = 3 * max(source.page_tokens, destination.page_tokens)
    drawn = draw(
        st.lists(rooms(most_tokens, can_hide_length), min_size=1, max_size=3, unique_by=lambda room: room.number)
    )
    return Case(families if drafted == "neither" else families + draft, source, destination, tuple(drawn))
