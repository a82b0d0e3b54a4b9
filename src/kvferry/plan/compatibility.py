"""Whether two sides can exchange caches at all, and which packed pages they cut between tokens for it.

Whole pages are the cheaper way, one run each, and taken wherever a page of one side is a page of the other. Those that
cannot be moved whole are cut, if they say how. Both sides come to the same answer, each by itself, since it follows
from the two layouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from kvferry.errors import IncompatiblePeerError, LayoutError, PageError, UsageError
from kvferry.layout import Component, Entry, RankCoordinates, RankLayout, Shard, TokenShare
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


_SHARE = "tensor-parallel share"
"""How plug-ins call the axis of what ranks hold apart from each other, where no more is known of it."""


def check_exchangeable(source: RankLayout, destination: RankLayout, *, source_name: str, destination_name: str) -> None:
    """Refuses two layouts that describe different caches, or pages that cannot be cut as the other side needs.

    Args:
        source_name: how messages call the source side.
        destination_name: how messages call the other.

    Raises:
        IncompatiblePeerError: naming everything that differs, with both values.
    """
    theirs = {component.name: component for component in source.components}
    ours = {component.name: component for component in destination.components}
    required = [{name for name, each in side.items() if not each.is_optional} for side in (theirs, ours)]
    differences = []
    if not required[0] <= ours.keys() or not required[1] <= theirs.keys():
        differences.append(f"components: {source_name} has {sorted(theirs)}, {destination_name} has {sorted(ours)}")
    for name in sorted(theirs.keys() & ours.keys()):
        differences += _component_differences(theirs[name], ours[name], source_name, destination_name)
        differences += _unknown_shares(theirs[name], ours[name], (source, destination))
    if not differences:
        differences = list(dict.fromkeys(_uncuttable_pages(source, destination, source_name, destination_name)))
    if differences:
        raise IncompatiblePeerError("the two sides cannot exchange caches: " + "; ".join(differences))


def _component_differences(theirs: Component, ours: Component, source_name: str, destination_name: str) -> list[str]:
    if (theirs.entry, theirs.packing) != (ours.entry, ours.packing):
        return [
            f"layout of {theirs.name!r}: {source_name} has {_form(theirs)}, {destination_name} has {_form(ours)}; let "
            "both sides store tokens in the same form"
        ]
    differences = []
    if theirs.dtype != ours.dtype:
        differences.append(
            f"dtype of {theirs.name!r}: {source_name} {theirs.dtype}, {destination_name} {ours.dtype}, and kvferry "
            "converts no values; let both sides cache the same dtype"
        )
    if theirs.axes != ours.axes:
        differences.append(
            f"axes of {theirs.name!r}: {source_name} ({', '.join(map(str, theirs.axes))}), "
            f"{destination_name} ({', '.join(map(str, ours.axes))})"
        )
    if theirs.window_tokens != ours.window_tokens:
        differences.append(
            f"window of {theirs.name!r}: {source_name} keeps {_window(theirs)}, {destination_name} {_window(ours)}"
        )
    return differences


def _unknown_shares(theirs: Component, ours: Component, layouts: Iterable[RankLayout]) -> Iterator[str]:
    """Yields what to do where a rank's part of a component is known as its share alone, and shares differ in size."""
    if theirs.axes != ours.axes and any(axis.name == _SHARE for axis in (*theirs.axes, *ours.axes)):
        held = {str(shard.box[0]) for layout in layouts for shard in layout.shards_of(ours.name) if shard.box[0]}
        yield (
            f"an engine does not say which part of {ours.name!r} its ranks have in {ours.axes[0].name} "
            f"{', '.join(sorted(held))}: give both sides the same tensor-parallel size"
        )


def _uncuttable_pages(
    source: RankLayout, destination: RankLayout, source_name: str, destination_name: str
) -> Iterator[str]:
    """Yields a sentence for every component whose packed pages would have to be cut between tokens."""
    for here, there, route in pages_to_cut(source, destination):
        if can_be_cut(here, there):
            continue
        pages = here.paging.page_tokens, there.paging.page_tokens
        theirs, ours = route.source_share.partition, route.destination_share.partition
        remedy = "give both sides the same"
        if pages[0] == pages[1]:
            remedy += ", or let ranks that share tokens take whole pages in turns"
        yield (
            f"layout of {here.component.name!r}: {_form(here.component)} cannot be cut between tokens, but "
            f"{source_name} has pages of {pages[0]} tokens ({theirs}) and {destination_name} "
            f"pages of {pages[1]} ({ours}); {remedy}"
        )


def _form(component: Component) -> str:
    match component.entry:
        case Entry.TOKEN:
            return "entries for every token"
        case Entry.PAGE:
            return f"packed pages ({component.packing})"
        case Entry.REQUEST:
            return "one entry per request"


def _window(component: Component) -> str:
    return "every token" if component.window_tokens is None else f"the last {component.window_tokens} tokens"


def check_token_share(layout: RankLayout, coordinates: RankCoordinates) -> None:
    """Compares the tokens that a layout holds with the rank's place under context parallelism, and with its pages.

    Raises:
        LayoutError: if they disagree, naming both.
    """
    given_out = layout.tokens.partition.page_tokens
    for group in layout.groups:
        is_given_out = not group.has_slots and not group.has_every_token
        if given_out is not None and is_given_out and given_out % group.page_tokens:
            raise LayoutError(
                f"context parallelism gives out whole pages of {given_out} tokens, but pages of group {group.name!r} "
                f"have {group.page_tokens}: give contiguous(cp_size, page_tokens) the size of the engine's pages"
            )
    parts, part = layout.tokens.partition.num_parts, layout.tokens.part
    if (parts, part) != (coordinates.cp_size, coordinates.cp_rank):
        raise LayoutError(
            f"the layout holds part {part} of {parts} parts of every request's tokens, but the rank has cp_rank "
            f"{coordinates.cp_rank} of cp_size {coordinates.cp_size}; give RankLayout the rank's share, such as "
            "tokens=TokenShare(interleaved(cp_size), cp_rank)"
        )


def check_share_tokens(share: TokenShare, tokens: int | None, share_tokens: int | None, *, where: str) -> None:
    """Compares how many tokens of a request a rank holds by its engine's count with what its layout says.

    Where a rank's share follows from the request's length, engines round in more than one way, and often to as many
    pages: a layout that names another way than the engine's would send other tokens' bytes, and nothing would show it.

    Args:
        share: the layout's.
        tokens: how many tokens the request has.
        share_tokens: how many of them this rank holds, by the engine's count.
        where: begins error messages.

    Raises:
        UsageError: if a number is needed and None.
        PageError: if the two differ, naming both.
    """
    partition = share.partition
    if share_tokens is None:
        if partition.depends_on_length:
            raise UsageError(
                f"{where}: this rank's share of a request follows from its length ({partition}): say how many tokens "
                "of it the engine keeps on this rank (share_tokens=...), so that a layout that counts otherwise shows"
            )
        return
    if tokens is None:
        raise UsageError(f"{where}: share_tokens is {share_tokens}: say how many tokens the request has (tokens=...)")
    expected = share.held_before(tokens, block=partition.block(tokens))
    if share_tokens != expected:
        raise PageError(
            f"{where}: of {tokens} tokens this rank holds {share_tokens} by its engine's count, {expected} by its "
            f"layout ({partition}): both must count alike, or other tokens would be sent. An engine that gives out "
            "whole pages has the layout contiguous(cp_size, page_tokens)"
        )
