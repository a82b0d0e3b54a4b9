"""A transport between endpoints of one process, with the full contract.

It is for tests of engines and of kvferry itself, and for trying things out; bytes are copied when a transfer is polled,
so that a write is on its way for a while, as on a wire.
"""

from __future__ import annotations

import ctypes
import threading
import time
import uuid
from dataclasses import dataclass

from kvferry.errors import PeerDisconnectedError
from kvferry.transport.base import PeerMetadata, Promises, TransferHandle, TransferReport
from kvferry.transport.copies import Copies
from kvferry.transport.ranges import Connection, RangeTransport


class InProcessNetwork:
    """Connects in-process transports; one per test.

    Attributes:
        members: those that can be reached, by name.
    """

    def __init__(self) -> None:
        # Guards the table of members, which endpoints join and leave from their own threads.
        self._lock = threading.Lock()
        self.members: dict[str, InProcessTransport] = {}

    def join(self, member: InProcessTransport) -> None:
        """Makes a transport reachable; one of the same name is replaced, as by a restart."""
        with self._lock:
            self.members[member.endpoint_name] = member

    def leave(self, member: InProcessTransport) -> None:
        """Makes a transport unreachable."""
        with self._lock:
            if self.members.get(member.endpoint_name) is member:
                del self.members[member.endpoint_name]

    def member(self, name: str) -> InProcessTransport:
        """Returns the transport of that name.

        Raises:
            PeerDisconnectedError: if there is none.
        """
        with self._lock:
            if name not in self.members:
                raise PeerDisconnectedError(f"no endpoint {name!r} in this process")
            return self.members[name]


@dataclass(slots=True, eq=False)
class InProcessConnection(Connection):
    """A connection, which ends when either side does: a later endpoint of the same name is another peer."""

    target: InProcessTransport


class _InProcessHandle(TransferHandle):
    def __init__(self, connection: InProcessConnection, copies: Copies, notification: bytes) -> None:
        self.connection = connection
        self.copies = copies
        self.notification = notification
        self.posted_at = time.perf_counter()
        self.report: TransferReport | None = None


class InProcessTransport(RangeTransport[InProcessConnection]):
    """Moves bytes within the process."""

    name = "inprocess"
    promises = Promises(
        can_abort=False,
        fenced_by_deregistration=True,
        fenced_by_death=True,
        keeps_order=False,
        posts_all_or_nothing=True,
    )
    may_deliver_late = False

    def __init__(self, network: InProcessNetwork, endpoint_name: str | None = None) -> None:
        """Joins a network.

        Args:
            network: what connects the endpoints.
            endpoint_name: a name that is unique in the network; made up if None.
        """
        super().__init__(endpoint_name or f"inprocess-{uuid.uuid4().hex}")
        self._network = network
        self._notifications: list[tuple[str, bytes]] = []
        self._closed = False
        network.join(self)

    def open(self, peer: PeerMetadata) -> InProcessConnection:
        return InProcessConnection(peer, self._network.member(peer.name))

    def alive(self, connection: InProcessConnection) -> InProcessTransport:
        """Returns the transport at the other end.

        Raises:
            PeerDisconnectedError: if it has left the network, or another one has its name.
        """
        name = connection.peer.name
        if self._network.member(name) is not connection.target:
            raise PeerDisconnectedError(f"{name!r} was started anew: connect again")
        return connection.target

    def start(self, connection: InProcessConnection, copies: Copies, notification: bytes) -> TransferHandle:
        self.alive(connection)
        return _InProcessHandle(connection, copies, notification)

    def poll(self, transfer: TransferHandle) -> TransferReport | None:
        assert isinstance(transfer, _InProcessHandle)
        if transfer.report is None:
            target = self.alive(transfer.connection)
            for source, destination, length in transfer.copies:
                ctypes.memmove(destination, source, length)
            if transfer.notification:
                target.deliver(self.endpoint_name, transfer.notification)
            elapsed = time.perf_counter() - transfer.posted_at
            transfer.report = TransferReport(transfer.copies.total_bytes, len(transfer.copies), 0.0, elapsed)
        return transfer.report

    def notify(self, peer: str, notification: bytes) -> None:
        self.alive(self.connection(peer)).deliver(self.endpoint_name, notification)

    def deliver(self, sender: str, notification: bytes) -> None:
        """Receives a notification from another transport of the network."""
        with self._lock:  # other endpoints' threads come here
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
