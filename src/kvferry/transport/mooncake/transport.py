"""Mooncake's transfer engine: RDMA where the machine has it, else TCP; CUDA memory with its builds for CUDA.

It is told ranges, each of which is a transfer of its own with a status that is asked for without waiting. (It has
batches, but waits for them in a busy loop.) It takes some 25 us a range over TCP and refuses all beyond 2,048 that one
peer has waiting, so that a few of each write's are on their way at a time, and the rest follows as it is polled.

It has no notification that leaves with an asynchronous write: those go over `MessageChannel`, once every range of the
write has ended, which since version 0.3.12 means that it is in the peer's memory.

It listens on every interface whatever address it is told; the kernel drops what comes by another one (`confine`).
Nobody has to prove anything to it: whoever reaches its ports can write into registered memory.
"""

from __future__ import annotations

import socket
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock, Thread
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.errors import (
    PeerDisconnectedError,
    RegistrationError,
    TransportError,
    TransportUnavailableError,
    quoted,
)
from kvferry.hosts import bracketed, is_wildcard
from kvferry.layout import Device, MemoryKind, Region
from kvferry.settings import Settings, environment
from kvferry.transport.base import PeerMetadata, Promises, TransferHandle, TransferReport
from kvferry.transport.confined_ports import confine, sockets_on_every_interface
from kvferry.transport.copies import Copies
from kvferry.transport.message_channel import ChannelAddress, ConnectionState, MessageChannel, MessageSender
from kvferry.transport.mooncake.mooncake_diagnosis import MooncakeDiagnosis, load_engine, uses_tcp
from kvferry.transport.mooncake.settings import MooncakeSettings
from kvferry.transport.ranges import Connection, RangeTransport
from kvferry.transport.registered import check_regions

RANGES_OF_A_WRITE = 64
"""Most ranges of one write that are on their way: more were no faster (22 to 29 us a range with 16 to 1,000)."""

RANGES_OF_A_PEER = 512
"""Most ranges that are on their way to one peer. Mooncake queues 1,024, lets 1,024 more wait, and fails the rest."""

_ACCEPT_S = 0.1
"""How long the thread that takes handshakes waits: `close` waits for it, while no other thread of Python's runs."""

_NOTICED_S = 0.1
"""How long a write that has failed may wait for the news that its peer is gone, which comes by another connection."""

_ENDED, _ON_ITS_WAY, _TIMED_OUT = 1, 0, -2  # what Mooncake says of a transfer; anything else is a failure
_REFUSED = 0  # in place of a transfer's number
_NOWHERE = 1  # an address at which nobody has memory
_LANES, _MOST_LANES = 4, 16  # MC_TCP_LANES_PER_PEER


class _Private(msgspec.Struct, frozen=True):
    """What peers are told of an endpoint beside its name and memory.

    Attributes:
        name: the endpoint's.
        server: as Mooncake knows it: host and port of its handshakes.
        messages: where notifications go.
    """

    name: str
    server: str
    messages: ChannelAddress


# Made here: msgspec 0.22 crashes if two threads are the first to decode a type.
_PRIVATE = msgspec.msgpack.Decoder(_Private)


@dataclass(slots=True, eq=False)
class MooncakeConnection(Connection):
    """A connection.

    Attributes:
        server: the peer, as Mooncake knows it.
        messages: carries notifications.
        borders: where pieces of the peer's memory begin, which a range must not cross.
        is_reached: whether Mooncake knows the peer's memory. Until then nothing is posted.
        problem: why it never will; "" as long as it may.
        lock: guards the number that follows; workers write side by side.
        on_their_way: ranges of all writes.
    """

    server: str
    messages: MessageSender
    borders: NDArray[np.uint64]
    is_reached: bool = False
    problem: str = ""
    lock: Lock = field(default_factory=Lock)
    on_their_way: int = 0

    @property
    def is_lost(self) -> bool:
        """Whether nothing goes to the peer any more."""
        return bool(self.problem) or self.messages.state is ConnectionState.LOST

    def take(self, wanted: int) -> int:
        """Takes up to so many places for ranges on their way, and returns how many."""
        with self.lock:
            taken = min(wanted, RANGES_OF_A_PEER - self.on_their_way)
            self.on_their_way += taken
        return taken

    def give_back(self, count: int) -> None:
        """Gives places back."""
        with self.lock:
            self.on_their_way -= count


@dataclass(slots=True, eq=False)
class MooncakeHandle(TransferHandle):
    """A write.

    Attributes:
        copies: all of its ranges.
        posted: how many of them have been posted, from the first on.
        on_their_way: Mooncake's numbers of those that have not ended, the first posted first.
        failed: what has failed of it; "" if nothing. What is on its way must end first.
        failed_at: when.
        problem: what `poll` raises.
    """

    connection: MooncakeConnection
    copies: Copies
    notification: bytes
    began_at: float
    post_s: float = 0.0
    posted: int = 0
    on_their_way: deque[int] = field(default_factory=deque)
    failed: str = ""
    failed_at: float = 0.0
    problem: TransportError | None = None
    report: TransferReport | None = None

    def fail(self, what: str) -> None:
        """Notes the first failure."""
        if not self.failed:
            self.failed, self.failed_at = what, time.monotonic()


class Pieces:
    """Memory without overlaps, as Mooncake wants it: what a region adds to those before."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, region: Region) -> list[Region]:
        """Adds a region and returns the parts of it that no earlier one has."""
        new, at = [], region.address
        first = bisect_right(self._stops, region.address)
        last = bisect_left(self._starts, region.stop)
        for start, stop in [*zip(self._starts[first:last], self._stops[first:last], strict=True), (region.stop, 0)]:
            if at < start:
                new.append(Region(at, start - at))
            at = max(at, stop)
        for piece in new:
            place = bisect_left(self._starts, piece.address)
            self._starts.insert(place, piece.address)
            self._stops.insert(place, piece.stop)
        return new

    @property
    def starts(self) -> NDArray[np.uint64]:
        """Where each piece begins, in ascending order."""
        return np.array(self._starts, np.uint64)


def pieces_of(regions: Iterable[Region]) -> Pieces:
    """Returns the pieces of regions that were registered in this order."""
    pieces = Pieces()
    for region in regions:
        pieces.add(region)
    return pieces


class MooncakeTransport(RangeTransport[MooncakeConnection]):
    """Moves bytes with Mooncake's transfer engine.

    What it promises is what version 0.3.13 was measured to do over TCP. After a process was killed in the middle of a
    write, its last bytes arrived within milliseconds. Four connections to a peer share the ranges, and nothing orders
    them. A write that has begun goes on after its owner has unregistered the memory. Of RDMA nothing was measured.

    Attributes:
        engine: Mooncake's.
        channel: carries notifications.
        server: what peers call this one.
    """

    name = "mooncake"
    diagnosis = MooncakeDiagnosis()

    @classmethod
    def check_available(cls) -> None:
        load_engine()

    @classmethod
    def from_settings(cls, settings: Settings, endpoint_name: str, *, writes: bool) -> MooncakeTransport:  # noqa: ARG003
        return cls(
            endpoint_name,
            host=settings.host,
            advertised_host=settings.advertise_host,
            device=settings.of(MooncakeSettings).mooncake_device or "",
        )

    def __init__(
        self, endpoint_name: str, *, host: str = "127.0.0.1", advertised_host: str | None = None, device: str = ""
    ) -> None:
        """Starts an engine.

        Args:
            endpoint_name: its name among all peers, new at every start.
            host: the address to listen on.
            advertised_host: as peers reach it; `host` if None.
            device: RDMA devices to use, separated by commas; "" leaves it to Mooncake.

        Raises:
            TransportUnavailableError: if Mooncake is missing, or was set to what kvferry cannot use.
            TransportError: if it cannot start.
        """
        super().__init__(endpoint_name)
        library = load_engine()
        advertised = advertised_host or host
        _check_variables(host, advertised)
        is_for_cuda = getattr(library, "SUPPORT_CUDA", False)
        self.memory_kinds = frozenset({MemoryKind.DRAM} | ({MemoryKind.VRAM} if is_for_cuda else set()))  # type: ignore[misc]
        self._is_tcp = uses_tcp()
        self.promises = Promises(
            can_abort=False,
            fenced_by_deregistration=False,
            fenced_by_death=self._is_tcp,
            keeps_order=False,
            posts_all_or_nothing=True,
        )
        self.channel = MessageChannel(endpoint_name, host, advertised)
        self._pieces = Pieces()
        self._borders = self._pieces.starts
        self._last_ranges: list[int] = []  # to peers that have died
        self._connecting: list[MessageSender] = []
        self._servers: dict[str, str] = {}  # who was reached under a name of Mooncake's, which keeps what it knew of it
        self.engine: Any = library.TransferEngine()
        before = sockets_on_every_interface()
        # Every port is one that is free: where peers are told each other's, nobody needs a server for that.
        code = self.engine.initialize(f"{bracketed(advertised)}:0", "P2PHANDSHAKE", "tcp", device)
        if code:
            self.channel.close()
            raise TransportError(f"Mooncake cannot start on {advertised} with device {device!r}: error {code}")
        for listening in sockets_on_every_interface() - before:
            listening.set_accept_timeout(_ACCEPT_S)
            if not is_wildcard(host):
                confine(listening, host)
        port = self.engine.get_rpc_port()
        with suppress(OSError), socket.create_connection(("localhost" if is_wildcard(host) else host, port), _ACCEPT_S):
            pass  # ends the first wait for a handshake, which is a second long
        self.server = f"{bracketed(advertised)}:{port}"

    def private_metadata(self) -> bytes:
        return msgspec.msgpack.encode(_Private(self.endpoint_name, self.server, self.channel.address))

    def register(self, regions: Sequence[Region], device: Device) -> None:
        check_regions(regions)
        super().register(regions, device)
        with self._lock:
            pieces = [piece for region in regions for piece in self._pieces.add(region)]
            self._borders = self._pieces.starts
        if pieces:
            code = self.engine.batch_register_memory(
                [piece.address for piece in pieces], [piece.length for piece in pieces]
            )
            if code:
                raise RegistrationError(f"Mooncake cannot register {len(pieces)} regions of {device}: error {code}")

    def open(self, peer: PeerMetadata) -> MooncakeConnection:
        try:
            private = _PRIVATE.decode(peer.private)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
            raise TransportError(f"{peer.name} sent no metadata of Mooncake's: {quoted(problem)}") from problem
        if private.name != peer.name:
            raise TransportError(f"a peer that calls itself {peer.name!r} sent the metadata of {private.name!r}")
        with self._lock:
            earlier = self._servers.setdefault(private.server, peer.name)
        if earlier != peer.name:
            raise TransportError(
                f"{peer.name} has the port that {earlier} had ({private.server}), and Mooncake would write to where "
                "that was: start either side anew"
            )
        connection = MooncakeConnection(
            peer,
            server=private.server,
            messages=self.channel.connect(peer.name, private.messages),
            borders=pieces_of(peer.regions).starts,
        )
        with self._lock:
            self._connecting.append(connection.messages)
        if peer.regions:
            Thread(target=self._reach, args=(connection,), name=f"{self.endpoint_name}-reach", daemon=True).start()
        return connection

    def _reach(self, connection: MooncakeConnection) -> None:
        """Has Mooncake ask the peer what its memory is; on a thread of its own, since one that is frozen lets it wait.

        Mooncake waits a minute, and in the second call lets no other thread of Python's run meanwhile. So that comes
        when the peer has just answered the first.
        """
        engine = self.engine
        if engine is None:
            return
        if not engine.send_probe(connection.server) and engine.get_first_buffer_address(connection.server):
            connection.is_reached = True
        else:
            connection.problem = f"{connection.peer.name} does not answer Mooncake at {connection.server}"

    def hang_up(self, connection: MooncakeConnection) -> None:
        if self._is_tcp and connection.is_reached and connection.is_lost and len(self._memory):
            # Mooncake keeps its sockets to a peer that has died until it next uses them. It uses each for a range that
            # nobody would take.
            source = self._memory.regions[0].address
            with self._lock:
                for _ in range(_connections_to_a_peer()):
                    number = self.engine.transfer_submit_write(connection.server, source, _NOWHERE, 1)
                    self._last_ranges += [number] if number != _REFUSED else []
        connection.messages.close()

    def start(self, connection: MooncakeConnection, copies: Copies, notification: bytes) -> MooncakeHandle:
        if connection.is_lost:
            raise _gone(connection)
        copies = copies.cut_at(self._borders, connection.borders)
        transfer = MooncakeHandle(connection, copies, notification, time.perf_counter())
        self._post_more(transfer)
        if transfer.failed and not transfer.on_their_way:
            raise self._problem(transfer)
        transfer.post_s = time.perf_counter() - transfer.began_at
        return transfer

    def _post_more(self, transfer: MooncakeHandle) -> None:
        """Posts as many of the ranges that are left as may be on their way."""
        connection, copies = transfer.connection, transfer.copies
        if not connection.is_reached:
            if connection.is_lost:
                transfer.fail(connection.problem or "was never reached")
            return
        wanted = min(RANGES_OF_A_WRITE - len(transfer.on_their_way), len(copies) - transfer.posted)
        taken = connection.take(wanted) if wanted else 0
        for done, (source, destination, length) in enumerate(copies.part(transfer.posted, taken)):
            number = self.engine.transfer_submit_write(connection.server, source, destination, length)
            if number == _REFUSED:
                transfer.fail(f"Mooncake does not take a range of {length} bytes")
                connection.give_back(taken - done)
                return
            transfer.on_their_way.append(number)
            transfer.posted += 1

    def poll(self, transfer: TransferHandle) -> TransferReport | None:
        assert isinstance(transfer, MooncakeHandle)
        if transfer.report is not None:
            return transfer.report
        while transfer.on_their_way:
            status = self.engine.transfer_check_status(transfer.on_their_way[0])
            if status in (_ON_ITS_WAY, _TIMED_OUT):  # the latter may still move
                break
            transfer.on_their_way.popleft()
            transfer.connection.give_back(1)
            if status != _ENDED:
                transfer.fail(f"Mooncake failed to write a range (status {status})")
        if not transfer.failed and transfer.posted < len(transfer.copies):
            self._post_more(transfer)
        if transfer.on_their_way:
            return None
        if transfer.failed:
            if not transfer.connection.is_lost and time.monotonic() < transfer.failed_at + _NOTICED_S:
                return None
            raise self._problem(transfer)
        if transfer.posted < len(transfer.copies):
            return None
        if transfer.notification:
            transfer.connection.messages.send(transfer.notification)
        transfer.report = TransferReport(
            total_bytes=transfer.copies.total_bytes,
            descriptors=len(transfer.copies),
            post_s=transfer.post_s,
            transfer_s=time.perf_counter() - transfer.began_at,
        )
        return transfer.report

    def _problem(self, transfer: MooncakeHandle) -> TransportError:
        """Returns the error of a write that has failed: the same however often it is asked for."""
        if transfer.problem is None:
            peer = transfer.connection.peer.name
            said = f"{transfer.failed}; its log, where this process writes its errors, may say why"
            if transfer.connection.is_lost:
                transfer.problem = PeerDisconnectedError(
                    f"writing to {peer}: the connection to {peer} is gone ({said})"
                )
            else:
                transfer.problem = TransportError(f"writing to {peer}: {said}")
        return transfer.problem

    def _is_on_its_way(self, number: int) -> bool:
        """Returns whether a range is; frees it if not."""
        return self.engine.transfer_check_status(number) in (_ON_ITS_WAY, _TIMED_OUT)

    def notify(self, peer: str, notification: bytes) -> None:
        connection = self.connection(peer)
        if connection.problem:
            raise _gone(connection)
        connection.messages.send(notification)

    def take_notifications(self) -> list[tuple[str, bytes]]:
        with self._lock:
            self._last_ranges = [each for each in self._last_ranges if self._is_on_its_way(each)]
            # What waits for a connection leaves when its state is asked.
            self._connecting = [each for each in self._connecting if each.state is ConnectionState.CONNECTING]
        return self.channel.take()

    def close(self) -> None:
        super().close()
        if self.engine is not None:
            self._last_ranges = []
            if self._borders.size:
                self.engine.batch_unregister_memory(self._borders.tolist())
            self.engine = None  # ends its threads and closes its ports, unless a peer is still being reached
            self.channel.close()


def _gone(connection: MooncakeConnection) -> PeerDisconnectedError:
    why = f" ({connection.problem})" if connection.problem else ""
    return PeerDisconnectedError(f"the connection to {connection.peer.name} is gone{why}")


def _check_variables(host: str, advertised: str) -> None:
    """Refuses what Mooncake reads from the environment if kvferry cannot work with it.

    Raises:
        TransportUnavailableError: naming the variable.
    """
    variables = environment()
    if variables.get("MC_TCP_PROTO") == "1":
        raise TransportUnavailableError(
            "with MC_TCP_PROTO=1 Mooncake says that a write has ended before its bytes have arrived: unset it"
        )
    for address in (host, advertised):
        if ":" in address and "MC_USE_IPV6" not in variables:
            raise TransportUnavailableError(f"Mooncake uses {address} only if MC_USE_IPV6=1 is set on every side")


def _connections_to_a_peer() -> int:
    """Returns how many TCP connections Mooncake has to each peer, at most."""
    given = environment().get("MC_TCP_LANES_PER_PEER", "")
    return int(given) if given.isdecimal() and 1 <= int(given) <= _MOST_LANES else _LANES
