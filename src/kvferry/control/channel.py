"""What both ends of the peer channel are made of over ZMQ: sockets, who is let in, who has to go, who is reached how.

All of it belongs to the thread that polls. Other threads wake that one with `Wakeup`, the only thing here that may be
called from any thread.

With credentials both ends speak CURVE: everything is encrypted, and each end proves that it has a key that comes of the
shared secret, before a single message passes. ZMQ asks a handler in the same context (ZAP, ZeroMQ's RFC 27) whether a
client's key is allowed; the listening end answers in the thread that polls it, whenever it receives. Without an
answer no client is let in.

ZMQ accepts every connection, from strangers too, and has no bound of its own. But it reports each to a socket that
monitors it: beyond the bound, the thread that polls shuts down the oldest stranger, as soon as it has a turn; if there
are only peers, the one that came last. Strangers are those whose handshake has not succeeded, or without credentials,
who were not sent any message: the operating system says how many bytes were.

A rank may have made several connections. Each is identified by the rank's name and a number, which is higher for every
one that the rank makes. The youngest is the right one: what an older one had left may come later. But where there is no
secret anybody can connect under a name, and with any number. So whoever has sent something last is sent to as well:
nobody keeps the answers from who asks, and a message that is for the other one changes nothing there.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import os
import socket
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from kvferry.control.credentials import Credentials
from kvferry.loggers import logger_of
from kvferry.open_files import share_of
from kvferry.protocol.bounded import remember
from kvferry.protocol.wire.codec import MAX_MESSAGE_BYTES

log = logger_of(__name__)

_Found = TypeVar("_Found")

_LINGER_MS = 500
_QUEUED_MESSAGES = 100_000
_WAKE_BYTES = 4096
_SPARE_CONNECTIONS = 512
_BYTES_SENT = struct.Struct("@200xQQ")  # struct tcp_info (linux/tcp.h): tcpi_bytes_sent and, of these, sent again
_GREETING_BYTES = 112  # more than ZMQ sends before any message, measured: 107
_CURVE_GREETING_BYTES = 256  # more than it sends whoever cannot prove to have the key; the others are sent 301
_LONGEST_HANDSHAKE_MS = 10_000
_PROBES = 3  # unanswered, of a connection that was idle: it has gone
_LONGEST_KEEPALIVE_S = 32_767  # ZMQ ends the process where Linux does not take a time

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


def configured(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    created = context.socket(kind)
    created.setsockopt(zmq.LINGER, _LINGER_MS)
    created.setsockopt(zmq.IPV6, 1)
    created.setsockopt(zmq.SNDHWM, _QUEUED_MESSAGES)
    created.setsockopt(zmq.RCVHWM, _QUEUED_MESSAGES)
    created.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES + 1024)
    created.setsockopt(zmq.HANDSHAKE_IVL, _LONGEST_HANDSHAKE_MS)
    return created


class Connections:
    """The connections of a listening socket, as ZMQ reports them; beyond a bound, strangers are shut down first.

    Attributes:
        monitors: what to poll for input; empty without a bound.
    """

    def __init__(self, most: int | None, *, has_secret: bool) -> None:
        """Begins with none.

        Args:
            most: how many there may be; None for any number.
            has_secret: whether strangers are told apart by CURVE's handshake.
        """
        self._greeting_bytes = _CURVE_GREETING_BYTES if has_secret else _GREETING_BYTES
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


def end_silent(listening: zmq.Socket[bytes], timeout_s: float) -> None:
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


class Doorkeeper:
    """Answers ZMQ's requests whether to let a client in (ZAP)."""

    def __init__(self, listening: zmq.Socket[bytes], credentials: Credentials) -> None:
        """Guards a socket that is not bound yet: lets in whoever proves to have the one public key that clients have.

        Args:
            listening: the only one with a guard in its context.
        """
        self.socket = listening.context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP_ADDRESS)
        self._allowed = z85.decode(credentials.connecting.public)
        listening.setsockopt(zmq.CURVE_SERVER, 1)
        listening.setsockopt(zmq.CURVE_SECRETKEY, credentials.listening.secret)
        listening.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        listening.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an answer no client is let in

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


_MARK = "~"  # between the name and the number
_MOST = 1 << 16


def identity_of(name: str, number: int) -> str:
    """Returns what the connection of that number calls itself."""
    return f"{name}{_MARK}{number}"


class _Route(NamedTuple):
    """Two connections, or one.

    Attributes:
        number: of the youngest that has sent anything.
        youngest: its identity.
        last: of the one that has sent something last.
    """

    number: int
    youngest: str
    last: str


class ReplyRoutes:
    """The connections of decode ranks that have sent anything. For the thread that has them."""

    def __init__(self) -> None:
        """Begins with none."""
        self._of: OrderedDict[str, _Route] = OrderedDict()  # by name

    def sender_of(self, identity: str) -> str:
        """Takes the identity of a connection that has sent something. Returns whose it is."""
        name, mark, digits = identity.rpartition(_MARK)
        if not mark or not digits.isdigit():
            name, digits = identity, "0"
        number, known = int(digits), self._of.get(name)
        if known is None or known.number <= number:
            known = _Route(number, identity, identity)
        remember(self._of, name, known._replace(last=identity), _MOST)
        return name

    def to(self, name: str) -> list[str]:
        """Returns the identities of the connections through which to send to whoever has a name."""
        route = self._of.get(name)
        return [] if route is None else list(dict.fromkeys((route.youngest, route.last)))

    def lost(self, name: str, identity: str) -> None:
        """Takes out a connection that is not there any more."""
        others = [each for each in self.to(name) if each != identity]
        route = self._of.pop(name)
        if others:
            number = 0 if identity == route.youngest else route.number
            self._of[name] = _Route(number, *others, *others)
