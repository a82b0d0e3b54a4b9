"""What the machine can do at best: the same bytes between the same processes in bulk, and copied in memory."""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.layout import Device, Region
from kvferry.transport import NixlTransport
from kvferry.transport.base import PeerMetadata, PreparedList

BLOCK_BYTES = 128 << 10


@dataclass(frozen=True, slots=True)
class BulkTimes:
    """When one rank's bulk writes began and ended, by the machine's steady clock, and their bytes."""

    started_at: float
    ended_at: float
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class _BulkWrite:
    """A contiguous write, as one descriptor and as many blocks.

    Attributes:
        num_bytes: bytes of the one descriptor.
        whole, blocks: descriptor lists of both sides.
    """

    num_bytes: int
    whole: tuple[PreparedList, PreparedList]
    blocks: tuple[PreparedList, PreparedList]


class BulkReceiver:
    """Where bulk writes go: the rank's own memory, which is poisoned again before it is used otherwise."""

    def __init__(self, memory: NDArray[np.uint8], rank: int) -> None:
        self._transport = NixlTransport(f"bench-bulk-decode-{rank}-{secrets.token_hex(8)}")
        self._transport.register([_region(memory)], Device())
        self.metadata = self._transport.metadata()

    def close(self) -> None:
        """Gives everything back."""
        self._transport.close()


class BulkSender:
    """Writes from a rank's own memory to where its requests' bytes go: so many bytes, whichever they are."""

    def __init__(
        self,
        memory: NDArray[np.uint8],
        targets: tuple[tuple[bytes, int, tuple[int, ...]], ...],
        rank: int,
        nixl_threads: int,
    ) -> None:
        """Args:
        targets: for every receiver its metadata, where in its memory to begin, and the bytes of every write.
        nixl_threads: NIXL's worker threads; 0 takes one for every processor.
        """
        threads = nixl_threads or os.cpu_count() or 1
        self._transport = NixlTransport(
            f"bench-bulk-prefill-{rank}-{secrets.token_hex(8)}", backend_parameters={"num_threads": str(threads)}
        )
        self._transport.register([_region(memory)], Device())
        self._writes: list[_BulkWrite] = []
        source = memory.ctypes.data
        for metadata, offset, lengths in targets:
            peer = self._transport.connect(metadata)
            target = _first_address(metadata) + offset
            for length in lengths:
                self._writes.append(self._prepare(peer, source, target, length))
                source += length
                target += length

    def write(self, is_in_blocks: bool, timeout_s: float) -> BulkTimes:
        """Writes everything, one after the other: the machine is busy with one.

        Raises:
            TimeoutError: if it takes too long.
        """
        started_at = time.monotonic()
        for write in self._writes:
            local, remote = write.blocks if is_in_blocks else write.whole
            # From the last block to the first: neighbours in this order are not merged, and stay many.
            indices = np.arange(local.count - 1, -1, -1, dtype=np.int32)
            flight = self._transport.post(local, indices, remote, indices, b"bulk")
            while self._transport.poll(flight) is None:
                if time.monotonic() > started_at + timeout_s:
                    raise TimeoutError(f"bulk writes were not through after {timeout_s:g} s")
                time.sleep(20e-6)
            self._transport.release(flight)
        return BulkTimes(started_at, time.monotonic(), sum(write.num_bytes for write in self._writes))

    def close(self) -> None:
        """Gives everything back."""
        self._transport.close()

    def _prepare(self, peer: str, source: int, target: int, length: int) -> _BulkWrite:
        def lists(row_of: list[list[tuple[int, int, int, int, int]]]) -> tuple[PreparedList, PreparedList]:
            local, remote = (np.array(rows, np.uint64) for rows in row_of)
            return self._transport.prepare(local, None), self._transport.prepare(remote, peer)

        count, rest = divmod(length, BLOCK_BYTES)
        whole = [[(start, length, 0, length, 1)] for start in (source, target)]
        blocks: list[list[tuple[int, int, int, int, int]]] = []
        for start in (source, target):
            rows = [(start, BLOCK_BYTES, 0, BLOCK_BYTES, count)] if count else []
            rows += [(start + count * BLOCK_BYTES, rest, 0, rest, 1)] if rest else []
            blocks.append(rows)
        return _BulkWrite(length, lists(whole), lists(blocks))


def copy_seconds(memory: NDArray[np.uint8], num_bytes: int) -> float:
    """Seconds for each byte of a copy from one half of a memory to the other."""
    length = min(num_bytes, len(memory) // 2)
    started = time.perf_counter()
    np.copyto(memory[len(memory) - length :], memory[:length])
    return (time.perf_counter() - started) / length


def _region(memory: NDArray[np.uint8]) -> Region:
    return Region(memory.ctypes.data, memory.nbytes)


def _first_address(metadata: bytes) -> int:
    return PeerMetadata.decode(metadata).regions[0].address
