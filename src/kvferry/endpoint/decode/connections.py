"""A decode endpoint's connections to prefill ranks, by address: links to the same rank share one."""

from __future__ import annotations

import logging

from kvferry.control.ends import ConnectingEnd, Connection
from kvferry.errors import PeerDisconnectedError
from kvferry.protocol.wire import codec, messages
from kvferry.protocol.wire.field_types import Message

log = logging.getLogger(__name__)


class Connections:
    """Connections that are open. For the endpoint's thread."""

    def __init__(self, end: ConnectingEnd, endpoint: str) -> None:
        """Begins with none.

        Args:
            end: what they are made with; it stays the caller's.
            endpoint: our own name.
        """
        self._end = end
        self._endpoint = endpoint
        self._open: dict[str, Connection] = {}
        self._attempts: dict[str, int] = {}  # the last to attach that was begun there

    @property
    def addresses(self) -> list[str]:
        """Where they go."""
        return list(self._open)

    def owns(self, connection: Connection) -> bool:
        """Whether a connection is still open."""
        return self._open.get(connection.address) is connection

    def open(self, address: str, attempt: int) -> None:
        """Makes sure that there is one, for an attempt to attach.

        Raises:
            PeerDisconnectedError: if the address makes no sense.
        """
        self._to(address)
        self._attempts[address] = attempt

    def send(self, address: str, message: Message) -> None:
        """Sends a message, over a new connection if there is none.

        Raises:
            PeerDisconnectedError: if the address makes no sense, or so many messages wait that nobody can be there.
            MessageError: if it cannot be encoded.
        """
        self._to(address).send(codec.encode(message))

    def _to(self, address: str) -> Connection:
        if address not in self._open:
            self._open[address] = self._end.connect(address)
        return self._open[address]

    def close(self, address: str) -> None:
        """Sends a close message and closes the connection. Where there is none, does nothing."""
        connection = self._open.pop(address, None)
        if connection is None:
            return
        try:
            attempt = self._attempts.pop(address, 0)
            connection.send(codec.encode(messages.Detach(endpoint=self._endpoint, attempt=attempt)))
        except PeerDisconnectedError as error:
            log.debug("no close message to %s: %s", address, error)
        self._end.disconnect(connection)
