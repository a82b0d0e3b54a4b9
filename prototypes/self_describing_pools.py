"""How SGLang's pools would say what they keep: one view for each kind of cache, by its axes.

This is the file `cache_views.py` that the pull request of docs/upstream/sglang-pools.md would add beside SGLang's
pools; the patch there has them call it. It knows SGLang's pools and nothing of kvferry. What only the model knows, such
as how many KV heads there are over all ranks, is handed to a pool where it is made, as `Share`s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank has of something that ranks, or pipeline stages, divide: neighbours, counted from `start`.

    Attributes:
        total: how many there are over all of them. Several ranks may hold the same ones.
    """

    start: int
    total: int


@dataclass(frozen=True, slots=True)
class StateBlock:
    """Neighbouring channels of recurrent state that ranks divide apart from others.

    Attributes:
        channels: how many there are over all ranks.
        units: how many parts they can be cut into: heads, or groups. With fewer than ranks, several hold the same.
    """

    channels: int
    units: int

    def held(self, ranks: Share) -> range:
        """Returns the channels that the rank of that number has."""
        first, count = ranks.start * self.units // ranks.total, max(1, self.units // ranks.total)
        width = self.channels // self.units
        return range(first * width, (first + count) * width)


@dataclass(frozen=True, slots=True)
class CacheAxis:
    """One axis of an entry.

    Attributes:
        total: its length over all ranks.
        start, stop: which of it the rank has.
        stride: bytes from one index to the next.
    """

    name: str
    total: int
    start: int
    stop: int
    stride: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheView:
    """One kind of cache in a pool: keys, values, latents, an index, scales or state.

    The byte at index j of one axis and k of another, of token t in page p, lies at the layer's address plus
    `p * page_stride + t * token_stride + j * its stride + k * its stride`, where indices count from the rank's first.

    Attributes:
        name: the same on all ranks, and apart from that of every other view.
        group: whose page numbers, or slots, it goes by: views of one group are addressed alike.
        entry: "token", "page" or "request": how often there is an entry. A page is moved whole where only `packing`
            says what is in it.
        layers: which of the model's layers of this kind the rank has.
        addresses: of each of these layers.
        axes: what an entry is made of, in bytes at last.
        page_tokens: tokens of a page; 1 where an entry is a request's.
        packing: the name of the order within a page, where tokens do not come first.
        window_tokens: how many tokens at a request's end are kept; None for all.
        is_draft: whether it is a draft model's, which the other side may lack.
        has_every_token: whether it has all tokens of a request also where ranks divide those of others.
        memory: "device" or "host".
    """

    name: str
    group: str
    entry: str
    layers: Share
    addresses: tuple[int, ...]
    axes: tuple[CacheAxis, ...]
    page_tokens: int
    num_pages: int
    page_stride: int
    token_stride: int
    packing: str | None = None
    window_tokens: int | None = None
    is_draft: bool = False
    has_every_token: bool = False
    memory: str = "device"


def views_of_heads(
    pool: Any, *, heads: Share, layers: Share, prefix: str = "", group: str = "kv", window_tokens: int | None = None
) -> Iterator[CacheView]:
    """Yields the views of a MHATokenToKVPool: keys, then values; nothing where the model has no such layers.

    Args:
        heads: its KV heads among those of the model in these layers.
        layers: its layers among those of this kind.
        prefix: what names begin with, for another pool of the same rank.
        window_tokens: how many tokens at a request's end it keeps.
    """
    if not layers.total:
        return
    item, held, tokens = pool.store_dtype.itemsize, pool.head_num, pool.page_size
    is_packed = pool.kv_cache_layout != "nhd"
    for name, buffers, dim in (("k", pool.k_buffer, pool.head_dim), ("v", pool.v_buffer, pool.v_head_dim)):
        of_head = dim * item * (tokens if is_packed else 1)
        yield _paged(
            pool,
            buffers,
            [CacheAxis("head", heads.total, heads.start, heads.start + held, of_head), _bytes(of_head)],
            row_bytes=held * dim * item,
            name=prefix + name,
            group=group,
            entry="page" if is_packed else "token",
            layers=layers,
            packing=f"SGLang's {pool.kv_cache_layout}, elements of {item} bytes" if is_packed else None,
            window_tokens=window_tokens,
        )


def views_of_latents(pool: Any, *, layers: Share, prefix: str = "", group: str = "kv") -> Iterator[CacheView]:
    """Yields the view of a MLATokenToKVPool: every rank has the same.

    Args:
        layers: its layers among those of this kind.
        prefix: what names begin with, for another pool of the same rank.
    """
    row = pool.kv_buffer[0][0].nbytes
    axes = [CacheAxis("head", 1, 0, 1, row), _bytes(row)]
    yield _paged(
        pool, pool.kv_buffer, axes, row_bytes=row, name=f"{prefix}latent", group=group, entry="token", layers=layers
    )


def views_of_state(pool: Any, *, layers: Share, ranks: Share, blocks: Sequence[StateBlock]) -> Iterator[CacheView]:
    """Yields the views of a MambaPool: of each block of each convolution, then of the state itself.

    Args:
        layers: its layers among those of this kind.
        ranks: the rank's number, among those that divide the state.
        blocks: what the channels of a convolution are made of.

    Raises:
        NotImplementedError: if it keeps something that every rank has whole.
    """
    kinds: list[tuple[str, int, list[Any]]] = []
    before = 0
    for field, tensor, axis, layer in pool._iter_transfer_state_entries():
        if axis is None:
            raise NotImplementedError(f"{field} of {type(pool).__name__} is not described")
        if not kinds or layer <= before:  # all layers of one kind come before those of the next
            kinds.append((field, axis, []))
        kinds[-1][2].append(tensor)
        before = layer
    for number, (field, axis, tensors) in enumerate(kinds):
        slots, *shape = tensors[0].shape
        rows, channels, slot_bytes = prod(shape[:axis]), shape[axis], tensors[0][0].nbytes
        row_bytes, width, at = slot_bytes // rows, slot_bytes // rows // channels, 0
        of = blocks if field == "conv" else [StateBlock(channels * ranks.total, channels * ranks.total)]
        for index, block in enumerate(of):
            held = block.held(ranks)
            yield CacheView(
                name=f"state {number}" + (f", block {index}" if len(of) > 1 else ""),
                group="state",
                entry="request",
                layers=layers,
                addresses=tuple(each.data_ptr() + at * width for each in tensors),
                axes=(
                    CacheAxis("row", rows, 0, rows, row_bytes),
                    CacheAxis("channel", block.channels, held.start, held.stop, width),
                    _bytes(width),
                ),
                page_tokens=1,
                num_pages=slots,
                page_stride=slot_bytes,
                token_stride=0,
            )
            at += len(held)


def _paged(pool: Any, buffers: Sequence[Any], axes: Sequence[CacheAxis], *, row_bytes: int, **more: Any) -> CacheView:
    tokens = pool.page_size
    return CacheView(
        addresses=tuple(each.data_ptr() for each in buffers),
        axes=tuple(axes),
        page_tokens=tokens,
        num_pages=(pool.size + tokens) // tokens,
        page_stride=row_bytes * tokens,
        token_stride=row_bytes if more["entry"] == "token" else 0,
        **more,
    )


def _bytes(count: int) -> CacheAxis:
    return CacheAxis("byte", count, 0, count, 1)
