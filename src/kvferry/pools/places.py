"""Where a request lies in the pools of one rank.

Counted out token by token, without the arithmetic that kvferry plans transfers with: what checks it must not share its
mistakes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvferry.layout import Component, Entry, Interval, PageGroup, RankLayout, Shard, TokenShare
from kvferry.plan.requests.page_numbers import AnyPages, GroupPages, pages_by_group

Pages: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TakenPages(GroupPages):
    """Pages that a request was given."""

    pages: Pages
    start: int = 0


def positions_of(share: TokenShare, tokens: int) -> list[int]:
    """The positions of a request that a rank holds, counted out one by one, without kvferry's arithmetic."""
    pattern, block, page = share.partition.pattern, share.partition.block_tokens, share.partition.page_tokens
    if page is not None:
        # Pages are given out one after the other: to every block as many, and of what is left one each to the first.
        num_pages = -(-tokens // page)
        parts = [
            part
            for number, part in enumerate(pattern)
            for _ in range(num_pages // len(pattern) + (number < num_pages % len(pattern)))
        ]
        return [position for position in range(tokens) if parts[position // page] == share.part]
    if block is None:
        block = max(1, (tokens + len(pattern) - 1) // len(pattern))
    return [position for position in range(tokens) if pattern[position // block % len(pattern)] == share.part]


def first_needed(window_tokens: int | None, tokens: int, prefix_tokens: int) -> int:
    """The first position that a decode rank needs of a request."""
    return prefix_tokens if window_tokens is None else max(prefix_tokens, tokens - window_tokens)


def entries_kept(component: Component, tokens: int) -> Interval:
    """The entries of a component that a request of so many tokens needs: tokens by position, or its one state."""
    if component.entry is Entry.REQUEST:
        return Interval(0, 1)
    return Interval(first_needed(component.window_tokens, tokens, 0), tokens)


def needed_pages(
    layout: RankLayout, group: PageGroup, tokens: int, *, prefix_tokens: int, whole_window: bool = False
) -> range:
    """The pages of a group that a request of so many tokens needs, as positions among the request's pages.

    Args:
        whole_window: whether a window's group gets pages for all tokens, not only for those in the window.
    """
    positions = positions_of(layout.share_of(group), tokens)
    first = 0 if whole_window else first_needed(group.window_tokens, tokens, prefix_tokens)
    start = sum(position < first for position in positions)
    pages = range(start // group.page_tokens, -(-len(positions) // group.page_tokens))
    return pages if start < len(positions) else range(pages.start, pages.start)


def by_group(layout: RankLayout, pages: AnyPages) -> dict[str, GroupPages]:
    """Pages by group; page numbers without a group are those of every group."""
    names = [group.name for group in layout.groups]
    return pages_by_group(
        pages if isinstance(pages, Mapping) else dict.fromkeys(names, pages), names, start=None, where="pool"
    )


def _placed(
    layout: RankLayout, pages: AnyPages, tokens: int | None, prefix_tokens: int | None
) -> tuple[dict[str, TakenPages], int]:
    """Where a request's pages stand in it, by group, and how many tokens it has.

    Args:
        prefix_tokens: where pages begin that do not say it, windows aside; None for the request's first.
    """
    kept, length = {}, tokens
    given_pages = by_group(layout, pages)
    for group in layout.groups:
        given = given_pages.get(group.name, GroupPages([]))
        numbers, first = page_numbers(given), given.start
        if first is None:
            if prefix_tokens is None or group.has_slots:
                first = 0
            elif tokens is None:
                first = prefix_tokens // group.page_tokens
            else:
                first = needed_pages(layout, group, tokens, prefix_tokens=prefix_tokens).start
        kept[group.name] = TakenPages(numbers, first)
        if tokens is None and not group.has_slots:
            length = max(length or 0, (first + len(numbers)) * group.page_tokens)
    return kept, length or 0


def places(
    layout: RankLayout, pages: AnyPages, tokens: int | None, prefix_tokens: int | None, absent: Sequence[str] = ()
) -> Iterator[tuple[Shard, int, Any, Pages]]:
    """For every shard and layer: which entries hold a part of a request, and the positions for which they stand.

    Args:
        prefix_tokens: the first position that is needed, windows aside; None asks for all that the pages hold.
    """
    kept, length = _placed(layout, pages, tokens, prefix_tokens)
    held = {group.name: positions_of(layout.share_of(group), length) for group in layout.groups}
    for shard in layout.shards:
        own, positions = kept[shard.group], held[shard.group]
        if shard.component.name in absent or not len(own.pages):
            continue
        where, numbers = _entries(shard, own, positions, length, prefix_tokens)
        for index in range(len(shard.addresses)):
            yield shard, index, where, numbers


def left_open(
    layout: RankLayout, pages: AnyPages, tokens: int | None, prefix_tokens: int, absent: Sequence[str]
) -> Iterator[tuple[Shard, int, tuple[int, int]]]:
    """The entries that may change or not."""
    kept, length = _placed(layout, pages, tokens, prefix_tokens)
    positions_in = {group.name: positions_of(layout.share_of(group), length) for group in layout.groups}
    for shard in layout.shards:
        positions = positions_in[shard.group]
        own, size = kept[shard.group], shard.paging.page_tokens
        if shard.component.name in absent or shard.component.entry is not Entry.TOKEN or not len(own.pages):
            continue
        low = first_needed(shard.component.window_tokens, length, prefix_tokens)
        needed = [index for index, position in enumerate(positions) if position >= low]
        held = sum(position < prefix_tokens for position in positions)
        if not needed:
            continue
        before = range(max(held, needed[0] // size * size), needed[0])
        behind = range(len(positions), -(-len(positions) // size) * size)
        for local in (*before, *behind):
            for index in range(len(shard.addresses)):
                yield shard, index, (int(own.pages[local // size - own.start]), local % size)


def _entries(
    shard: Shard, own: TakenPages, positions: list[int], tokens: int, prefix_tokens: int | None
) -> tuple[Any, Pages]:
    if shard.component.entry is Entry.REQUEST:
        return (own.pages[:1], 0), np.zeros(1, np.int64)
    size = shard.paging.page_tokens
    low = 0 if prefix_tokens is None else first_needed(shard.component.window_tokens, tokens, prefix_tokens)
    front = own.start * size
    local = [
        index
        for index, position in enumerate(positions)
        if position >= low and front <= index < front + len(own.pages) * size
    ]
    numbers = np.array([positions[index] for index in local], np.int64)
    order, within = np.divmod(np.array(local, np.int64), size)
    page = own.pages[order - own.start]
    if shard.component.entry is Entry.TOKEN:
        return (page, within), numbers
    firsts = [place for place, index in enumerate(local) if place == 0 or index % size == 0]
    return (page[firsts], 0), numbers[firsts] // size


def page_numbers(pages: GroupPages) -> Pages:
    """Page numbers as an array, whatever they were given as."""
    return np.asarray(pages.pages, np.int64)
