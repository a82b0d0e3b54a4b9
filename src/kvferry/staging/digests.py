"""Digests of packed blocks: those that a prefill rank sends, and those that a decode rank finds in its pages.

The digest is XXH3 of 64 bits, over all of a row's bytes as they follow each other in packed order. It detects
accidents, such as a wrong address, a lost write or a flipped bit, and no deliberate changes: of wrong rows, one in
2^64 has the right digest by chance. Digests are not added up, so that no two faults cancel out, and bytes that have
changed places are a fault like any other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import xxhash

from kvferry.errors import ChecksumError, MessageError, SettingsError
from kvferry.layout import Device, MemoryKind, Region
from kvferry.plan import ElectedRoute, PairPlan, Unit
from kvferry.plan.packing import PackedPiece, Segment, Starts, digested_together
from kvferry.plan.requests.moved_blocks import (
    DIGEST_BYTES,
    UnitPlaces,
    bytes_of,
    moved_blocks,
    pack_units,
    row_bounds,
    row_bytes_of,
)
from kvferry.plan.requests.moves import Move
from kvferry.plan.requests.page_numbers import Pages
from kvferry.protocol.wire.messages import ChunkArrived, Digests, StagedSegment
from kvferry.staging.kernels import Kernels, array_at
from kvferry.staging.memory import StagingMemory
from kvferry.staging.resources import StagingResources


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The blocks of a segment in the receiver's pages.

    Attributes:
        starts: where each begins, in the order in which they are packed.
        piece: the piece that they are of.
        pages: the page of every unit; each index of the first axis has as many units.
    """

    starts: Starts
    piece: PackedPiece
    pages: Pages

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return len(self.starts) * self.piece.block_bytes


def resolved(segment: StagedSegment, unit: Unit, plan: PairPlan, places: UnitPlaces) -> Blocks:
    """Finds the blocks of a segment.

    Args:
        plan: what the writer may send.
        places: the places of the room's units.

    Raises:
        MessageError: if it is not what the writer may send, or not what the room requested.
    """
    pieces = plan.packed_pieces(unit)
    if segment.piece >= len(pieces):
        raise MessageError(f"piece {segment.piece} of {len(pieces)}")
    piece = pieces[segment.piece]
    if not segment.first_base < segment.stop_base <= piece.num_bases:
        raise MessageError(f"indices {segment.first_base} to {segment.stop_base} of {piece.num_bases}")
    units, pages = places.find(segment.units, plan.route(segment.piece), unit=unit)
    return Blocks(piece.destination.starts(segment.first_base, segment.stop_base, units, pages), piece, pages)


DIGESTED_BYTES = 2 << 20
"""How much is gathered and digested at a time, where bytes go directly: it stays in the processor's cache."""


def digests_of(address: int, num_bases: int, block_bytes: int, bounds: Sequence[int]) -> bytes:
    """Computes the digests of packed blocks, row by row.

    Args:
        address: where the first block is packed, in CPU memory.
        num_bases: indices of the first axis.
        block_bytes: bytes of every block.
        bounds: where rows begin and the last one ends, in units.
    """
    packed = array_at(address, (num_bases, bounds[-1] * block_bytes), "|u1")
    return b"".join(
        xxhash.xxh3_64_digest(np.ascontiguousarray(packed[:, first * block_bytes : stop * block_bytes]).data)
        for first, stop in pairwise(bounds)
    )


def segment_digests(segment: Segment, move: Move, piece: PackedPiece, address: int, *, row_bytes: int) -> Digests:
    """Computes the digests that a prefill rank sends with a segment packed at `address`; see `row_bytes_of`."""
    num_bases = segment.stop_base - segment.first_base
    bounds = row_bounds(
        move.destination_pages[segment.first_unit : segment.stop_unit],
        unit_bytes=num_bases * piece.block_bytes,
        row_bytes=row_bytes,
    )
    return Digests(row_bytes, digests_of(address, num_bases, piece.block_bytes, bounds.tolist()))


class DigestMemory:
    """Kernels, and CPU memory to gather blocks into for their digests. For any thread; each has memory of its own.

    Attributes:
        free: what nobody uses.
    """

    def __init__(self, resources: StagingResources, regions: Sequence[Region], device: Device) -> None:
        """Makes the kernels; memory is taken when it is first needed.

        Args:
            regions: the pool's memory.
            device: where it is.

        Raises:
            SettingsError: if the pool is in a GPU's memory.
        """
        if device.kind is not MemoryKind.DRAM:
            raise SettingsError(
                f"checksums (KVFERRY_CHECKSUMS of the decode side) are for pools in CPU memory, and this one is on "
                f"{device}: turn them off"
            )
        self.kernels: Kernels = resources.kernels(regions, device)
        self._resources = resources
        self._device = device
        # Guards the list: every thread that digests takes a piece, and gives it back.
        self._lock = threading.Lock()
        self.free: list[StagingMemory] = []

    @contextmanager
    def borrowed(self, num_bytes: int) -> Iterator[int]:
        """Lends memory of at least so many bytes while a `with` block lasts, by its address.

        Raises:
            SettingsError: if there is no such memory.
        """
        with self._lock:
            memory = self.free.pop() if self.free else None
        if memory is None or memory.num_bytes < num_bytes:
            memory = self._resources.allocate(max(num_bytes, DIGESTED_BYTES), self._device)
        try:
            yield memory.address
        finally:
            with self._lock:
                self.free.append(memory)

    def of_write(
        self, elected: Sequence[ElectedRoute], moves: Sequence[Move], pieces: Sequence[PackedPiece]
    ) -> tuple[StagedSegment, ...]:
        """Digests a direct write. Returns it as segments, which are never staged, with their digests.

        Args:
            elected: what the rank sends in the room; moves refer to it.
            pieces: every piece of the pair's plan, as it is packed in the unit of the write.

        Raises:
            SettingsError: if there is no memory to gather into.
            RegistrationError: if a page lies outside the pool.
        """
        loads = moved_blocks(elected, moves, pieces)
        row_bytes = row_bytes_of(bytes_of(loads))
        found = []
        for segment in digested_together(loads, DIGESTED_BYTES):
            move, piece = moves[segment.move], pieces[segment.piece]
            which = slice(segment.first_unit, segment.stop_unit)
            starts = piece.source.starts(
                segment.first_base, segment.stop_base, move.source_units[which], move.source_pages[which]
            )
            with self.borrowed(segment.num_bytes) as address:
                self.kernels.gather(starts, piece.source.shape, address)
                digests = segment_digests(segment, move, piece, address, row_bytes=row_bytes)
            units = pack_units(move.destination_numbers[which])
            found.append(StagedSegment(segment.piece, segment.first_base, segment.stop_base, units, digests))
        return tuple(found)


def verify_chunk(
    message: ChunkArrived,
    plan: PairPlan,
    places: UnitPlaces,
    memory: DigestMemory,
    *,
    is_wanted: Callable[[], bool],
) -> None:
    """Compares the digests of a chunk that was written directly with those of what is in the pages.

    Args:
        plan: what the writer may send.
        places: the places of the room's units.
        is_wanted: returns whether the result still matters.

    Raises:
        ChecksumError: if one differs, or there are none.
        MessageError: if the chunk is not what the writer may send, or not what the room requested.
        SettingsError: if there is no memory to gather into.
    """
    if not message.segments:
        raise ChecksumError(f"prefill rank {message.writer} sent no digests, though they were requested")
    for segment in message.segments:
        if not is_wanted():
            return
        blocks = resolved(segment, message.unit, plan, places)
        if blocks.num_bytes > max(DIGESTED_BYTES, blocks.piece.block_bytes):
            raise MessageError(f"{blocks.num_bytes} bytes to be digested at a time are more than {DIGESTED_BYTES}")
        with memory.borrowed(blocks.num_bytes) as address:
            verify_segment(
                segment, blocks, plan, places, memory.kernels, address, unit=message.unit, writer=message.writer
            )


def verify_segment(
    segment: StagedSegment,
    blocks: Blocks,
    plan: PairPlan,
    places: UnitPlaces,
    kernels: Kernels,
    address: int,
    *,
    unit: Unit,
    writer: int,
) -> None:
    """Gathers a segment's blocks from the pages that they have arrived in, and compares their digests.

    Args:
        blocks: where the blocks are.
        plan: as for `verify_chunk`.
        places: as for `verify_chunk`.
        address: where to gather them.
        writer: the engine rank that sent them.

    Raises:
        ChecksumError: if one differs, or there are none.
        MessageError: if there is not one digest for every row.
    """
    if segment.digests is None:
        raise ChecksumError(f"prefill rank {writer} sent no digests, though they were requested")
    num_bases, block_bytes = segment.stop_base - segment.first_base, blocks.piece.block_bytes
    row_bytes, sent = segment.digests.row_bytes, segment.digests.values
    bounds = row_bounds(blocks.pages, unit_bytes=num_bases * block_bytes, row_bytes=row_bytes).tolist()
    if len(sent) != DIGEST_BYTES * (len(bounds) - 1):
        raise MessageError(f"{len(sent)} bytes of digests for {len(bounds) - 1} rows")
    kernels.gather(blocks.starts, blocks.piece.destination.shape, address)
    found = digests_of(address, num_bases, block_bytes, bounds)
    if found == sent:
        return
    theirs, ours = (np.frombuffer(each, f"|V{DIGEST_BYTES}") for each in (sent, found))
    wrong = np.flatnonzero(theirs != ours).tolist()
    row = wrong[0]
    where = places.describe(segment.units, bounds[row], bounds[row + 1], plan.route(segment.piece), unit=unit)
    more = f"; so do {len(wrong) - 1} more of the {len(ours)} digests of this part" if len(wrong) > 1 else ""
    raise ChecksumError(
        f"{plan.describe(segment.piece, segment.first_base, segment.stop_base)} in {where}, written by prefill rank "
        f"{writer}: the digest of what is there, {ours[row].tobytes().hex()}, differs from that of what was sent, "
        f"{theirs[row].tobytes().hex()}{more}"
    )
