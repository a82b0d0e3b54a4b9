"""The unit of work: one part of a request's pages, and the rules for handing parts in."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvferry.errors import ChunkError, PageError

Pages = NDArray[np.int64]

_INT64 = np.dtype(np.int64)


class Chunk(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One part of a request.

    Attributes:
        number: counts from 0 in the order of submission.
        start: the position of its first page among the request's pages.
        pages: page numbers in the prefill rank's pool, int64.
        is_last: whether the request ends with this chunk.
        aux: the request's aux data, with the last chunk of the rank that sends it.
    """

    number: int
    start: int
    pages: Pages
    is_last: bool
    aux: bytes | None = None

    @property
    def stop(self) -> int:
        """The position after its last page."""
        return self.start + len(self.pages)


class ChunkSequence:
    """Numbers the chunks of one request and refuses those that break the order. Owned by the caller's thread."""

    def __init__(self, room: int, pool_pages: int) -> None:
        self._room = room
        self._where = f"room {room}"
        self._pool_pages = pool_pages
        self._next_number = 0
        self._next_page = 0
        self._complete = False

    @property
    def is_complete(self) -> bool:
        """Whether the last chunk was made."""
        return self._complete

    def chunk(self, pages: ArrayLike, *, start: int | None, is_last: bool, aux: bytes | None) -> Chunk:
        """Checks and numbers the next chunk. A refused chunk changes nothing.

        Args:
            pages: page numbers of the chunk.
            start: position of the first page in the request; None continues where the chunk before ended. The first
                chunk may start behind 0 if the decode side holds what comes before.

        Raises:
            ChunkError: after the last chunk, or if the chunk does not continue the one before.
            PageError: if page numbers are not integers or out of range.
        """
        if self._complete:
            raise ChunkError(f"room {self._room}: a chunk after the last one; open a new room for a new request")
        begin = self._next_page if start is None else start
        if begin != self._next_page and (self._next_number > 0 or begin < 0):
            raise ChunkError(
                f"room {self._room}: a chunk starts at page {begin} of the request where page {self._next_page} is next"
            )
        chunk = Chunk(
            number=self._next_number,
            start=begin,
            pages=pages_in_pool(pages, pool_pages=self._pool_pages, where=self._where),
            is_last=is_last,
            aux=aux,
        )
        self._next_number += 1
        self._next_page = chunk.stop
        self._complete = is_last
        return chunk


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
    seen = np.zeros(int(pages.max()) + 1, np.bool_)
    seen[pages] = True
    if np.count_nonzero(seen) != pages.size:
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
