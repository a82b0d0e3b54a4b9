"""A transport that is as bad as a real one may be, for the simulation: what is on its way moves when somebody says so.

The contract is kept to the letter and not beyond. Bytes land piece by piece in any order, are read only when they land,
and go on landing after the writer was frozen, or for a moment after it was killed. Notifications come late, in any
order and more than once. A write may fail half done. Nothing fences: whoever closes or forgets a peer stops no write.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes that land at once.

    Attributes:
        source, destination: addresses.
    """

    source: int
    destination: int
    num_bytes: int


class SimulatedFlight(Flight):
    """A write on its way.

    Attributes:
        source, target: the two transports.
        left: pieces that have not landed.
        notification: what the target gets at the end.
        problem: why it failed, once it has.
        has_ended: whether nothing of it moves any more.
    """

    __slots__ = (
        "_descriptors",
        "_total_bytes",
        "has_ended",
        "is_known",
        "left",
        "notification",
        "problem",
        "source",
        "target",
    )

    def __init__(
        self, source: SimulatedTransport, target: SimulatedTransport, pieces: list[Piece], notification: bytes
    ) -> None:
        self.source = source
        self.target = target
        self.left = pieces
        self.notification = notification
        self.problem: Exception | None = None
        self.has_ended = False
        self.is_known = False  # whether the writer was told of the end
        self._total_bytes = sum(piece.num_bytes for piece in pieces)
        self._descriptors = len(pieces)

    @property
    def report(self) -> FlightReport:
        """What is said of it in the end."""
        return FlightReport(self._total_bytes, self._descriptors, 0.0, 0.0)


@dataclass(slots=True, eq=False)
class Notification:
    """A notification on its way.

    Attributes:
        sender: the name of the transport that it comes from.
    """

    sender: str
    target: SimulatedTransport
    data: bytes


@dataclass(slots=True, eq=False)
class SimulatedWire:
    """What connects simulated transports, and all that is on its way between them.

    Attributes:
        members: transports by name.
        flights: writes that have not ended.
        notifications: those that have not arrived.
        on_piece: called with every piece that is about to land, and its write.
        fails_to: asked before a write is posted or a peer connected; an exception makes that fail.
        breaches: what was done that the contract forbids.
    """

    on_piece: Callable[[SimulatedFlight, Piece], None]
    fails_to: Callable[[str], Exception | None]
    members: dict[str, SimulatedTransport] = field(default_factory=dict)
    flights: list[SimulatedFlight] = field(default_factory=list)
    notifications: list[Notification] = field(default_factory=list)
    breaches: list[str] = field(default_factory=list)

    def reaches(self, transport: SimulatedTransport) -> bool:
        """Whether no other transport has taken its name."""
        return self.members.get(transport.endpoint_name) is transport

    def land(self, flight: SimulatedFlight, index: int) -> None:
        """Lets one piece land; the last one ends the write."""
        piece = flight.left.pop(index)
        if flight.target.is_mapped:
            self.on_piece(flight, piece)
            ctypes.memmove(piece.destination, piece.source, piece.num_bytes)
        if not flight.left:
            self._end(flight)

    def fail(self, flight: SimulatedFlight, problem: Exception | None) -> None:
        """Ends a write as it is.

        Args:
            problem: what its writer is told; None if that is dead.
        """
        flight.problem = problem
        flight.left.clear()
        self._end(flight)

    def _end(self, flight: SimulatedFlight) -> None:
        flight.has_ended = True
        self.flights.remove(flight)

    def deliver(self, notification: Notification) -> None:
        """Hands a notification over, and keeps nothing of it."""
        self.notifications.remove(notification)
        if notification.target.is_mapped:
            notification.target.arrived.append((notification.sender, notification.data))


class SimulatedTransport(Transport):
    """Moves bytes over a simulated wire.

    Attributes:
        arrived: notifications that nobody has taken.
        is_mapped: whether the process that it belongs to has its memory still: not so once it is dead.
    """

    name = "simulated"

    def __init__(self, wire: SimulatedWire, endpoint_name: str) -> None:
        """Args:
        endpoint_name: unique among all that the wire ever had.
        """
        self.endpoint_name = endpoint_name
        self.arrived: deque[tuple[str, bytes]] = deque()
        self.is_mapped = True
        self._wire = wire
        self._regions: tuple[Region, ...] = ()
        self._device = Device()
        self._peers: dict[str, tuple[PeerMetadata, SimulatedTransport]] = {}
        self._lists: dict[str | None, set[PreparedList]] = {}
        wire.members[endpoint_name] = self

    def register(self, regions: Sequence[Region], device: Device) -> None:
        if device.kind is not MemoryKind.DRAM:
            raise RegistrationError(f"the simulated transport copies host memory only, not {device}")
        check_same_device(self._regions, self._device, device)
        self._regions = (*self._regions, *regions)

    def metadata(self) -> bytes:
        return PeerMetadata(name=self.endpoint_name, device=self._device, regions=self._regions, private=b"").encode()

    def connect(self, metadata: bytes) -> str:
        peer = PeerMetadata.decode(metadata)
        target = self._wire.members.get(peer.name)
        problem = self._wire.fails_to("connect")
        if target is None or problem is not None:
            raise problem or PeerDisconnectedError(f"no endpoint {peer.name!r}")
        self.disconnect(peer.name)
        self._peers[peer.name] = peer, target
        return peer.name

    def disconnect(self, peer: str) -> None:
        if any(flight.source is self and flight.target.endpoint_name == peer for flight in self._wire.flights):
            self._wire.breaches.append(f"{self.endpoint_name} forgets {peer}, to which it still writes")
        self._peers.pop(peer, None)
        self._lists.pop(peer, None)

    def _target(self, peer: str) -> tuple[PeerMetadata, SimulatedTransport]:
        if peer not in self._peers:
            raise PeerDisconnectedError(f"no connection to {peer!r}: connect first")
        return self._peers[peer]

    def prepare(self, rows: RowArray, peer: str | None) -> PreparedList:
        if peer is None:
            check_rows(rows, self._regions, self._device, owner="this endpoint")
        else:
            metadata, _ = self._target(peer)
            check_rows(rows, metadata.regions, metadata.device, owner=peer)
        prepared = PreparedList(peer, _expanded(rows), len(rows), int(rows[:, 4].sum()))
        self._lists.setdefault(peer, set()).add(prepared)
        return prepared

    def release_list(self, prepared: PreparedList) -> None:
        self._lists.get(prepared.peer, set()).discard(prepared)
        if not self._lists.get(prepared.peer):
            self._lists.pop(prepared.peer, None)

    def post(
        self,
        local: PreparedList,
        local_indices: DescriptorIndices,
        remote: PreparedList,
        remote_indices: DescriptorIndices,
        notification: bytes,
    ) -> Flight:
        _, target = self._target(peer_written_to(local, remote))
        check_lists(local, remote, self._lists)
        check_counts(local_indices, remote_indices)
        here, there = _selected(local, local_indices), _selected(remote, remote_indices)
        if any(mine[1] != theirs[1] for mine, theirs in zip(here, there, strict=True)):
            raise TransportError("local and remote descriptors differ in length")
        pieces = [Piece(mine[0], theirs[0], mine[1]) for mine, theirs in zip(here, there, strict=True)]
        return self._start(target, pieces, notification)

    def write(self, source: Region, peer: str, address: int, notification: bytes) -> Flight:
        metadata, target = self._target(peer)
        check_range(source, self._regions, owner="this endpoint")
        check_range(Region(address, source.length), metadata.regions, owner=peer)
        half = source.length // 2
        pieces = [Piece(source.address + half, address + half, source.length - half)]
        if half:
            pieces.append(Piece(source.address, address, half))
        return self._start(target, pieces, notification)

    def _start(self, target: SimulatedTransport, pieces: list[Piece], notification: bytes) -> SimulatedFlight:
        problem = self._wire.fails_to("post")
        if problem is not None:
            raise problem
        if not target.is_mapped or not self._wire.reaches(target):
            raise PeerDisconnectedError(f"{target.endpoint_name} is dead, or was started anew: connect again")
        flight = SimulatedFlight(self, target, pieces, notification)
        self._wire.flights.append(flight)
        return flight

    def poll(self, flight: Flight) -> FlightReport | None:
        assert isinstance(flight, SimulatedFlight)
        if not flight.has_ended and not self._wire.reaches(flight.target):
            self._wire.fail(flight, PeerDisconnectedError(f"{flight.target.endpoint_name} was started anew"))
        if not flight.has_ended:
            return None
        if flight.problem is not None:
            raise flight.problem
        if not flight.is_known:
            flight.is_known = True
            if flight.notification:
                self._wire.notifications.append(Notification(self.endpoint_name, flight.target, flight.notification))
        return flight.report

    def release(self, flight: Flight) -> None:
        assert isinstance(flight, SimulatedFlight)
        if not flight.has_ended:
            self._wire.breaches.append(f"{self.endpoint_name} releases a write that is on its way")

    def notify(self, peer: str, notification: bytes) -> None:
        _, target = self._target(peer)
        problem = self._wire.fails_to("notify")
        if problem is not None or not target.is_mapped or not self._wire.reaches(target):
            raise problem or PeerDisconnectedError(f"{peer} is dead, or was started anew: connect again")
        self._wire.notifications.append(Notification(self.endpoint_name, target, notification))

    def take_notifications(self) -> list[tuple[str, bytes]]:
        taken = list(self.arrived)
        self.arrived.clear()
        return taken

    def close(self) -> None:
        self._peers.clear()
        self._lists.clear()


def _selected(prepared: PreparedList, indices: DescriptorIndices) -> list[tuple[int, int]]:
    """Address and length of the descriptors that are selected.

    Raises:
        TransportError: if there is no such descriptor.
    """
    if int(indices.min()) < 0 or int(indices.max()) >= prepared.count:
        raise TransportError(f"descriptors {indices.min()} to {indices.max()} of {prepared.count} were selected")
    return [prepared.handle[index] for index in indices.tolist()]


def _expanded(rows: RowArray) -> list[tuple[int, int]]:
    """Address and length of every descriptor."""
    return [
        (first + index * stride, length) for first, length, _, stride, count in rows.tolist() for index in range(count)
    ]
