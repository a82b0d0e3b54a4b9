"""Descriptor lists that a transport prepares once per peer, and the indices that select from them.

One row describes the same run in every page of a pool: an address, a length, and a stride repeated as often as there
are pages, or units of pages where those lie one behind the other. A list of rows therefore stands for many descriptors,
numbered row by row, and a chunk is selected by plain arithmetic on page numbers.

Transports merge selected descriptors that follow each other in the list and in the memory of both sides. `Selector`
therefore orders them by source address, and keeps what is merged below a limit: a few giant descriptors would leave
most of a transport's threads without work.
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

MERGED_BYTES = 1 << 20
"""Most bytes that neighbours are merged into: large enough that a descriptor costs nothing beside its bytes, small
enough that all threads of a transport get some of any large write."""

_MOST_DESCRIPTORS = int(np.iinfo(np.int32).max)
_MOST_ROWS = 1 << 22  # 160 MiB


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """How one side's descriptors of a piece are numbered.

    The descriptor of a run in a unit of a page is `firsts[run] + unit * unit_step + page * page_step`.

    Attributes:
        firsts: every run's descriptor in unit 0 of page 0, shape [runs].
    """

    firsts: DescriptorIndices
    unit_step: int
    page_step: int

    def indices(self, units: PageArray, pages: PageArray) -> DescriptorIndices:
        """Returns the numbers of the descriptors of every run in the given units, run by run.

        Args:
            units: which unit of its page, shape [units].
            pages: the page of each, shape [units].

        Returns:
            Shape [runs * units], the units innermost.
        """
        offsets = (units * self.unit_step + pages * self.page_step).astype(np.int32)
        return np.add.outer(self.firsts, offsets).ravel()


@dataclass(frozen=True, slots=True, eq=False)
class PieceNumbers:
    """How the descriptors of a piece are numbered; those of both sides pair up, run by run.

    Attributes:
        length: bytes of each descriptor.
    """

    source: Numbers
    destination: Numbers
    length: int

    def part(self, first_base: int, stop_base: int, num_bases: int) -> PieceNumbers:
        """Returns those of some indices of the piece's first axis.

        Args:
            first_base: the first index.
            stop_base: the one after the last.
            num_bases: how many the piece has.
        """
        if (first_base, stop_base) == (0, num_bases):
            return self
        runs = len(self.source.firsts) // num_bases  # index by index of the first axis
        which = slice(first_base * runs, stop_base * runs)
        source, destination = (
            Numbers(each.firsts[which], each.unit_step, each.page_step) for each in (self.source, self.destination)
        )
        return PieceNumbers(source, destination, self.length)


@dataclass(frozen=True, slots=True, eq=False)
class DescriptorRows:
    """The descriptors of the pieces that one source rank may send to one receiver.

    Attributes:
        source: a uint64 array of shape [rows, 5]: address, length in bytes, device index, stride in bytes, count.
        destination: the same for the destination side.
        pieces: how the descriptors of every piece are numbered.
    """

    source: RowArray
    destination: RowArray
    pieces: tuple[PieceNumbers, ...]


def descriptor_rows(pieces: Sequence[tuple[Runs, Shard, Shard]]) -> DescriptorRows:
    """Makes the rows of several pieces, one after the other.

    Args:
        pieces: for every piece its runs, and the source's and the receiver's shard that they are in.

    Raises:
        LayoutError: if a side has more descriptors than a 32-bit index can number, or too many rows to prepare.
    """
    check_descriptors(pieces)  # before any row is made, since a peer decides how many there are
    source, here = _side_rows([(runs.source, runs.length, runs.source_steps, shard) for runs, shard, _ in pieces])
    destination, there = _side_rows(
        [(runs.destination, runs.length, runs.destination_steps, shard) for runs, _, shard in pieces]
    )
    lengths = [runs.length for runs, _, _ in pieces]
    return DescriptorRows(source, destination, tuple(map(PieceNumbers, here, there, lengths)))


def check_descriptors(pieces: Sequence[tuple[Runs, Shard, Shard]]) -> None:
    """Checks that the rows of several pieces can be made, without making them.

    Args:
        pieces: as for `descriptor_rows`.

    Raises:
        LayoutError: if a side has more descriptors than a 32-bit index can number, or too many rows to prepare.
    """
    _check_counts("source", [(runs.count, runs.source_steps, shard) for runs, shard, _ in pieces])
    _check_counts("receiver", [(runs.count, runs.destination_steps, shard) for runs, _, shard in pieces])


def _rows_of_run(steps: PageSteps) -> int:
    """Returns how many rows a run takes: one if units go on from page to page as within one, else one per unit."""
    return 1 if steps.page_stride == steps.units * steps.unit_stride else steps.units


def _check_counts(side: str, pieces: Sequence[tuple[int, PageSteps, Shard]]) -> None:
    """Refuses too many rows, given how many runs each piece has in a unit."""
    rows = sum(count * _rows_of_run(steps) for count, steps, _ in pieces)
    descriptors = sum(count * steps.units * shard.paging.num_pages for count, steps, shard in pieces)
    if rows > _MOST_ROWS or descriptors > _MOST_DESCRIPTORS:
        raise LayoutError(
            f"{rows} runs a page of the {side}, {descriptors} in all pages, are more than can be prepared ("
            f"{_MOST_ROWS} and {_MOST_DESCRIPTORS}): use a smaller pool, or larger pages in a layout that both sides "
            "share"
        )


def _side_rows(pieces: Sequence[tuple[Addresses, int, PageSteps, Shard]]) -> tuple[RowArray, list[Numbers]]:
    rows: list[RowArray] = [np.empty((0, 5), np.uint64)]
    numbers: list[Numbers] = []
    count = 0
    for starts, length, steps, shard in pieces:
        pages, per_run = shard.paging.num_pages, _rows_of_run(steps)
        goes_on = per_run < steps.units
        stride, repeated = (steps.unit_stride, pages * steps.units) if goes_on else (steps.page_stride, pages)
        units = np.arange(per_run, dtype=np.uint64) * np.uint64(steps.unit_stride)
        of_piece = np.empty((len(starts) * per_run, 5), np.uint64)
        of_piece[:, 0] = np.add.outer(starts, units).ravel()
        of_piece[:, 1:] = length, shard.device.index, stride, repeated
        rows.append(of_piece)
        in_run = pages * steps.units
        firsts = (count + np.arange(len(starts), dtype=np.int64) * in_run).astype(np.int32)
        numbers.append(Numbers(firsts, 1, steps.units) if goes_on else Numbers(firsts, pages, 1))
        count += len(starts) * in_run
    return np.concatenate(rows), numbers


@dataclass(frozen=True, slots=True, eq=False)
class Selector:
    """Selects descriptors of pieces whose units are numbered alike, as many on both sides and in the same order.

    Attributes:
        source: of the pieces' runs, one piece after the other.
        destination: likewise.
        merged_units: most neighbours that may be merged into one descriptor.
    """

    source: Numbers
    destination: Numbers
    merged_units: int

    def select(
        self,
        source_units: PageArray,
        source_pages: PageArray,
        destination_units: PageArray,
        destination_pages: PageArray,
    ) -> tuple[DescriptorIndices, DescriptorIndices]:
        """Returns the descriptors of every run in every given unit, for the source and for the destination.

        Args:
            source_units: which unit of its page each is.
            source_pages: the page of each; no pair of the two occurs twice.
            destination_units: which unit of its page the same unit becomes.
            destination_pages: the page that it goes to.
        """
        order = merging_order(source_units, source_pages, self.merged_units)
        return (
            self.source.indices(source_units[order], source_pages[order]),
            self.destination.indices(destination_units[order], destination_pages[order]),
        )


def merging_order(units: PageArray, pages: PageArray, most: int) -> NDArray[np.intp]:
    """Returns the order in which neighbours are merged into descriptors of at most `most` units.

    Units that are neighbours on both sides follow each other when they are sorted by one side's memory, whatever the
    order of the pages was. They are cut into blocks, and the blocks stand in reverse, so that none goes on where the
    one before it in the list ends.

    Args:
        units: which unit of its page each is, on one side.
        pages: the page of each.
    """
    if not len(units):
        return np.empty(0, np.intp)
    places = pages * (int(units.max()) + 1) + units
    order = np.argsort(places)
    if len(order) <= most:
        return order
    starts = np.arange(0, len(order), most)[::-1]
    blocks = np.add.outer(starts, np.arange(most)).ravel()
    return order[blocks[blocks < len(order)]]


def selectors(
    pieces: Sequence[PieceNumbers], chosen: Sequence[int], *, merged_bytes: int = MERGED_BYTES
) -> tuple[Selector, ...]:
    """Makes the selectors of some pieces of one route, once for all chunks between the two ranks.

    Args:
        pieces: all pieces of the pair, or parts of them.
        chosen: the numbers of those to select.
        merged_bytes: most bytes of a merged descriptor.
    """
    alike: dict[tuple[int, ...], list[PieceNumbers]] = {}
    for piece in (pieces[number] for number in chosen):
        here, there, most = piece.source, piece.destination, max(1, merged_bytes // piece.length)
        key = here.unit_step, here.page_step, there.unit_step, there.page_step, most
        alike.setdefault(key, []).append(piece)
    return tuple(
        Selector(joined([each.source for each in members]), joined([each.destination for each in members]), most)
        for (*_, most), members in alike.items()
    )


def joined(pieces: Sequence[Numbers]) -> Numbers:
    """Joins the numbers of pieces with equal steps."""
    return Numbers(np.concatenate([each.firsts for each in pieces]), pieces[0].unit_step, pieces[0].page_step)
