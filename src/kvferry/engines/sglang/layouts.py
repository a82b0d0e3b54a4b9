"""SGLang's caches as a `RankLayout`.

SGLang describes its caches by lists of buffers: an address, a length, and the bytes of one item, which is a page of
tokens or the slot of a request. Attention has its layers' keys first and then their values, a latent one buffer a
layer. Within an item tokens come before heads, and heads before what each of them caches (NHD).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from kvferry import Axis, Component, Device, Entry, Interval, Paging, RankCoordinates, RankLayout, Shard, split
from kvferry.errors import LayoutError

KV_GROUP = "kv"
WINDOW_GROUP = "window"
STATE_GROUP = "state"


@dataclass(frozen=True, slots=True)
class Buffers:
    """Buffers of one pool, as SGLang lists them.

    Attributes:
        addresses: the address of each buffer.
        lengths: the length of each, in bytes.
        item_bytes: the bytes of one item of each: a page, or a slot.
    """

    addresses: tuple[int, ...]
    lengths: tuple[int, ...]
    item_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.addresses) == len(self.lengths) == len(self.item_bytes):
            raise LayoutError(
                f"{len(self.addresses)} buffers have {len(self.lengths)} lengths and {len(self.item_bytes)} item sizes"
            )
        for length, item in zip(self.lengths, self.item_bytes, strict=True):
            if item < 1 or length < item:
                raise LayoutError(f"a buffer of {length} bytes has items of {item}")

    def __len__(self) -> int:
        return len(self.addresses)

    def __getitem__(self, part: slice) -> Buffers:
        return Buffers(self.addresses[part], self.lengths[part], self.item_bytes[part])


@dataclass(frozen=True, slots=True)
class StateBuffer:
    """One buffer of recurrent state: of one layer, with one item per slot.

    An item is `rows` times `channels` times something; ranks divide the channels.

    Attributes:
        layer: the layer's number.
        channels: how many this rank holds; 0 where every rank holds everything.
        blocks: sizes, over all ranks, of the blocks that the channels are made of, where each is divided for itself.
    """

    address: int
    length: int
    item_bytes: int
    layer: int
    channels: int
    rows: int = 1
    blocks: tuple[int, ...] | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """What must be equal in layers that are described together."""
        return self.length // self.item_bytes, self.item_bytes, self.channels, self.rows, self.blocks


@dataclass(frozen=True, slots=True)
class Caches:
    """All that a rank caches.

    Attributes:
        kv: the buffers of full attention, or of latents, without those of a draft model.
        page_tokens: tokens a page, in all pools with pages.
        kv_heads: how many the whole model has; None for latents.
        draft: a draft model's buffers, whose pages have the numbers of the others'.
        window: the pool of sliding-window attention, where that has its own.
        window_tokens: how long that window is.
        state: recurrent state.
        first_layer: the number of the first layer on this rank.
        layers: how many the whole model has; None if all are on this rank.
    """

    kv: Buffers
    page_tokens: int
    kv_heads: int | None
    draft: Buffers = field(default_factory=lambda: Buffers((), (), ()))
    window: Buffers | None = None
    window_tokens: int | None = None
    state: tuple[StateBuffer, ...] = ()
    first_layer: int = 0
    layers: int | None = None


def describe(caches: Caches, coordinates: RankCoordinates, device: Device) -> RankLayout:
    """Describes a rank's caches.

    Raises:
        LayoutError: if sizes do not fit together, naming them; or if the pipeline is divided and there is more than
            attention.
    """
    if coordinates.pp_size > 1 and (caches.window is not None or caches.state or len(caches.draft)):
        raise LayoutError(
            "with pipeline stages nothing but full attention can be described: sliding windows in a pool of their own, "
            "recurrent state and draft models need --pp-size 1"
        )
    pools = _Pools(caches, coordinates, device)
    shards = [*pools.attention("", caches.kv, group=KV_GROUP)]
    if len(caches.draft):
        shards += pools.draft(caches.draft)
    if caches.window is not None:
        shards += pools.attention("window ", caches.window, group=WINDOW_GROUP, window_tokens=caches.window_tokens)
    shards += pools.state(caches.state)
    return RankLayout(shards=tuple(shards))


@dataclass(frozen=True, slots=True)
class _Pools:
    """Describes one pool after the other."""

    caches: Caches
    coordinates: RankCoordinates
    device: Device

    def attention(
        self, prefix: str, buffers: Buffers, *, group: str, window_tokens: int | None = None
    ) -> Iterator[Shard]:
        """Yields the shards of keys and values, or of latents."""
        for name, part in self._keys_and_values(buffers):
            row_bytes, layers = self._row_bytes(part, name), self._layers(len(part))
            total, held = self._heads(prefix + name)
            if row_bytes % len(held):
                raise LayoutError(f"{prefix}{name}: {row_bytes} bytes a token are not those of {len(held)} heads")
            head_bytes = row_bytes // len(held)
            component = Component(
                name=prefix + name,
                axes=(Axis("layer", layers[0]), Axis("head", total), Axis("byte", head_bytes)),
                dtype="uint8",
                window_tokens=window_tokens,
            )
            yield self._paged(component, (layers[1], held, Interval(0, head_bytes)), part, row_bytes, group)

    def draft(self, buffers: Buffers) -> Iterator[Shard]:
        """Yields the shards of a draft model, uncut: SGLang does not say how many heads it has."""
        tp_rank, tp_size = self.coordinates.tp_rank, self.coordinates.tp_size
        for index in range(len(buffers)):
            part = buffers[index : index + 1]
            row_bytes = self._row_bytes(part, f"draft {index}")
            component = Component(
                name=f"draft {index}",
                axes=(Axis("layer", 1), Axis("tensor-parallel share", tp_size), Axis("byte", row_bytes)),
                dtype="uint8",
                is_optional=True,
            )
            box = (Interval(0, 1), Interval(tp_rank, tp_rank + 1), Interval(0, row_bytes))
            yield self._paged(component, box, part, row_bytes, KV_GROUP)

    def state(self, buffers: Sequence[StateBuffer]) -> Iterator[Shard]:
        """Yields the shards of recurrent state."""
        for number, layers in enumerate(_kinds(buffers)):
            first = layers[0]
            divided = max(1, first.channels) * first.rows
            if first.item_bytes % divided:
                raise LayoutError(
                    f"recurrent state {number}: {first.item_bytes} bytes a slot are not {first.rows} rows of "
                    f"{first.channels} channels"
                )
            inner = first.item_bytes // divided
            for block, (start, total, held) in enumerate(self._channels(first, number)):
                component = Component(
                    name=f"state {number}" if first.blocks is None else f"state {number}, block {block}",
                    axes=(
                        Axis("layer", len(layers)),
                        Axis("row", first.rows),
                        Axis("channel", total),
                        Axis("byte", inner),
                    ),
                    dtype="uint8",
                    entry=Entry.REQUEST,
                )
                yield Shard(
                    component=component,
                    box=(Interval(0, len(layers)), Interval(0, first.rows), held, Interval(0, inner)),
                    addresses=tuple(layer.address + start * inner for layer in layers),
                    strides=(max(1, first.channels) * inner, inner, 1),
                    paging=Paging(
                        page_tokens=1,
                        num_pages=first.length // first.item_bytes,
                        page_stride=first.item_bytes,
                        token_stride=0,
                    ),
                    device=self.device,
                    group=STATE_GROUP,
                )

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _keys_and_values(self, buffers: Buffers) -> Iterator[tuple[str, Buffers]]:
        if self.caches.kv_heads is None:
            yield "latent", buffers
            return
        half, odd = divmod(len(buffers), 2)
        if odd:
            raise LayoutError(f"{len(buffers)} buffers are not keys and values of as many layers")
        yield "k", buffers[:half]
        yield "v", buffers[half:]

    def _layers(self, held: int) -> tuple[int, Interval]:
        """Returns how many layers the model has, and which of them this rank holds."""
        if self.caches.layers is None:
            return held, Interval(0, held)
        first = self.caches.first_layer
        return self.caches.layers, Interval(first, first + held)

    def _heads(self, name: str) -> tuple[int, Interval]:
        if self.caches.kv_heads is None:
            return 1, Interval(0, 1)
        if self.caches.kv_heads < 1:
            raise LayoutError(f"{name}: a model with {self.caches.kv_heads} heads")
        return self.caches.kv_heads, split(self.caches.kv_heads, self.coordinates.tp_size, self.coordinates.tp_rank)

    def _channels(self, state: StateBuffer, number: int) -> Iterator[tuple[int, int, Interval]]:
        """Yields, for every block, its start on this rank, its size over all ranks, and this rank's part of it."""
        tp_rank, tp_size = self.coordinates.tp_rank, self.coordinates.tp_size
        if state.channels == 0:
            yield 0, 1, Interval(0, 1)
            return
        blocks = state.blocks or (state.channels * tp_size,)
        if any(size % tp_size for size in blocks) or sum(blocks) != state.channels * tp_size:
            raise LayoutError(
                f"recurrent state {number}: {state.channels} channels a rank on {tp_size} ranks are not blocks of "
                f"{list(blocks)} channels, each divided evenly"
            )
        held = [size // tp_size for size in blocks]
        for start, size, mine in zip(accumulate(held, initial=0), blocks, held, strict=False):
            yield start, size, Interval(tp_rank * mine, (tp_rank + 1) * mine)

    def _row_bytes(self, buffers: Buffers, name: str) -> int:
        """Returns the bytes of one token in one layer."""
        tokens = self.caches.page_tokens
        sizes = set(buffers.item_bytes)
        if len(sizes) != 1 or buffers.item_bytes[0] % tokens:
            raise LayoutError(
                f"{name}: pages of {tokens} tokens have {sorted(sizes)} bytes: they must have as many in every layer, "
                "and each token must have as many"
            )
        return buffers.item_bytes[0] // tokens

    def _paged(
        self,
        component: Component,
        box: tuple[Interval, Interval, Interval],
        buffers: Buffers,
        row_bytes: int,
        group: str,
    ) -> Shard:
        page_bytes = buffers.item_bytes[0]
        return Shard(
            component=component,
            box=box,
            addresses=buffers.addresses,
            strides=(len(box[2]), 1),
            paging=Paging(
                page_tokens=self.caches.page_tokens,
                num_pages=min(buffers.lengths) // page_bytes,
                page_stride=page_bytes,
                token_stride=row_bytes,
            ),
            device=self.device,
            group=group,
        )


def _kinds(buffers: Sequence[StateBuffer]) -> Iterator[list[StateBuffer]]:
    """Groups buffers to describe together: SGLang lists all layers of one kind of state, then those of the next."""
    kind: list[StateBuffer] = []
    for each in buffers:
        if kind and (each.kind != kind[-1].kind or each.layer <= kind[-1].layer):
            yield kind
            kind = []
        kind.append(each)
    if kind:
        yield kind
