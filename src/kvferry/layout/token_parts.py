"""Packed pages as entries for every token, where it is known in which parts a page keeps its tokens.

A page that has all tokens' keys and then all their scales has no entry for a token that lies together. Each part by
itself has: so a component with one entry per page becomes one with an entry for every token, of which a rank holds a
shard for each part. It describes the same bytes, in more pieces.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import accumulate, pairwise

import msgspec

from kvferry.layout.component import Axis, Component, Entry
from kvferry.layout.interval import Interval, volume
from kvferry.layout.shard import RankLayout, Shard


def cut_between_tokens(layout: RankLayout, components: Collection[str]) -> RankLayout:
    """Returns a layout that describes packed pages token by token.

    Args:
        components: the names of those to describe so. Each says its `token_parts`.
    """
    shards: list[Shard] = []
    for shard in layout.shards:
        shards += _token_by_token(shard) if shard.component.name in components else (shard,)
    return msgspec.structs.replace(layout, shards=tuple(shards))


def _token_by_token(shard: Shard) -> Iterator[Shard]:
    packed, element_bytes = shard.component, shard.component.element_bytes
    *outer, last = packed.axes
    component = Component(
        name=packed.name,
        axes=(*outer, Axis(last.name, sum(packed.token_parts))),
        dtype=packed.dtype,
        entry=Entry.TOKEN,
        window_tokens=packed.window_tokens,
        is_optional=packed.is_optional,
    )
    if volume(shard.box) == 0:
        yield msgspec.structs.replace(shard, component=component, box=(*shard.box[:-1], Interval(0, 0)))
        return
    for start, stop in pairwise(accumulate(packed.token_parts, initial=0)):
        before = start * shard.paging.page_tokens * element_bytes
        yield msgspec.structs.replace(
            shard,
            component=component,
            box=(*shard.box[:-1], Interval(start, stop)),
            addresses=tuple(address + before for address in shard.addresses),
            paging=msgspec.structs.replace(shard.paging, token_stride=(stop - start) * element_bytes),
        )
