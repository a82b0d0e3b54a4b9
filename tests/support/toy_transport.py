"""A transport of one file, made as CONTRIBUTING's recipe says: bytes go over TCP, notifications as short lines of text.

It moves bytes between processes, and knows neither strides nor indices. It is slow, trusts everyone who reaches its
port, and is here for what its being there proves: KVFERRY_TRANSPORT=tests.support.toy_transport:ToyTransport.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BufferedReader

import numpy as np

from kvferry import MemoryKind, Region, Settings
from kvferry.errors import MessageError, PeerDisconnectedError, RegistrationError, TransportError
from kvferry.findings import Finding, good
from kvferry.transport import (
    Connection,
    Copies,
    Diagnosis,
    PeerMetadata,
    Promises,
    RangeTransport,
    TextNotifications,
    TransferHandle,
    TransferReport,
    WayTaken,
)

LONGEST_LINE = 200
RANGES_IN_A_FRAME = 64
PATIENCE_S = 10.0

_FRAME = struct.Struct("!cQ")  # what follows, and how much of it
_RANGES, _END, _TEXT = b"R", b"E", b"T"
_NUMBER = struct.Struct("!Q")


class ToyDiagnosis(Diagnosis):
    """What `kvferry doctor` is told."""

    remedy = "look at KVFERRY_HOST, and whether a firewall lets any port through"

    def findings(self, settings: Settings) -> Iterator[Finding]:
        yield good("toy", f"a port of {settings.host}, whichever is free")

    def way_taken(self, said: str, *, is_local: bool, kind: MemoryKind = MemoryKind.DRAM) -> WayTaken:
        return WayTaken("the toy takes TCP")


@dataclass(slots=True, eq=False)
class ToyConnection(Connection):
    """A connection that we write by.

    Attributes:
        to_send: what is left to send, in order: memory that is read when it is sent.
        ended: writes that the peer has all bytes of, by number.
        problem: why the connection is of no use any more.
    """

    socket: socket.socket
    lock: threading.Lock = field(default_factory=threading.Lock)
    to_send: deque[memoryview] = field(default_factory=deque)
    received: bytearray = field(default_factory=bytearray)
    ended: set[int] = field(default_factory=set)
    writes: int = 0
    problem: Exception | None = None

    def get_on(self) -> None:
        """Sends and receives what can be without waiting. Called with the lock."""
        if self.problem is not None:
            return
        try:
            with contextlib.suppress(BlockingIOError):
                while self.to_send:
                    sent = self.socket.send(self.to_send[0])
                    rest = self.to_send[0][sent:]
                    self.to_send.popleft()
                    if rest:
                        self.to_send.appendleft(rest)
            with contextlib.suppress(BlockingIOError):
                while data := self.socket.recv(4096):
                    self.received += data
                raise ConnectionResetError("the peer has closed it")
        except OSError as error:
            self.fail(error)
        while len(self.received) >= _NUMBER.size:
            self.ended.add(_NUMBER.unpack_from(self.received)[0])
            del self.received[: _NUMBER.size]

    def fail(self, problem: Exception) -> None:
        """Ends it: from now on no memory is read. Called with the lock."""
        self.problem = self.problem or problem
        self.to_send.clear()
        self.socket.close()

    def check(self) -> None:
        """Raises PeerDisconnectedError if it has ended."""
        if self.problem is not None:
            raise PeerDisconnectedError(f"the connection to {self.peer.name} is gone: {self.problem}") from self.problem

    def queue(self, *parts: bytes | memoryview) -> None:
        """Adds what is to be sent. Called with the lock."""
        self.to_send.extend(memoryview(part) for part in parts if len(part))


@dataclass(slots=True, eq=False)
class ToyHandle(TransferHandle):
    """A write."""

    connection: ToyConnection
    number: int
    notification: bytes
    total_bytes: int
    ranges: int
    post_s: float
    posted_at: float
    report: TransferReport | None = None


class ToyTransport(RangeTransport[ToyConnection]):
    """Moves bytes over TCP, and promises nothing: nothing was measured."""

    name = "toy"
    promises = Promises(
        can_abort=False,
        fenced_by_deregistration=False,
        fenced_by_death=False,
        keeps_order=False,
        posts_all_or_nothing=False,
    )
    may_deliver_late = True
    diagnosis = ToyDiagnosis()

    @classmethod
    def from_settings(cls, settings: Settings, endpoint_name: str, *, writes: bool) -> ToyTransport:
        return cls(endpoint_name, host=settings.host, advertised_host=settings.advertise_host)

    def __init__(self, endpoint_name: str, *, host: str = "127.0.0.1", advertised_host: str | None = None) -> None:
        """Listens on any port of an address."""
        super().__init__(endpoint_name)
        self._texts = TextNotifications(longest=LONGEST_LINE)
        self._arrived: deque[tuple[str, bytes]] = deque()
        self._server = socket.create_server((host, 0))
        self._address = f"{advertised_host or host}:{self._server.getsockname()[1]}"
        self._is_closed = False
        # What peers write by, and the threads that read it.
        self._incoming: dict[socket.socket, threading.Thread] = {}
        self._listener = threading.Thread(target=self._listen, name=f"{endpoint_name}-toy", daemon=True)
        self._listener.start()

    # --- our side: we write

    def private_metadata(self) -> bytes:
        return self._address.encode()

    def open(self, peer: PeerMetadata) -> ToyConnection:
        try:
            host, _, port = peer.private.decode().rpartition(":")
            connected = socket.create_connection((host, int(port)), PATIENCE_S)
        except (OSError, ValueError, OverflowError) as error:
            raise TransportError(f"{peer.name} cannot be reached at {peer.private!r}: {error}") from error
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _send_line(connected, self.endpoint_name)
            name = _line(connected.makefile("rb"))
        except (OSError, MessageError) as error:
            connected.close()
            raise TransportError(f"{peer.name} does not answer: {error}") from error
        if name != peer.name:
            connected.close()
            raise TransportError(f"a peer that calls itself {peer.name!r} sent the address of {name!r}")
        connected.setblocking(False)
        return ToyConnection(peer, connected)

    def hang_up(self, connection: ToyConnection) -> None:
        with connection.lock:
            connection.fail(ConnectionAbortedError("disconnected"))

    def start(self, connection: ToyConnection, copies: Copies, notification: bytes) -> ToyHandle:
        began_at = time.perf_counter()
        with connection.lock:
            connection.get_on()
            connection.check()
            for batch in copies.batches(RANGES_IN_A_FRAME):
                table = np.stack([batch.destinations, batch.lengths], axis=1).astype(">u8").tobytes()
                connection.queue(_FRAME.pack(_RANGES, len(batch)), table)
                connection.queue(*(_memory(source, length) for source, _, length in batch))
            connection.writes += 1
            number = connection.writes
            connection.queue(_FRAME.pack(_END, number))
            connection.get_on()
        post_s = time.perf_counter() - began_at
        return ToyHandle(connection, number, notification, copies.total_bytes, len(copies), post_s, began_at)

    def poll(self, transfer: TransferHandle) -> TransferReport | None:
        assert isinstance(transfer, ToyHandle)
        if transfer.report is not None:
            return transfer.report
        connection = transfer.connection
        with connection.lock:
            connection.get_on()
            if transfer.number not in connection.ended:
                connection.check()
                return None
            if transfer.notification:
                self._queue_notification(connection, transfer.notification)
            connection.ended.discard(transfer.number)
        elapsed = time.perf_counter() - transfer.posted_at
        transfer.report = TransferReport(transfer.total_bytes, transfer.ranges, transfer.post_s, elapsed)
        return transfer.report

    def notify(self, peer: str, notification: bytes) -> None:
        connection = self.connection(peer)
        with connection.lock:
            connection.get_on()
            self._queue_notification(connection, notification)

    def _queue_notification(self, connection: ToyConnection, notification: bytes) -> None:
        connection.check()
        for piece in self._texts.pieces(notification):
            connection.queue(_FRAME.pack(_TEXT, len(piece)), piece.encode())
        connection.get_on()

    def take_notifications(self) -> list[tuple[str, bytes]]:
        with self._lock:
            connections = list(self._connections.values())
        for connection in connections:
            with connection.lock:
                connection.get_on()
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

    # --- their side: peers write to us

    def _listen(self) -> None:
        while True:
            try:
                accepted, _ = self._server.accept()
            except OSError:
                return
            reader = threading.Thread(target=self._serve, args=(accepted,), daemon=True)
            with self._lock:
                if self._is_closed:
                    accepted.close()
                    return
                self._incoming[accepted] = reader
            reader.start()

    def _serve(self, accepted: socket.socket) -> None:
        stream = accepted.makefile("rb")
        source = f"{accepted.fileno()}"  # of pieces: a peer that connects anew is another one
        with accepted, stream, contextlib.suppress(OSError, EOFError, MessageError, RegistrationError):
            sender = _line(stream)
            source = f"{sender} {accepted.getpeername()}"
            _send_line(accepted, self.endpoint_name)
            while header := stream.read(_FRAME.size):
                what, amount = _FRAME.unpack(header)
                if what == _RANGES:
                    self._receive(stream, amount)
                elif what == _END:
                    accepted.sendall(_NUMBER.pack(amount))
                else:
                    text = _exactly(stream, amount, most=LONGEST_LINE).decode("ascii", "replace")
                    whole = self._texts.add(source, text)
                    if whole is not None:
                        self._arrived.append((sender, whole))
        self._texts.forget(source)
        with self._lock:
            self._incoming.pop(accepted, None)

    def _receive(self, stream: BufferedReader, count: int) -> None:
        table = np.frombuffer(_exactly(stream, 16 * count, most=16 * RANGES_IN_A_FRAME), ">u8").reshape(-1, 2)
        for address, length in table.tolist():
            self._memory.check_range(Region(address, length))
            view, at = _memory(address, length), 0
            while at < length:
                got = stream.readinto(view[at:])
                if not got:
                    raise EOFError
                at += got

    def close(self) -> None:
        super().close()
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            incoming = dict(self._incoming)
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._server.close()
        for accepted, reader in incoming.items():
            with contextlib.suppress(OSError):
                accepted.shutdown(socket.SHUT_RDWR)
            reader.join(PATIENCE_S)
        self._listener.join(PATIENCE_S)


def _memory(address: int, length: int) -> memoryview:
    """The memory itself, not a copy."""
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


def _send_line(connected: socket.socket, text: str) -> None:
    connected.sendall(text.encode() + b"\n")


def _line(stream: BufferedReader) -> str:
    line = stream.readline(4 * LONGEST_LINE)
    if not line.endswith(b"\n"):
        raise MessageError(f"no line of text: {line!r}")
    return line[:-1].decode("utf-8", "replace")


def _exactly(stream: BufferedReader, count: int, *, most: int) -> bytes:
    if count > most:
        raise MessageError(f"{count} bytes, where {most} are the most")
    data = stream.read(count)
    if len(data) != count:
        raise EOFError
    return data
