"""What a decode rank requests, group by group: worked out on the decode side, checked on the prefill side."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import index
from typing import Annotated, TypeAlias

import msgspec

from kvferry.errors import PageError, UsageError
from kvferry.layout import Entry, PageGroup, RankLayout
from kvferry.layout.interval import volume
from kvferry.plan import Demand, needed_locally
from kvferry.plan.requests.page_numbers import (
    MAX_PAGES,
    AnyPages,
    GroupPages,
    PageNumbers,
    Pages,
    checked_pages,
    pages_by_group,
)

MAX_POSITION = 2**48
Position: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_POSITION)]
"""A position in a request, in tokens or pages. No request is nearly that long, and none makes 64 bits overflow."""


class GroupRequest(msgspec.Struct, frozen=True, array_like=True):
    """What a decode rank requests for one of its groups of pages. Positions are those of tokens in the request.

    Attributes:
        name: the group's name on the decode side.
        held: the decode rank has the tokens before this position; they must not be touched.
        start: the first token that it needs.
        stop: the first after those that it needs.
        first_page: how many pages of the request come before the given ones on this rank.
        pages: page numbers on the decode side.
    """

    name: Annotated[str, msgspec.Meta(max_length=256)]
    held: Position
    start: Position
    stop: Position
    first_page: Position
    pages: PageNumbers

    @property
    def demand(self) -> Demand:
        """The tokens that it needs."""
        return Demand(self.held, self.start, self.stop)


def demands_of(
    layout: RankLayout, pages: AnyPages, *, prefix_tokens: int, tokens: int | None, where: str
) -> tuple[GroupRequest, ...]:
    """Works out what a decode rank requests.

    Args:
        pages: as for `DecodeEndpoint.open`, and so are prefix_tokens and tokens.
        where: begins error messages.

    Raises:
        PageError: if pages are wrong, or not as many as the tokens take.
    """
    prefix_tokens = _count("prefix_tokens", prefix_tokens, where)
    if tokens is not None and prefix_tokens > (tokens := _count("tokens", tokens, where)):
        raise PageError(f"{where}: a prefix of {prefix_tokens} tokens is longer than the request's {tokens}")
    groups = layout.groups
    in_use = {shard.group for shard in layout.shards if volume(shard.box)}
    given = pages_by_group(pages, [group.name for group in groups], start=None, where=where)
    if missing := sorted(in_use - given.keys()):
        raise PageError(f"{where}: no pages for group {missing}; say [] where nothing is missing here")
    wanted = []
    for group in groups:
        if group.name not in in_use:  # a pipeline stage without such layers has nowhere to put anything
            wanted.append(GroupRequest(group.name, held=0, start=0, stop=0, first_page=0, pages=PageNumbers()))
            continue
        name = where if len(groups) == 1 else f"{where}, group {group.name!r}"
        numbers = checked_pages(given[group.name].pages, pool_pages=group.num_pages, where=name)
        if len(numbers) > MAX_PAGES:
            raise PageError(f"{name}: {len(numbers)} pages in one request: {MAX_PAGES} at most can be asked for")
        own = given[group.name].held_tokens
        held = prefix_tokens if own is None else min(prefix_tokens, _count("held_tokens", own, name))
        if group.has_slots:
            wanted.append(_slot(group, numbers, where=name))
        elif tokens is None:
            wanted.append(_without_length(layout, group, given[group.name], numbers, held, where=name))
        else:
            wanted.append(_with_length(layout, group, given[group.name], numbers, held, tokens, where=name))
    if (last := max(each.stop for each in wanted)) > MAX_POSITION:
        raise PageError(f"{where}: the pages end with token {last}: no request has more than {MAX_POSITION} tokens")
    return tuple(wanted)


def _count(what: str, number: int, where: str) -> int:
    """Returns a number of tokens or pages as a plain integer, which can be sent."""
    try:
        count = index(number)
    except TypeError as error:
        raise PageError(f"{where}: {what} is {number!r}: it must be an integer") from error
    if count < 0:
        raise PageError(f"{where}: {what} is {count}: it must not be negative")
    if count > MAX_POSITION:
        raise PageError(f"{where}: {what} is {count}: no request has more than {MAX_POSITION} tokens")
    return count


def _slot(group: PageGroup, slots: Pages, *, where: str) -> GroupRequest:
    if len(slots) > 1:
        raise PageError(f"{where}: {len(slots)} slots for one request: it has one, or [] if its state is not wanted")
    return GroupRequest(group.name, held=0, start=0, stop=len(slots), first_page=0, pages=PageNumbers.of(slots))


def _without_length(
    layout: RankLayout, group: PageGroup, given: GroupPages, pages: Pages, prefix_tokens: int, *, where: str
) -> GroupRequest:
    if not layout.share_of(group).partition.is_whole:
        raise PageError(f"{where}: context parallelism divides a request by token: say how many it has (tokens=...)")
    first_page = prefix_tokens // group.page_tokens if given.start is None else _count("start", given.start, where)
    start = max(prefix_tokens, first_page * group.page_tokens)
    if group.window_tokens is None and start > prefix_tokens:
        raise PageError(
            f"{where}: the pages begin with page {first_page} of the request, but the first token that is needed is in "
            f"page {prefix_tokens // group.page_tokens}"
        )
    stop = max(start, (first_page + len(pages)) * group.page_tokens) if len(pages) else start
    if len(pages):
        _check_cut(layout, group, prefix_tokens, start, where=where)
    return GroupRequest(group.name, prefix_tokens, start, stop, first_page, PageNumbers.of(pages))


def _with_length(
    layout: RankLayout,
    group: PageGroup,
    given: GroupPages,
    pages: Pages,
    prefix_tokens: int,
    tokens: int,
    *,
    where: str,
) -> GroupRequest:
    window = tokens if group.window_tokens is None else group.window_tokens
    start = max(prefix_tokens, tokens - window)
    share = layout.share_of(group)
    block = share.partition.block(tokens)
    low, high = share.held_before(start, block=block), share.held_before(tokens, block=block)
    first_page = low // group.page_tokens if given.start is None else _count("start", given.start, where)
    if low < high and first_page * group.page_tokens > low:
        raise PageError(
            f"{where}: the pages begin with page {first_page} of the request, but the first token that is needed is in "
            f"page {low // group.page_tokens}"
        )
    needed = -(-high // group.page_tokens) - first_page if low < high else 0
    if len(pages) != needed:
        raise PageError(
            f"{where}: {len(pages)} pages where tokens {start} to {tokens} of the request take {needed} pages of "
            f"{group.page_tokens} on this rank"
        )
    if low < high:
        _check_cut(layout, group, share.held_before(prefix_tokens, block=block), low, where=where)
    return GroupRequest(group.name, prefix_tokens, start, tokens, first_page, PageNumbers.of(pages))


def _check_cut(layout: RankLayout, group: PageGroup, held: int, low: int, *, where: str) -> None:
    """Refuses to begin inside a packed page of which this side holds the front."""
    page_start = low // group.page_tokens * group.page_tokens
    if held <= page_start:
        return
    packed = [s.component.name for s in layout.shards if s.group == group.name and s.component.entry is Entry.PAGE]
    if packed:
        raise PageError(
            f"{where}: a prefix that ends inside a page of {group.page_tokens} tokens cannot be continued, since pages "
            f"of {packed[0]!r} are packed; round the prefix down to whole pages and let the rest be sent"
        )


def wanted_groups(
    groups: Sequence[GroupRequest],
    layout: RankLayout,
    *,
    receivers: int,
    tokens: int | None,
    filled: Collection[str],
    where: str,
) -> dict[str, GroupRequest]:
    """Checks what a decode rank requested, and returns it by group.

    Args:
        layout: the decode rank's.
        receivers: how many decode ranks it says will open the room.
        tokens: how many tokens it says the request has.
        filled: the groups of which this rank was elected to send something, by its own count.
        where: begins error messages.

    Raises:
        PageError: if it contradicts itself or the layout.
    """
    names = sorted(group.name for group in groups)
    if receivers < 1 or names != sorted(filled):
        raise PageError(
            f"{where}: {receivers} receivers and pages for groups {names} make no sense: of the decode rank's "
            f"groups {[group.name for group in layout.groups]} this rank fills {sorted(filled)}"
        )
    wanted = {}
    for asked in groups:
        group = layout.group(asked.name)
        asked.pages.check(pool_pages=group.num_pages, where=where)
        low, high = _local_range(layout, group, asked, tokens, where)
        if tokens is not None and not group.has_slots and asked.stop > tokens:
            raise PageError(
                f"{where}: tokens {asked.start} to {asked.stop} of group {asked.name!r} are asked for, but the request "
                f"has {tokens}"
            )
        capacity = (asked.first_page + len(asked.pages)) * group.page_tokens
        if not asked.held <= asked.start <= asked.stop or (
            low < high and not asked.first_page * group.page_tokens <= low < high <= capacity
        ):
            raise PageError(
                f"{where}: {len(asked.pages)} pages of group {asked.name!r} from page {asked.first_page} on do not "
                f"hold tokens {asked.start} to {asked.stop}"
            )
        wanted[asked.name] = asked
    return wanted


def _local_range(
    layout: RankLayout, group: PageGroup, asked: GroupRequest, tokens: int | None, where: str
) -> tuple[int, int]:
    if group.has_slots:
        return asked.start, asked.stop
    try:
        return needed_locally(layout.share_of(group), asked.demand, request_tokens=tokens)
    except UsageError as error:
        raise PageError(f"{where}: {error}") from error
