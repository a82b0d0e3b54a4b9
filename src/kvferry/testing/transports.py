"""An in-process transport that misbehaves on request."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence

from kvferry.layout import Device, Region
from kvferry.plan.descriptors import DescriptorIndices, RowArray
from kvferry.transport import InProcessNetwork, InProcessTransport, PreparedList, TransferHandle, TransferReport

Fault = Callable[[str], None]
"""Called with the peer's name before the real thing; what it raises, the transport raises."""


class FaultyTransport(InProcessTransport):
    """Fails, holds or watches writes when it is told so. Every hook may be set at any time.

    Attributes:
        on_register: called before memory is registered; what it raises, the transport raises, as with all of these.
        on_prepare: called before descriptors are prepared.
        on_post: called before a write is posted.
        on_poll: called before a write is polled.
        on_notify: called before a notification is sent.
        on_notified: called after a notification was handed over.
        on_take: called before notifications are taken.
        held: peers whose writes do not end; True holds all of them.
        posted: writes that were started.
        misused: what the endpoint did against the transport's contract.
    """

    def __init__(self, network: InProcessNetwork, endpoint_name: str | None = None) -> None:
        super().__init__(network, endpoint_name)
        self.on_register: Callable[[], None] | None = None
        self.on_prepare: Fault | None = None
        self.on_post: Fault | None = None
        self.on_poll: Fault | None = None
        self.on_notify: Fault | None = None
        self.on_notified: Fault | None = None
        self.on_take: Callable[[], None] | None = None
        self.held: set[str] | bool = False
        self.posted = 0
        self.misused: list[str] = []
        self._transfer_lock = threading.Lock()
        self._flights: dict[
            TransferHandle, tuple[str, tuple[PreparedList, ...]]
        ] = {}  # with the peer and the lists in use
        self._released: weakref.WeakSet[TransferHandle] = weakref.WeakSet()

    @property
    def in_flight(self) -> int:
        """Writes that were posted and have not ended."""
        return len(self._flights)

    def holds(self, peer: str) -> bool:
        return self.held if isinstance(self.held, bool) else peer in self.held

    def register(self, regions: Sequence[Region], device: Device) -> None:
        if self.on_register is not None:
            self.on_register()
        super().register(regions, device)

    def prepare(self, rows: RowArray, peer: str | None) -> PreparedList:
        if self.on_prepare is not None:
            self.on_prepare(peer or "")
        return super().prepare(rows, peer)

    def release_list(self, prepared: PreparedList) -> None:
        with self._transfer_lock:
            if any(prepared in lists for _, lists in self._flights.values()):
                self.misused.append("a list was released under a write")
        super().release_list(prepared)

    def disconnect(self, peer: str) -> None:
        self._refuse_under_write(peer, "disconnected")
        super().disconnect(peer)

    def connect(self, metadata: bytes) -> str:
        name = super().connect(metadata)
        self._refuse_under_write(name, "connected anew")
        return name

    def _refuse_under_write(self, peer: str, what: str) -> None:
        with self._transfer_lock:
            if any(target == peer for target, _ in self._flights.values()):
                self.misused.append(f"{peer} was {what} under a write")

    def post(
        self,
        local: PreparedList,
        local_indices: DescriptorIndices,
        remote: PreparedList,
        remote_indices: DescriptorIndices,
        notification: bytes,
    ) -> TransferHandle:
        assert remote.peer is not None
        if self.on_post is not None:
            self.on_post(remote.peer)
        transfer = super().post(local, local_indices, remote, remote_indices, notification)
        return self._started(transfer, remote.peer, local, remote)

    def write(self, source: Region, peer: str, address: int, notification: bytes) -> TransferHandle:
        if self.on_post is not None:
            self.on_post(peer)
        return self._started(super().write(source, peer, address, notification), peer)

    def _started(self, transfer: TransferHandle, peer: str, *used: PreparedList) -> TransferHandle:
        with self._transfer_lock:
            self.posted += 1
            self._flights[transfer] = peer, used
        return transfer

    def poll(self, transfer: TransferHandle) -> TransferReport | None:
        with self._transfer_lock:
            if transfer in self._released:
                self.misused.append("a transfer was polled after its release")
        known = self._flights.get(transfer)
        if known is not None:
            peer, _ = known
            if self.on_poll is not None:
                self.on_poll(peer)
            if self.holds(peer):
                return None
        return super().poll(transfer)

    def release(self, transfer: TransferHandle) -> None:
        with self._transfer_lock:
            if transfer in self._released:
                self.misused.append("a transfer was released twice")
            self._released.add(transfer)
            self._flights.pop(transfer, None)
        super().release(transfer)

    def notify(self, peer: str, notification: bytes) -> None:
        if self.on_notify is not None:
            self.on_notify(peer)
        super().notify(peer, notification)
        if self.on_notified is not None:
            self.on_notified(peer)

    def take_notifications(self) -> list[tuple[str, bytes]]:
        if self.on_take is not None:
            self.on_take()
        return super().take_notifications()
