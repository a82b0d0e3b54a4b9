"""What kvferry's plug-in for SGLang would be left with, once pools describe themselves: their views as a layout."""

from __future__ import annotations

from collections.abc import Iterable

from kvferry import Axis, Component, Device, Entry, Interval, Paging, RankLayout, Shard, TokenShare
from prototypes.self_describing_pools import CacheView


def layout_of(views: Iterable[CacheView], device: Device, tokens: TokenShare | None = None) -> RankLayout:
    """Returns the layout of one memory of a rank.

    Args:
        views: of what lies there, in the same order on all ranks.
        device: where that is.
        tokens: which tokens of a request the rank keeps; None for all.

    Raises:
        LayoutError: if a view contradicts itself, naming it.
    """
    return RankLayout(shards=tuple(_shard(view, device) for view in views), tokens=tokens or TokenShare())


def _shard(view: CacheView, device: Device) -> Shard:
    first = view.layers.start
    return Shard(
        component=Component(
            name=view.name,
            axes=(Axis("layer", view.layers.total), *(Axis(axis.name, axis.total) for axis in view.axes)),
            dtype="uint8",  # what elements are is compared by the fingerprint
            entry=Entry(view.entry),
            packing=view.packing,
            window_tokens=view.window_tokens,
            is_optional=view.is_draft,
        ),
        box=(
            Interval(first, first + len(view.addresses)),
            *(Interval(axis.start, axis.stop) for axis in view.axes),
        ),
        addresses=view.addresses,
        strides=tuple(axis.stride for axis in view.axes),
        paging=Paging(
            page_tokens=view.page_tokens,
            num_pages=view.num_pages,
            page_stride=view.page_stride,
            token_stride=view.token_stride,
        ),
        device=device,
        group=view.group,
        has_every_token=view.has_every_token,
    )
