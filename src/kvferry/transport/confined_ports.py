"""Keeps strangers from ports that a library opens on every interface, although it was told an address.

A socket filter of the kernel (classic BPF, socket(7), SO_ATTACH_FILTER) drops each packet that was not sent to one of
the addresses meant. Connections inherit it from the socket that listens. It takes no privilege.
"""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Container, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvferry.errors import TransportError

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # asm-generic/socket.h; Python's socket module does not name them
_LISTENS = "0A"  # the state of a listening socket in /proc/net/tcp
_ANYWHERE = {"0" * 8, "0" * 32}

# Opcodes of classic BPF (linux/filter.h), and where packets begin for a filter: at the IP header.
_LOAD_BYTE, _LOAD_WORD, _AND, _IF_EQUAL, _RETURN = 0x30, 0x20, 0x54, 0x15, 0x06
_IP_HEADER = 0xFFF00000
_VERSION_BITS, _IPV4 = 0xF0, 0x40
_IPV4_DESTINATION, _IPV6_DESTINATION = 16, 24
_PASS, _DROP = 0xFFFFFFFF, 0


@dataclass(frozen=True, slots=True)
class ListeningSocket:
    """A TCP socket of this process that listens.

    Attributes:
        descriptor: its file descriptor.
        port: on which it listens.
    """

    descriptor: int
    port: int

    def set_accept_timeout(self, seconds: float) -> None:
        """Sets how long one wait for a connection takes at most, from the next one on."""
        duration = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))  # struct timeval
        self.set_option(socket.SO_RCVTIMEO, duration)

    def set_option(self, option: int, value: bytes) -> None:
        """Sets a socket option (SOL_SOCKET). Needs no descriptor more, since there may be none left.

        Raises:
            OSError: if the kernel refuses, or, with EBADF or ENOTSOCK, the descriptor is not this socket's any more.
        """
        opened = socket.socket(fileno=self.descriptor)
        try:
            if not opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) or opened.getsockname()[1] != self.port:
                raise OSError(errno.EBADF, f"descriptor {self.descriptor} is another socket's now")
            opened.setsockopt(socket.SOL_SOCKET, option, value)
        finally:
            opened.detach()  # it stays open


def sockets_on_every_interface() -> set[ListeningSocket]:
    """Returns this process's TCP sockets that listen on every interface."""
    return listening_sockets(_ANYWHERE)


def listening_sockets(addresses: Container[str] | None = None) -> set[ListeningSocket]:
    """Returns this process's TCP sockets that listen; with addresses, as the kernel lists them, on these alone."""
    ports = {inode: port for inode, address, port in _listening() if addresses is None or address in addresses}
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            inode = os.readlink(entry).removeprefix("socket:[").removesuffix("]")
            if inode in ports:
                found.add(ListeningSocket(int(entry.name), ports[inode]))
    return found


def _listening() -> Iterator[tuple[str, str, int]]:
    """Yields inode, address and port of every socket in this network namespace that listens."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):  # a kernel without IPv6
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                address, _, port = fields[1].partition(":")
                if fields[3] == _LISTENS:
                    yield fields[9], address, int(port, 16)


def confine(listening: ListeningSocket, host: str) -> None:
    """Makes the kernel drop what comes to a listening socket by another address than a host's.

    Args:
        host: an address, or a name, of which all addresses are meant.

    Raises:
        TransportError: if the host has no address, or the kernel refuses.
    """
    try:
        found = {str(each[4][0]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        addresses = {ipaddress.ip_address(address.partition("%")[0]) for address in found}
        _filter(listening, _program(addresses))
    except OSError as error:
        raise TransportError(f"port {listening.port} cannot be kept to {host!r} (KVFERRY_HOST): {error}") from error


def shut(listening: ListeningSocket) -> None:
    """Makes the kernel drop whatever comes to a listening socket, so that who connects tries again and again."""
    _filter(listening, _step(_RETURN, _DROP))


def open_again(listening: ListeningSocket) -> None:
    """Takes it back."""
    listening.set_option(_SO_DETACH_FILTER, bytes(4))


def _filter(listening: ListeningSocket, program: bytes) -> None:
    instructions = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions))  # struct sock_fprog
    listening.set_option(_SO_ATTACH_FILTER, described)


def _program(addresses: set[ipaddress.IPv4Address | ipaddress.IPv6Address]) -> bytes:
    """Returns the filter: what passes over IPv4, and what over IPv6."""
    steps: dict[int, list[bytes]] = {4: [], 6: []}
    for address in addresses:
        at = _IPV4_DESTINATION if address.version == 4 else _IPV6_DESTINATION
        steps[address.version] += _pass_if(address.packed, at)
    of_ipv4 = [*steps[4], _step(_RETURN, _DROP)]
    which = [
        _step(_LOAD_BYTE, _IP_HEADER),
        _step(_AND, _VERSION_BITS),
        _step(_IF_EQUAL, _IPV4, if_false=len(of_ipv4)),
    ]
    return b"".join([*which, *of_ipv4, *steps[6], _step(_RETURN, _DROP)])


def _pass_if(packed: bytes, at: int) -> list[bytes]:
    """Returns the steps that let a packet pass if it holds some bytes, and go on behind them if not."""
    words = [word for (word,) in struct.iter_unpack("!L", packed)]
    code = []
    for number, word in enumerate(words):
        left = 2 * (len(words) - number - 1) + 1  # steps between this comparison and what follows the address
        code += [_step(_LOAD_WORD, _IP_HEADER + at + 4 * number), _step(_IF_EQUAL, word, if_false=left)]
    return [*code, _step(_RETURN, _PASS)]


def _step(opcode: int, operand: int, *, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", opcode, 0, if_false, operand)  # struct sock_filter
