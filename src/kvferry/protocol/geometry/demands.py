"""What a decode rank requests, group by group: worked out on the decode side, checked on the prefill side."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from operator import index

from kvferry.errors import PageError, UsageError
from kvferry.layout import Entry, PageGroup, RankLayout
from kvferry.layout.interval import volume
from kvferry.plan import Demand, needed_locally
from kvferry.protocol.pages.chunks import AnyPages, GroupPages, Pages, checked_pages, pages_by_group
from kvferry.protocol.pages.page_numbers import MAX_PAGES, PageNumbers
from kvferry.protocol.wire.field_types import MAX_POSITION
from kvferry.protocol.wire.messages import OpenGroup, OpenRoom


@dataclass(frozen=True, slots=True, eq=False)
class WantedGroup:
    """What a receiver requests for one of its groups, and where it goes.

    Attributes:
        demand: the tokens that it needs.
        first_page: how many pages of the request come before the given ones on the receiver.
        pages: page numbers on the receiver.
    """

    demand: Demand
    first_page: int
    pages: PageNumbers


def demands_of(
    layout: RankLayout, pages: AnyPages, *, prefix_tokens: int, tokens: int | None, where: str
) -> tuple[OpenGroup, ...]:
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
            wanted.append(OpenGroup(group.name, held=0, start=0, stop=0, first_page=0, pages=PageNumbers()))
            continue
        name = where if len(groups) == 1 else f"{where}, group {group.name!r}"
        numbers = checked_pages(given[group.name].pages, pool_pages=group.num_pages, where=name)
        if len(numbers) > MAX_PAGES:
            raise PageError(f"{name}: {len(numbers)} pages in one request: {MAX_PAGES} at most can be asked for")
        if group.has_slots:
            wanted.append(_slot(group, numbers, where=name))
        elif tokens is None:
            wanted.append(_without_length(layout, group, given[group.name], numbers, prefix_tokens, where=name))
        else:
            wanted.append(_with_length(layout, group, given[group.name], numbers, prefix_tokens, tokens, where=name))
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


def _slot(group: PageGroup, slots: Pages, *, where: str) -> OpenGroup:
    if len(slots) > 1:
        raise PageError(f"{where}: {len(slots)} slots for one request: it has one, or [] if its state is not wanted")
    return OpenGroup(group.name, held=0, start=0, stop=len(slots), first_page=0, pages=PageNumbers.of(slots))


def _without_length(
    layout: RankLayout, group: PageGroup, given: GroupPages, pages: Pages, prefix_tokens: int, *, where: str
) -> OpenGroup:
    if not layout.tokens.partition.is_whole:
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
    return OpenGroup(group.name, prefix_tokens, start, stop, first_page, PageNumbers.of(pages))


def _with_length(
    layout: RankLayout,
    group: PageGroup,
    given: GroupPages,
    pages: Pages,
    prefix_tokens: int,
    tokens: int,
    *,
    where: str,
) -> OpenGroup:
    window = tokens if group.window_tokens is None else group.window_tokens
    start = max(prefix_tokens, tokens - window)
    share, block = layout.tokens, layout.tokens.partition.block(tokens)
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
    return OpenGroup(group.name, prefix_tokens, start, tokens, first_page, PageNumbers.of(pages))


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


def wanted_of(group: OpenGroup) -> WantedGroup:
    """Reads what is requested of a group, on the decode side, which requested it: nothing is checked."""
    return WantedGroup(Demand(group.held, group.start, group.stop), group.first_page, group.pages)


def wanted_groups(
    message: OpenRoom, layout: RankLayout, *, filled: Collection[str], where: str
) -> dict[str, WantedGroup]:
    """Checks what a decode rank requested, and returns it by group.

    Args:
        layout: the decode rank's.
        filled: the groups of which this rank was elected to send something, by its own count.
        where: begins error messages.

    Raises:
        PageError: if it contradicts itself or the layout.
    """
    names = sorted(group.name for group in message.groups)
    if message.receivers < 1 or names != sorted(filled):
        raise PageError(
            f"{where}: {message.receivers} receivers and pages for groups {names} make no sense: of the decode rank's "
            f"groups {[group.name for group in layout.groups]} this rank fills {sorted(filled)}"
        )
    wanted = {}
    for asked in message.groups:
        group = layout.group(asked.name)
        asked.pages.check(pool_pages=group.num_pages, where=where)
        low, high = _local_range(layout, group, asked, message.tokens, where)
        if message.tokens is not None and not group.has_slots and asked.stop > message.tokens:
            raise PageError(
                f"{where}: tokens {asked.start} to {asked.stop} of group {asked.name!r} are asked for, but the request "
                f"has {message.tokens}"
            )
        capacity = (asked.first_page + len(asked.pages)) * group.page_tokens
        if not asked.held <= asked.start <= asked.stop or (
            low < high and not asked.first_page * group.page_tokens <= low < high <= capacity
        ):
            raise PageError(
                f"{where}: {len(asked.pages)} pages of group {asked.name!r} from page {asked.first_page} on do not "
                f"hold tokens {asked.start} to {asked.stop}"
            )
        wanted[asked.name] = WantedGroup(Demand(asked.held, asked.start, asked.stop), asked.first_page, asked.pages)
    return wanted


def _local_range(
    layout: RankLayout, group: PageGroup, asked: OpenGroup, tokens: int | None, where: str
) -> tuple[int, int]:
    if group.has_slots:
        return asked.start, asked.stop
    try:
        return needed_locally(layout.tokens, Demand(asked.held, asked.start, asked.stop), request_tokens=tokens)
    except UsageError as error:
        raise PageError(f"{where}: {error}") from error
