"""Which packed pages two sides cut between tokens: those that cannot be moved whole, and say how they can be cut.

Whole pages are the cheaper way, one run each, and taken wherever a page of one side is a page of the other. Both sides
come to the same answer, each by itself, since it follows from the two layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvferry.layout import Entry, RankLayout, Shard
from kvferry.layout.interval import overlap
from kvferry.layout.token_parts import cut_between_tokens
from kvferry.plan.routes import Route, route_between


def described_alike(
    sources: Mapping[int, RankLayout], destination: RankLayout
) -> tuple[Mapping[int, RankLayout], RankLayout]:
    """Returns the layouts of both sides as they are exchanged: with some packed pages token by token, or as they are.

    Args:
        sources: those of source ranks, by group rank.
        destination: that of the receiver. `check_exchangeable` has accepted it with each of them.
    """
    if not any(component.token_parts for component in destination.components):
        return sources, destination
    names = {
        here.component.name
        for source in sources.values()
        for here, there, _ in pages_to_cut(source, destination)
        if can_be_cut(here, there)
    }
    if not names:
        return sources, destination
    return (
        {rank: cut_between_tokens(source, names) for rank, source in sources.items()},
        cut_between_tokens(destination, names),
    )


def pages_to_cut(source: RankLayout, destination: RankLayout) -> Iterator[tuple[Shard, Shard, Route]]:
    """Yields the shards of packed pages, one of either side, of which no page of one is a page of the other."""
    for there in destination.shards:
        for here in source.shards_of(there.component.name):
            if here.component.entry is not Entry.PAGE or overlap(here.box, there.box) is None:
                continue
            route = route_between(source, here.group, destination, there.group)
            theirs, ours = route.source_share.partition, route.destination_share.partition
            is_cut_anywhere = None in (theirs.cut_tokens, ours.cut_tokens)
            pages = here.paging.page_tokens, there.paging.page_tokens
            if route.unit_tokens != pages[0] or pages[0] != pages[1] or (is_cut_anywhere and theirs != ours):
                yield here, there, route


def can_be_cut(source: Shard, destination: Shard) -> bool:
    """Whether packed pages of either side say how they are cut between tokens, and alike."""
    return source.component.token_parts == destination.component.token_parts != ()
