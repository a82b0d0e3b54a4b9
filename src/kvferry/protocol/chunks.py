"""The unit of work: one part of a request's pages, and the rules for handing parts in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvferry.errors import ChunkError, PageError
from kvferry.layout import PageGroup

Pages = NDArray[np.int64]

_INT64 = np.dtype(np.int64)
_MOST_PAGES_MARKED = 1 << 24


@dataclass(frozen=True, slots=True)
class GroupPages:
    """Page numbers of one group, and where they belong in the request.

    Attributes:
        pages: page numbers in this rank's pool.
        start: how many pages of the group come before them in the request, on this rank. None continues where the chunk
            before ended, or begins where the request's needs begin.
    """

    pages: ArrayLike
    start: int | None = None


AnyPages: TypeAlias = "ArrayLike | Mapping[str, ArrayLike | GroupPages]"
"""Page numbers of the only group, or of several groups by name."""


def pages_by_group(pages: AnyPages, groups: Sequence[str], *, start: int | None, where: str) -> dict[str, GroupPages]:
    """Page numbers as callers give them, by group.

    Args:
        groups: the groups of the rank's layout.
        start: of the pages, where they are not given by group.

    Raises:
        PageError: if a group is unknown, or several are meant by a single list.
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
    """

    group: str
    start: int
    pages: Pages

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
    """

    number: int
    parts: tuple[ChunkPart, ...]
    is_last: bool
    aux: bytes | None = None


class ChunkSequence:
    """Numbers the chunks of one request and refuses those that break the order. Owned by the caller's thread."""

    def __init__(self, room: int, groups: Sequence[PageGroup]) -> None:
        """Args:
        groups: of the rank's layout.
        """
        self._room = room
        self._where = f"room {room}"
        self._groups = {group.name: group for group in groups}
        self._names = tuple(self._groups)
        self._next_number = 0
        self._next_page = dict.fromkeys(self._groups, 0)
        self._has_begun: set[str] = set()
        self._complete = False

    @property
    def is_complete(self) -> bool:
        """Whether the last chunk was made."""
        return self._complete

    def chunk(self, pages: AnyPages, *, start: int | None, is_last: bool, aux: bytes | None) -> Chunk:
        """Checks and numbers the next chunk. A refused chunk changes nothing.

        Args:
            pages: page numbers of the chunk.
            start: position of the first page in the request; None continues where the chunk before ended. The first
                chunk may start behind 0 if the decode side holds what comes before, and any chunk of a window if what
                is left out lies before the window.

        Raises:
            ChunkError: after the last chunk, or if the chunk does not continue the one before.
            PageError: if page numbers are not integers or out of range, or there is no such group.
        """
        if self._complete:
            raise ChunkError(f"room {self._room}: a chunk after the last one; open a new room for a new request")
        given = pages_by_group(pages, self._names, start=start, where=self._where)
        chunk = Chunk(
            number=self._next_number,
            parts=tuple(self._part(name, group_pages) for name, group_pages in given.items()),
            is_last=is_last,
            aux=aux,
        )
        self._next_number += 1
        for part in chunk.parts:
            self._next_page[part.group] = part.stop
            self._has_begun.add(part.group)
        self._complete = is_last
        return chunk

    def _part(self, name: str, given: GroupPages) -> ChunkPart:
        group, expected = self._groups[name], self._next_page[name]
        where = self._where if len(self._names) == 1 else f"{self._where}, group {name!r}"
        begin = expected
        if given.start is not None:
            try:
                begin = index(given.start)
            except TypeError as error:
                raise ChunkError(f"{where}: start is {given.start!r}: it must be an integer") from error
        may_skip = name not in self._has_begun or group.window_tokens is not None
        if begin != expected and (begin < expected or not may_skip):
            raise ChunkError(f"{where}: a chunk starts at page {begin} of the request where page {expected} is next")
        part = ChunkPart(name, begin, pages_in_pool(given.pages, pool_pages=group.num_pages, where=where))
        if group.has_slots and part.stop > 1:
            raise PageError(
                f"{where}: {part.stop} slots for one request: hand in its slot once, when the state is final"
            )
        return part


def checked_pages(pages: ArrayLike, *, pool_pages: int, where: str) -> Pages:
    """A private copy of page numbers, all inside the pool and each there once.

    Raises:
        PageError: naming an offending page.
    """
    copy = pages_in_pool(pages, pool_pages=pool_pages, where=where)
    refuse_repeated(copy, where=where)
    return copy


def pages_in_pool(pages: ArrayLike, *, pool_pages: int, where: str) -> Pages:
    """A private copy of page numbers, all inside the pool.

    A scheduler waits for this: hence few calls, and such as are cheap also when their code is not in the cache.

    Raises:
        PageError: naming an offending page.
    """
    copy = _integers(pages, where)
    if not copy.size:
        return copy
    unsigned = copy.view(np.uint64)  # as unsigned numbers negative ones are too large as well: one look is enough
    if unsigned[unsigned.argmax()] >= pool_pages:  # argmax costs half of what max does
        position = int(np.flatnonzero((copy < 0) | (copy >= pool_pages))[0])
        page = np.asarray(pages)[position]
        raise PageError(f"{where}: page {page} at position {position} is out of range: the pool has {pool_pages} pages")
    return copy


def refuse_repeated(pages: Pages, *, where: str) -> None:
    """Refuses page numbers that are there more than once.

    Raises:
        PageError: naming the first.
    """
    if not pages.size:
        return
    highest = int(pages.max())
    if highest > _MOST_PAGES_MARKED:  # a peer may claim a pool that no memory could mark
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
    """A private copy of a flat sequence of integers."""
    if type(pages) is np.ndarray and pages.dtype is _INT64 and pages.ndim == 1:
        return np.array(pages, np.int64)
    try:
        given = np.asarray(pages)
    except ValueError as error:
        raise PageError(f"{where}: pages must be a flat sequence of integers: {error}") from error
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise PageError(f"{where}: pages must be a flat sequence of integers, not {given.dtype} of shape {given.shape}")
    return given.astype(np.int64)
