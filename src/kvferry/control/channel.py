"""The peer channel: small messages between a decode rank and a prefill rank over one ZMQ connection.

A channel belongs to the thread that polls it. Other threads hand their messages to that thread and wake it up with
`Wakeup`, the only thing here that may be called from anywhere.
"""

from __future__ import annotations

import contextlib
import socket

import zmq

from kvferry.errors import PeerDisconnectedError, SettingsError
from kvferry.protocol.messages import MAX_MESSAGE_BYTES

_LINGER_MS = 500
_QUEUED_MESSAGES = 100_000


class Wakeup:
    """Wakes a thread that waits in a poller. `wake` may be called from any thread, any number of times."""

    def __init__(self) -> None:
        self._receiving, self._sending = socket.socketpair()
        self._receiving.setblocking(False)
        self._sending.setblocking(False)

    def fileno(self) -> int:
        """What to poll for input."""
        return self._receiving.fileno()

    def wake(self) -> None:
        """Makes the descriptor readable. A full socket is readable already; a closed one has nobody to wake."""
        with contextlib.suppress(OSError):
            self._sending.send(b"!")

    def clear(self) -> None:
        """Makes it unreadable again."""
        with contextlib.suppress(BlockingIOError):
            while self._receiving.recv(4096):
                pass

    def close(self) -> None:
        """Gives both descriptors back."""
        self._receiving.close()
        self._sending.close()


def _configured(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    created = context.socket(kind)
    created.setsockopt(zmq.LINGER, _LINGER_MS)
    created.setsockopt(zmq.IPV6, 1)
    created.setsockopt(zmq.SNDHWM, _QUEUED_MESSAGES)
    created.setsockopt(zmq.RCVHWM, _QUEUED_MESSAGES)
    created.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES + 1024)
    return created


class ListeningChannel:
    """A prefill rank's end: many decode ranks connect to it, each known by its endpoint's identity."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], *, host: str, port: int) -> None:
        """Args:
        host: address to bind to; IPv6 addresses in brackets.
        port: 0 takes any free one.

        Raises:
            SettingsError: if the address cannot be bound, saying why.
        """
        self.socket = _configured(context, zmq.ROUTER)
        # Tells us when a message has nobody to go to, and lets a reconnecting peer take its identity along.
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            self.socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self.socket.close()
            raise SettingsError(
                f"the peer channel cannot listen on {host} port {port} (KVFERRY_HOST, KVFERRY_CONTROL_PORT): "
                f"{error.strerror}. Choose another port, or 0 for any free one"
            ) from error
        endpoint = self.socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self.port = int(endpoint.rstrip(b"\0").rpartition(b":")[2])

    def receive(self) -> list[tuple[str, bytes]]:
        """Everything that has come: (identity of the sender, message). Frames that are no message are dropped."""
        received = []
        with contextlib.suppress(zmq.Again):
            while True:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
                if len(frames) == 2:
                    received.append((frames[0].decode("utf-8", "replace"), frames[1]))
        return received

    def send(self, identity: str, message: bytes) -> None:
        """Sends to a decode rank.

        Raises:
            PeerDisconnectedError: if it is not connected.
        """
        try:
            self.socket.send_multipart([identity.encode(), message], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise PeerDisconnectedError(f"no connection to {identity}: {error.strerror}") from error

    def close(self) -> None:
        """Closes the socket; what was sent has half a second to leave."""
        self.socket.close()


class ConnectedChannel:
    """A decode rank's end: one connection to one prefill rank, made anew by ZMQ when it breaks."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], *, identity: str, address: str) -> None:
        """Args:
        identity: of this endpoint.
        address: of the prefill rank, such as tcp://127.0.0.1:40000.

        Raises:
            PeerDisconnectedError: if the address makes no sense.
        """
        self.address = address
        self.socket = _configured(context, zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, identity.encode())
        self.socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5000)
        try:
            self.socket.connect(address)
        except zmq.ZMQError as error:
            self.socket.close()
            raise PeerDisconnectedError(f"cannot connect to {address!r}: {error.strerror}") from error

    def receive(self) -> list[bytes]:
        """Every message that has come."""
        received = []
        with contextlib.suppress(zmq.Again):
            while True:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
                if len(frames) == 1:
                    received.append(frames[0])
        return received

    def send(self, message: bytes) -> None:
        """Sends to the prefill rank.

        Raises:
            PeerDisconnectedError: if so much waits for it already that it must be gone.
        """
        try:
            self.socket.send(message, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise PeerDisconnectedError(f"cannot send to {self.address}: {error.strerror}") from error

    def close(self) -> None:
        """Closes the socket; what was sent has half a second to leave."""
        self.socket.close()
