"""The page numbers of an open request, as they travel and are kept.

Allocators hand out neighbours: most requests lie in few runs of pages that follow one another, and a run takes 16 bytes
however long it is. Where there are no such runs the plain numbers are smaller, at 8 bytes each. Either way the pages
are counted before any are written out: a run of 2**40 pages costs whoever reads it nothing.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from kvferry.errors import MessageError, PageError
from kvferry.plan.requests.chunks import Pages, refuse_out_of_range, refuse_repeated
from kvferry.plan.routes import ascending_ranges

MAX_PAGES = 2**21
"""Page numbers in one list."""

_NUMBER_BYTES = 8
_RUN_BYTES = 16


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
