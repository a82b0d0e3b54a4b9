"""What the machine can do at best: the same bytes between the same memories of the same processes, in bulk."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.applications.bench.commands import BulkTimes, Target
from kvferry.applications.bench.pool import Storage
from kvferry.endpoint.construction import create_transport
from kvferry.layout import Device
from kvferry.plan.descriptors import DescriptorIndices
from kvferry.settings import Settings
from kvferry.transport import PeerMetadata, PreparedList, Transport

BLOCK_BYTES = 128 << 10
_FIRST_WRITE_S = 30.0


@dataclass(frozen=True, slots=True, eq=False)
class _BulkWrite:
    """A contiguous write, as one descriptor and as many blocks.

    Attributes:
        num_bytes: bytes of the one descriptor.
        whole: descriptor lists of both sides for all bytes in one piece.
        blocks: the same, block by block.
    """

    num_bytes: int
    whole: tuple[PreparedList, PreparedList]
    blocks: tuple[PreparedList, PreparedList]


def bulk_transport(storage: Storage, side: str, rank: int, settings: Settings) -> Transport:
    """What bulk writes go from or to: the rank's own memory, which is poisoned again before it is used otherwise."""
    name = f"bench-bulk-{side}-{rank}-{secrets.token_hex(8)}"
    transport = create_transport(settings, name, writes=side == "prefill")
    transport.register([storage.region], storage.device)
    return transport


class BulkSender:
    """Writes from a rank's own memory to where its requests' bytes go: so many bytes, whichever they are."""

    def __init__(self, transport: Transport, storage: Storage, targets: Sequence[Target]) -> None:
        """Connects to every receiver and prepares the writes to it.

        Args:
            targets: where to write, for every receiver.

        Raises:
            TimeoutError: if nothing can be written within half a minute.
        """
        self._transport = transport
        self._device = storage.device
        self._writes: list[_BulkWrite] = []
        source = storage.address
        for each in targets:
            peer = self._transport.connect(each.metadata)
            target = PeerMetadata.decode(each.metadata)
            address = target.regions[0].address + each.offset
            for length in each.lengths:
                self._writes.append(self._prepare(peer, target.device, source, address, length))
                source += length
                address += length
            # The first write to a peer maps a GPU's memory. It is not timed, as the first round of endpoints is not.
            self._post(self._writes[-1].blocks, np.zeros(1, np.int32), time.monotonic(), _FIRST_WRITE_S)

    def write(self, is_in_blocks: bool, timeout_s: float) -> BulkTimes:
        """Writes everything, one after the other: the machine is busy with one.

        Raises:
            TimeoutError: if it takes too long.
        """
        started_at = time.monotonic()
        for write in self._writes:
            lists = write.blocks if is_in_blocks else write.whole
            # From the last block to the first: neighbours in this order are not merged, and stay many.
            self._post(lists, np.arange(lists[0].count - 1, -1, -1, dtype=np.int32), started_at, timeout_s)
        return BulkTimes(started_at, time.monotonic(), sum(write.num_bytes for write in self._writes))

    def _post(
        self,
        lists: tuple[PreparedList, PreparedList],
        indices: DescriptorIndices,
        started_at: float,
        timeout_s: float,
    ) -> None:
        local, remote = lists
        transfer = self._transport.post(local, indices, remote, indices, b"bulk")
        while self._transport.poll(transfer) is None:
            if time.monotonic() > started_at + timeout_s:
                raise TimeoutError(f"bulk writes were not through after {timeout_s:g} s")
            time.sleep(20e-6)
        self._transport.release(transfer)

    def _prepare(self, peer: str, peer_device: Device, source: int, target: int, length: int) -> _BulkWrite:
        sides = ((None, self._device.index, source), (peer, peer_device.index, target))
        count, rest = divmod(length, BLOCK_BYTES)
        whole, blocks = [], []
        for owner, device, start in sides:
            whole.append(self._transport.prepare(np.array([(start, length, device, length, 1)], np.uint64), owner))
            rows = [(start, BLOCK_BYTES, device, BLOCK_BYTES, count)] if count else []
            rows += [(start + count * BLOCK_BYTES, rest, device, rest, 1)] if rest else []
            blocks.append(self._transport.prepare(np.array(rows, np.uint64), owner))
        return _BulkWrite(length, (whole[0], whole[1]), (blocks[0], blocks[1]))
