"""Which bytes a digest covers. Both sides derive it alike, from a segment's description and the receiver's pages.

A segment's blocks are packed index by index of the first axis, unit by unit, and packed they are the same bytes on both
sides, however either side lays them out. A row is the part of such a segment that goes to one page of the receiver,
index after index. Each row has a digest. Where pages are small, several that follow each other make one row, so that
digests are never much to send.
"""

from __future__ import annotations

import numpy as np

from kvferry.plan.requests.chunks import Pages

DIGEST_BYTES = 8
_LEAST_ROW_BYTES = 512
_MOST_ROWS = 1 << 16


def row_bytes_of(num_bytes: int) -> int:
    """Returns the least bytes of a row in a message about `num_bytes`: 65,536 rows take half a mebibyte."""
    return max(_LEAST_ROW_BYTES, -(-num_bytes // _MOST_ROWS))


def row_bounds(pages: Pages, *, unit_bytes: int, row_bytes: int) -> Pages:
    """Returns where rows begin, and where the last one ends, counted in units.

    Args:
        pages: the page of every unit on the receiver.
        unit_bytes: bytes of a unit, of all indices of the first axis.
        row_bytes: bytes that a row has at least on average, unless it is the only one.
    """
    cuts = np.flatnonzero(np.diff(pages)) + 1
    units = -(-row_bytes // unit_bytes)
    if units > 1 and len(cuts):
        _, firsts = np.unique(cuts // units, return_index=True)
        cuts = cuts[firsts]
        cuts = cuts[cuts >= units]
    return np.concatenate([np.zeros(1, np.int64), cuts, np.array([len(pages)], np.int64)])
