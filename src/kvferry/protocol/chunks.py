"""The unit of work: one part of a request's pages, and the rules for handing parts in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvferry.errors import ChunkError, PageError

Pages = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
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
            PageError: if page numbers are not integers, out of range or repeated.
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
            pages=checked_pages(pages, pool_pages=self._pool_pages, where=f"room {self._room}"),
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
    try:
        given = np.asarray(pages)
    except ValueError as error:
        raise PageError(f"{where}: pages must be a flat sequence of integers: {error}") from error
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise PageError(f"{where}: pages must be a flat sequence of integers, not {given.dtype} of shape {given.shape}")
    copy = given.astype(np.int64, copy=True)
    if copy.size == 0:
        return copy
    # The scheduler waits for this. As unsigned numbers negative ones are too large as well, so that one look is enough,
    # and argmax costs half of what max does when its code is not in the cache.
    unsigned = copy.view(np.uint64)
    if unsigned[unsigned.argmax()] >= pool_pages:
        position = int(np.flatnonzero((copy < 0) | (copy >= pool_pages))[0])
        raise PageError(
            f"{where}: page {given[position]} at position {position} is out of range: the pool has {pool_pages} pages"
        )
    seen = np.zeros(pool_pages, np.bool_)
    seen[copy] = True
    if np.count_nonzero(seen) != copy.size:
        numbers, counts = np.unique(copy, return_counts=True)
        first = int(np.flatnonzero(counts > 1)[0])
        raise PageError(f"{where}: page {numbers[first]} appears {counts[first]} times; a request holds each page once")
    return copy
