"""A transport between endpoints of one process, with the full contract.

It is for tests of engines and of kvferry itself, and for trying things out; bytes are copied when a flight is polled,
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
from numpy.typing import NDArray

from kvferry.errors import PeerDisconnectedError, RegistrationError, TransportError
from kvferry.layout import Device, MemoryKind, Region
from kvferry.plan.descriptors import DescriptorIndices, RowArray
from kvferry.transport.base import (
    Flight,
    FlightReport,
    PeerMetadata,
    PreparedList,
    Transport,
    check_counts,
    check_lists,
    check_range,
    check_rows,
    check_same_device,
    peer_written_to,
)


class InProcessNetwork:
    """What in-process transports are connected by; one per test."""

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
        """The transport of that name.

        Raises:
            PeerDisconnectedError: if there is none.
        """
        with self._lock:
            if name not in self._members:
                raise PeerDisconnectedError(f"no endpoint {name!r} in this process")
            return self._members[name]


@dataclass(frozen=True, slots=True, eq=False)
class _Connection:
    """Ends when either side does: a later endpoint of the same name is another peer, with other memory."""

    peer: PeerMetadata
    target: InProcessTransport


class _InProcessFlight(Flight):
    def __init__(self, connection: _Connection, copies: tuple[NDArray[np.uint64], ...], notification: bytes) -> None:
        self.connection = connection
        self.sources, self.destinations, self.lengths = copies
        self.notification = notification
        self.posted_at = time.perf_counter()
        self.report: FlightReport | None = None


class InProcessTransport(Transport):
    """Moves bytes within the process."""

    name = "inprocess"

    def __init__(self, network: InProcessNetwork, endpoint_name: str | None = None) -> None:
        """Args:
        network: what connects the endpoints.
        endpoint_name: unique in the network; made up if None.
        """
        self.endpoint_name = endpoint_name or f"inprocess-{uuid.uuid4().hex}"
        self._network = network
        self._regions: tuple[Region, ...] = ()
        self._device = Device()
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
        check_same_device(self._regions, self._device, device)
        with self._lock:
            self._regions, self._device = (*self._regions, *regions), device

    def metadata(self) -> bytes:
        return PeerMetadata(name=self.endpoint_name, device=self._device, regions=self._regions, private=b"").encode()

    def connect(self, metadata: bytes) -> str:
        peer = PeerMetadata.decode(metadata)
        connection = _Connection(peer, self._network.member(peer.name))
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
        if self._network.member(connection.peer.name) is not connection.target:
            raise PeerDisconnectedError(f"{connection.peer.name!r} was started anew: connect again")
        return connection.target

    def prepare(self, rows: RowArray, peer: str | None) -> PreparedList:
        if peer is None:
            check_rows(rows, self._regions, self._device, owner="this endpoint")
        else:
            connection = self._connection(peer)
            check_rows(rows, connection.peer.regions, connection.peer.device, owner=peer)
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
    ) -> Flight:
        connection = self._connection(peer_written_to(local, remote))
        with self._lock:
            check_lists(local, remote, self._lists)
        check_counts(local_indices, remote_indices)
        sources, lengths = _expand(local, local_indices)
        destinations, remote_lengths = _expand(remote, remote_indices)
        if not np.array_equal(lengths, remote_lengths):
            raise TransportError("local and remote descriptors differ in length")
        self._alive(connection)
        return _InProcessFlight(connection, (sources, destinations, lengths), notification)

    def write(self, source: Region, peer: str, address: int, notification: bytes) -> Flight:
        connection = self._connection(peer)
        check_range(source, self._regions, owner="this endpoint")
        check_range(Region(address, source.length), connection.peer.regions, owner=peer)
        self._alive(connection)
        copies = tuple(np.array([number], np.uint64) for number in (source.address, address, source.length))
        return _InProcessFlight(connection, copies, notification)

    def poll(self, flight: Flight) -> FlightReport | None:
        assert isinstance(flight, _InProcessFlight)
        if flight.report is None:
            target = self._alive(flight.connection)
            for source, destination, length in zip(
                flight.sources.tolist(), flight.destinations.tolist(), flight.lengths.tolist(), strict=True
            ):
                ctypes.memmove(destination, source, length)
            if flight.notification:
                target.deliver(self.endpoint_name, flight.notification)
            elapsed = time.perf_counter() - flight.posted_at
            flight.report = FlightReport(int(flight.lengths.sum()), len(flight.lengths), 0.0, elapsed)
        return flight.report

    def release(self, flight: Flight) -> None:
        pass

    def notify(self, peer: str, notification: bytes) -> None:
        self._alive(self._connection(peer)).deliver(self.endpoint_name, notification)

    def deliver(self, sender: str, notification: bytes) -> None:
        """Takes a notification from another transport of the network."""
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


def _expand(prepared: PreparedList, indices: DescriptorIndices) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Addresses and lengths of the selected descriptors."""
    rows: RowArray = prepared.handle
    if indices.min() < 0 or indices.max() >= prepared.count:
        raise TransportError(f"descriptor indices [{indices.min()}, {indices.max()}] exceed a list of {prepared.count}")
    starts = np.concatenate([[0], np.cumsum(rows[:, 4])]).astype(np.int64)
    row = np.searchsorted(starts, indices, side="right") - 1
    element = (indices - starts[row]).astype(np.uint64)
    return rows[row, 0] + element * rows[row, 3], rows[row, 1]
