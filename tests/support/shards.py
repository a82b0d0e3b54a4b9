"""Shards without memory: a byte a token, a page or a slot."""

from __future__ import annotations

from kvferry.layout import Axis, Component, Entry, Interval, Paging, Shard


def byte_shard(
    name: str = "k",
    group: str = "kv",
    *,
    entry: Entry = Entry.TOKEN,
    page_tokens: int = 16,
    num_pages: int = 40,
    window_tokens: int | None = None,
) -> Shard:
    """One layer of one byte; slots where there is one entry per request."""
    component = Component(
        name=name,
        axes=(Axis("layer", 1),),
        dtype="uint8",
        entry=entry,
        window_tokens=window_tokens,
        packing="test" if entry is Entry.PAGE else None,
    )
    page_tokens = 1 if entry is Entry.REQUEST else page_tokens
    bytes_per_page = page_tokens if entry is Entry.TOKEN else 1
    return Shard(
        component=component,
        box=(Interval(0, 1),),
        addresses=(4096 * (1 + sum(name.encode())),),
        strides=(),
        paging=Paging(page_tokens, num_pages, bytes_per_page, 1 if entry is Entry.TOKEN else 0),
        group=group,
    )
