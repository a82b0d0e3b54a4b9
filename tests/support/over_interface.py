"""A transport of kvferry's over any that SGLang's `make_transport()` may return, for what tests kvferry's own.

Rooms, their generations, aborts and completions are the endpoints' affair here, as they are SGLang's protocol's there:
what holds for the endpoints over it shows that the interface is enough to decide these.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from prototypes.transport_interface import BaseTransport, CancelResult, MemoryRegion, OpenedPeer, Progress

from kvferry.errors import MessageError, TransportError
from kvferry.layout import Device, MemoryKind
from kvferry.transport import Connection, Copies, PeerMetadata, Promises, RangeTransport, TransferHandle, TransferReport


@dataclass(slots=True, eq=False)
class OverConnection(Connection):
    """A connection: a peer that was opened."""

    opened: OpenedPeer


@dataclass(slots=True, eq=False)
class OverHandle(TransferHandle):
    """A write."""

    handle: Any
    total_bytes: int
    blocks: int
    posted_at: float
    report: TransferReport | None = None


class OverInterface(RangeTransport[OverConnection]):
    """Moves bytes by SGLang's interface and nothing else."""

    name = "sglang"
    memory_kinds = frozenset(MemoryKind)
    merges = False

    def __init__(self, moving: BaseTransport) -> None:
        """Begins its first life.

        Args:
            moving: what moves the bytes.
        """
        moving.init()
        super().__init__(moving.life)
        self.moving = moving
        can = moving.capabilities
        self.promises = Promises(
            can_abort=can.cancel,
            fenced_by_deregistration=can.fenced_by_deregistration,
            fenced_by_death=can.fenced_by_death,
            keeps_order=False,
            posts_all_or_nothing=can.submits_all_or_nothing,
        )
        self.may_deliver_late = can.late_arrivals

    def register(self, regions: Any, device: Device) -> None:
        super().register(regions, device)
        index = None if device.kind is MemoryKind.DRAM else device.index
        self.moving.register_memory([MemoryRegion(each.address, each.length, index) for each in regions])

    def private_metadata(self) -> bytes:
        return self.moving.local_desc()

    def open(self, peer: PeerMetadata) -> OverConnection:
        try:
            opened = self.moving.open_peer(peer.name, peer.private)
        except MessageError as error:
            raise TransportError(f"what {peer.name!r} says of itself cannot be read: {error}") from error
        if opened.life != peer.name:
            self.moving.close_peer(opened)
            raise TransportError(f"a peer that calls itself {peer.name!r} sent the description of {opened.life!r}")
        return OverConnection(peer, opened)

    def hang_up(self, connection: OverConnection) -> None:
        self.moving.close_peer(connection.opened)

    def start(self, connection: OverConnection, copies: Copies, notification: bytes) -> OverHandle:
        posted_at = time.perf_counter()
        handle = self.moving.submit(connection.opened, copies, notification)
        return OverHandle(handle, copies.total_bytes, len(copies), posted_at)

    def poll(self, transfer: TransferHandle) -> TransferReport | None:
        assert isinstance(transfer, OverHandle)
        status = self.moving.poll(transfer.handle)
        if status.progress is Progress.FAILED:
            raise status.error or TransportError("the write failed, and nobody says why")
        if status.progress is Progress.DONE and transfer.report is None:
            elapsed = time.perf_counter() - transfer.posted_at
            transfer.report = TransferReport(transfer.total_bytes, transfer.blocks, 0.0, elapsed)
        return transfer.report

    def release(self, transfer: TransferHandle) -> None:
        assert isinstance(transfer, OverHandle)
        if self.moving.cancel(transfer.handle) is CancelResult.IN_FLIGHT:
            raise AssertionError("a write is given up that is on its way")

    def notify(self, peer: str, notification: bytes) -> None:
        self.moving.send_event(self.connection(peer).opened, notification)

    def take_notifications(self) -> list[tuple[str, bytes]]:
        return self.moving.drain_events()

    def close(self) -> None:
        super().close()
        self.moving.close()
