"""From selected descriptors to the bytes that they copy: for transports that move bytes themselves.

Such a transport keeps the rows of a descriptor list as the list's handle.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import TransportError
from kvferry.plan.descriptors import DescriptorIndices, RowArray
from kvferry.transport.base import PreparedList, check_counts


class Copies(NamedTuple):
    """What one write copies, element by element.

    Attributes:
        sources: the addresses that are read.
        destinations: the addresses that are written.
        lengths: in bytes.
    """

    sources: NDArray[np.uint64]
    destinations: NDArray[np.uint64]
    lengths: NDArray[np.uint64]


def copies_between(
    local: PreparedList, local_indices: DescriptorIndices, remote: PreparedList, remote_indices: DescriptorIndices
) -> Copies:
    """Returns what a write from the selected local descriptors to the selected remote ones copies.

    Raises:
        TransportError: if one side selects more descriptors than the other, longer ones, or some that there are not.
    """
    check_counts(local_indices, remote_indices)
    sources, lengths = _expand(local, local_indices)
    destinations, remote_lengths = _expand(remote, remote_indices)
    if not np.array_equal(lengths, remote_lengths):
        raise TransportError("local and remote descriptors differ in length")
    return Copies(sources, destinations, lengths)


def _expand(prepared: PreparedList, indices: DescriptorIndices) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Returns addresses and lengths of the selected descriptors."""
    rows: RowArray = prepared.handle
    if indices.min() < 0 or indices.max() >= prepared.count:
        raise TransportError(f"descriptor indices [{indices.min()}, {indices.max()}] exceed a list of {prepared.count}")
    starts = np.concatenate([[0], np.cumsum(rows[:, 4])]).astype(np.int64)
    row = np.searchsorted(starts, indices, side="right") - 1
    element = (indices - starts[row]).astype(np.uint64)
    return rows[row, 0] + element * rows[row, 3], rows[row, 1]
