"""The peer channel: small messages between a decode rank and a prefill rank over one ZMQ connection.

A channel belongs to the thread that polls it. Other threads queue their messages for that thread and wake it with
`Wakeup`, the only thing here that may be called from any thread.

With credentials both ends speak CURVE: everything is encrypted, and each end proves that it has a key that comes of the
shared secret, before a single message passes. ZMQ asks a handler in the same context (ZAP, ZeroMQ's RFC 27) whether a
client's key is allowed; the listening channel answers in the thread that polls it, whenever it receives. Without an
answer no client is let in.

ZMQ accepts every connection, from strangers too, and has no bound of its own. But it reports each to a socket that
monitors it: beyond the bound, the thread that polls shuts down the oldest stranger, as soon as it has a turn; if there
are only peers, the one that came last. Strangers are those whose handshake has not succeeded, or without credentials,
who were not sent any message: the operating system says how many bytes were.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import math
import os
import re
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from kvferry.control.credentials import Credentials, secret_hint
from kvferry.control.reply_routes import ReplyRoutes, identity_of
from kvferry.errors import PeerDisconnectedError, SettingsError
from kvferry.loggers import logger_of
from kvferry.open_files import CONNECTION, REMEDY, lack, share_of
from kvferry.protocol.wire.codec import MAX_MESSAGE_BYTES

log = logger_of(__name__)

_Found = TypeVar("_Found")

_LINGER_MS = 500
_QUEUED_MESSAGES = 100_000
_MOST_AT_A_TIME = 1000
_WAKE_BYTES = 4096
_SPARE_CONNECTIONS = 512
_BYTES_SENT = struct.Struct("@200xQQ")  # struct tcp_info (linux/tcp.h): tcpi_bytes_sent and, of these, sent again
_GREETING_BYTES = 112  # more than ZMQ sends before any message, measured: 107
_CURVE_GREETING_BYTES = 256  # more than it sends whoever cannot prove to have the key; the others are sent 301
_LONGEST_HANDSHAKE_MS = 10_000
_PROBES = 3  # unanswered, of a connection that was idle: it has gone
_LONGEST_KEEPALIVE_S = 32_767  # ZMQ ends the process where Linux does not take a time
_IDENTITY = re.compile(rb"[!-~]{1,255}")

_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"kvferry"


class Wakeup:
    """Wakes a thread that waits in a poller. `wake` may be called from any thread, any number of times."""

    def __init__(self) -> None:
        self._receiving, self._sending = socket.socketpair()
        self._receiving.setblocking(False)
        self._sending.setblocking(False)

    def fileno(self) -> int:
        """Returns the descriptor to poll for input."""
        return self._receiving.fileno()

    def wake(self) -> None:
        """Makes the descriptor readable. A full socket is readable already; a closed one has no thread to wake."""
        with contextlib.suppress(OSError):
            self._sending.send(b"!")

    def clear(self) -> None:
        """Makes the descriptor unreadable again."""
        with contextlib.suppress(BlockingIOError):
            while len(self._receiving.recv(_WAKE_BYTES)) == _WAKE_BYTES:
                pass

    def close(self) -> None:
        """Closes both ends of the socket pair."""
        self._receiving.close()
        self._sending.close()


def has_input(socket: zmq.Socket[bytes]) -> bool:
    """Whether there is something to receive.

    Asked before each receiving: that releases the interpreter's lock also where it finds nothing, and a thread that
    computes lets nobody have it back for 5 ms. This does not.
    """
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def _configured(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    created = context.socket(kind)
    created.setsockopt(zmq.LINGER, _LINGER_MS)
    created.setsockopt(zmq.IPV6, 1)
    created.setsockopt(zmq.SNDHWM, _QUEUED_MESSAGES)
    created.setsockopt(zmq.RCVHWM, _QUEUED_MESSAGES)
    created.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES + 1024)
    created.setsockopt(zmq.HANDSHAKE_IVL, _LONGEST_HANDSHAKE_MS)
    return created


def _waiting(socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    """Yields the messages that have arrived, only so many at a time."""
    for _ in range(_MOST_AT_A_TIME):
        if not has_input(socket):
            return
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:  # what there was came from a connection that has just gone
            return


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turns ZMQ's errors into one that begins with `what` and, if a limit was reached, says which."""
    try:
        yield
    except zmq.ZMQError as error:
        raise PeerDisconnectedError(f"{what}: {error.strerror}{_limit_hint(error)}") from error


def _limit_hint(error: zmq.ZMQError) -> str:
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        return ""
    return f". This process may have no more open files or sockets, and each connection takes three: {REMEDY}"


class _Connections:
    """The connections of a listening socket, as ZMQ reports them; beyond a bound, strangers are shut down first.

    Attributes:
        monitors: what to poll for input; empty without a bound.
    """

    def __init__(self, most: int | None, greeting_bytes: int) -> None:
        """Begins with none.

        Args:
            most: how many there may be; None for any number.
            greeting_bytes: what strangers are sent at most.
        """
        self._greeting_bytes = greeting_bytes
        self.monitors: list[zmq.Socket[bytes]] = []
        self._most = most
        self._peers: set[int] = set()  # file descriptors, likewise below
        self._strangers: dict[int, None] = {}  # those to which nothing had been sent at the last look, the oldest first
        self._is_full = False

    def watch(self, listening: zmq.Socket[bytes]) -> None:
        """Counts the connections of a socket that is not bound yet."""
        if self._most is None:
            return
        address = f"inproc://connections-of-{id(self)}"
        listening.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        monitor = listening.context.socket(zmq.PAIR)
        self.monitors.append(monitor)
        monitor.setsockopt(zmq.RCVHWM, 0)  # ZMQ's thread would wait for room, and `close` for that thread
        monitor.connect(address)

    def shut_surplus_down(self, port: int) -> None:
        """Shuts down as many connections as there are beyond the bound.

        Args:
            port: on which the socket listens.
        """
        for monitor in self.monitors:
            while has_input(monitor):
                self._take(recv_monitor_message(monitor, zmq.NOBLOCK), port)

    def _take(self, event: Mapping[str, Any], port: int) -> None:
        assert self._most is not None
        descriptor = int(event["value"])
        self._peers.discard(descriptor)
        self._strangers.pop(descriptor, None)
        if event["event"] == zmq.EVENT_DISCONNECTED:
            self._is_full = self._is_full and self._count >= self._most
            return
        self._strangers[descriptor] = None
        if self._count <= self._most:
            return
        if not self._is_full:
            self._is_full = True
            log.warning(
                "the peer channel has %d connections, as many as it may (KVFERRY_MAX_DECODE_RANKS, ulimit -n): from "
                "now on the oldest stranger has to go for each that comes, and if there is none, the one that comes",
                self._most,
            )
        _shut_down(self._next_to_go(port, came=descriptor), port)

    @property
    def _count(self) -> int:
        return len(self._peers) + len(self._strangers)

    def _next_to_go(self, port: int, *, came: int) -> int:
        """Returns the oldest stranger; the connection that has come if all others are peers. It is not counted on."""
        for descriptor in list(self._strangers):
            del self._strangers[descriptor]
            if descriptor == came or _sent(descriptor, port) <= self._greeting_bytes:
                return descriptor
            self._peers.add(descriptor)
        raise AssertionError("the one that has come is among them")

    def close(self, listening: zmq.Socket[bytes]) -> None:
        """Counts no more."""
        for monitor in self.monitors:
            listening.disable_monitor()
            monitor.close(linger=0)


def most_connections(decode_ranks: int) -> int:
    """Returns how many connections a peer channel may have for so many decode ranks.

    Some more for those that connect anew and for handshakes, and no more than three of eight files that the process may
    open: if there are none left, nothing else of the process works either.
    """
    return share_of(6, 16, most=decode_ranks + _SPARE_CONNECTIONS)


def _of_connection(descriptor: int, port: int, use: Callable[[socket.socket], _Found], otherwise: _Found) -> _Found:
    """Uses a connection to this port. The descriptor may be something else by now, or closed."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getsockname()[1] == port:
            return use(connection)
    return otherwise


def _shut_down(descriptor: int, port: int) -> None:
    """Shuts a connection down; ZMQ closes it."""
    _of_connection(descriptor, port, lambda connection: connection.shutdown(socket.SHUT_RDWR), None)


def _sent(descriptor: int, port: int) -> int:
    """Returns how many bytes this side has sent by a connection; 0 where Linux is older than 4.19."""

    def sent(connection: socket.socket) -> int:
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_SENT.size)
        sent, again = _BYTES_SENT.unpack(told.ljust(_BYTES_SENT.size, b"\0"))
        return int(sent - again)

    return _of_connection(descriptor, port, sent, 0)


def _end_silent(listening: zmq.Socket[bytes], timeout_s: float) -> None:
    """Has the system end the connections of a socket that is not bound yet whose other end is silent for good.

    A decode rank that has made its connection anew cannot tell this side so where nothing gets through the old one,
    which would stay, and count, for good. The system asks the other system, not the process: one that is frozen stays
    connected. It takes twice as long as a silent rank takes to be given up, by heartbeats, which decide.
    """
    timeout_s = min(timeout_s, _LONGEST_KEEPALIVE_S)
    listening.setsockopt(zmq.TCP_KEEPALIVE, 1)
    listening.setsockopt(zmq.TCP_KEEPALIVE_IDLE, math.ceil(timeout_s))
    listening.setsockopt(zmq.TCP_KEEPALIVE_INTVL, math.ceil(timeout_s / _PROBES))
    listening.setsockopt(zmq.TCP_KEEPALIVE_CNT, _PROBES)
    listening.setsockopt(zmq.TCP_MAXRT, int(2 * timeout_s * 1000))


class _Doorkeeper:
    """Answers ZMQ's requests whether to let a client in (ZAP)."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: bytes) -> None:
        """Lets in whoever proves to have one public key.

        Args:
            allowed: the one public key that clients have, Z85.
        """
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP_ADDRESS)
        self._allowed = z85.decode(allowed)

    def answer(self) -> None:
        """Answers every request that waits."""
        while has_input(self.socket):
            version, request, *rest = self.socket.recv_multipart(zmq.NOBLOCK)
            # domain, address, identity, mechanism, and the client's key
            is_known = (
                len(rest) == 5
                and (version, rest[0], rest[3]) == (b"1.0", _ZAP_DOMAIN, b"CURVE")
                and hmac.compare_digest(rest[4], self._allowed)
            )
            status = (b"200", b"OK") if is_known else (b"400", b"unknown key")
            self.socket.send_multipart([b"1.0", request, *status, b"", b""])


class ListeningChannel:
    """A prefill rank's end: many decode ranks connect to it, each identified by its endpoint's name.

    Attributes:
        doorkeeper: answers who may come in; None without secrets.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        host: str,
        port: int,
        credentials: Credentials | None = None,
        max_connections: int | None = None,
        peer_timeout_s: float | None = None,
    ) -> None:
        """Binds the port; messages are received from then on.

        Args:
            context: with credentials, no other listening channel may have any in the same one.
            host: address to bind to; IPv6 addresses in brackets.
            port: 0 takes any free one.
            credentials: only peers with the same come in; None lets everyone in.
            max_connections: how many there may be, half-open ones included; then the oldest of strangers has to go,
                and among peers the one that comes. None is no bound.
            peer_timeout_s: silence after which a decode rank counts as lost; None leaves connections of lost ones open.

        Raises:
            SettingsError: if the address cannot be bound, saying why.
        """
        self._routes = ReplyRoutes()
        self._connections = _Connections(
            max_connections, _GREETING_BYTES if credentials is None else _CURVE_GREETING_BYTES
        )
        self.socket = _configured(context, zmq.ROUTER)
        # Makes a message without a route an error, and lets a reconnecting peer keep its identity.
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if peer_timeout_s is not None:
            _end_silent(self.socket, peer_timeout_s)
        self.doorkeeper: _Doorkeeper | None = None
        if credentials is not None:
            self.doorkeeper = _Doorkeeper(context, credentials.connecting.public)
            self.socket.setsockopt(zmq.CURVE_SERVER, 1)
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, credentials.listening.secret)
            self.socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
            self.socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an answer no client is let in
        try:
            self._connections.watch(self.socket)
            self.socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            remedy = _limit_hint(error) or ". Choose another port, or 0 for any free one"
            raise SettingsError(
                f"the peer channel cannot listen on {host} port {port} (KVFERRY_HOST, KVFERRY_CONTROL_PORT): "
                f"{error.strerror}{remedy}"
            ) from error
        endpoint = self.socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self.port = int(endpoint.rstrip(b"\0").rpartition(b":")[2])

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """What to poll for input; `receive` takes care of all of them."""
        doorkeeper = [] if self.doorkeeper is None else [self.doorkeeper.socket]
        return [self.socket, *self._connections.monitors, *doorkeeper]

    def wait(self, timeout_ms: int) -> None:
        """Waits until there may be something to receive, for so many milliseconds at most."""
        poller = zmq.Poller()
        for each in self.sockets:
            poller.register(each, zmq.POLLIN)
        poller.poll(timeout_ms)

    def receive(self) -> list[tuple[str, bytes]]:
        """Returns the messages that have arrived: (name of the sender, message). Drops frames that are no message.

        Returns only so many at a time, so that the thread that polls has time for other things.
        """
        self._connections.shut_surplus_down(self.port)
        if self.doorkeeper is not None:
            self.doorkeeper.answer()
        return [
            (self._routes.sender_of(frames[0].decode("ascii")), frames[1])
            for frames in _waiting(self.socket)
            if len(frames) == 2 and _IDENTITY.fullmatch(frames[0])
        ]

    def send(self, identity: str, message: bytes) -> None:
        """Sends to a decode rank.

        Raises:
            PeerDisconnectedError: if it is not connected.
        """
        is_sent, problem = False, None
        for route in self._routes.to(identity):
            try:
                self.socket.send_multipart([route.encode(), message], zmq.NOBLOCK)
                is_sent = True
            except zmq.ZMQError as error:
                self._routes.lost(identity, route)
                problem = error
        if not is_sent:
            reason = "it has sent nothing" if problem is None else problem.strerror
            raise PeerDisconnectedError(f"no connection to {identity}: {reason}") from problem

    def close(self) -> None:
        """Closes the socket; what was sent has half a second to leave."""
        self._connections.close(self.socket)
        self.socket.close()
        if self.doorkeeper is not None:
            self.doorkeeper.socket.close()


class ConnectedChannel:
    """A decode rank's end: one connection to one prefill rank, made anew by ZMQ when it breaks."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        identity: str,
        address: str,
        number: int = 0,
        credentials: Credentials | None = None,
    ) -> None:
        """Begins to connect, and does not wait for it.

        Args:
            identity: of this endpoint: visible ASCII, no more than 240 characters.
            number: higher than of all connections that this endpoint had before. ZMQ goes on sending what a closed one
                had left, and of two that call themselves the same the prefill rank's end of ZMQ keeps the one that came
                last.
            address: of the prefill rank, such as tcp://127.0.0.1:40000.
            credentials: whoever listens there must have the same.

        Raises:
            PeerDisconnectedError: if the address makes no sense, or the process may open too few files more.
        """
        self.address = address
        self._has_secret = credentials is not None
        if problem := lack(CONNECTION):  # for what the transport will take, too
            raise PeerDisconnectedError(f"cannot connect to {address!r}: {problem}")
        with contextlib.ExitStack() as undo:
            undo.enter_context(_explained(f"cannot connect to {address!r}"))
            self.socket = _configured(context, zmq.DEALER)
            undo.callback(self.socket.close, linger=0)  # ends what monitors it, too
            self._prepare(identity_of(identity, number), credentials)
            self.socket.connect(address)
            undo.pop_all()

    def _prepare(self, identity: str, credentials: Credentials | None) -> None:
        self.socket.setsockopt(zmq.IDENTITY, identity.encode())
        # Links to a successor at this address may use this connection, and must not wait for it long.
        self.socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        # ZMQ reconnects by itself, and does not report what was in flight when the connection broke.
        self.monitor: zmq.Socket[bytes] = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        if credentials is not None:
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, credentials.listening.public)
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, credentials.connecting.public)
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, credentials.connecting.secret)

    def receive(self) -> list[bytes]:
        """Returns the messages that have arrived, only so many at a time."""
        return [frames[0] for frames in _waiting(self.socket) if len(frames) == 1]

    def take_break(self) -> bool:
        """Whether the connection broke since the last call: what was in flight may be lost."""
        has_broken = False
        while has_input(self.monitor):
            self.monitor.recv_multipart(zmq.NOBLOCK)
            has_broken = True
        return has_broken

    def send(self, message: bytes) -> None:
        """Sends to the prefill rank.

        Raises:
            PeerDisconnectedError: if so many messages wait that the rank must have gone, or refuses this side.
        """
        try:
            self.socket.send(message, zmq.NOBLOCK)
        except zmq.Again as error:
            raise PeerDisconnectedError(
                f"cannot send to {self.address}: it is gone, or has another secret: "
                f"{secret_hint(has_secret=self._has_secret)}"
            ) from error
        except zmq.ZMQError as error:
            raise PeerDisconnectedError(f"cannot send to {self.address}: {error.strerror}") from error

    def close(self) -> None:
        """Closes the socket; what was sent has half a second to leave."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close()
