"""A transport whose writes are the device's work: each done some time after it was posted, and seen when polled."""

from __future__ import annotations

import ctypes
import time
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvferry.layout import MemoryKind
from kvferry.transport import InProcessNetwork, InProcessTransport, TransferHandle, TransferReport
from kvferry.transport.copies import Copies
from kvferry.transport.inprocess import InProcessConnection
from proof.device.device import FakeDevice, Work
from proof.device.ordering import Ranges, ranges_of


class _DeviceWrite(TransferHandle):
    def __init__(self, connection: InProcessConnection, work: Work, copies: Copies, notification: bytes) -> None:
        self.connection = connection
        self.work = work
        self.copies = copies
        self.notification = notification
        self.posted_at = time.perf_counter()
        self.report: TransferReport | None = None
        self.polls = 0


class DeviceTransport(InProcessTransport):
    """Moves bytes between pools of one device, as slowly as its seed says."""

    memory_kinds: ClassVar[frozenset[MemoryKind]] = frozenset({MemoryKind.DRAM, MemoryKind.VRAM})

    def __init__(
        self, network: InProcessNetwork, device: FakeDevice, endpoint_name: str | None = None, *, polls: int = 0
    ) -> None:
        """Joins a network.

        Args:
            network: what connects the endpoints.
            device: what moves the bytes.
            endpoint_name: a name that is unique in the network; made up if None.
            polls: how often a write is polled in vain, at the least.
        """
        super().__init__(network, endpoint_name)
        self._device = device
        self._polls = polls

    def start(self, connection: InProcessConnection, copies: Copies, notification: bytes) -> TransferHandle:
        self.alive(connection)

        def move() -> None:
            for source, destination, length in copies:
                ctypes.memmove(destination, source, length)

        work = self._device.write(
            f"write of {copies.total_bytes} bytes",
            move,
            reads=_ranges(copies.sources, copies.lengths),
            writes=_ranges(copies.destinations, copies.lengths),
        )
        return _DeviceWrite(connection, work, copies, notification)

    def poll(self, transfer: TransferHandle) -> TransferReport | None:
        assert isinstance(transfer, _DeviceWrite)
        transfer.polls += 1
        if transfer.report is None and transfer.polls > self._polls and self._device.look(transfer.work):
            if transfer.notification:
                self.alive(transfer.connection).deliver(self.endpoint_name, transfer.notification)
            elapsed = time.perf_counter() - transfer.posted_at
            transfer.report = TransferReport(transfer.copies.total_bytes, len(transfer.copies), 0.0, elapsed)
        return transfer.report


def _ranges(addresses: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> Ranges:
    """Returns the ranges that a write touches; runs of one length at a time, since most have the same."""
    starts = addresses.astype(np.int64)
    parts = [ranges_of(starts[lengths == length], int(length)) for length in np.unique(lengths)]
    together = np.concatenate(parts) if parts else np.empty((0, 2), np.int64)
    ordered: Ranges = together[np.argsort(together[:, 0])]
    return ordered
