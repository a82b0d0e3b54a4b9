"""The unit of work: a chunk, which is one part of a request's pages, and the rules for handing chunks in.

A chunk may be handed in layer by layer, in ranges, as a model computes them: the same pages again and again, each time
for other layers, in any order. Pages count as handed in once all layers of their group are; the next pages come then.
"Layer" stands for an index of a component's first axis, whatever that is. Chunks of the same pages whose layers follow
each other are joined, so that they leave in one write. So are chunks that wait for a turn, if their pages follow each
other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import TypeAlias

import msgspec
import numpy as np
from msgspec import structs

from kvferry.errors import ChunkError, PageError
from kvferry.layout import Component, Interval, PageGroup, Shard
from kvferry.plan.requests.page_numbers import (
    AnyPages,
    GroupPages,
    Pages,
    integers_of,
    pages_by_group,
    refuse_out_of_range,
    refuse_repeated,
)

Layers: TypeAlias = "Interval | Mapping[str, Interval]"
"""Layers of all components, which have the same number of them; or of some components, by name."""


def layers_by_component(layers: Layers, components: Iterable[Component], *, where: str) -> dict[str, Interval]:
    """Says which layers of each component are meant.

    Args:
        components: those of the rank.

    Raises:
        ChunkError: if a component is unknown or has no such layer, or a single range is given for components of
            different numbers of layers.
    """
    totals = {component.name: component.axes[0].size for component in components}
    if not isinstance(layers, Mapping):
        if len(set(totals.values())) > 1:
            raise ChunkError(
                f"{where}: layers {layers} of components that have different numbers of them, {totals}: say which "
                "layers of each, by name"
            )
        layers = dict.fromkeys(totals, layers)
    for name, part in layers.items():
        if name not in totals:
            raise ChunkError(f"{where}: layers of {name!r}: this rank's components are {list(totals)}")
        if part.stop > totals[name]:
            raise ChunkError(f"{where}: layers {part} of {name!r}, which has {totals[name]}")
    return dict(layers)


@dataclass(frozen=True, slots=True)
class LayerProgress:
    """Which layers of one group's pages have been handed in, for pages that come layer by layer.

    Attributes:
        held: the layers that the group has on this rank, by component.
        begun: the first of the pages of which some layers have come, and the one after the last; None if there are
            none.
        missing: the layers of these pages that are still to come, by component.
    """

    held: Mapping[str, frozenset[int]]
    begun: tuple[int, int] | None = None
    missing: Mapping[str, frozenset[int]] = field(default_factory=dict)

    @classmethod
    def of_group(cls, group: str, shards: Iterable[Shard]) -> LayerProgress:
        """Begins with none.

        Args:
            group: the group's name.
            shards: those of the rank.
        """
        held: dict[str, frozenset[int]] = {}
        for shard in shards:
            if shard.group == group and all(shard.box):
                name = shard.component.name
                held[name] = held.get(name, frozenset()) | _indices(shard.box[0])
        return cls(held)

    def has_any(self, layers: Mapping[str, Interval]) -> bool:
        """Returns whether the group has any of these layers."""
        return any(self.held.get(name, frozenset()) & _indices(part) for name, part in layers.items())

    def after(self, layers: Mapping[str, Interval], start: int, stop: int, *, where: str) -> LayerProgress:
        """Returns how far they have come once layers of some pages are handed in.

        Args:
            start: the position of the first page.
            stop: the position after the last page.

        Raises:
            ChunkError: if some of these layers were handed in before, or layers of other pages are still missing.
        """
        if self.begun is not None and self.begun != (start, stop):
            raise ChunkError(
                f"{where}: pages {start} to {stop} of the request where {self.missing_in_words} come first"
            )
        missing = self.held if self.begun is None else self.missing
        rest: dict[str, frozenset[int]] = {}
        for name, held in self.held.items():
            taken = held & _indices(layers[name]) if name in layers else frozenset()
            if again := taken - missing.get(name, frozenset()):
                raise ChunkError(f"{where}: {_named(name, again)} of pages {start} to {stop} were handed in already")
            if left := missing.get(name, frozenset()) - taken:
                rest[name] = left
        return LayerProgress(self.held, (start, stop) if rest else None, rest)

    @property
    def missing_in_words(self) -> str:
        """What is still to come of the pages that were begun."""
        assert self.begun is not None
        layers = " and ".join(_named(name, rest) for name, rest in self.missing.items())
        return f"{layers} of pages {self.begun[0]} to {self.begun[1]}"


def _indices(part: Interval) -> frozenset[int]:
    return frozenset(range(part.start, part.stop))


def _named(component: str, layers: frozenset[int]) -> str:
    return f"layers {sorted(layers)} of {component!r}"


_INT64 = np.dtype(np.int64)
_PAGE_BYTES = _INT64.itemsize
_MOST_PAGES = 1 << 31


class ChunkPart(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The pages of one group.

    Attributes:
        group: the group's name.
        start: the position of its first page among the request's pages on this rank.
        pages: page numbers in the prefill rank's pool, int64.
        pool_pages: how many pages that pool has.
    """

    group: str
    start: int
    pages: Pages
    pool_pages: int = _MOST_PAGES

    @property
    def stop(self) -> int:
        """The position after its last page."""
        return self.start + len(self.pages)


class Chunk(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One part of a request.

    Attributes:
        number: counts from 0 in the order of submission.
        parts: its pages, by group.
        is_last: whether the request ends with this chunk.
        aux: the request's aux data, with the last chunk of the rank that sends it.
        layers: the layers that it has of its pages, by component; None for all.
        token_part: which part of the request's tokens its pages hold; None for that of the rank's layout.
    """

    number: int
    parts: tuple[ChunkPart, ...]
    is_last: bool
    aux: bytes | None = None
    layers: Mapping[str, Interval] | None = None
    token_part: int | None = None

    @property
    def num_pages(self) -> int:
        """How many pages it has, of all groups."""
        return sum(len(part.pages) for part in self.parts)


class HandedIn(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A chunk as it was handed in: numbered and in order, but with page numbers that are not checked yet.

    Attributes:
        number: as of a `Chunk`.
        is_last: as of a `Chunk`.
        aux: as of a `Chunk`.
        parts: group, start and page numbers of every part; the numbers are a copy, as bytes of int64.
        submitted_at: when it was handed in.
        is_ready: returns whether the pages hold what is to be sent; None if they do.
        layers: as of a `Chunk`.
        token_part: as of a `Chunk`.
        completes: whether no layers of its pages are to come after it.
    """

    number: int
    parts: tuple[tuple[PageGroup, int, bytes], ...]
    is_last: bool
    aux: bytes | None
    submitted_at: float
    is_ready: Callable[[], bool] | None = None
    layers: Mapping[str, Interval] | None = None
    token_part: int | None = None
    completes: bool = True

    def chunk(self) -> Chunk:
        """Returns the chunk, with page numbers to compute with. They are not checked yet; see `why_impossible`."""
        parts = tuple(
            ChunkPart(group.name, start, np.frombuffer(numbers, np.int64), group.num_pages)
            for group, start, numbers in self.parts
        )
        return Chunk(self.number, parts, self.is_last, self.aux, self.layers, self.token_part)


class _Progress:
    """How far a request's chunks have come in one group."""

    __slots__ = ("group", "has_begun", "layers", "next_page")

    def __init__(self, group: PageGroup) -> None:
        self.group = group
        self.next_page = 0
        self.has_begun = False
        self.layers: LayerProgress | None = None  # made when layers are handed in for the first time


class ChunkSequence:
    """Numbers the chunks of one request and refuses those that break the order. Owned by the caller's thread.

    A scheduler waits for `hand_in`, in a process that computes: what costs time is code and data that are not in the
    cache, and calls that let other threads run. Hence few calls, and no look at any page number.
    """

    def __init__(self, room: int, groups: Sequence[PageGroup], shards: Sequence[Shard] = ()) -> None:
        """Starts a room's chunks.

        Args:
            room: the transfer's number, for errors.
            groups: the groups of the rank's layout.
            shards: the shards of the rank's layout, for chunks of some layers alone.
        """
        self._shards = shards
        self._where = f"room {room}"
        self._progress = {group.name: _Progress(group) for group in groups}
        self._only = self._progress[groups[0].name] if len(groups) == 1 and not groups[0].has_slots else None
        self._next_number = 0
        self._complete = False
        self._is_layered = False  # whether any chunk has had some layers alone

    @property
    def submitted(self) -> int:
        """How many chunks were handed in."""
        return self._next_number

    @property
    def is_complete(self) -> bool:
        """Whether the last chunk was handed in."""
        return self._complete

    def hand_in(
        self,
        pages: AnyPages,
        *,
        start: int | None,
        is_last: bool,
        aux: bytes | None,
        now: float,
        is_ready: Callable[[], bool] | None = None,
        layers: Layers | None = None,
        token_part: int | None = None,
    ) -> HandedIn:
        """Copies and numbers the next chunk. A refused chunk changes nothing.

        Args:
            pages: page numbers of the chunk.
            start: position of the first page in the request; None continues where the chunk before ended. The first
                chunk may start behind 0 if the decode side holds what comes before, and any chunk of a window if what
                is left out lies before the window.
            now: the time.
            is_ready: as of a `HandedIn`.
            layers: the layers that the chunk has of its pages; None for all.
            token_part: which part of the request's tokens the pages hold, if not that of the rank's layout.

        Raises:
            ChunkError: after the last chunk, or if the chunk does not continue the one before; also in its layers.
            PageError: if page numbers are not integers, there is no such group, or several slots are given.
        """
        if self._complete:
            raise ChunkError(_after_the_last(self._where))
        if layers is not None or self._is_layered:
            handed_in = self._some_layers(layers, pages, start, is_last=is_last, aux=aux, now=now)
            return structs.replace(handed_in, is_ready=is_ready, token_part=token_part)
        only = self._only
        parts: tuple[tuple[PageGroup, int, bytes], ...]
        if (
            only is not None
            and start is None
            and type(pages) is np.ndarray
            and pages.dtype is _INT64
            and pages.ndim == 1
        ):
            # `tobytes` copies at once; NumPy's own ways to copy, and to look for a maximum, let other threads run.
            parts = ((only.group, only.next_page, pages.tobytes()),)
            only.next_page += len(pages)
            only.has_begun = True
        else:
            given = pages_by_group(pages, tuple(self._progress), start=start, where=self._where)
            parts = tuple(self._part(self._progress[name], each) for name, each in given.items())
            for group, begin, numbers in parts:
                progress = self._progress[group.name]
                progress.next_page = begin + len(numbers) // _PAGE_BYTES
                progress.has_begun = True
        handed_in = HandedIn(self._next_number, parts, is_last, aux, now, is_ready, layers=None, token_part=token_part)
        self._next_number += 1
        self._complete = is_last
        return handed_in

    def _some_layers(
        self, layers: Layers | None, pages: AnyPages, start: int | None, *, is_last: bool, aux: bytes | None, now: float
    ) -> HandedIn:
        """Like `hand_in`, for a request of which any chunk has some layers alone."""
        components = tuple({shard.component.name: shard.component for shard in self._shards}.values())
        whole = {component.name: Interval(0, component.axes[0].size) for component in components}
        meant = whole if layers is None else layers_by_component(layers, components, where=self._where)
        given = pages_by_group(pages, tuple(self._progress), start=start, where=self._where)
        parts: list[tuple[PageGroup, int, bytes]] = []
        after = {name: each.layers or self._no_layers(each) for name, each in self._progress.items()}
        for name, each in given.items():
            if not after[name].has_any(meant):
                continue
            part = self._part(self._progress[name], each)
            stop = part[1] + len(part[2]) // _PAGE_BYTES
            if stop > part[1]:
                after[name] = after[name].after(meant, part[1], stop, where=f"{self._where}, group {name!r}")
                parts.append(part)
        if is_last and (unfinished := [each for each in after.values() if each.begun is not None]):
            missing = " and ".join(each.missing_in_words for each in unfinished)
            raise ChunkError(f"{self._where}: the last chunk comes before {missing}")
        for group, begin, numbers in parts:
            progress, is_through = self._progress[group.name], after[group.name].begun is None
            progress.layers = after[group.name]
            progress.next_page = begin + (len(numbers) // _PAGE_BYTES if is_through else 0)
            progress.has_begun = True
        self._is_layered = True
        completes = all(each.begun is None for each in after.values())
        handed_in = HandedIn(self._next_number, tuple(parts), is_last, aux, now, layers=meant, completes=completes)
        self._next_number += 1
        self._complete = is_last
        return handed_in

    def _no_layers(self, progress: _Progress) -> LayerProgress:
        progress.layers = LayerProgress.of_group(progress.group.name, self._shards)
        return progress.layers

    def _part(self, progress: _Progress, given: GroupPages) -> tuple[PageGroup, int, bytes]:
        group, expected = progress.group, progress.next_page
        where = self._where if len(self._progress) == 1 else f"{self._where}, group {group.name!r}"
        begin = expected
        if given.start is not None:
            try:
                begin = index(given.start)
            except TypeError as error:
                raise ChunkError(f"{where}: start is {given.start!r}: it must be an integer") from error
        may_skip = not progress.has_begun or group.window_tokens is not None
        if begin != expected and (begin < expected or not may_skip):
            raise ChunkError(f"{where}: a chunk starts at page {begin} of the request where page {expected} is next")
        numbers = integers_of(given.pages, where).tobytes()
        slots = begin + len(numbers) // _PAGE_BYTES
        if group.has_slots and slots > 1:
            raise PageError(f"{where}: {slots} slots for one request: hand in its slot once, when the state is final")
        return group, begin, numbers


def _after_the_last(where: str) -> str:
    return f"{where}: a chunk after the last one; open a new room for a new request"


def why_impossible(chunk: Chunk, *, where: str) -> PageError | None:
    """Returns what is wrong with a chunk's page numbers: the pool lacks one, or one appears more than once."""
    for part in chunk.parts:
        name = where if len(chunk.parts) == 1 else f"{where}, group {part.group!r}"
        try:
            refuse_out_of_range(part.pages, pool_pages=part.pool_pages, where=name)
            refuse_repeated(part.pages, where=name)
        except PageError as error:
            return error
    return None


def components_by_group(shards: Iterable[Shard]) -> dict[str, frozenset[str]]:
    """Returns the names of the components that a rank has in each of its groups."""
    components: dict[str, frozenset[str]] = {}
    for shard in shards:
        components[shard.group] = components.get(shard.group, frozenset()) | {shard.component.name}
    return components


def joined(first: HandedIn, second: HandedIn, components: Mapping[str, frozenset[str]]) -> HandedIn | None:
    """Returns two chunks as one, or None if they are not of the same pages, or do not follow each other.

    The second may have groups that the first lacks, and the other way around: as where recurrent state is there with
    the last layers.

    Args:
        first: the one that was handed in first. The joined one has its number.
        second: the next one.
        components: the names of the components of each group.
    """
    if first.layers is None or second.layers is None or first.completes or first.token_part != second.token_part:
        return None
    layers = dict(first.layers)
    for name, part in second.layers.items():
        union = _union(layers[name], part) if name in layers else part
        if union is None:
            return None
        layers[name] = union
    parts = {group.name: (group, start, pages) for group, start, pages in first.parts}
    for group, start, pages in second.parts:
        known = parts.get(group.name)
        if known is None and components[group.name].isdisjoint(first.layers):
            parts[group.name] = group, start, pages
        elif known is None or known[1:] != (start, pages):
            return None
    lacking = parts.keys() - {group.name for group, _, _ in second.parts}
    if any(not components[name].isdisjoint(second.layers) for name in lacking):
        return None
    return structs.replace(
        second,
        number=first.number,
        parts=tuple(parts.values()),
        submitted_at=first.submitted_at,
        layers=layers,
    )


def goes_on(chunk: Chunk, previous: Chunk) -> bool:
    """Whether a chunk has pages of the same groups as the one before it, and begins in each where that ends.

    Both are of all layers, and of the same token part.
    """
    is_alike = chunk.layers is None and previous.layers is None and chunk.token_part == previous.token_part
    return (
        is_alike
        and len(chunk.parts) == len(previous.parts)
        and all(
            part.group == before.group and part.start == before.stop
            for part, before in zip(chunk.parts, previous.parts, strict=True)
        )
    )


def take_together(waiting: deque[Chunk], most_pages: int) -> Chunk:
    """Takes out the first of some chunks and, as one with it, those behind it that go on where it ends.

    Args:
        waiting: chunks of one request, in order; at least one.
        most_pages: how many pages they may have together; the first is taken in any case, and keeps its number.
    """
    taken = [waiting.popleft()]
    num_pages = taken[0].num_pages
    while waiting and num_pages + waiting[0].num_pages <= most_pages and goes_on(waiting[0], taken[-1]):
        num_pages += waiting[0].num_pages
        taken.append(waiting.popleft())
    if len(taken) == 1:
        return taken[0]
    parts = tuple(
        structs.replace(of[0], pages=np.concatenate([part.pages for part in of]))
        for of in zip(*(chunk.parts for chunk in taken), strict=True)
    )
    return structs.replace(taken[-1], number=taken[0].number, parts=parts)


def _union(first: Interval, second: Interval) -> Interval | None:
    """Returns the interval that two make, in whichever order; None if they make none."""
    low, high = sorted((first, second), key=lambda part: part.start)
    return Interval(low.start, high.stop) if low.stop == high.start else None
