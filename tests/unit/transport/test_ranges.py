"""What is kept for transports that are told ranges: connections are hung up once, and lists end with them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from kvferry import Device, MemoryKind, Region
from kvferry.errors import RegistrationError, TransportError
from kvferry.transport import (
    Connection,
    Copies,
    PeerMetadata,
    Promises,
    RangeTransport,
    TransferHandle,
    TransferReport,
)

PROMISES = Promises(can_abort=False, fenced_by_deregistration=False, fenced_by_death=False, keeps_order=False)


@dataclass(slots=True, eq=False)
class Line(Connection):
    number: int = 0


@dataclass(slots=True, eq=False)
class Recording(RangeTransport[Line]):
    """Moves nothing, and remembers what it was told."""

    name = "recording"
    promises = PROMISES
    opened: int = 0
    hung_up: list[int] = field(default_factory=list)
    started: list[list[tuple[int, int, int]]] = field(default_factory=list)
    is_reachable: bool = True

    def open(self, peer: PeerMetadata) -> Line:
        if not self.is_reachable:
            raise TransportError("nobody there")
        self.opened += 1
        return Line(peer, self.opened)

    def hang_up(self, connection: Line) -> None:
        self.hung_up.append(connection.number)

    def start(self, connection: Line, copies: Copies, notification: bytes) -> TransferHandle:
        self.started.append(list(copies))
        return TransferHandle()

    def poll(self, transfer: TransferHandle) -> TransferReport | None:
        return None

    def notify(self, peer: str, notification: bytes) -> None:
        self.connection(peer)

    def take_notifications(self) -> list[tuple[str, bytes]]:
        return []


def made() -> Recording:
    transport = Recording()
    RangeTransport.__init__(transport, "here")
    transport.register([Region(4096, 4096)], Device())
    return transport


def peer(name: str = "there") -> bytes:
    return PeerMetadata(name=name, device=Device(), regions=(Region(8192, 4096),), private=b"").encode()


def test_every_connection_is_hung_up_once():
    transport = made()
    for name in ("there", "elsewhere"):
        transport.connect(peer(name))
    transport.connect(peer())
    assert transport.hung_up == [1]
    transport.disconnect("elsewhere")
    transport.disconnect("elsewhere")
    assert transport.hung_up == [1, 2]
    transport.close()
    transport.close()
    assert transport.hung_up == [1, 2, 3]


def test_a_connection_that_cannot_be_made_anew_leaves_the_one_that_is_there():
    transport = made()
    transport.connect(peer())
    transport.is_reachable = False
    with pytest.raises(TransportError, match="nobody there"):
        transport.connect(peer())
    assert transport.hung_up == []
    transport.notify("there", b"still here")


def test_a_write_is_given_as_ranges_that_are_joined():
    transport = made()
    transport.connect(peer())
    local = transport.prepare(np.array([[4096, 8, 0, 8, 16]], np.uint64), None)
    remote = transport.prepare(np.array([[8192, 8, 0, 8, 16]], np.uint64), "there")
    transport.post(local, np.array([1, 2, 5], np.int32), remote, np.array([3, 4, 9], np.int32), b"")
    transport.write(Region(4096, 100), "there", 9000, b"")
    assert transport.started == [[(4104, 8216, 16), (4136, 8264, 8)], [(4096, 9000, 100)]]


def test_memory_that_it_cannot_copy_is_refused_by_name():
    with pytest.raises(RegistrationError, match="the recording transport copies DRAM only, not VRAM:2"):
        made().register([Region(1, 1)], Device(MemoryKind.VRAM, 2))
