"""What a port may get that has nothing to do with it: noise, other protocols, and clients that take their time."""

from __future__ import annotations

import contextlib
import json
import random
import socket
from collections import deque

from tests.fuzz.mutation import HEADER, Mutator

_MOST_OPEN = 48
_TLS_HELLO = bytes.fromhex(
    "16030100a5010000a10303000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f20e0e1e2e3e4e5e6e7e8e9eaeb"
    "ecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff00081302130313011301010000500000000e000c0000096c6f63616c686f7374"
)
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"


def zmtp_greeting(mechanism: bytes, *, as_server: bool) -> bytes:
    """How ZMQ 3.1 begins (ZeroMQ's RFC 23)."""
    return _GREETING + mechanism.ljust(20, b"\0") + bytes([as_server]) + bytes(31)


def zmtp_ready(identity: bytes, kind: bytes = b"DEALER") -> bytes:
    """What follows it where there is no security."""

    def entry(name: bytes, value: bytes) -> bytes:
        return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value

    body = b"\x05READY" + entry(b"Socket-Type", kind) + entry(b"Identity", identity)
    return b"\x04" + bytes([len(body)]) + body


def zmtp_frame(body: bytes, flags: int = 0) -> bytes:
    """A message of one frame."""
    return bytes([flags | 2]) + len(body).to_bytes(8, "big") + body


class Foreign:
    """Makes byte streams, of one source of chance."""

    def __init__(self, chance: random.Random, mutator: Mutator, bodies: list[bytes]) -> None:
        """Args:
        bodies: registrations, right in everything.
        """
        self._chance = chance
        self._mutator = mutator
        self._bodies = bodies

    def stream(self) -> bytes:
        """What one connection says."""
        chance = self._chance
        made = chance.choice((self._noise, self._zmtp, self._zmtp, self._http, self._http, self._tls, self._message))()
        for _ in range(chance.choice((0, 0, 1, 3))):
            made = self._mutator.damaged(made)
        return made

    def _noise(self) -> bytes:
        return self._chance.randbytes(self._chance.choice((0, 1, 9, 10, 64, 65, 5000)))

    def _tls(self) -> bytes:
        return _TLS_HELLO + self._noise()

    def _message(self) -> bytes:
        return self._mutator.message()

    def _zmtp(self) -> bytes:
        chance = self._chance
        made = zmtp_greeting(
            chance.choice((b"NULL", b"CURVE", b"PLAIN", b"", b"\xff" * 20)), as_server=chance.random() < 0.2
        )
        if chance.random() < 0.8:
            # Frames of a peer that is heard are tested elsewhere: these go on with what only looks like one.
            made += chance.choice(
                (
                    b"\x04" + bytes([chance.randrange(256)]) + chance.randbytes(chance.randrange(256)),
                    b"\x06" + (1 << chance.choice((5, 20, 40, 63))).to_bytes(8, "big") + b"\x05READY",
                    b"\x04\xc8\x05HELLO\x01\x00" + bytes(72) + chance.randbytes(120),
                    zmtp_ready(chance.randbytes(chance.choice((0, 1, 200)))),
                    zmtp_ready(b"hostile-9", chance.choice((b"DEALER", b"ROUTER", b"SUB", b"x")))
                    + zmtp_frame(HEADER + chance.randbytes(50)),
                    zmtp_frame(chance.randbytes(20), flags=chance.randrange(256)),
                )
            )
        return made

    def _http(self) -> bytes:
        """Requests that cannot register: the path is that of another engine than the body's."""
        chance = self._chance
        method = chance.choice(("GET", "PUT", "PUT", "DELETE", "POST", "OPTIONS", "PRI", "G\x00T"))
        path = chance.choice(
            (
                "/v1/engines/nobody/ranks/0",
                "/v1/engines/nobody/ranks/99999999999",
                "/v1/engines/nobody/ranks/0?incarnation=nobody",
                "/v1/engines",
                "/health",
                "/" + "a" * 5000,
                "/v1/engines/%ff%00/ranks/-1",
                "http://elsewhere/",
                "*",
            )
        )
        body = chance.choice((*self._bodies, self._mutator.damaged(chance.choice(self._bodies)), b"[" * 20000, b""))
        declared = chance.choice((len(body), len(body), 0, len(body) + 10, 10**30, -1))
        lines = [
            f"{method} {path} HTTP/{chance.choice(('1.1', '1.1', '1.0', '2.0', '9'))}",
            "Host: x",
            chance.choice((f"Content-Length: {declared}", "Transfer-Encoding: chunked", "Expect: 100-continue")),
            chance.choice(("Connection: close", "Upgrade: websocket\r\nConnection: Upgrade", "Accept: */*")),
            chance.choice(
                ("X: y", "Authorization: Bearer " + "0" * 64, "Authorization: Basic eDp5", "X: " + "y" * 70000)
            ),
        ]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


class Connections:
    """Says such things to ports, and leaves some connections open, half said."""

    def __init__(self, ports: list[int]) -> None:
        self._ports = ports
        self._open: deque[tuple[socket.socket, bytes]] = deque()
        self.received: list[bytes] = []

    def say(self, chance: random.Random, data: bytes) -> None:
        """All or the first part of a stream to one of the ports; what came back on others is kept."""
        connection = socket.create_connection(("127.0.0.1", chance.choice(self._ports)), 20)
        connection.setblocking(False)
        said = chance.choice((0, chance.randrange(len(data) + 1), len(data), len(data)))
        with contextlib.suppress(OSError):
            connection.send(data[:said])
        self._open.append((connection, data[said:]))
        self._drip(chance)
        while len(self._open) > _MOST_OPEN:
            self._end(chance)

    def _drip(self, chance: random.Random) -> None:
        """One more byte on a connection that waits."""
        place = chance.randrange(len(self._open))
        connection, left = self._open[place]
        with contextlib.suppress(OSError):
            connection.send(left[:1])
        self._open[place] = connection, left[1:]

    def _end(self, chance: random.Random) -> None:
        connection, _ = self._open.popleft()
        with contextlib.suppress(OSError):
            while data := connection.recv(65536):
                self.received.append(data)
        if chance.random() < 0.3:  # in the middle of everything, without a close message
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()

    def close(self) -> None:
        while self._open:
            self._end(random.Random(0))

    def take_heard(self) -> bytes:
        """Everything that was answered since the last call."""
        received, self.received = b"".join(self.received), []
        return received


def unlike(engine: str, body: bytes) -> bytes:
    """A registration of another engine."""
    return json.dumps({**json.loads(body), "engine": engine}).encode()
