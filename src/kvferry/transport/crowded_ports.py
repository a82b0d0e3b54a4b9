"""Keeps strangers at a library's ports from taking all files that this process may open.

UCX accepts whoever connects, without a bound, keeps those that say nothing, and closes its listening socket for good
as soon as it cannot accept for want of a descriptor. So a thread that sleeps until somebody connects shuts such ports
while too many files are open: the kernel drops what comes, and who connects tries again. Meanwhile it ends the
connections that do not begin as UCX's do; UCX closes them when it next moves bytes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import socket
import struct
import termios
import threading
from collections.abc import Collection
from contextlib import suppress

from kvferry.loggers import logger_of
from kvferry.open_files import REMEDY, num_open, share_of
from kvferry.transport.confined_ports import ListeningSocket, open_again, shut

log = logger_of(__name__)

_UCX_BEGINS_WITH = struct.pack("=Q", 0xCAFEBABE12345678)  # UCT_TCP_MAGIC_NUMBER (uct/tcp/tcp.h)
_RECEIVED = struct.Struct("@52xI72xQ")  # struct tcp_info (linux/tcp.h): tcpi_last_data_recv, tcpi_bytes_received
_MOMENT_MS = 100  # in which who connects says something
_LOOK_S = 0.2
_NO_LIMIT = 1 << 62


class CrowdedPorts:
    """Shuts a library's ports while this process has more than three quarters of the files open that it may have."""

    def __init__(self, listening: Collection[ListeningSocket]) -> None:
        """Watches sockets that listen; they stay the library's."""
        self._listening = tuple(listening)
        self._ports = {each.port for each in listening}
        self._events = select.epoll()
        self._stop, self._stopping = os.pipe()
        self._events.register(self._stop, select.EPOLLIN)
        for each in listening:
            self._events.register(each.descriptor, select.EPOLLIN | select.EPOLLET)
        self._is_crowded = False
        self._shut: set[ListeningSocket] = set()
        self._reserve = os.open(os.devnull, os.O_RDONLY)
        self._thread = threading.Thread(target=self._run, name="kvferry-ports", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Watches no more. To be called before the library closes its sockets; may be called again."""
        if self._stopping >= 0:
            os.close(self._stopping)
            self._stopping = -1
            self._thread.join()
            self._events.close()
            os.close(self._stop)
            if self._reserve >= 0:
                os.close(self._reserve)

    def _run(self) -> None:
        while not any(number == self._stop for number, _ in self._events.poll(self._look_again_s())):
            try:
                self._look()
            except OSError as error:  # not one descriptor was left
                log.debug("the ports %s are not watched for a moment: %s", self._ports, error)

    def _look_again_s(self) -> float | None:
        return _LOOK_S if self._is_crowded or self._shut else None

    def _look(self) -> None:
        is_crowded = self._are_too_many_open()
        if is_crowded and not self._is_crowded:
            log.warning("so many files are open that the ports %s are shut for a while: %s", self._ports, REMEDY)
        self._is_crowded = is_crowded
        for each in self._listening:
            if is_crowded != (each in self._shut):
                self._turn(each)
        if is_crowded:
            self._end_strangers()

    def _are_too_many_open(self) -> bool:
        try:
            return num_open() > share_of(11 if self._is_crowded else 12, 16, most=_NO_LIMIT)
        except OSError:  # there is none left to count them with
            return True

    def _turn(self, each: ListeningSocket) -> None:
        """Shuts a socket, or opens it again. What fails is tried again with the next look, and keeps no other up."""
        try:
            (shut if self._is_crowded else open_again)(each)
        except OSError as error:
            log.debug("port %d is not shut or opened for a moment: %s", each.port, error)
            if error.errno in (errno.EBADF, errno.ENOTSOCK):  # the library has closed it
                self._listening = tuple(other for other in self._listening if other != each)
                self._shut.discard(each)
        else:
            self._shut ^= {each}

    def _end_strangers(self) -> None:
        """Ends them with a descriptor that is kept for this, as there may be none left."""
        if self._reserve >= 0:
            os.close(self._reserve)
            self._reserve = -1
        try:
            self._end_each_stranger()
        finally:
            self._reserve = os.open(os.devnull, os.O_RDONLY)

    def _end_each_stranger(self) -> None:
        for entry in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(int(entry))) as connection:
                    if self._is_stranger(connection):
                        connection.shutdown(socket.SHUT_RDWR)

    def _is_stranger(self, connection: socket.socket) -> bool:
        """Whether somebody has connected to one of the ports, and not begun as UCX does."""
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
            return False
        if connection.getsockname()[1] not in self._ports or connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            return False
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.size)
        if len(told) < _RECEIVED.size:  # an old kernel does not count them
            return False
        silent_ms, received = _RECEIVED.unpack(told)
        if received < len(_UCX_BEGINS_WITH):
            return bool(silent_ms > _MOMENT_MS)
        (unread,) = struct.unpack("@i", fcntl.ioctl(connection, termios.FIONREAD, bytes(4)))
        if unread < received:  # UCX has read the beginning, and closes what begins otherwise
            return False
        return connection.recv(len(_UCX_BEGINS_WITH), socket.MSG_PEEK | socket.MSG_DONTWAIT) != _UCX_BEGINS_WITH
