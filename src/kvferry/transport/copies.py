"""From descriptor rows and indices to plain copies: for transports that are told addresses, and know no descriptors.

A row stands for many descriptors, and a write selects some of either side's by their numbers. What it copies is as many
ranges of bytes, which are computed here some thousands at a time, joined where both sides go on, and handed out in
batches as small as a transport's library takes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import TransportError
from kvferry.plan.descriptors import DescriptorIndices, RowArray
from kvferry.transport.base import PreparedList, check_counts

DIFFERENT_LENGTHS = "local and remote descriptors differ in length"

AT_A_TIME = 1 << 16
"""Descriptors that are expanded at a time: what is needed beside the result stays below some megabytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """What one write copies, range by range. Iterating gives (source, destination, length) as plain integers.

    Attributes:
        sources: the addresses that are read.
        destinations: the addresses that are written.
        lengths: in bytes.
    """

    sources: NDArray[np.uint64]
    destinations: NDArray[np.uint64]
    lengths: NDArray[np.uint64]

    @staticmethod
    def one(source: int, destination: int, length: int) -> Copies:
        """Makes the copy of a single range."""
        return Copies(*(np.array([number], np.uint64) for number in (source, destination, length)))

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        return zip(self.sources.tolist(), self.destinations.tolist(), self.lengths.tolist(), strict=True)

    @property
    def total_bytes(self) -> int:
        """Bytes of all ranges together."""
        return int(self.lengths.sum())

    def merged(self) -> Copies:
        """Joins ranges that follow each other in the list and in the memory of both sides."""
        if not len(self):
            return self
        goes_on = self.sources[:-1] + self.lengths[:-1] == self.sources[1:]
        goes_on &= self.destinations[:-1] + self.lengths[:-1] == self.destinations[1:]
        firsts = np.concatenate([[0], np.flatnonzero(~goes_on) + 1])
        return Copies(self.sources[firsts], self.destinations[firsts], np.add.reduceat(self.lengths, firsts))

    def part(self, first: int, count: int) -> Copies:
        """Returns so many ranges, from one on."""
        which = slice(first, first + count)
        return Copies(self.sources[which], self.destinations[which], self.lengths[which])

    def cut_at(self, sources: NDArray[np.uint64], destinations: NDArray[np.uint64]) -> Copies:
        """Cuts ranges that cross a border on either side, for a library that wants each within one registered region.

        Args:
            sources: addresses on the side that is read, ascending: a range may end there or begin, and not go on.
            destinations: on the side that is written.
        """
        cut = self
        for borders, addresses in ((sources, "sources"), (destinations, "destinations")):
            starts = getattr(cut, addresses)
            first = np.searchsorted(borders, starts, side="right")
            after = np.searchsorted(borders, starts + cut.lengths, side="left")
            cut = cut._with_cuts(starts, borders, first, after) if (first < after).any() else cut
        return cut

    def _with_cuts(
        self,
        starts: NDArray[np.uint64],
        borders: NDArray[np.uint64],
        first: NDArray[np.int64],
        after: NDArray[np.int64],
    ) -> Copies:
        """Returns the ranges cut at those borders, numbered from `first` to before `after` for each range."""
        counts = after - first + 1
        whole = np.repeat(np.arange(len(self)), counts)
        number = np.arange(len(whole)) - np.repeat(np.cumsum(counts) - counts, counts)
        ends = starts + self.lengths
        begin = np.where(number == 0, starts[whole], borders[np.maximum(first[whole] + number - 1, 0)])
        last = np.minimum(first[whole] + number, len(borders) - 1)
        end = np.where(number == counts[whole] - 1, ends[whole], borders[last])
        moved = begin - starts[whole]
        return Copies(self.sources[whole] + moved, self.destinations[whole] + moved, end - begin)

    def batches(self, most: int) -> Iterator[Copies]:
        """Yields all ranges in their order, at most so many at a time."""
        for start in range(0, len(self), most):
            yield self.part(start, most)


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """A prepared list's rows, and the number of the first descriptor of each."""

    rows: RowArray
    firsts: NDArray[np.int64]

    def expanded(self, indices: DescriptorIndices) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Returns addresses and lengths of the selected descriptors."""
        row = np.searchsorted(self.firsts, indices, side="right") - 1
        element = (indices - self.firsts[row]).astype(np.uint64)
        return self.rows[row, 0] + element * self.rows[row, 3], self.rows[row, 1]


def list_of_rows(rows: RowArray, peer: str | None) -> PreparedList:
    """Prepares a list that `copies_between` can read, from rows that were checked. Keeps a copy of them.

    Args:
        rows: as `Transport.prepare` is given them.
        peer: whose memory they describe; None for our own.
    """
    counts = rows[:, 4].astype(np.int64)
    handle = _Rows(rows.copy(), np.cumsum(counts) - counts)
    return PreparedList(peer, handle, len(rows), int(counts.sum()))


def copies_between(
    local: PreparedList,
    local_indices: DescriptorIndices,
    remote: PreparedList,
    remote_indices: DescriptorIndices,
    *,
    merges: bool = True,
) -> Copies:
    """Returns what a write from the selected local descriptors to the selected remote ones copies.

    Args:
        local: made by `list_of_rows`, as the remote one.
        merges: whether ranges that go on on both sides are joined.

    Raises:
        TransportError: if one side selects more descriptors than the other, longer ones, or some that there are not.
    """
    check_selection(local, local_indices, remote, remote_indices)
    parts = []
    for start in range(0, len(local_indices), AT_A_TIME):
        which = slice(start, start + AT_A_TIME)
        sources, lengths = local.handle.expanded(local_indices[which])
        destinations, remote_lengths = remote.handle.expanded(remote_indices[which])
        if not np.array_equal(lengths, remote_lengths):
            raise TransportError(DIFFERENT_LENGTHS)
        part = Copies(sources, destinations, lengths)
        parts.append(part.merged() if merges else part)
    if len(parts) == 1:
        return parts[0]
    whole = Copies(
        np.concatenate([part.sources for part in parts]),
        np.concatenate([part.destinations for part in parts]),
        np.concatenate([part.lengths for part in parts]),
    )
    return whole.merged() if merges else whole  # once more, where one part ends and the next begins


def check_selection(
    local: PreparedList, local_indices: DescriptorIndices, remote: PreparedList, remote_indices: DescriptorIndices
) -> None:
    """Refuses a selection of which one side has more descriptors than the other, or some that there are not.

    Raises:
        TransportError: naming them.
    """
    check_counts(local_indices, remote_indices)
    _check_range(local, local_indices)
    _check_range(remote, remote_indices)


def _check_range(prepared: PreparedList, indices: DescriptorIndices) -> None:
    if indices.min() < 0 or indices.max() >= prepared.count:
        raise TransportError(f"descriptor indices [{indices.min()}, {indices.max()}] exceed a list of {prepared.count}")
