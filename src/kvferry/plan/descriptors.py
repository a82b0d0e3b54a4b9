"""Descriptor lists that a transport prepares once per peer, and the indices that select from them.

One row describes the same run in every page of a pool: an address, a length, and a page stride repeated as often as
there are pages. A list of rows therefore stands for many descriptors, numbered row by row, and a chunk is selected by
plain arithmetic on page numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import LayoutError
from kvferry.layout import Shard
from kvferry.plan.lowering import Addresses, PageSteps, Runs

DescriptorIndices = NDArray[np.int32]
RowArray = NDArray[np.uint64]
PageArray = NDArray[np.int64]

_MOST_DESCRIPTORS = int(np.iinfo(np.int32).max)
_MOST_ROWS = 1 << 22  # 160 MiB


@dataclass(frozen=True, slots=True, eq=False)
class SideRows:
    """One side's descriptors for the pieces that one source rank may send to one receiver.

    Attributes:
        rows: uint64 array of shape [rows, 5]: address, length in bytes, device index, page stride in bytes, pages.
        firsts: for every piece, the number of the descriptor that stands for page 0, by run and granule: int32 array of
            shape [runs, granules].
    """

    rows: RowArray
    firsts: tuple[DescriptorIndices, ...]


@dataclass(frozen=True, slots=True, eq=False)
class DescriptorRows:
    """Both sides' descriptors; those of a piece pair up, run by run."""

    source: SideRows
    destination: SideRows


def descriptor_rows(pieces: Sequence[tuple[Runs, Shard, Shard]]) -> DescriptorRows:
    """The rows of several pieces, one after the other.

    Args:
        pieces: for every piece its runs, and the source's and the receiver's shard that they are in.

    Raises:
        LayoutError: if a side has more descriptors than a 32-bit index can number, or too many rows to prepare.
    """
    # Counted before anything is made: a peer decides how many there are.
    _check_counts("source", [(runs.count * runs.source_steps.granules, shard) for runs, shard, _ in pieces])
    _check_counts("receiver", [(runs.count * runs.destination_steps.granules, shard) for runs, _, shard in pieces])
    return DescriptorRows(
        _side_rows([(runs.source, runs.length, runs.source_steps, shard) for runs, shard, _ in pieces]),
        _side_rows([(runs.destination, runs.length, runs.destination_steps, shard) for runs, _, shard in pieces]),
    )


def _check_counts(side: str, pieces: Sequence[tuple[int, Shard]]) -> None:
    """Refuses too many rows, given how many each piece has for one page."""
    rows = sum(count for count, _ in pieces)
    descriptors = sum(count * shard.paging.num_pages for count, shard in pieces)
    if rows > _MOST_ROWS or descriptors > _MOST_DESCRIPTORS:
        raise LayoutError(
            f"{rows} runs a page of the {side}, {descriptors} in all pages, are more than can be prepared ("
            f"{_MOST_ROWS} and {_MOST_DESCRIPTORS}): use a smaller pool, or larger pages in a layout that both sides "
            "share"
        )


def _side_rows(pieces: Sequence[tuple[Addresses, int, PageSteps, Shard]]) -> SideRows:
    rows, firsts, count = [np.empty((0, 5), np.uint64)], [], 0
    for starts, length, steps, shard in pieces:
        pages = shard.paging.num_pages
        granules = np.arange(steps.granules, dtype=np.uint64) * np.uint64(steps.granule_stride)
        of_piece = np.empty((len(starts) * steps.granules, 5), np.uint64)
        of_piece[:, 0] = np.add.outer(starts, granules).ravel()
        of_piece[:, 1:] = length, shard.device.index, steps.page_stride, pages
        rows.append(of_piece)
        numbers = count + np.arange(len(of_piece), dtype=np.int64) * pages
        firsts.append(numbers.astype(np.int32).reshape(len(starts), steps.granules))
        count += len(of_piece) * pages
    return SideRows(np.concatenate(rows), tuple(firsts))


def descriptor_indices(firsts: DescriptorIndices, granules: PageArray, pages: PageArray) -> DescriptorIndices:
    """The indices of every run in every given granule of a page.

    Run by run with the granules innermost, so that those that follow each other in memory follow each other in the
    list, where the transport can merge them.

    Args:
        firsts: the descriptors of page 0, shape [runs, granules in a page].
        granules: which granule of its page, shape [granules].
        pages: the page of each, shape [granules].

    Returns:
        int32 array of shape [runs * granules].
    """
    by_run = firsts if firsts.shape[1] == 1 else firsts[:, granules]
    indices: DescriptorIndices = (by_run + pages.astype(np.int32)).ravel()
    return indices
