"""Both ends of the peer channel, as the threads that poll them use them: wait for input, be woken, receive, send.

An end belongs to one thread. `wake` may be called from any other.
"""

from __future__ import annotations

import contextlib
import itertools
import selectors
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

import zmq

from kvferry.control.channel import ConnectedChannel, ListeningChannel, Wakeup, has_input
from kvferry.control.credentials import Credentials
from kvferry.errors import SettingsError
from kvferry.open_files import lack

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


class ZmqListeningEnd(ListeningEnd):
    """A listening end over ZMQ."""

    def __init__(
        self,
        *,
        host: str,
        port: int,
        credentials: Credentials | None = None,
        max_connections: int | None = None,
        peer_timeout_s: float | None = None,
    ) -> None:
        """Binds the port; messages are received from then on.

        Args:
            host: address to bind to; IPv6 addresses in brackets.
            port: 0 takes any free one.
            credentials: only peers with the same come in; None lets everyone in.
            max_connections: how many there may be; None is no bound.
            peer_timeout_s: as of `ListeningChannel`.

        Raises:
            SettingsError: if the address cannot be bound, or this process may open too few files, saying why.
        """
        self._context = _context()
        self._wakeup = Wakeup()
        try:
            self._channel = ListeningChannel(
                self._context,
                host=host,
                port=port,
                credentials=credentials,
                max_connections=max_connections,
                peer_timeout_s=peer_timeout_s,
            )
        except BaseException:
            self._give_back()
            raise
        self.port = self._channel.port
        self._poller = zmq.Poller()
        for socket in self._channel.sockets:
            self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._wakeup.fileno(), zmq.POLLIN)

    def wait(self, timeout_ms: int) -> None:
        ready = self._poller.poll(timeout_ms)
        if any(each == self._wakeup.fileno() for each, _ in ready):
            self._wakeup.clear()

    def wake(self) -> None:
        self._wakeup.wake()

    def receive(self) -> list[tuple[str, bytes]]:
        return self._channel.receive()

    def send(self, identity: str, message: bytes) -> None:
        self._channel.send(identity, message)

    def close(self) -> None:
        self._channel.close()
        self._give_back()

    def _give_back(self) -> None:
        self._context.destroy(linger=0)  # a channel that was not made may have left a socket open
        self._wakeup.close()


class ZmqConnection(Connection):
    """A connection over ZMQ."""

    def __init__(self, channel: ConnectedChannel, on_sent: Callable[[ZmqConnection], None]) -> None:
        """Takes the connection.

        Args:
            on_sent: called after something was sent, or could not be.
        """
        self.channel = channel
        self.address = channel.address
        self._on_sent = on_sent

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """What has input when there is something to receive, or the connection broke."""
        return self.channel.socket, self.channel.monitor

    @property
    def has_input(self) -> bool:
        """Whether there is something to receive, or the connection broke."""
        return any(has_input(socket) for socket in self.sockets)

    def receive(self) -> list[bytes]:
        return self.channel.receive()

    def take_break(self) -> bool:
        return self.channel.take_break()

    def send(self, message: bytes) -> None:
        try:
            self.channel.send(message)
        finally:
            self._on_sent(self)


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
        channel = ConnectedChannel(
            self._context,
            identity=self._identity,
            address=address,
            number=next(self._numbers),
            credentials=self._credentials,
        )
        connection = ZmqConnection(channel, self._sent)
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
        connection.channel.close()

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
