"""What lies in the pools: bytes that follow from the place of an element in its request, whatever rank holds it where.

A number of eight bytes is the sum of three random ones, for its layer, its token and its place in the token, so that
bytes that are right but in a wrong place differ from those that belong there.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.applications.bench.options import BenchOptions
from kvferry.applications.bench.pool import Pool
from kvferry.layout import Interval, Shard, ShardedComponent
from kvferry.pools.places import TakenPages, entries_kept
from kvferry.pools.pool import POISON

Numbers = NDArray[np.unsignedinteger[Any]]

_BLOCK_BYTES = 256 << 10
"""Filled and compared at a time: in the processor's cache, and so little that the allocator keeps it. At 1 MiB, which
it gives back to the system every time, checking took four times as long."""

_LAYER, _TOKEN, _PLACE = (number << 56 for number in range(3))
_REQUEST_SHIFT, _COMPONENT_SHIFT = 32, 40


@dataclass(frozen=True, slots=True)
class Checked:
    """What a check found.

    Attributes:
        checked_bytes: bytes that were compared, those of no request included.
        wrong_bytes: bytes that were not as they should be.
        first_wrong: where the first of them lies, in words; None if there is none.
    """

    checked_bytes: int = 0
    wrong_bytes: int = 0
    first_wrong: str | None = None

    def __add__(self, other: Checked) -> Checked:
        return Checked(
            self.checked_bytes + other.checked_bytes,
            self.wrong_bytes + other.wrong_bytes,
            self.first_wrong or other.first_wrong,
        )


def write(pool: Pool, options: BenchOptions, *, threads: int = 1) -> None:
    """Fills the pages of every request."""

    def write_part(part: _Part) -> None:
        for request in range(options.requests):
            for pages, positions in part.blocks(pool.requests[request][part.shard.group]):
                expected = part.expected(request, positions)
                part.array[pages] = expected.reshape(len(pages), -1, *expected.shape[1:])

    with ThreadPoolExecutor(threads) as executor:
        list(executor.map(write_part, _parts(pool, options)))
    pool.push()


def check(pool: Pool, options: BenchOptions, *, passes: int = 1, threads: int = 1) -> Checked:
    """Compares what `host` has in the pages of every request with what belongs there, and all others with poison.

    Args:
        passes: how often transfers went over the pages of all requests; see `BenchOptions.source_of`.
    """
    last_pass = (passes - 1) * options.requests

    def check_part(part: _Part) -> Checked:
        found, group = Checked(), part.shard.group
        for request in range(options.requests):
            source = options.source_of(last_pass + request)
            for pages, positions in part.blocks(pool.requests[request][group]):
                found += part.compared(source, pages, positions)
        guard = part.array[pool.untaken()[group]]
        damaged = int(np.count_nonzero(np.ascontiguousarray(guard).view(np.uint8) != POISON))
        return found + Checked(guard.nbytes, damaged, f"{part.name}, a page of no request" if damaged else None)

    with ThreadPoolExecutor(threads) as executor:
        return sum(executor.map(check_part, _parts(pool, options)), Checked())


def damage(pool: Pool, options: BenchOptions) -> None:
    """Changes one byte of the last request that the pool holds something of, in `host`."""
    part = list(_parts(pool, options))[-1]
    taken = pool.requests[-1][part.shard.group]
    page, inside = divmod(part.kept.stop - 1, part.array.shape[1])
    part.array[taken.pages[page - taken.start], inside].flat[-1] ^= 1


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """One layer of one shard.

    Attributes:
        kept: positions of what a request needs of it.
        array: its pages, [page, token, ..., number].
        base: the layer's number in the sum.
        places: those of the places in a token, [..., number].
    """

    name: str
    shard: Shard
    kept: Interval
    array: Numbers
    base: np.uint64
    places: NDArray[np.uint64]

    def blocks(self, taken: TakenPages) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """A request's pages a few at a time, with the positions of their tokens."""
        step = max(1, _BLOCK_BYTES // (self.array[0].size * self.array.itemsize))
        page_tokens = self.array.shape[1]
        for start in range(0, len(taken.pages), step):
            block = taken.pages[start : start + step]
            first = (taken.start + start) * page_tokens
            yield block, np.arange(first, first + len(block) * page_tokens)

    def expected(self, request: int, positions: NDArray[np.int64]) -> Numbers:
        """The numbers at some positions of a request, [position, ..., number]."""
        tokens = _random(positions.astype(np.uint64) + np.uint64(_TOKEN + (request << _REQUEST_SHIFT))) + self.base
        numbers = tokens.reshape(-1, *(1 for _ in self.places.shape)) + self.places
        if self.array.itemsize < 8:
            numbers = _random(numbers)  # in few bytes the sums of two tokens would often differ by nothing
        return numbers.astype(self.array.dtype, copy=False)

    def compared(self, request: int, pages: NDArray[np.int64], positions: NDArray[np.int64]) -> Checked:
        """What a check finds in some pages, which should hold these positions of a request."""
        got = self.array[pages].reshape(len(positions), *self.array.shape[2:])
        if positions[0] < self.kept.start or positions[-1] >= self.kept.stop:
            wanted = (positions >= self.kept.start) & (positions < self.kept.stop)
            got, positions = got[wanted], positions[wanted]
        wrong = _differences(got, self.expected(request, positions))
        place = f"{self.name} of request {request}, token {positions[wrong[0]]}" if len(wrong) else None
        return Checked(got.nbytes, len(wrong), place)


def _parts(pool: Pool, options: BenchOptions) -> Iterator[_Part]:
    """Every layer of every shard of a rank that holds something."""
    described = {sharded.component.name: (index, sharded) for index, sharded in enumerate(options.model.components)}
    for shard in pool.layout.shards:
        index, sharded = described[shard.component.name]
        lane_bytes = _lane_bytes(sharded)
        for row, layer in enumerate(range(shard.box[0].start, shard.box[0].stop)):
            array = pool.layer(shard, row, lane_bytes)
            if array.size:
                yield _Part(
                    name=f"{shard.component.name} of layer {sharded.layers[layer]}",
                    shard=shard,
                    kept=entries_kept(shard.component, options.tokens),
                    array=array,
                    base=_random(np.array([_LAYER + (index << _COMPONENT_SHIFT) + layer], np.uint64))[0],
                    places=_places(shard, lane_bytes),
                )


def _lane_bytes(sharded: ShardedComponent) -> int:
    """Bytes of the numbers of a component: as many as fit its last axis whole, on whatever rank."""
    last, element_bytes = sharded.component.axes[-1], sharded.component.element_bytes
    together = element_bytes if sharded.tp_axis == last.name else last.size * element_bytes
    return next(size for size in (8, 4, 2, 1) if together % size == 0)


def _places(shard: Shard, lane_bytes: int) -> NDArray[np.uint64]:
    element_bytes = shard.component.element_bytes
    shape = [axis.size for axis in shard.component.axes[1:]]
    held = [slice(interval.start, interval.stop) for interval in shard.box[1:]]
    shape[-1] = shape[-1] * element_bytes // lane_bytes
    held[-1] = slice(held[-1].start * element_bytes // lane_bytes, held[-1].stop * element_bytes // lane_bytes)
    places = np.arange(prod(shape), dtype=np.uint64) + np.uint64(_PLACE)
    whole = _random(places).reshape(shape)
    part: NDArray[np.uint64] = whole[tuple(held)]
    return part


def _differences(got: Numbers, expected: Numbers) -> NDArray[np.int64]:
    """For every byte that differs, the position that it belongs to."""
    if np.array_equal(got, expected):
        return np.empty(0, np.int64)
    positions, *_ = np.nonzero(
        np.ascontiguousarray(got).view(np.uint8).reshape(len(got), -1)
        != np.ascontiguousarray(expected).view(np.uint8).reshape(len(got), -1)
    )
    return positions


def _random(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A random number for every number, always the same: the finaliser of SplitMix64."""
    numbers = numbers * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0xD1B54A32D192ED03)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    numbers ^= numbers >> np.uint64(31)
    return numbers
