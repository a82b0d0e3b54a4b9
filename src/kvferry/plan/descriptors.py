"""Descriptor lists that a transport prepares once per peer, and the indices that select from them.

One row describes the same run in every page of the pool: an address, a length, and a page stride repeated as often as
there are pages. A list of n rows therefore stands for n x pages descriptors, numbered row by row, and a chunk is
selected by plain arithmetic on page numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import LayoutError
from kvferry.plan.lowering import Runs

DescriptorIndices = NDArray[np.int32]
RowArray = NDArray[np.uint64]
PageArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DescriptorRows:
    """Both sides' rows for the pieces that one source rank may send to one receiver.

    Attributes:
        source, destination: uint64 arrays of shape [rows, 5]: address, length in bytes, device index, page stride in
            bytes, number of pages.
        piece_rows: for every piece, the range of its rows.
    """

    source: RowArray
    destination: RowArray
    piece_rows: tuple[slice, ...]


def descriptor_rows(
    pieces: Sequence[Runs],
    *,
    source_pages: int,
    destination_pages: int,
    source_device: int,
    destination_device: int,
) -> DescriptorRows:
    """The rows of several pieces, one after the other.

    Args:
        source_pages, destination_pages: pages in either side's pool.
        source_device, destination_device: the device indices of either side's pool.

    Raises:
        LayoutError: if a side has more descriptors than a 32-bit index can number.
    """
    source, destination, ranges, count = [np.empty((0, 5), np.uint64)], [np.empty((0, 5), np.uint64)], [], 0
    for runs in pieces:
        source.append(_rows(runs.source, runs.length, source_device, runs.source_page_stride, source_pages))
        destination.append(
            _rows(
                runs.destination,
                runs.length,
                destination_device,
                runs.destination_page_stride,
                destination_pages,
            )
        )
        ranges.append(slice(count, count + len(runs.source)))
        count += len(runs.source)
    for side, pages in (("source", source_pages), ("receiver", destination_pages)):
        if count * pages > np.iinfo(np.int32).max:
            raise LayoutError(
                f"{count} runs a page in {pages} pages of the {side} are more descriptors than can be numbered "
                f"(2^31 - 1): use a smaller pool or larger pages with a layout that both sides share"
            )
    return DescriptorRows(np.concatenate(source), np.concatenate(destination), tuple(ranges))


def _rows(addresses: NDArray[np.uint64], length: int, device: int, page_stride: int, pages: int) -> RowArray:
    rows = np.empty((len(addresses), 5), np.uint64)
    rows[:, 0] = addresses
    rows[:, 1:] = length, device, page_stride, pages
    return rows


def select_rows(ranges: Sequence[slice]) -> NDArray[np.int32]:
    """The row numbers of several pieces, in order."""
    return np.concatenate([np.empty(0, np.int32), *(np.arange(r.start, r.stop, dtype=np.int32) for r in ranges)])


def descriptor_indices(rows: NDArray[np.int32], pages: PageArray, *, pool_pages: int) -> DescriptorIndices:
    """The indices of every given row in every given page.

    Row by row with the pages innermost, so that pages that follow each other in memory follow each other in the list,
    where the transport can merge them.

    Args:
        rows: row numbers, shape [rows].
        pages: page numbers, shape [pages].
        pool_pages: pages in the pool that the rows were made for.

    Returns:
        int32 array of shape [rows * pages].
    """
    indices: DescriptorIndices = np.add.outer(rows * np.int32(pool_pages), pages.astype(np.int32)).ravel()
    return indices
