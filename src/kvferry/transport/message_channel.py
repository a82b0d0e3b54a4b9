"""Notifications over connections of kvferry's own, for a transport whose library carries none, or in the wrong order.

Each side has one socket that it receives by, and one for every peer that it sends to. A message on a connection arrives
once and in order, or the connection is gone, for good: it is never opened again by itself, since what was on its way is
lost then. Whoever sends must know the receiver's token, which is in the metadata that peers are given.
"""

from __future__ import annotations

import enum
import hmac
import secrets
import threading
import time

import msgspec
import zmq

from kvferry.errors import PeerDisconnectedError, TransportError
from kvferry.hosts import bracketed
from kvferry.loggers import logger_of
from kvferry.open_files import CONNECTION, lack

log = logger_of(__name__)

_TOKEN_BYTES = 16
_LONGEST_MESSAGE = 16 << 20
_QUEUED_MESSAGES = 10_000  # of one sender, strangers among them, until somebody takes them
_CONNECT_S = 10.0
_MOMENT_MS = 50
_HEARTBEAT_MS = 30_000  # by which a host that has vanished is told from one that is silent
_SILENCE_MS = 60_000  # a process may be frozen for so long: whether it is given up sooner is not for a transport to say
_LINGER_MS = 500
_FRAMES = 3
_MOST_AT_A_TIME = 1000


class ChannelAddress(msgspec.Struct, frozen=True):
    """Where messages to an endpoint go. Travels in its metadata.

    Attributes:
        host: as peers reach it.
        port: of the socket that it receives by.
        token: what every message to it must begin with.
    """

    host: str
    port: int
    token: bytes


class ConnectionState(enum.Enum):
    """What is known of a connection."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    LOST = "lost"


class MessageSender:
    """A connection to one peer, waited for a moment only: what is sent before it is there follows when it is.

    Every method may be called from any thread.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], ours: str, peer: str, address: ChannelAddress) -> None:
        """Begins to connect.

        Args:
            ours: the name that the peer is told.
            peer: its name, for messages.

        Raises:
            TransportError: if the address is none, or this process may open too few files more.
        """
        self._peer = peer
        self._head = [address.token, ours.encode()]
        # Guards what follows; ZMQ gives a socket to one thread at a time.
        self._lock = threading.Lock()
        self._state = ConnectionState.CONNECTING
        self._waiting: list[bytes] = []
        self._given_up_at = time.monotonic() + _CONNECT_S
        where = f"tcp://{bracketed(address.host)}:{address.port}"
        if problem := lack(CONNECTION):
            raise TransportError(f"{peer} cannot be reached at {where!r}: {problem}")
        self._socket = _configured(context, zmq.PUSH)
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # a message is for a connection that there is
        try:
            self._socket.connect(where)
            self._socket.poll(_MOMENT_MS, zmq.POLLOUT)  # most are there by then, and need nobody to look again
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            raise TransportError(f"{peer} cannot be reached at {where!r}: {error}") from error

    @property
    def state(self) -> ConnectionState:
        """What is known by now. Whatever waits for the connection leaves when this is asked."""
        with self._lock:
            return self._settled()

    def _settled(self) -> ConnectionState:
        """Brings the state up to date. Called with the lock."""
        if self._state is ConnectionState.LOST:
            return self._state
        is_there = bool(self._socket.poll(0, zmq.POLLOUT))  # what waits to be sent has no bound
        if is_there:
            self._state = ConnectionState.CONNECTED
            try:
                while self._waiting:
                    self._socket.send_multipart([*self._head, self._waiting[0]], zmq.NOBLOCK)
                    del self._waiting[0]
            except zmq.ZMQError as error:  # it has broken meanwhile
                log.debug("the connection to %s is gone: %s", self._peer, error)
                self._state = ConnectionState.LOST
        elif self._state is ConnectionState.CONNECTED or time.monotonic() > self._given_up_at:
            self._state = ConnectionState.LOST
        return self._state

    def send(self, message: bytes) -> None:
        """Sends a message without waiting.

        Raises:
            PeerDisconnectedError: if the connection is gone, or could not be made within ten seconds.
        """
        with self._lock:
            try:
                state = self._settled()
                if state is ConnectionState.CONNECTING:
                    self._waiting.append(message)
                elif state is ConnectionState.CONNECTED:
                    self._socket.send_multipart([*self._head, message], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                self._state = ConnectionState.LOST
                raise PeerDisconnectedError(f"the connection to {self._peer} is gone ({error})") from error
        if state is ConnectionState.LOST:
            raise PeerDisconnectedError(f"the connection to {self._peer} is gone")

    def close(self) -> None:
        """Ends the connection. What was sent still has half a second to leave."""
        with self._lock:
            self._state = ConnectionState.LOST
            self._socket.close()


class MessageChannel:
    """What one endpoint receives by, and makes its connections with."""

    def __init__(self, endpoint_name: str, host: str, advertised_host: str) -> None:
        """Listens on any free port of an address.

        Raises:
            TransportError: if it cannot.
        """
        if problem := lack(CONNECTION):  # libzmq would end the process
            raise TransportError(f"cannot listen on {host!r} for notifications: {problem}")
        self._name = endpoint_name
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._dropped = 0  # notifications of strangers
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # Guards the socket, which ZMQ gives to one thread at a time.
        self._lock = threading.Lock()
        self._socket = _configured(self._context, zmq.PULL)
        try:
            port = self._socket.bind_to_random_port(f"tcp://{bracketed(host)}")
        except zmq.ZMQError as error:
            self.close()
            raise TransportError(f"cannot listen on {host!r} (KVFERRY_HOST) for notifications: {error}") from error
        self.address = ChannelAddress(advertised_host, port, self._token)

    def connect(self, peer: str, address: ChannelAddress) -> MessageSender:
        """Begins to connect to a peer.

        Raises:
            TransportError: if the address is none.
        """
        return MessageSender(self._context, self._name, peer, address)

    def take(self) -> list[tuple[str, bytes]]:
        """Returns what has arrived since the last call, or some of it: (name of the sender, message)."""
        taken: list[tuple[str, bytes]] = []
        with self._lock:
            for _ in range(_MOST_AT_A_TIME):  # strangers' among them: they must not hold the caller
                if self._socket.closed:
                    break
                try:
                    frames = self._socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                if len(frames) != _FRAMES or not hmac.compare_digest(frames[0], self._token):
                    self._drop()
                    continue
                taken.append((frames[1].decode("utf-8", "replace"), frames[2]))
        return taken

    def _drop(self) -> None:
        """Counts a stranger's notification, and says so ever more rarely: a flood must not fill the log."""
        self._dropped += 1
        if self._dropped.bit_count() == 1:  # the 1st, 2nd, 4th, 8th, and so on
            log.warning("notification %d of a stranger, without this endpoint's token, was dropped", self._dropped)

    def close(self) -> None:
        """Closes the socket that it receives by, and all connections; what was sent has half a second to leave."""
        with self._lock:
            self._socket.close(linger=0)
        self._context.destroy(linger=_LINGER_MS)  # a connection that somebody has forgotten would keep it from ending


def _configured(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    created = context.socket(kind)
    created.setsockopt(zmq.IPV6, 1)
    created.setsockopt(zmq.SNDHWM, 0)  # bounded by the writes that are on their way, each of which sends one
    created.setsockopt(zmq.RCVHWM, _QUEUED_MESSAGES)
    created.setsockopt(zmq.LINGER, _LINGER_MS)
    created.setsockopt(zmq.MAXMSGSIZE, _LONGEST_MESSAGE)
    created.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    created.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
    return created
