"""What a rank's layout would be if its pools had said it: the stand-in for pools that describe themselves."""

from __future__ import annotations

from prototypes.self_describing_pools import CacheAxis, CacheView, Share

from kvferry import MemoryKind, RankLayout


def views_of(layout: RankLayout) -> list[CacheView]:
    """Returns the views of all that a rank has."""
    return [
        CacheView(
            name=shard.component.name,
            group=shard.group,
            entry=shard.component.entry.value,
            layers=Share(shard.box[0].start, shard.component.axes[0].size),
            addresses=shard.addresses,
            axes=tuple(
                CacheAxis(axis.name, axis.size, held.start, held.stop, stride)
                for axis, held, stride in zip(shard.component.axes[1:], shard.box[1:], shard.strides, strict=True)
            ),
            page_tokens=shard.paging.page_tokens,
            num_pages=shard.paging.num_pages,
            page_stride=shard.paging.page_stride,
            token_stride=shard.paging.token_stride,
            packing=shard.component.packing,
            window_tokens=shard.component.window_tokens,
            is_draft=shard.component.is_optional,
            has_every_token=shard.has_every_token,
            memory="host" if shard.device.kind is MemoryKind.DRAM else "device",
        )
        for shard in layout.shards
    ]
