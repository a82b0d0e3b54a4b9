"""The peer channel: small messages between a decode rank and a prefill rank over one connection, and its two ends.

The threads that poll the ends wait for input, are woken, receive and send; over ZMQ, with what `channel` has. An end
belongs to one thread. `wake` may be called from any other.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import re
import selectors
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator

import zmq

from kvferry.control.channel import (
    Connections,
    Doorkeeper,
    ReplyRoutes,
    Wakeup,
    configured,
    end_silent,
    has_input,
    identity_of,
)
from kvferry.control.credentials import Credentials, secret_hint
from kvferry.errors import PeerDisconnectedError, SettingsError
from kvferry.open_files import CONNECTION, REMEDY, lack

_MOST_AT_A_TIME = 1000
_IDENTITY = re.compile(rb"[!-~]{1,255}")

_FILES = 16
"""More than ZMQ's threads and the first sockets take."""
_MOST_SOCKETS = 65535
"""libzmq's own bound (ZMQ_SOCKET_LIMIT); by itself it allows 1,023, which are 341 connections, of three each."""


def _context(*, max_sockets: int | None = None) -> zmq.Context[zmq.Socket[bytes]]:
    """Makes a context whose threads run already: libzmq ends the process where they find no descriptor.

    Args:
        max_sockets: how many sockets it may have; None for as many as ZMQ allows by itself.

    Raises:
        SettingsError: if this process may not open as many files.
    """
    if problem := lack(_FILES):
        raise SettingsError(f"the peer channel cannot be opened: {problem}")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    if max_sockets is not None:
        context.set(zmq.MAX_SOCKETS, max_sockets)
    context.socket(zmq.PAIR).close()  # the first one starts them
    return context


class ListeningEnd(ABC):
    """A prefill rank's end: many decode ranks connect to it, each identified by its endpoint's name.

    Attributes:
        port: where it listens.
    """

    port: int

    @abstractmethod
    def wait(self, timeout_ms: int) -> None:
        """Waits until a message arrives or `wake` is called, for so many milliseconds at most."""

    @abstractmethod
    def wake(self) -> None:
        """Ends a wait, or the next one. From any thread."""

    @abstractmethod
    def receive(self) -> list[tuple[str, bytes]]:
        """Returns the messages that have arrived: (name of the sender, message)."""

    @abstractmethod
    def send(self, identity: str, message: bytes) -> None:
        """Sends to a decode rank.

        Raises:
            PeerDisconnectedError: if it is not connected.
        """

    @abstractmethod
    def close(self) -> None:
        """Gives everything back."""


class Connection(ABC):
    """A decode rank's connection to one prefill rank, made anew when it breaks.

    Attributes:
        address: of the prefill rank.
    """

    address: str

    @abstractmethod
    def receive(self) -> list[bytes]:
        """Returns the messages that have arrived."""

    @abstractmethod
    def take_break(self) -> bool:
        """Whether the connection broke since the last call: messages of either side may be lost."""

    @abstractmethod
    def send(self, message: bytes) -> None:
        """Sends to the prefill rank.

        Raises:
            PeerDisconnectedError: if so many messages wait already that the rank must have gone.
        """


class ConnectingEnd(ABC):
    """A decode rank's end: connections to prefill ranks."""

    @abstractmethod
    def connect(self, address: str) -> Connection:
        """Begins a connection.

        Raises:
            PeerDisconnectedError: if the address makes no sense.
        """

    @abstractmethod
    def disconnect(self, connection: Connection) -> None:
        """Closes a connection; what was sent has a moment to leave."""

    @abstractmethod
    def wait(self, timeout_ms: int) -> Collection[Connection]:
        """Waits as `ListeningEnd.wait` does; returns the connections with messages, and those that broke."""

    @abstractmethod
    def wake(self) -> None:
        """Ends a wait, or the next one. From any thread."""

    @abstractmethod
    def close(self) -> None:
        """Gives everything back, connections that are still open too. May be called again."""


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


class ZmqListeningEnd(ListeningEnd):
    """A listening end over ZMQ.

    Attributes:
        socket: that it listens by.
        doorkeeper: answers who may come in; None without secrets.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        credentials: Credentials | None = None,
        max_connections: int | None = None,
        peer_timeout_s: float | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        """Binds the port; messages are received from then on.

        Args:
            host: address to bind to; IPv6 addresses in brackets.
            port: 0 takes any free one.
            credentials: only peers with the same come in; None lets everyone in.
            max_connections: how many there may be, half-open ones included; then the oldest of strangers has to go,
                and among peers the one that comes. None is no bound.
            peer_timeout_s: silence after which a decode rank counts as lost; None leaves connections of lost ones open.
            context: in which no other end has credentials; None makes one of its own.

        Raises:
            SettingsError: if the address cannot be bound, or this process may open too few files, saying why.
        """
        self._routes = ReplyRoutes()
        self._connections = Connections(max_connections, has_secret=credentials is not None)
        self.doorkeeper: Doorkeeper | None = None
        with contextlib.ExitStack() as undo:
            if context is None:
                context = _context()
                undo.callback(context.destroy, linger=0)
            self._wakeup = Wakeup()
            undo.callback(self._wakeup.close)
            self.socket = configured(context, zmq.ROUTER)
            undo.callback(self.socket.close)
            undo.callback(self._connections.close, self.socket)
            # Makes a message without a route an error, and lets a reconnecting peer keep its identity.
            self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
            if peer_timeout_s is not None:
                end_silent(self.socket, peer_timeout_s)
            if credentials is not None:
                self.doorkeeper = Doorkeeper(self.socket, credentials)
                undo.callback(self.doorkeeper.socket.close)
            self._bind(host, port)
            self._resources = undo.pop_all()
        endpoint = self.socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self.port = int(endpoint.rstrip(b"\0").rpartition(b":")[2])
        self._poller = zmq.Poller()
        for each in (*self.sockets, self._wakeup.fileno()):
            self._poller.register(each, zmq.POLLIN)

    def _bind(self, host: str, port: int) -> None:
        try:
            self._connections.watch(self.socket)
            self.socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            remedy = _limit_hint(error) or ". Choose another port, or 0 for any free one"
            raise SettingsError(
                f"the peer channel cannot listen on {host} port {port} (KVFERRY_HOST, KVFERRY_CONTROL_PORT): "
                f"{error.strerror}{remedy}"
            ) from error

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """What has input when there is something to receive; `receive` takes care of all of them."""
        doorkeeper = [] if self.doorkeeper is None else [self.doorkeeper.socket]
        return [self.socket, *self._connections.monitors, *doorkeeper]

    def wait(self, timeout_ms: int) -> None:
        ready = self._poller.poll(timeout_ms)
        if any(each == self._wakeup.fileno() for each, _ in ready):
            self._wakeup.clear()

    def wake(self) -> None:
        self._wakeup.wake()

    def receive(self) -> list[tuple[str, bytes]]:
        """Returns the messages that have arrived, as `ListeningEnd.receive`. Drops frames that are no message.

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
        self._resources.close()


class ZmqConnection(Connection):
    """A connection over ZMQ, made anew by ZMQ when it breaks.

    Attributes:
        socket: that it sends and receives by.
        monitor: has input when the connection broke.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        identity: str,
        address: str,
        number: int = 0,
        credentials: Credentials | None = None,
        on_sent: Callable[[ZmqConnection], None] = lambda _: None,
    ) -> None:
        """Begins to connect, and does not wait for it.

        Args:
            identity: of this endpoint: visible ASCII, no more than 240 characters.
            number: higher than of all connections that this endpoint had before. ZMQ goes on sending what a closed one
                had left, and of two that call themselves the same the prefill rank's end of ZMQ keeps the one that came
                last.
            address: of the prefill rank, such as tcp://127.0.0.1:40000.
            credentials: whoever listens there must have the same.
            on_sent: called after something was sent, or could not be.

        Raises:
            PeerDisconnectedError: if the address makes no sense, or the process may open too few files more.
        """
        self.address = address
        self._has_secret = credentials is not None
        self._on_sent = on_sent
        if problem := lack(CONNECTION):  # for what the transport will take, too
            raise PeerDisconnectedError(f"cannot connect to {address!r}: {problem}")
        with contextlib.ExitStack() as undo:
            undo.enter_context(_explained(f"cannot connect to {address!r}"))
            self.socket = configured(context, zmq.DEALER)
            undo.callback(self.socket.close, linger=0)  # ends what monitors it, too
            # ZMQ reconnects by itself, and does not report what was in flight when the connection broke.
            self.monitor: zmq.Socket[bytes] = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._prepare(identity_of(identity, number), credentials)
            self.socket.connect(address)
            undo.pop_all()

    def _prepare(self, identity: str, credentials: Credentials | None) -> None:
        self.socket.setsockopt(zmq.IDENTITY, identity.encode())
        # Links to a successor at this address may use this connection, and must not wait for it long.
        self.socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        if credentials is not None:
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, credentials.listening.public)
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, credentials.connecting.public)
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, credentials.connecting.secret)

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """What has input when there is something to receive, or the connection broke."""
        return self.socket, self.monitor

    @property
    def has_input(self) -> bool:
        """Whether there is something to receive, or the connection broke."""
        return any(has_input(socket) for socket in self.sockets)

    def receive(self) -> list[bytes]:
        """Returns the messages that have arrived, only so many at a time."""
        return [frames[0] for frames in _waiting(self.socket) if len(frames) == 1]

    def take_break(self) -> bool:
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
        finally:
            self._on_sent(self)

    def close(self) -> None:
        """Closes the socket; what was sent has half a second to leave."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close()


class ZmqConnectingEnd(ConnectingEnd):
    """A connecting end over ZMQ.

    A look costs what has happened, however many connections there are. ZMQ's own poller asks every socket every time.
    The operating system's knows which have news, for which ZMQ makes a socket's descriptor readable. It does so once:
    sending and receiving take the news in passing. So connections that were sent to, or had input at the last look, are
    asked at the next.
    """

    def __init__(self, identity: str, credentials: Credentials | None = None) -> None:
        """Makes what connections are made with; none is made yet.

        Args:
            identity: this endpoint's name.
            credentials: whoever listens must have the same.

        Raises:
            SettingsError: if this process may open too few files.
        """
        self._identity = identity
        self._numbers = itertools.count(1)
        self._credentials = credentials
        self._context = _context(max_sockets=_MOST_SOCKETS)
        self._wakeup = Wakeup()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup.fileno(), selectors.EVENT_READ)
        self._to_ask: dict[ZmqConnection, None] = {}  # those that may have input though no descriptor says so

    def connect(self, address: str) -> Connection:
        connection = ZmqConnection(
            self._context,
            identity=self._identity,
            address=address,
            number=next(self._numbers),
            credentials=self._credentials,
            on_sent=self._sent,
        )
        try:
            for socket in connection.sockets:
                self._selector.register(socket.fileno(), selectors.EVENT_READ, connection)
        except BaseException:
            self._forget(connection)
            raise
        return connection

    def _sent(self, connection: ZmqConnection) -> None:
        self._to_ask[connection] = None

    def disconnect(self, connection: Connection) -> None:
        assert isinstance(connection, ZmqConnection)
        self._forget(connection)

    def _forget(self, connection: ZmqConnection) -> None:
        for socket in connection.sockets:
            with contextlib.suppress(KeyError):
                self._selector.unregister(socket.fileno())
        self._to_ask.pop(connection, None)
        connection.close()

    def wait(self, timeout_ms: int) -> Collection[Connection]:
        self._to_ask = {connection: None for connection in self._to_ask if connection.has_input}
        for key, _ in self._selector.select(0 if self._to_ask else timeout_ms / 1000):
            if key.data is None:
                self._wakeup.clear()
            elif key.data not in self._to_ask and key.data.has_input:
                self._to_ask[key.data] = None
        return list(self._to_ask)

    def wake(self) -> None:
        self._wakeup.wake()

    def close(self) -> None:
        self._context.destroy()
        self._selector.close()
        self._wakeup.close()
