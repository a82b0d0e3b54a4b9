"""What a rank of SGLang caches, as its scheduler lists it: buffers, heads, blocks of channels.

SGLang describes its caches by lists of buffers: an address, a length, and the bytes of one item, which is a page of
tokens or the slot of a request. Attention has its layers' keys first and then their values, a latent one buffer a
layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.errors import LayoutError


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


class Listed:
    """Buffers in the order in which SGLang lists them, of which each pool takes its own.

    Attributes:
        name: what they are of, in SGLang's words.
        items: the bytes of one item of each; 0 where a layer has none.
    """

    def __init__(self, name: str, addresses: Sequence[int], lengths: Sequence[int], items: Sequence[int]) -> None:
        self.name = name
        self.items = items
        self._addresses, self._lengths, self._at = addresses, lengths, 0

    def take(self, count: int, *, places: int = 1) -> Buffers:
        """Returns the next ones.

        Args:
            places: how many of ours one of SGLang's items has.
        """
        return self._buffers(range(count), count, places)

    def take_layers(self, count: int) -> tuple[tuple[int, ...], Buffers]:
        """Returns which of the next layers have a buffer, and theirs."""
        layers = tuple(layer for layer, item in enumerate(self.items[self._at : self._at + count]) if item)
        return layers, self._buffers(layers, count)

    def rest(self) -> Buffers:
        """Returns all that were not taken."""
        return self.take(len(self.items) - self._at)

    def check_empty(self) -> None:
        """Checks that all were taken.

        Raises:
            LayoutError: if not.
        """
        if self._at != len(self.items):
            raise LayoutError(
                f"SGLang lists {len(self.items)} buffers of {self.name}, and {self._at} are known of its pool"
            )

    def _buffers(self, layers: Iterable[int], count: int, places: int = 1) -> Buffers:
        start, self._at = self._at, self._at + count
        if self._at > len(self.items):
            raise LayoutError(f"SGLang lists {len(self.items)} buffers of {self.name}, and its pool has more")
        at = [start + layer for layer in layers]
        return Buffers(
            tuple(self._addresses[each] for each in at),
            tuple(self._lengths[each] for each in at),
            tuple(self.items[each] // places for each in at),
        )


def listed_state(args: Any, number: int) -> Listed:
    """Returns the buffers of one of a rank's states, by its KVArgs."""
    lists = args.state_data_ptrs, args.state_data_lens, args.state_item_lens
    return Listed(args.state_types[number].value, *(each[number] for each in lists))


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of keys and values, alike in all layers of one pool.

    Attributes:
        held: how many this rank has.
        total: how many the whole model has in these layers; None if SGLang does not say it in a way that its pool
            confirms. Ranks exchange with ranks of the same number then, and sides of as many ranks.
        key_bytes: of one head's key of one token.
        value_bytes: of its value.
        packing: the name of the order within a page, where tokens do not come first; None for NHD.
    """

    held: int
    total: int | None
    key_bytes: int
    value_bytes: int
    packing: str | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """Which layers of one kind a rank has, of those that the whole model has.

    Attributes:
        first: how many of them are on pipeline stages before this one.
        total: how many the whole model has; None if all are on this rank.
    """

    first: int = 0
    total: int | None = None


@dataclass(frozen=True, slots=True)
class Stages:
    """The layers of a rank, by kind, each counted among those of its kind that the whole model has.

    Attributes:
        attention: with full attention, or with sparse attention where SGLang lists the others apart.
        window: with sliding windows.
        state: with recurrent state.
        dense: without sparse attention, where SGLang lists them apart.
    """

    attention: Stage = Stage()
    window: Stage = Stage()
    state: Stage = Stage()
    dense: Stage = Stage()


@dataclass(frozen=True, slots=True)
class Attention:
    """A pool of keys and values, or of latents.

    Attributes:
        heads: of keys and values; None for latents.
        pages: how many the pool has, for a pipeline stage that has none of these layers.
        part_bytes: of an item, how many are keys, and how many values, or how many are latents; None if all are.
    """

    buffers: Buffers
    heads: Heads | None
    pages: int = 1
    part_bytes: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.buffers)


NOTHING = Attention(Buffers((), (), ()), None)


DRAFT = "draft "
"""What the names of a draft model's components begin with."""


@dataclass(frozen=True, slots=True)
class Uncut:
    """Buffers of which every tensor-parallel rank has the same: one item a page, request or token, which stays whole.

    Attributes:
        name: of the component; says whether the layers are a draft model's.
        layers: the numbers of the layers that have one, counted from this rank's first.
        count: how many layers this rank has.
        buffers: theirs.
        packing: the name of the order within a page; None where an item is a request's or a token's.
        group: what items are numbered by.
        stage: which of the model's layers these are; None for those with attention.
        window_tokens: where an item is a token's, how many at a request's end have one; None where it is not.
    """

    name: str
    layers: tuple[int, ...]
    count: int
    buffers: Buffers
    packing: str | None
    group: str
    stage: Stage | None = None
    window_tokens: int | None = None

    @classmethod
    def of(
        cls,
        name: str,
        buffers: Buffers,
        packing: str | None,
        group: str,
        stage: Stage | None = None,
        window_tokens: int | None = None,
    ) -> Uncut:
        """Of layers that all have one."""
        layers = tuple(range(len(buffers)))
        return cls(name, layers, len(layers), buffers, packing, group, stage, window_tokens)


@dataclass(frozen=True, slots=True)
class Block:
    """Neighbouring channels of recurrent state that ranks divide apart from others.

    Attributes:
        channels: how many there are over all ranks.
        units: how many parts they can be cut into: heads or groups. With fewer than ranks, several ranks hold one.
    """

    channels: int
    units: int

    def __post_init__(self) -> None:
        if self.units < 1 or self.channels < 1 or self.channels % self.units:
            raise LayoutError(f"a block of {self.channels} channels of recurrent state cannot be cut into {self.units}")


@dataclass(frozen=True, slots=True)
class StateBuffer:
    """One buffer of recurrent state: of one layer, with one item per slot.

    An item is `rows` times `channels` times something; ranks divide the channels.

    Attributes:
        layer: the layer's number.
        channels: how many this rank holds; 0 where every rank holds everything.
        rows: how many there are; no rank divides them.
        blocks: what the channels are made of; None if that is unknown. Ranks exchange with ranks of the same number
            then.
    """

    address: int
    length: int
    item_bytes: int
    layer: int
    channels: int
    rows: int = 1
    blocks: tuple[Block, ...] | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """What must be equal in layers that are described together."""
        return self.length // self.item_bytes, self.item_bytes, self.channels, self.rows, self.blocks


@dataclass(frozen=True, slots=True)
class Caches:
    """All that a rank caches.

    Attributes:
        kv: full attention, or latents, without those of a draft model.
        page_tokens: tokens a page, in all pools with pages.
        draft: a draft model's buffers, whose pages have the numbers of the others'.
        draft_heads: those of a draft model; None for latents.
        window: the pool of sliding-window attention, where that has its own.
        window_tokens: how long that window is.
        state: recurrent state.
        scales: of blocks of keys and values, in pages with the numbers of theirs.
        window_scales: of blocks of the window's.
        dense: keys and values of layers that SGLang lists apart, in pages with the numbers of `kv`.
        index: keys of an index of sparse attention, in pages with the numbers of `kv`.
        uncut: what every rank has whole, in pages with the numbers of `kv` or of the window, or in slots of requests.
        stages: which of the model's layers of each kind the rank has.
    """

    kv: Attention
    page_tokens: int
    draft: Buffers = NOTHING.buffers
    draft_heads: Heads | None = None
    window: Attention | None = None
    window_tokens: int | None = None
    state: tuple[StateBuffer, ...] = ()
    scales: Attention | None = None
    window_scales: Attention | None = None
    dense: Attention | None = None
    index: Attention | None = None
    uncut: tuple[Uncut, ...] = ()
    stages: Stages = Stages()

    @property
    def has_attention(self) -> bool:
        """Whether this rank, or another pipeline stage, has layers in `kv`."""
        return bool(len(self.kv)) or bool(self.stages.attention.total)
