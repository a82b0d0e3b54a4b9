"""Connections to a server that have not asked anything yet: how many there may be, and for how long.

They count from the moment at which they are accepted: a client that never ends its TLS handshake takes a file
descriptor of the process, too. All of it runs on the server's one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Callable
from dataclasses import dataclass


class Listener(socket.socket):
    """A listening socket that tells of every connection that it accepts.

    Attributes:
        on_accept: called with each.
    """

    on_accept: Callable[[socket.socket], None] | None = None

    @classmethod
    def of(cls, listening: socket.socket) -> Listener:
        """Takes a listening socket over."""
        return cls(listening.family, listening.type, listening.proto, listening.detach())

    def accept(self) -> tuple[socket.socket, object]:
        """Accepts a connection, as every socket does."""
        connection, address = super().accept()
        if self.on_accept is not None:
            self.on_accept(connection)
        return connection, address


@dataclass(slots=True)
class _Silent:
    """A connection that has not asked anything.

    Attributes:
        is_open: whether it still is.
        send_away: ends it.
        timer: does that when its time is over.
    """

    is_open: Callable[[], bool]
    send_away: Callable[[], None]
    timer: asyncio.TimerHandle


class SilentClients:
    """Sends clients away that ask nothing for too long, and the oldest of them where there are too many."""

    def __init__(self, *, most: int, longest_s: float) -> None:
        """Begins with none.

        Args:
            most: how many there may be.
            longest_s: how long each may take from when it was accepted, or began another request, in seconds.
        """
        self._most = most
        self._longest_s = longest_s
        self._numbers = itertools.count()
        self._accepted: dict[int, int] = {}  # by file descriptor: the number of the last connection that had it
        self._silent: dict[int, _Silent] = {}  # by the connection's number, the oldest first

    def accepted(self, connection: socket.socket) -> None:
        """Counts a connection that was just accepted, and whose handshake may fail without anybody's saying so."""

        def shut_down() -> None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

        number = self._accepted[connection.fileno()] = next(self._numbers)
        self.expect(number, shut_down, is_open=lambda: connection.fileno() >= 0)

    def connected(self, descriptor: int, send_away: Callable[[], None]) -> int:
        """Takes over a connection that was accepted: it is ended in another way from now on, and its time runs on.

        Returns:
            Its number: unlike its descriptor, no later connection has the same.
        """
        number = self._accepted.pop(descriptor)
        silent = self._silent.get(number)
        if silent is not None:
            silent.is_open, silent.send_away = (lambda: True), send_away
        return number

    def expect(self, number: int, send_away: Callable[[], None], *, is_open: Callable[[], bool] = lambda: True) -> None:
        """Counts a connection, by its number."""
        timer = asyncio.get_running_loop().call_later(self._longest_s, self._send_away, number)
        self._silent[number] = _Silent(is_open, send_away, timer)
        if len(self._silent) > self._most:
            for closed in [each for each, silent in self._silent.items() if not silent.is_open()]:
                self.forget(closed)
        while len(self._silent) > self._most:
            self._send_away(next(iter(self._silent)))

    def expects(self, number: int) -> bool:
        """Whether a connection is counted."""
        return number in self._silent

    def forget(self, number: int) -> None:
        """Counts a connection no more: it has asked something, or has ended."""
        silent = self._silent.pop(number, None)
        if silent is not None:
            silent.timer.cancel()

    def _send_away(self, number: int) -> None:
        silent = self._silent[number]
        self.forget(number)
        silent.send_away()
