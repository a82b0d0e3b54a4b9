"""Transports of every kind, in pairs with some memory: for the tests of the contract, and of what is particular."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import pytest
from _pytest.mark import ParameterSet
from proof.device import FakeDevice, FakeResources
from proof.simulated_transport import SimulatedHandle, SimulatedTransport, SimulatedWire
from prototypes.sglang_transport import KVFerryTransport
from tests.support.over_interface import OverInterface
from tests.support.toy_transport import ToyConnection, ToyTransport
from tests.support.waiting import PATIENCE_S

from kvferry.errors import TransportError, TransportUnavailableError
from kvferry.layout import Device, Region
from kvferry.staging.mapped import MappedTransport
from kvferry.transport import (
    InProcessNetwork,
    InProcessTransport,
    NixlTransport,
    PeerMetadata,
    PreparedList,
    Promises,
    TransferHandle,
    TransferReport,
    Transport,
)
from kvferry.transport.mooncake.transport import MooncakeTransport

DEADLINE_S = PATIENCE_S
MEMORY = 1 << 20
POISON = 0xEE
HOST = Device()


class Moving(SimulatedTransport):
    """A simulated transport on a wire that gets on whenever somebody looks, the last piece first."""

    def __init__(self, wire: SimulatedWire, name: str) -> None:
        super().__init__(wire, name)
        self.moving = wire

    def poll(self, transfer: TransferHandle) -> TransferReport | None:
        assert isinstance(transfer, SimulatedHandle)
        if transfer.left:
            self.moving.land(transfer, len(transfer.left) - 1)
        return super().poll(transfer)

    def take_notifications(self) -> list[tuple[str, bytes]]:
        for notification in list(self.moving.notifications):
            self.moving.deliver(notification)
        return super().take_notifications()


NOTHING = Promises(can_abort=False, fenced_by_deregistration=False, fenced_by_death=False, keeps_order=False)
WHOLE_POSTS = replace(NOTHING, posts_all_or_nothing=True)
ONLY_DEATH = replace(NOTHING, fenced_by_death=True)
DEATH_AND_WHOLE_POSTS = replace(ONLY_DEATH, posts_all_or_nothing=True)


def _raise(*_: object) -> Any:
    raise TransportError("planted: nothing begins")


def nixl_of(transport: NixlTransport) -> tuple[Any, Any]:
    """NIXL's agent of a transport, and its bindings."""
    return transport._agent, transport._nixl


def _nixl_breaks(transport: NixlTransport, patch: pytest.MonkeyPatch) -> None:
    """All of a request is posted, and then it raises."""
    agent, bindings = nixl_of(transport)
    error = bindings.nixlBackendError("planted")
    left = [error]

    class Breaking:
        def __getattr__(self, name: str) -> Any:
            return getattr(agent, name)

        def postXferReq(self, *arguments: Any) -> Any:  # noqa: N802
            if not left:
                return agent.postXferReq(*arguments)
            agent.postXferReq(arguments[0], b"")  # what fails in the middle sends no notification
            raise left.pop()

    patch.setattr(transport, "_agent", Breaking())


def _mooncake_breaks(transport: MooncakeTransport, patch: pytest.MonkeyPatch) -> None:
    """The third range is refused."""
    engine, submitted = transport.engine, count(1)

    class Breaking:
        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

        def transfer_submit_write(self, *arguments: Any) -> int:
            number: int = 0 if next(submitted) == 3 else engine.transfer_submit_write(*arguments)
            return number

    patch.setattr(transport, "engine", Breaking())


def _mapped_breaks(transport: MappedTransport, patch: pytest.MonkeyPatch) -> None:
    """The second kernel is not launched."""
    stream = type(transport.copies.streams.own())
    launch, launched = stream.launch_runs, count(1)

    def launches(self: Any, copy: Any) -> None:
        if next(launched) == 2:
            raise RuntimeError("planted")
        launch(self, copy)

    patch.setattr(stream, "launch_runs", launches)


def _toy_breaks(transport: ToyTransport, patch: pytest.MonkeyPatch) -> None:
    """One range is sent, and the rest not even queued."""
    queue, queued = ToyConnection.queue, count(1)

    def queues(self: Any, *parts: Any) -> None:
        if next(queued) == 3:
            raise TransportError("planted")
        queue(self, *parts)

    patch.setattr(ToyConnection, "queue", queues)


@dataclass(frozen=True, slots=True)
class Kind:
    """A transport, made in a certain way.

    Attributes:
        of: its class.
        make: makes one of a name.
        promises: what it promises: whoever promises more extends the tests, since what holds pages relies on it.
        breaks: lets the library of one fail in the middle of its next post, where it has a library.
        joins: whether ranges that go on on both sides become one.
        cuts: how many descriptors may be cut in two, to share a write between threads.
        has_device: whether it brings a device of its own, whatever the machine has.
    """

    of: type[Transport]
    make: Callable[[Kit, str], Transport]
    promises: Promises = NOTHING
    breaks: Callable[[Any, pytest.MonkeyPatch], None] = lambda transport, patch: patch.setattr(
        transport, "start", _raise
    )
    joins: bool = True
    cuts: int = 0
    has_device: bool = False


def nixl_as_endpoints_have_it(kit: Kit, name: str) -> Transport:
    """Only one side writes, and shares its writes between threads."""
    return NixlTransport(name, threads=2, only_writes=True) if name.startswith("here") else NixlTransport(name)


KINDS = {
    "inprocess": Kind(
        InProcessTransport,
        lambda kit, name: InProcessTransport(kit.network, name),
        replace(DEATH_AND_WHOLE_POSTS, fenced_by_deregistration=True),  # writes are their process's own steps
    ),
    "simulated": Kind(Moving, lambda kit, name: Moving(kit.wire, name), ONLY_DEATH, joins=False),
    # What it promises was measured: tests/processes.
    "nixl": Kind(NixlTransport, lambda kit, name: NixlTransport(name), DEATH_AND_WHOLE_POSTS, _nixl_breaks),
    "nixl with threads": Kind(
        NixlTransport,
        lambda kit, name: NixlTransport(name, threads=2, smallest_share=1),
        DEATH_AND_WHOLE_POSTS,
        _nixl_breaks,
        cuts=1,
    ),
    "nixl as endpoints have it": Kind(
        NixlTransport, nixl_as_endpoints_have_it, DEATH_AND_WHOLE_POSTS, _nixl_breaks, cuts=1
    ),
    "mooncake": Kind(
        MooncakeTransport, lambda kit, name: MooncakeTransport(name), DEATH_AND_WHOLE_POSTS, _mooncake_breaks
    ),
    # A kernel into mapped memory is fenced by nothing that was measured: staging/mapped.py.
    "mapped-inprocess": Kind(
        MappedTransport,
        lambda kit, name: MappedTransport(
            InProcessTransport(kit.network, name), FakeResources(kit.device), offers=True
        ),
        WHOLE_POSTS,
        _mapped_breaks,
        joins=False,
        has_device=True,
    ),
    # What SGLang plans to ask of transports, and kvferry behind it.
    "sglang": Kind(
        OverInterface,
        lambda kit, name: OverInterface(KVFerryTransport(lambda life: InProcessTransport(kit.network, name))),
        replace(DEATH_AND_WHOLE_POSTS, fenced_by_deregistration=True),
        joins=False,  # the interface does not say what became of neighbours
    ),
    "toy": Kind(ToyTransport, lambda kit, name: ToyTransport(name), breaks=_toy_breaks),
}
"""Every transport that keeps the contract: a new one is added here."""


IN_FULL = ("nixl", "nixl with threads")
"""What only the whole proof has: `make test` has NIXL as endpoints have it, which is one of each."""


def in_tiers(names: Iterable[str]) -> list[ParameterSet]:
    """Returns parameters for kinds, marked with their tiers."""
    return [pytest.param(name, marks=pytest.mark.full if name in IN_FULL else ()) for name in names]


class Kit:
    """Makes transports of one kind and closes them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.kind = KINDS[name]
        self.made: list[Transport] = []
        self.network: InProcessNetwork = InProcessNetwork()
        self.device: FakeDevice = FakeDevice(1)
        self.wire: SimulatedWire = SimulatedWire(
            on_post=lambda transfer: None, on_piece=lambda transfer, piece: None, fails_to=lambda what: None
        )
        try:
            self.kind.of.check_available()
        except TransportUnavailableError as error:
            pytest.skip(str(error))

    def make(self, name: str) -> Transport:
        made = self.kind.make(self, name)
        self.made.append(made)
        return made

    def end(self, name: str = "end", size: int = MEMORY, fill: int = POISON) -> End:
        return End(self.make(f"{name}-{uuid.uuid4().hex[:8]}"), np.full(size, fill, np.uint8))

    def close(self) -> None:
        for transport in self.made:
            transport.close()


class End:
    """A transport with some memory, in which descriptor rows count from 0."""

    def __init__(self, transport: Transport, memory: Any, device: Device = HOST) -> None:
        self.transport, self.memory, self.device = transport, memory, device
        address = memory.data_ptr() if hasattr(memory, "data_ptr") else memory.ctypes.data
        self.region = Region(address, memory.nbytes)
        transport.register([self.region], device)

    def rows(self, *rows: tuple[int, int, int, int]) -> Any:
        """Rows of (offset, length, stride, count)."""
        start, index = self.region.address, self.device.index
        return np.array([(start + at, length, index, stride, count) for at, length, stride, count in rows], np.uint64)


@dataclass
class Pair:
    """Two ends, the first connected to the second."""

    kit: Kit
    here: End
    there: End
    peer: str

    @property
    def name(self) -> str:
        return PeerMetadata.decode(self.here.transport.metadata()).name

    def lists(self, here: list[tuple[int, int, int, int]], there: list[tuple[int, int, int, int]]) -> Lists:
        transport = self.here.transport
        return (
            transport.prepare(self.here.rows(*here), None),
            transport.prepare(self.there.rows(*there), self.peer),
        )

    def clean(self) -> None:
        self.here.memory[:] = np.random.default_rng(5).integers(0, 200, len(self.here.memory))
        self.there.memory[:] = POISON
        self.there.transport.take_notifications()


Lists = tuple[PreparedList, PreparedList]


def connected(kit: Kit, size: int = MEMORY) -> Pair:
    here, there = kit.end("here", size), kit.end("there", size)
    pair = Pair(kit, here, there, here.transport.connect(there.transport.metadata()))
    pair.clean()
    return pair


def numbers(*values: int) -> Any:
    return np.array(values, np.int32)


def until(what: str, ready: Callable[[], Any]) -> Any:
    """The first true answer of `ready`; fails loudly when it takes too long."""
    deadline = time.monotonic() + DEADLINE_S
    while not (answer := ready()):
        if time.monotonic() > deadline:
            pytest.fail(f"no {what} within {DEADLINE_S} s")
        time.sleep(2e-4)
    return answer


def finish(transport: Transport, transfer: TransferHandle) -> TransferReport:
    report: TransferReport = until("end of a write", lambda: transport.poll(transfer))
    transport.release(transfer)
    return report


def write(pair: Pair, lists: Lists, here: Any, there: Any, notification: bytes = b"written") -> TransferReport:
    transport = pair.here.transport
    return finish(transport, transport.post(lists[0], here, lists[1], there, notification))


def arrivals(transport: Transport, count: int, *, sender: Transport | None = None) -> list[tuple[str, bytes]]:
    """Exactly `count` notifications: waits for them, then looks whether more come.

    Args:
        sender: who sent them over a new connection and polled nothing; makes progress by taking its own.
    """
    received: list[tuple[str, bytes]] = []

    def enough() -> bool:
        if sender is not None:
            sender.take_notifications()
        received.extend(transport.take_notifications())
        return len(received) >= count

    until(f"{count} notifications", enough)
    time.sleep(0.02)
    received.extend(transport.take_notifications())
    assert len(received) == count
    return received


def write_range(pair: Pair, source: int, destination: int, length: int, notification: bytes = b"") -> TransferReport:
    transport = pair.here.transport
    region = Region(pair.here.region.address + source, length)
    return finish(transport, transport.write(region, pair.peer, pair.there.region.address + destination, notification))


def cuda() -> Any:
    """torch, where there is a GPU that it can use; else None."""
    torch = pytest.importorskip("torch")
    return torch if torch.cuda.is_available() else None
