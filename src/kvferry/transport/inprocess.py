"""A transport between endpoints of one process, with the full contract.

It is for tests of engines and of kvferry itself, and for trying things out; bytes are copied when a transfer is polled,
so that a write is on its way for a while, as on a wire.
"""

from __future__ import annotations

import ctypes
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.errors import PeerDisconnectedError, RegistrationError
from kvferry.layout import Device, MemoryKind, Region
from kvferry.plan.descriptors import DescriptorIndices, RowArray
from kvferry.transport.base import (
    PeerMetadata,
    PreparedList,
    Promises,
    TransferHandle,
    TransferReport,
    Transport,
    check_lists,
    peer_written_to,
)
from kvferry.transport.copies import Copies, copies_between
from kvferry.transport.registered import RegisteredMemory


class InProcessNetwork:
    """Connects in-process transports; one per test."""

    def __init__(self) -> None:
        # Guards the table of members, which endpoints join and leave from their own threads.
        self._lock = threading.Lock()
        self._members: dict[str, InProcessTransport] = {}

    def join(self, member: InProcessTransport) -> None:
        """Makes a transport reachable; one of the same name is replaced, as by a restart."""
        with self._lock:
            self._members[member.endpoint_name] = member

    def leave(self, member: InProcessTransport) -> None:
        """Makes a transport unreachable."""
        with self._lock:
            if self._members.get(member.endpoint_name) is member:
                del self._members[member.endpoint_name]

    def member(self, name: str) -> InProcessTransport:
        """Returns the transport of that name.

        Raises:
            PeerDisconnectedError: if there is none.
        """
        with self._lock:
            if name not in self._members:
                raise PeerDisconnectedError(f"no endpoint {name!r} in this process")
            return self._members[name]


@dataclass(frozen=True, slots=True, eq=False)
class _Connection:
    """A connection, which ends when either side does: a later endpoint of the same name is another peer."""

    name: str
    memory: RegisteredMemory
    target: InProcessTransport


class _InProcessHandle(TransferHandle):
    def __init__(self, connection: _Connection, copies: Copies, notification: bytes) -> None:
        self.connection = connection
        self.copies = copies
        self.notification = notification
        self.posted_at = time.perf_counter()
        self.report: TransferReport | None = None


class InProcessTransport(Transport):
    """Moves bytes within the process."""

    name = "inprocess"
    promises = Promises(can_abort=False, fenced_by_deregistration=True, fenced_by_death=True, keeps_order=False)
    may_deliver_late = False

    def __init__(self, network: InProcessNetwork, endpoint_name: str | None = None) -> None:
        """Joins a network.

        Args:
            network: what connects the endpoints.
            endpoint_name: a name that is unique in the network; made up if None.
        """
        self.endpoint_name = endpoint_name or f"inprocess-{uuid.uuid4().hex}"
        self._network = network
        self._memory = RegisteredMemory("this endpoint")
        # Guards the tables below: worker threads connect and prepare, other endpoints' threads append notifications.
        self._lock = threading.Lock()
        self._connections: dict[str, _Connection] = {}
        self._lists: dict[str | None, set[PreparedList]] = {}
        self._notifications: list[tuple[str, bytes]] = []
        self._closed = False
        network.join(self)

    def register(self, regions: Sequence[Region], device: Device) -> None:
        if device.kind is not MemoryKind.DRAM:
            raise RegistrationError(f"the in-process transport copies host memory only, not {device}")
        self._memory.check_device(device)
        self._memory.add(regions, device)

    def metadata(self) -> bytes:
        return PeerMetadata(
            name=self.endpoint_name, device=self._memory.device, regions=self._memory.regions, private=b""
        ).encode()

    def connect(self, metadata: bytes) -> str:
        peer = PeerMetadata.decode(metadata)
        memory = RegisteredMemory(peer.name, peer.device, peer.regions)
        connection = _Connection(peer.name, memory, self._network.member(peer.name))
        self.disconnect(peer.name)
        with self._lock:
            self._connections[peer.name] = connection
        return peer.name

    def disconnect(self, peer: str) -> None:
        with self._lock:
            self._connections.pop(peer, None)
            self._lists.pop(peer, None)

    def _connection(self, peer: str) -> _Connection:
        with self._lock:
            connection = self._connections.get(peer)
        if connection is None:
            raise PeerDisconnectedError(f"no connection to {peer!r}: connect first")
        return connection

    def _alive(self, connection: _Connection) -> InProcessTransport:
        if self._network.member(connection.name) is not connection.target:
            raise PeerDisconnectedError(f"{connection.name!r} was started anew: connect again")
        return connection.target

    def prepare(self, rows: RowArray, peer: str | None) -> PreparedList:
        if peer is None:
            self._memory.check_rows(rows)
        else:
            self._connection(peer).memory.check_rows(rows)
        prepared = PreparedList(peer, rows.copy(), len(rows), int(rows[:, 4].sum()))
        with self._lock:
            self._lists.setdefault(peer, set()).add(prepared)
        return prepared

    def release_list(self, prepared: PreparedList) -> None:
        with self._lock:
            self._lists.get(prepared.peer, set()).discard(prepared)

    def post(
        self,
        local: PreparedList,
        local_indices: DescriptorIndices,
        remote: PreparedList,
        remote_indices: DescriptorIndices,
        notification: bytes,
    ) -> TransferHandle:
        connection = self._connection(peer_written_to(local, remote))
        with self._lock:
            check_lists(local, remote, self._lists)
        copies = copies_between(local, local_indices, remote, remote_indices)
        self._alive(connection)
        return _InProcessHandle(connection, copies, notification)

    def write(self, source: Region, peer: str, address: int, notification: bytes) -> TransferHandle:
        connection = self._connection(peer)
        self._memory.check_range(source)
        connection.memory.check_range(Region(address, source.length))
        self._alive(connection)
        copies = Copies(*(np.array([number], np.uint64) for number in (source.address, address, source.length)))
        return _InProcessHandle(connection, copies, notification)

    def poll(self, transfer: TransferHandle) -> TransferReport | None:
        assert isinstance(transfer, _InProcessHandle)
        if transfer.report is None:
            target = self._alive(transfer.connection)
            for source, destination, length in zip(*(each.tolist() for each in transfer.copies), strict=True):
                ctypes.memmove(destination, source, length)
            if transfer.notification:
                target.deliver(self.endpoint_name, transfer.notification)
            elapsed = time.perf_counter() - transfer.posted_at
            lengths = transfer.copies.lengths
            transfer.report = TransferReport(int(lengths.sum()), len(lengths), 0.0, elapsed)
        return transfer.report

    def release(self, transfer: TransferHandle) -> None:
        pass

    def notify(self, peer: str, notification: bytes) -> None:
        self._alive(self._connection(peer)).deliver(self.endpoint_name, notification)

    def deliver(self, sender: str, notification: bytes) -> None:
        """Receives a notification from another transport of the network."""
        with self._lock:
            self._notifications.append((sender, notification))

    def take_notifications(self) -> list[tuple[str, bytes]]:
        with self._lock:
            taken, self._notifications = self._notifications, []
        return taken

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._network.leave(self)
            self._connections.clear()
