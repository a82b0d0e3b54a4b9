"""Connections to a server: how many there may be, and for how long those that have not asked anything.

They count from the moment at which they are accepted: a client that never ends its TLS handshake takes a file
descriptor of the process, too. Where there are too many, the one goes on which nothing has come for longest: whoever
comes anew is served, however many stay. All of it runs on the server's one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

# Whoever waits for longer than clients do is answered in vain, and comes again: with too much to do, a server with a
# long queue answers nobody in time. And all that wait are accepted at once, and again before the first are read: three
# times as many must not be more than may be silent, which two of three connections may.
BACKLOG = 128

STAYS = "stays"
"""What a request's state has where its connection is kept for longer: it comes from a rank that is registered."""


class Listener(socket.socket):
    """A listening socket that tells of every connection that it accepts.

    Attributes:
        on_accept: called with each.
    """

    on_accept: Callable[[socket.socket], None] | None = None
    _reserve: int | None = None  # a file that a connection may have the place of, to be refused

    @classmethod
    def of(cls, listening: socket.socket) -> Listener:
        """Takes a listening socket over."""
        taken = cls(listening.family, listening.type, listening.proto, listening.detach())
        taken._reserve = os.open(os.devnull, os.O_RDONLY)
        return taken

    def close(self) -> None:
        """Closes it."""
        super().close()
        reserve, self._reserve = self._reserve, None
        if reserve is not None:
            os.close(reserve)

    def accept(self) -> tuple[socket.socket, object]:
        """Accepts a connection, as every socket does; refuses it where this process may open no more files.

        What is not accepted would make the listening socket readable again and again.
        """
        try:
            connection, address = super().accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or self._reserve is None:
                raise
            os.close(self._reserve)
            self._reserve = None
            with contextlib.suppress(OSError):
                super().accept()[0].close()
            with contextlib.suppress(OSError):
                self._reserve = os.open(os.devnull, os.O_RDONLY)
            raise ConnectionAbortedError("refused: this process may open no more files") from error
        if self.on_accept is not None:
            self.on_accept(connection)
        return connection, address


@dataclass(slots=True)
class _Client:
    """A connection.

    Attributes:
        is_open: whether it still is.
        send_away: ends it.
    """

    is_open: Callable[[], bool]
    send_away: Callable[[], None]


class Clients:
    """Sends clients away that ask nothing for too long, and those that were silent longest where there are too many."""

    def __init__(self, *, most: int, most_silent: int, longest_s: float) -> None:
        """Begins with none.

        Args:
            most: how many there may be.
            most_silent: how many of these may not have asked anything yet.
            longest_s: how long each may take from when it was accepted, or began another request, in seconds.
        """
        self._most = most
        self._most_silent = most_silent
        self._longest_s = longest_s
        self._numbers = itertools.count()
        self._accepted: dict[int, int] = {}  # by file descriptor: the number of the last connection that had it
        self._clients: dict[int, _Client] = {}  # by the connection's number, the one that was last heard of last
        self._silent: dict[int, asyncio.TimerHandle] = {}  # those that have not asked anything, the oldest first

    def accepted(self, connection: socket.socket) -> None:
        """Counts a connection that was just accepted, and whose handshake may fail without anybody's saying so."""

        def shut_down() -> None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

        number = self._accepted[connection.fileno()] = next(self._numbers)
        self._clients[number] = _Client(lambda: connection.fileno() >= 0, shut_down)
        self.expect(number)
        self._send_surplus_away(self._clients, self._most)

    def connected(self, descriptor: int, send_away: Callable[[], None]) -> int:
        """Takes over a connection that was accepted: it is ended in another way from now on, and its time runs on.

        Returns:
            Its number: unlike its descriptor, no later connection has the same.
        """
        number = self._accepted.pop(descriptor)
        if number in self._clients:
            self._clients[number] = _Client(lambda: True, send_away)
        else:
            send_away()
        return number

    def expect(self, number: int) -> None:
        """Begins the time in which a connection must ask something."""
        if number in self._clients and number not in self._silent:
            self._silent[number] = asyncio.get_running_loop().call_later(self._longest_s, self._send_away, number)
            self._send_surplus_away(self._silent, self._most_silent)

    def has_asked(self, number: int) -> None:
        """Ends that time."""
        timer = self._silent.pop(number, None)
        if timer is not None:
            timer.cancel()

    def was_heard(self, number: int) -> None:
        """Counts a connection as the last of which something was heard."""
        client = self._clients.pop(number, None)
        if client is not None:
            self._clients[number] = client

    def forget(self, number: int) -> None:
        """Counts a connection no more: it has ended."""
        self.has_asked(number)
        self._clients.pop(number, None)

    def _send_surplus_away(self, among: Mapping[int, object], most: int) -> None:
        if len(among) > most:
            for closed in [each for each in among if not self._clients[each].is_open()]:
                self.forget(closed)
        while len(among) > most:
            self._send_away(next(iter(among)))

    def _send_away(self, number: int) -> None:
        client = self._clients[number]
        self.forget(number)
        client.send_away()
