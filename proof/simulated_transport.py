"""A transport as bad as a real one may be, for the simulation, which decides when what is on its way moves.

The contract is kept to the letter and not beyond. Bytes land piece by piece in any order, are read only when they land,
and go on landing after the writer was frozen, or for a moment after it was killed. Notifications come late, in any
order and more than once. A write may fail half done, and what was sent of it before lands after the error was
reported. A post may raise when some of its descriptors are on their way: nobody has a handle of them, and they go on,
until they end or their writer forgets the peer. A connection may be lost without a word: nothing that is sent through
it arrives, until it is found broken; then nothing can be sent. Nothing else fences: closing stops no write.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvferry.errors import PeerDisconnectedError
from kvferry.layout import Region
from kvferry.transport.base import PeerMetadata, Promises, TransferHandle, TransferReport
from kvferry.transport.copies import Copies
from kvferry.transport.ranges import Connection, RangeTransport


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes that land at once.

    Attributes:
        source: the address that it is read from.
        destination: the address that it is written to.
        sent: what was read, once it was sent and lies in some buffer; None if it is read when it lands.
    """

    source: int
    destination: int
    num_bytes: int
    sent: bytes | None = None


class SimulatedHandle(TransferHandle):
    """A write on its way.

    Attributes:
        source: the transport that writes.
        target: the transport whose memory is written.
        left: pieces that have not landed.
        notification: what the target gets at the end.
        problem: why it failed, once it has.
        has_ended: whether nothing of it is read or sent any more; what was sent before an error may be left.
        number: of all posts of the wire.
        is_orphan: whether its post has raised, so that its writer has no handle of it.
    """

    __slots__ = (
        "_descriptors",
        "_total_bytes",
        "has_ended",
        "is_known",
        "is_orphan",
        "left",
        "notification",
        "number",
        "problem",
        "source",
        "target",
    )

    def __init__(
        self,
        number: int,
        source: SimulatedTransport,
        target: SimulatedTransport,
        pieces: list[Piece],
        notification: bytes,
    ) -> None:
        self.source = source
        self.target = target
        self.number = number
        self.left = pieces
        self.notification = notification
        self.problem: Exception | None = None
        self.has_ended = False
        self.is_orphan = False
        self.is_known = False  # whether `poll` has reported the end
        self._total_bytes = sum(piece.num_bytes for piece in pieces)
        self._descriptors = len(pieces)

    @property
    def report(self) -> TransferReport:
        """The report that `poll` returns once the write has ended."""
        return TransferReport(self._total_bytes, self._descriptors, 0.0, 0.0)


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
class Loss:
    """The loss of a connection, without a word.

    Attributes:
        source: the transport that writes through it.
        is_met: whether anything was sent since.
        is_broken: whether nothing can be sent through it any more.
    """

    source: SimulatedTransport
    is_met: bool = False
    is_broken: bool = False


@dataclass(slots=True, eq=False)
class SimulatedWire:
    """What connects simulated transports, and all that is on its way between them.

    Attributes:
        members: transports by name.
        transfers: writes of which something may land.
        notifications: those that have not arrived.
        on_post: called with every write that was posted.
        on_piece: called with every piece that is about to land, and its write.
        fails_to: called before a peer is connected or a notification sent, which fails with the exception that it
            returns, if any.
        breaks_off: called with a write whose descriptors are being posted, of which it may leave some out; the post
            raises the exception that it returns, if any, and what it has left of the write goes on.
        on_forgotten: called with each write of an earlier post that raised, once its writer has forgotten the peer.
        on_broken: called with the loss of a connection that is met by a post, or a notification, which raises.
        breaches: what a transport's user did that the contract forbids, in words.
        posts: how many there were.
        lost: connections that carry nothing more.
    """

    on_post: Callable[[SimulatedHandle], None]
    on_piece: Callable[[SimulatedHandle, Piece], None]
    fails_to: Callable[[str], Exception | None]
    breaks_off: Callable[[SimulatedHandle], Exception | None] = lambda _: None
    on_forgotten: Callable[[SimulatedHandle], None] = lambda _: None
    on_broken: Callable[[Loss], None] = lambda _: None
    members: dict[str, SimulatedTransport] = field(default_factory=dict)
    transfers: list[SimulatedHandle] = field(default_factory=list)
    notifications: list[Notification] = field(default_factory=list)
    breaches: list[str] = field(default_factory=list)
    posts: int = 0
    lost: dict[SimulatedConnection, Loss] = field(default_factory=dict)

    def is_lost(self, transfer: SimulatedHandle) -> bool:
        """Whether a write does not get on, since its connection was lost."""
        return not transfer.has_ended and transfer.source.connected.get(transfer.target.endpoint_name) in self.lost

    def reaches(self, transport: SimulatedTransport) -> bool:
        """Returns whether a transport can be reached: no other one has taken its name."""
        return self.members.get(transport.endpoint_name) is transport

    def land(self, transfer: SimulatedHandle, index: int) -> None:
        """Lets one piece land; the last one ends the write."""
        piece = transfer.left.pop(index)
        if transfer.target.is_mapped:
            self.on_piece(transfer, piece)
            ctypes.memmove(piece.destination, piece.source if piece.sent is None else piece.sent, piece.num_bytes)
        if not transfer.left:
            self._stop(transfer)
            self.transfers.remove(transfer)

    def fail(self, transfer: SimulatedHandle, problem: Exception | None, *, sent: int = 0) -> None:
        """Ends a write as it is.

        Args:
            problem: the exception that its writer's `poll` raises; None if the writer is dead.
            sent: how many of the pieces that are left were sent before, and land yet.
        """
        transfer.problem = problem if transfer.problem is None else transfer.problem
        transfer.left[:] = [
            replace(piece, sent=ctypes.string_at(piece.source, piece.num_bytes)) for piece in transfer.left[:sent]
        ]
        self._stop(transfer)
        if not transfer.left:
            self.transfers.remove(transfer)

    def _stop(self, transfer: SimulatedHandle) -> None:
        if not transfer.has_ended:
            transfer.has_ended = True
            if not transfer.is_orphan:
                transfer.source.unreported.add(transfer)

    @property
    def moving(self) -> list[SimulatedHandle]:
        """Writes that have not ended, and go on."""
        return [transfer for transfer in self.transfers if not transfer.has_ended]

    def deliver(self, notification: Notification) -> None:
        """Delivers a notification, and takes it off the wire."""
        self.notifications.remove(notification)
        if notification.target.is_mapped:
            notification.target.arrived.append((notification.sender, notification.data))


@dataclass(slots=True, eq=False)
class SimulatedConnection(Connection):
    """A connection to a transport of the same wire."""

    target: SimulatedTransport


class SimulatedTransport(RangeTransport[SimulatedConnection]):
    """Moves bytes over a simulated wire.

    Attributes:
        arrived: notifications that were not taken yet.
        is_mapped: whether its process still has its memory: not so once the process is dead.
        unreported: writes that have ended without that `poll` has said so.
    """

    name = "simulated"
    promises = Promises(can_abort=False, fenced_by_deregistration=False, fenced_by_death=True, keeps_order=False)
    merges = False  # each piece lands by itself

    def __init__(self, wire: SimulatedWire, endpoint_name: str) -> None:
        """Joins a wire.

        Args:
            wire: what connects the transports.
            endpoint_name: a name that no other transport of the wire ever had.
        """
        super().__init__(endpoint_name)
        self.arrived: deque[tuple[str, bytes]] = deque()
        self.is_mapped = True
        self.unreported: set[SimulatedHandle] = set()
        self.connected: dict[str, SimulatedConnection] = self._connections
        self.wire = wire
        wire.members[endpoint_name] = self

    def open(self, peer: PeerMetadata) -> SimulatedConnection:
        target = self.wire.members.get(peer.name)
        problem = self.wire.fails_to("connect")
        if target is None or problem is not None:
            raise problem or PeerDisconnectedError(f"no endpoint {peer.name!r}")
        return SimulatedConnection(peer, target)

    def disconnect(self, peer: str) -> None:
        for transfer in self.wire.moving:
            if transfer.source is not self or transfer.target.endpoint_name != peer:
                continue
            if transfer.is_orphan:
                self.wire.on_forgotten(transfer)
            else:
                self.wire.breaches.append(f"{self.endpoint_name} forgets {peer}, to which it still writes")
        super().disconnect(peer)

    def start(self, connection: SimulatedConnection, copies: Copies, notification: bytes) -> SimulatedHandle:
        return self._start(connection.target, [Piece(*copy) for copy in copies], notification)

    def write(self, source: Region, peer: str, address: int, notification: bytes) -> TransferHandle:
        connection = self.connection(peer)
        self._memory.check_range(source)
        connection.memory.check_range(Region(address, source.length))
        half = source.length // 2
        pieces = [Piece(source.address + half, address + half, source.length - half)]
        if half:
            pieces.append(Piece(source.address, address, half))
        return self._start(connection.target, pieces, notification)

    def _start(self, target: SimulatedTransport, pieces: list[Piece], notification: bytes) -> SimulatedHandle:
        self._check_unbroken(target.endpoint_name)
        if not target.is_mapped or not self.wire.reaches(target):
            raise PeerDisconnectedError(f"{target.endpoint_name} is dead, or was started anew: connect again")
        self.wire.posts += 1
        transfer = SimulatedHandle(self.wire.posts, self, target, pieces, notification)
        problem = self.wire.breaks_off(transfer)
        if problem is not None:
            transfer.is_orphan = True
            if transfer.left:
                self.wire.transfers.append(transfer)
            raise problem
        self.wire.transfers.append(transfer)
        self.wire.on_post(transfer)
        return transfer

    def poll(self, transfer: TransferHandle) -> TransferReport | None:
        assert isinstance(transfer, SimulatedHandle)
        if not transfer.has_ended and not self.wire.reaches(transfer.target):
            self.wire.fail(transfer, PeerDisconnectedError(f"{transfer.target.endpoint_name} was started anew"))
        if not transfer.has_ended:
            return None
        self.unreported.discard(transfer)
        if transfer.problem is not None:
            raise transfer.problem
        if not transfer.is_known:
            transfer.is_known = True
            if transfer.notification:
                self._notify(transfer.target, transfer.notification)
        return transfer.report

    def _notify(self, target: SimulatedTransport, notification: bytes) -> None:
        connection = self.connected.get(target.endpoint_name)
        if connection in self.wire.lost:
            self.wire.lost[connection].is_met = True
        else:
            self.wire.notifications.append(Notification(self.endpoint_name, target, notification))

    def _check_unbroken(self, peer: str) -> None:
        loss = self.wire.lost.get(self.connection(peer))
        if loss is not None and loss.is_broken:
            self.wire.on_broken(loss)
            raise PeerDisconnectedError(f"the connection to {peer} is broken: connect again")

    def release(self, transfer: TransferHandle) -> None:
        assert isinstance(transfer, SimulatedHandle)
        if not transfer.has_ended:
            self.wire.breaches.append(f"{self.endpoint_name} releases a write that is on its way")

    def notify(self, peer: str, notification: bytes) -> None:
        target = self.connection(peer).target
        problem = self.wire.fails_to("notify")
        if problem is not None or not target.is_mapped or not self.wire.reaches(target):
            raise problem or PeerDisconnectedError(f"{peer} is dead, or was started anew: connect again")
        self._check_unbroken(peer)
        self._notify(target, notification)

    def take_notifications(self) -> list[tuple[str, bytes]]:
        taken = list(self.arrived)
        self.arrived.clear()
        return taken

    def close(self) -> None:
        self._connections.clear()
        self._lists.clear()
