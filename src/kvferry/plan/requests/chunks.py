"""The unit of work: a chunk, which is one part of a request's pages, and the rules for handing chunks in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import TypeAlias

import msgspec
import numpy as np
from msgspec import structs
from numpy.typing import ArrayLike, NDArray

from kvferry.errors import ChunkError, PageError
from kvferry.layout import Interval, PageGroup, Shard
from kvferry.plan.requests.layers import LayerProgress, Layers, layers_by_component

Pages = NDArray[np.int64]

_INT64 = np.dtype(np.int64)
_PAGE_BYTES = _INT64.itemsize
_MOST_PAGES = 1 << 31
_MOST_PAGES_MARKED = 1 << 24


@dataclass(frozen=True, slots=True)
class GroupPages:
    """Page numbers of one group, and where they belong in the request.

    Attributes:
        pages: page numbers in this rank's pool.
        start: how many pages of the group come before them in the request, on this rank. None continues where the chunk
            before ended, or begins where the request's needs begin.
        held_tokens: on the decode side, how many of the request's first tokens are here already in this group; None for
            as many as in the others (prefix_tokens).
    """

    pages: ArrayLike
    start: int | None = None
    held_tokens: int | None = None


AnyPages: TypeAlias = "ArrayLike | Mapping[str, ArrayLike | GroupPages]"
"""Page numbers of the only group, or of several groups by name."""


def pages_by_group(pages: AnyPages, groups: Sequence[str], *, start: int | None, where: str) -> dict[str, GroupPages]:
    """Sorts page numbers by group, in whichever form the caller gave them.

    Args:
        groups: the groups of the rank's layout.
        start: position of the pages in the request, where they are not given by group.

    Raises:
        PageError: if a group is unknown, or there is a single list for several groups.
    """
    if isinstance(pages, Mapping):
        if unknown := sorted(set(pages) - set(groups)):
            raise PageError(f"{where}: no group {unknown}: this rank's pages are in groups {list(groups)}")
        if start is not None:
            raise PageError(f"{where}: start {start} beside pages by group: say it with GroupPages(pages, start)")
        return {name: each if isinstance(each, GroupPages) else GroupPages(each) for name, each in pages.items()}
    if len(groups) != 1:
        raise PageError(
            f"{where}: this rank's pages are in groups {list(groups)}: hand in a mapping of their names to page numbers"
        )
    return {groups[0]: GroupPages(pages, start)}


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
        numbers = _integers(given.pages, where).tobytes()
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


def checked_pages(pages: ArrayLike, *, pool_pages: int, where: str) -> Pages:
    """Returns a private copy of page numbers, which lie in the pool and appear once each.

    Raises:
        PageError: naming an offending page.
    """
    copy = _integers(pages, where)
    refuse_out_of_range(copy, pool_pages=pool_pages, where=where)
    refuse_repeated(copy, where=where)
    return copy


def refuse_out_of_range(pages: Pages, *, pool_pages: int, where: str) -> None:
    """Refuses page numbers that the pool does not have.

    Raises:
        PageError: naming the first.
    """
    outside = (pages < 0) | (pages >= pool_pages)
    if outside.any():
        position = int(outside.argmax())
        raise PageError(
            f"{where}: page {pages[position]} at position {position} is out of range: the pool has {pool_pages} pages"
        )


def refuse_repeated(pages: Pages, *, where: str) -> None:
    """Refuses page numbers that appear more than once.

    Raises:
        PageError: naming the first.
    """
    if not pages.size:
        return
    highest = int(pages.max())
    if highest > _MOST_PAGES_MARKED:  # a peer may claim a pool that is too large to mark in memory
        distinct = len(np.unique(pages))
    else:
        seen = np.zeros(highest + 1, np.bool_)
        seen[pages] = True
        distinct = int(np.count_nonzero(seen))
    if distinct != pages.size:
        numbers, counts = np.unique(pages, return_counts=True)
        first = int(np.flatnonzero(counts > 1)[0])
        raise PageError(f"{where}: page {numbers[first]} appears {counts[first]} times; a request holds each page once")


def _integers(pages: ArrayLike, where: str) -> Pages:
    """Returns a private copy of a flat sequence of integers."""
    try:
        given = np.asarray(pages)
    except ValueError as error:
        raise PageError(f"{where}: pages must be a flat sequence of integers: {error}") from error
    except Exception as error:  # a tensor's own: of a device, sparse, with gradients, of a type that NumPy lacks
        about = [str(getattr(pages, name)) for name in ("dtype", "device", "layout") if hasattr(pages, name)]
        given_as = type(pages).__name__ + (f" ({', '.join(about)})" if about else "")
        raise PageError(
            f"{where}: no page numbers can be read from a {given_as}: {error}; hand in a flat sequence of integers in "
            "main memory, a NumPy array of int64 for one"
        ) from error
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise PageError(f"{where}: pages must be a flat sequence of integers, not {given.dtype} of shape {given.shape}")
    if given.dtype == np.uint64 and given.size and given.max() > np.iinfo(np.int64).max:
        position = int(given.argmax())
        raise PageError(f"{where}: page {given[position]} at position {position} is out of range of any pool")
    return given.astype(np.int64)
