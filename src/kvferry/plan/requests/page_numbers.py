"""Page numbers: as callers hand them in, checked, and as those of an open request travel and are kept.

Allocators hand out neighbours: most requests lie in few runs of pages that follow one another, and a run takes 16 bytes
however long it is. Where there are no such runs the plain numbers are smaller, at 8 bytes each. Either way the pages
are counted before any are written out: a run of 2**40 pages costs whoever reads it nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvferry.errors import MessageError, PageError
from kvferry.plan.routes import ascending_ranges

Pages = NDArray[np.int64]

MAX_PAGES = 2**21
"""Page numbers in one list."""

_NUMBER_BYTES = 8
_RUN_BYTES = 16
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


class PageNumbers(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Page numbers in the order of a request. Indexed by positions like an array, but never written out as a whole.

    Attributes:
        count: how many there are.
        data: the numbers, or where that is smaller their runs: first page and pages of each. int64 little-endian.

    Raises:
        MessageError: if the data is neither of so many pages.
    """

    count: Annotated[int, msgspec.Meta(ge=0, le=MAX_PAGES)] = 0
    data: Annotated[bytes, msgspec.Meta(max_length=_NUMBER_BYTES * MAX_PAGES)] = b""

    @classmethod
    def of(cls, pages: Pages) -> PageNumbers:
        """Packs page numbers. There may be no more than `MAX_PAGES`."""
        begins = np.flatnonzero(np.diff(pages, prepend=pages[:1] - 2) != 1)
        if _RUN_BYTES * len(begins) >= _NUMBER_BYTES * len(pages):
            return cls(len(pages), pages.astype("<i8", copy=False).tobytes())
        runs = np.stack([pages[begins], np.diff(begins, append=len(pages))], axis=1)
        return cls(len(pages), runs.astype("<i8").tobytes())

    def __post_init__(self) -> None:
        size = len(self.data)
        if size == _NUMBER_BYTES * self.count:
            return
        if size > _NUMBER_BYTES * self.count or size % _RUN_BYTES or not size:
            raise MessageError(
                f"{size} bytes of page numbers are neither {self.count} numbers of {_NUMBER_BYTES} bytes nor fewer "
                f"bytes of runs, {_RUN_BYTES} each"
            )
        _, counts = self._runs
        # One by one first, so that no sum overflows.
        if counts.min() < 1 or counts.max() > self.count or counts.sum() != self.count:
            raise MessageError(f"{len(counts)} runs of {counts.min()} to {counts.max()} pages are not {self.count}")

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, order: Pages) -> Pages:
        """Returns the page at each position, an array of non-negative integers. Writes out no more than lies between.

        Raises:
            IndexError: if there are not so many pages.
        """
        pages: Pages
        if not self._are_runs:
            pages = self._numbers[order]
            return pages
        if not len(order):
            return np.empty(0, np.int64)
        firsts, counts = self._runs
        stops = np.cumsum(counts)
        lowest, highest = order.min(), order.max()
        low, high = np.searchsorted(stops, [lowest, highest], side="right")
        before, behind = lowest - (stops[low] - counts[low]), stops[high] - 1 - highest
        firsts, counts = firsts[low : high + 1].copy(), counts[low : high + 1].copy()
        firsts[0] += before
        counts[0] -= before
        counts[-1] -= behind
        pages = ascending_ranges(firsts, counts)[order - lowest]
        return pages

    def numbers(self) -> Pages:
        """Writes all page numbers out."""
        return ascending_ranges(*self._runs) if self._are_runs else self._numbers

    def check(self, *, pool_pages: int, where: str) -> None:
        """Refuses page numbers that the pool does not have, or that appear more than once. Writes out no run.

        Raises:
            PageError: naming an offending page.
        """
        if not self._are_runs:
            refuse_out_of_range(self._numbers, pool_pages=pool_pages, where=where)
            refuse_repeated(self._numbers, where=where)
            return
        firsts, counts = self._runs
        outside = (firsts < 0) | (firsts > pool_pages - counts)
        if outside.any():
            run = int(outside.argmax())
            within = max(0, pool_pages - int(firsts[run])) if firsts[run] >= 0 else 0
            raise PageError(
                f"{where}: page {firsts[run] + within} at position {counts[:run].sum() + within} is out of range: the "
                f"pool has {pool_pages} pages"
            )
        ascending = np.argsort(firsts)
        begins, stops = firsts[ascending], (firsts + counts)[ascending]
        meets = begins[1:] < stops[:-1]
        if meets.any():
            page = begins[1:][meets.argmax()]
            times = np.count_nonzero((firsts <= page) & (page < firsts + counts))
            raise PageError(f"{where}: page {page} appears {times} times; a request holds each page once")

    @property
    def _are_runs(self) -> bool:
        return len(self.data) != _NUMBER_BYTES * self.count

    @property
    def _numbers(self) -> Pages:
        return np.frombuffer(self.data, "<i8").astype(np.int64, copy=False)

    @property
    def _runs(self) -> tuple[Pages, Pages]:
        """First page and number of pages of every run."""
        runs = self._numbers.reshape(-1, 2)
        return runs[:, 0], runs[:, 1]


def checked_pages(pages: ArrayLike, *, pool_pages: int, where: str) -> Pages:
    """Returns a private copy of page numbers, which lie in the pool and appear once each.

    Raises:
        PageError: naming an offending page.
    """
    copy = integers_of(pages, where)
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


def integers_of(pages: ArrayLike, where: str) -> Pages:
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
