"""The peer channel of the simulation: ordered while a connection lasts, lossy when it breaks, late as it likes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import chain

from kvferry.control.ends import ConnectingEnd, Connection, ListeningEnd
from kvferry.errors import PeerDisconnectedError
from kvferry.protocol.wire.codec import decode_to_prefill
from kvferry.protocol.wire.messages import RefuseRoom
from kvferry.protocol.wire.versions import SPOKEN, Versions

NEXT_RELEASE = Versions(SPOKEN.oldest, SPOKEN.newest + 1)
"""Which versions a release speaks that is to come, and whoever reads what any rank says."""


@dataclass(slots=True, eq=False)
class Line(Connection):
    """One decode rank's connection to an address.

    As over ZMQ, what is sent while nobody listens there waits for whoever listens there next.

    Attributes:
        identity: the decode rank's name.
        up: messages on their way to the prefill rank.
        down: messages on their way from it.
        is_cut: whether nothing gets through at present.
        loses_up: whether what is sent to the prefill rank is lost, and nobody is told, until it is made anew.
        loses_down: the same of what is sent to the decode rank.
        has_broken: whether it broke, and the decode rank does not know yet.
        is_closed: whether the decode rank has ended it; what it sent before still leaves.
        arrived: messages that the decode rank has not read.
    """

    address: str
    identity: str
    network: ControlNetwork
    up: deque[bytes] = field(default_factory=deque)
    down: deque[bytes] = field(default_factory=deque)
    arrived: deque[bytes] = field(default_factory=deque)
    is_cut: bool = False
    loses_up: bool = False
    loses_down: bool = False
    has_broken: bool = False
    is_closed: bool = False

    def receive(self) -> list[bytes]:
        assert not self.is_closed, "a connection that was closed is read"
        taken = list(self.arrived)
        self.arrived.clear()
        return taken

    def take_break(self) -> bool:
        assert not self.is_closed, "a connection that was closed is looked at"
        has_broken, self.has_broken = self.has_broken, False
        return has_broken

    def send(self, message: bytes) -> None:
        if self.is_closed:
            raise PeerDisconnectedError(f"cannot send to {self.address}: the connection was closed")
        if self.network.fails_to_send():
            raise PeerDisconnectedError(f"cannot send to {self.address}: its queue is full")
        if self.network.on_sent is not None:
            self.network.on_sent(self, message, True)
        if not self.loses_up:
            self.up.append(message)

    @property
    def is_silent(self) -> bool:
        """Whether it carries nothing more, one way at least."""
        return self.loses_up or self.loses_down

    def drop_lost(self) -> None:
        """Drops what is on its way where nothing arrives any more."""
        if self.loses_up:
            self.up.clear()
        if self.loses_down:
            self.down.clear()


class SimulatedListeningEnd(ListeningEnd):
    """A prefill rank's."""

    def __init__(self, network: ControlNetwork, address: str) -> None:
        self.port = int(address.rpartition(":")[2])
        self.address = address
        self.arrived: deque[tuple[str, bytes]] = deque()
        self.lines: dict[str, Line] = {}  # by identity, those whose first message has come
        self._network = network
        network.listening[address] = self

    def wait(self, timeout_ms: int) -> None:
        pass

    def wake(self) -> None:
        pass

    def receive(self) -> list[tuple[str, bytes]]:
        taken = list(self.arrived)
        self.arrived.clear()
        return taken

    def send(self, identity: str, message: bytes) -> None:
        line = self.lines.get(identity)
        if line is None or line.is_closed:
            raise PeerDisconnectedError(f"no connection to {identity}")
        if self._network.on_sent is not None:
            self._network.on_sent(line, message, False)
        if not line.loses_down:
            line.down.append(message)

    def close(self) -> None:
        if self._network.listening.get(self.address) is self:
            del self._network.listening[self.address]


class SimulatedConnectingEnd(ConnectingEnd):
    """A decode rank's."""

    def __init__(self, network: ControlNetwork, identity: str) -> None:
        self.lines: list[Line] = []
        self._network = network
        self._identity = identity

    def connect(self, address: str) -> Connection:
        line = Line(address, self._identity, self._network)
        self.lines.append(line)
        self._network.lines.append(line)
        return line

    def disconnect(self, connection: Connection) -> None:
        assert isinstance(connection, Line)
        self.lines.remove(connection)
        connection.is_closed = True

    def wait(self, timeout_ms: int) -> Collection[Connection]:
        return [line for line in self.lines if line.arrived or line.has_broken]

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(slots=True, eq=False)
class ControlNetwork:
    """All connections.

    Attributes:
        fails_to_send: asked before a message is sent.
        lines: every connection that may still carry something.
        listening: who listens where.
        on_sent: called with every message that is sent, the connection, and whether it goes to the prefill rank.
    """

    fails_to_send: Callable[[], bool]
    on_sent: Callable[[Line, bytes, bool], None] | None = None
    lines: list[Line] = field(default_factory=list)
    listening: dict[str, SimulatedListeningEnd] = field(default_factory=dict)

    def can_go_up(self, line: Line) -> bool:
        """Whether a message can reach the prefill rank's address."""
        return bool(line.up) and not line.is_cut and line.address in self.listening

    def go_up(self, line: Line, index: int = 0) -> None:
        """Lets a message arrive at whoever listens."""
        end = self.listening[line.address]
        end.lines[line.identity] = line
        message = line.up[index]
        del line.up[index]
        end.arrived.append((line.identity, message))

    def go_down(self, line: Line, index: int = 0) -> None:
        """Lets a message arrive at the decode rank."""
        message = line.down[index]
        del line.down[index]
        if not line.is_closed:
            line.arrived.append(message)

    def carries_refusal_of(self, room: int) -> bool:
        """Whether a prefill rank has yet to read that a room was refused: a broken connection may hold that back."""
        unread = chain.from_iterable(line.up for line in self.lines)
        arrived = (message for end in self.listening.values() for _, message in end.arrived)
        messages = (decode_to_prefill(data, NEXT_RELEASE) for data in chain(unread, arrived))
        return any(isinstance(message, RefuseRoom) and message.room == room for message in messages)

    def forget(self) -> None:
        """Drops connections that have nothing left to carry."""
        self.lines = [line for line in self.lines if not line.is_closed or line.up]

    def break_line(self, line: Line, kept_up: int, kept_down: int) -> None:
        """Breaks a connection: of what was on its way only the first few messages arrive.

        The prefill rank cannot reach the other side until that has sent something again.
        """
        line.has_broken = True
        while len(line.up) > kept_up:
            line.up.pop()
        while len(line.down) > kept_down:
            line.down.pop()
        end = self.listening.get(line.address)
        if end is not None and end.lines.get(line.identity) is line:
            del end.lines[line.identity]

    def listener_died(self, address: str) -> None:
        """Nobody listens at an address any more, in the middle of everything."""
        self.listening.pop(address, None)
