"""What lies in the pools: known contents, written and checked a few pages at a time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.applications.bench.options import BenchOptions
from kvferry.applications.bench.pool import Pool
from kvferry.layout import Interval, Shard
from kvferry.pools.contents import Elements, KnownContents
from kvferry.pools.places import TakenPages, entries_kept
from kvferry.pools.pool import POISON

_BLOCK_BYTES = 256 << 10
"""Filled and compared at a time: in the processor's cache, and so little that the allocator keeps it. At 1 MiB, which
it gives back to the system every time, checking took four times as long."""


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
                expected = KnownContents(request).of(part.shard, part.layer, positions)
                part.array[pages] = expected.reshape(len(pages), -1, *expected.shape[1:])

    with ThreadPoolExecutor(threads) as executor:
        list(executor.map(write_part, _parts(pool, options)))
    pool.memory.push()


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
        layer: its index on the component's first axis.
        kept: positions of what a request needs of it.
        array: its pages, [page, token, ...].
    """

    name: str
    shard: Shard
    layer: int
    kept: Interval
    array: Elements

    def blocks(self, taken: TakenPages) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """A request's pages a few at a time, with the positions of their tokens."""
        step = max(1, _BLOCK_BYTES // (self.array[0].size * self.array.itemsize))
        page_tokens = self.array.shape[1]
        for start in range(0, len(taken.pages), step):
            block = taken.pages[start : start + step]
            first = (taken.start + start) * page_tokens
            yield block, np.arange(first, first + len(block) * page_tokens)

    def compared(self, request: int, pages: NDArray[np.int64], positions: NDArray[np.int64]) -> Checked:
        """What a check finds in some pages, which should hold these positions of a request."""
        got = self.array[pages].reshape(len(positions), *self.array.shape[2:])
        if positions[0] < self.kept.start or positions[-1] >= self.kept.stop:
            wanted = (positions >= self.kept.start) & (positions < self.kept.stop)
            got, positions = got[wanted], positions[wanted]
        wrong = _differences(got, KnownContents(request).of(self.shard, self.layer, positions))
        place = f"{self.name} of request {request}, token {positions[wrong[0]]}" if len(wrong) else None
        return Checked(got.nbytes, len(wrong), place)


def _parts(pool: Pool, options: BenchOptions) -> Iterator[_Part]:
    """Every layer of every shard of a rank that holds something."""
    described = {sharded.component.name: sharded for sharded in options.model.components}
    for shard in pool.layout.shards:
        for row, layer in enumerate(range(shard.box[0].start, shard.box[0].stop)):
            array = pool.elements(shard, row)
            if array.size:
                yield _Part(
                    name=f"{shard.component.name} of layer {described[shard.component.name].layers[layer]}",
                    shard=shard,
                    layer=layer,
                    kept=entries_kept(shard.component, options.tokens),
                    array=array,
                )


def _differences(got: Elements, expected: Elements) -> NDArray[np.int64]:
    """For every byte that differs, the position that it belongs to."""
    if np.array_equal(got, expected):
        return np.empty(0, np.int64)
    positions, *_ = np.nonzero(
        np.ascontiguousarray(got).view(np.uint8).reshape(len(got), -1)
        != np.ascontiguousarray(expected).view(np.uint8).reshape(len(got), -1)
    )
    return positions
