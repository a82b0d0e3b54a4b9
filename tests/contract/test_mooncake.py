"""What is particular to Mooncake: ranges and registered regions, its ports, its versions, and what it keeps."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.transports import (
    MEMORY,
    POISON,
    Kit,
    Pair,
    arrivals,
    connected,
    finish,
    numbers,
    until,
    write,
    write_range,
)

from kvferry.errors import (
    PeerDisconnectedError,
    RegistrationError,
    TransportError,
    TransportUnavailableError,
)
from kvferry.findings import Severity
from kvferry.layout import Device, MemoryKind, Region
from kvferry.settings import Settings
from kvferry.transport import PeerMetadata
from kvferry.transport.confined_ports import sockets_on_every_interface
from kvferry.transport.mooncake import transport as mooncake
from kvferry.transport.mooncake.mooncake_diagnosis import load_engine
from kvferry.transport.mooncake.transport import MooncakeHandle, MooncakeTransport, Pieces, pieces_of

HALF = MEMORY // 2


@pytest.fixture
def kit() -> Iterator[Kit]:
    made = Kit("mooncake")
    yield made
    made.close()


@pytest.fixture
def pair(kit: Kit) -> Pair:
    """A pair of which Mooncake knows the peer's memory: until then nothing is posted."""
    made = connected(kit)
    assert isinstance(made.here.transport, MooncakeTransport)
    connection = made.here.transport.connection(made.peer)
    until("the peer is reached", lambda: connection.is_reached)
    return made


class Counting:
    """Mooncake's engine, with a count of the ranges that are on their way; fails what it is told to."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.on_their_way: set[int] = set()
        self.most = 0
        self.refuses: set[int] = set()
        self.fails: set[int] = set()
        self.holds = False
        self.held: set[int] = set()
        self.submitted = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def transfer_submit_write(self, server: str, source: int, destination: int, length: int) -> int:
        self.submitted += 1
        if self.submitted in self.refuses:
            return 0
        if self.submitted in self.fails:
            destination = 1
        number: int = self.engine.transfer_submit_write(server, source, destination, length)
        self.on_their_way.add(number)
        self.most = max(self.most, len(self.on_their_way))
        return number

    def transfer_check_status(self, number: int) -> int:
        if self.holds or number in self.held:
            return 0
        status: int = self.engine.transfer_check_status(number)
        if status != 0:
            self.on_their_way.discard(number)
        return status


@pytest.fixture
def counting(pair: Pair) -> Counting:
    transport = pair.here.transport
    assert isinstance(transport, MooncakeTransport)
    counting = transport.engine = Counting(transport.engine)
    return counting


# --- ranges


def test_a_write_of_any_number_of_ranges_leaves_a_few_at_a_time(pair: Pair, counting: Counting):
    count = 10_000
    lists = pair.lists([(0, 16, 32, count)], [(0, 16, 48, count)])
    order = np.random.default_rng(1).permutation(count).astype(np.int32)
    report = write(pair, lists, order, order)
    assert (report.descriptors, report.total_bytes) == (count, 16 * count)
    assert counting.most == mooncake.RANGES_OF_A_WRITE
    expected = np.full(MEMORY, POISON, np.uint8)
    expected[: 48 * count].reshape(count, 48)[:, :16] = pair.here.memory[: 32 * count].reshape(count, 32)[:, :16]
    np.testing.assert_array_equal(pair.there.memory, expected)
    arrivals(pair.there.transport, 1)


def test_many_writes_to_a_peer_share_what_it_takes(pair: Pair, counting: Counting):
    """More than Mooncake queues (2,048 ranges): it would fail those beyond."""
    count = 200
    lists = pair.lists([(0, 16, 32, count)], [(0, 16, 48, count)])
    transport, every = pair.here.transport, np.arange(count, dtype=np.int32)
    counting.holds = True
    transfers = [transport.post(lists[0], every, lists[1], every, b"%d" % number) for number in range(50)]
    assert [transport.poll(transfer) for transfer in transfers] == [None] * 50
    assert counting.most == mooncake.RANGES_OF_A_PEER
    counting.holds = False
    until("end of all", lambda: None not in [transport.poll(transfer) for transfer in transfers])
    for transfer in transfers:
        finish(transport, transfer)
    assert len(arrivals(pair.there.transport, 50)) == 50
    assert counting.submitted == 50 * count


def test_a_range_that_fails_fails_its_write_once_all_have_ended(pair: Pair, counting: Counting):
    count = 500
    lists = pair.lists([(0, 16, 32, count)], [(0, 16, 48, count)])
    every = np.arange(count, dtype=np.int32)
    counting.fails = {30}
    transfer = pair.here.transport.post(lists[0], every, lists[1], every, b"never")
    with pytest.raises(TransportError, match=r"failed to write a range .status -1.") as caught:
        until("an end", lambda: pair.here.transport.poll(transfer))
    assert not isinstance(caught.value, PeerDisconnectedError)
    assert not counting.on_their_way, "nothing is on its way any more"
    assert counting.submitted < count
    with pytest.raises(TransportError, match="status -1"):
        pair.here.transport.poll(transfer)
    assert write(pair, lists, every, every, b"the next").descriptors == count
    assert arrivals(pair.there.transport, 1) == [(pair.name, b"the next")]


def test_a_write_that_has_failed_ends_when_the_last_of_its_ranges_has(pair: Pair, counting: Counting):
    lists = pair.lists([(0, 16, 32, 4)], [(0, 16, 48, 4)])
    counting.fails = {1}
    transfer = pair.here.transport.post(lists[0], numbers(*range(4)), lists[1], numbers(*range(4)), b"never")
    assert isinstance(transfer, MooncakeHandle)
    counting.held = {transfer.on_their_way[-1]}
    until("the failure", lambda: pair.here.transport.poll(transfer) or transfer.failed)
    failed_at = time.monotonic()
    while time.monotonic() < failed_at + 3 * mooncake._NOTICED_S:
        assert pair.here.transport.poll(transfer) is None, "a range is on its way"
    counting.held = set()
    with pytest.raises(TransportError, match="status -1"):
        until("an end", lambda: pair.here.transport.poll(transfer))


@pytest.mark.parametrize("refused", [1, 40, 100])
def test_a_range_that_is_not_taken_fails_its_write(pair: Pair, counting: Counting, refused: int):
    count = 200
    lists = pair.lists([(0, 16, 32, count)], [(0, 16, 48, count)])
    every = np.arange(count, dtype=np.int32)
    counting.refuses = {refused}
    transport = pair.here.transport
    with pytest.raises(TransportError, match="does not take a range of 16 bytes"):
        finish(transport, transport.post(lists[0], every, lists[1], every, b"never"))
    assert not counting.on_their_way
    assert transport.connection(pair.peer).on_their_way == 0  # type: ignore[attr-defined]
    assert write(pair, lists, every, every, b"the next").descriptors == count
    assert arrivals(pair.there.transport, 1) == [(pair.name, b"the next")]


# --- registered regions


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), max_size=12))
def test_pieces_do_not_overlap_and_cover_what_was_registered(regions: list[tuple[int, int]]):
    pieces, covered = Pieces(), set[int]()
    for address, length in regions:
        wanted = set(range(address, address + length))
        new = pieces.add(Region(address, length))
        added = [byte for piece in new for byte in range(piece.address, piece.stop)]
        assert sorted(added) == sorted(wanted - covered), "each byte once, and none that is there"
        covered |= wanted
    starts = pieces.starts.tolist()
    assert starts == sorted(starts)
    assert starts == pieces_of(Region(*each) for each in regions).starts.tolist()


def test_memory_may_be_registered_again_in_other_pieces_and_a_range_may_cross_them(kit: Kit):
    """Mooncake refuses memory that overlaps what it has, and ranges that lie in two regions."""
    pair = connected(kit)
    for end in (pair.here, pair.there):
        start = end.region.address
        end.transport.register([Region(start, 64), Region(start + HALF - 7, 99)], Device())
    here, there = kit.end("here", 64), kit.end("there", 64)
    memory = [np.zeros(MEMORY, np.uint8) for _ in range(2)]
    memory[0][:] = pair.here.memory
    for end, some, border in zip((here, there), memory, (HALF, HALF + 1000), strict=True):
        address = some.ctypes.data
        end.transport.register([Region(address, border)], Device())
        end.transport.register([Region(address + border, MEMORY - border)], Device())
        end.transport.register([Region(address, MEMORY)], Device())  # so that a range over both is registered memory
        end.memory, end.region = some, Region(address, MEMORY)
    apart = Pair(kit, here, there, here.transport.connect(there.transport.metadata()))
    assert write_range(apart, 0, 0, MEMORY).descriptors == 3
    np.testing.assert_array_equal(memory[1], memory[0])
    pair.here.transport.connect(pair.there.transport.metadata())
    assert write_range(pair, 0, 0, MEMORY).total_bytes == MEMORY
    np.testing.assert_array_equal(pair.there.memory, pair.here.memory)


def test_a_region_without_length_is_refused(kit: Kit):
    with pytest.raises(RegistrationError, match="without address or length"):
        kit.make("x").register([Region(4096, 0)], Device())


def test_what_mooncake_cannot_register_is_an_error(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pair.here.transport, "engine", Refusing())
    with pytest.raises(RegistrationError, match="cannot register 1 regions of DRAM:0: error -7"):
        pair.here.transport.register([Region(4096, 8)], Device())


class Refusing:
    def batch_register_memory(self, addresses: list[int], lengths: list[int]) -> int:
        return -7


@pytest.mark.parametrize("is_for_cuda", [True, False])
def test_a_build_for_cuda_takes_device_memory(kit: Kit, is_for_cuda: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(load_engine(), "SUPPORT_CUDA", is_for_cuda)
    assert (MemoryKind.VRAM in kit.make("x").memory_kinds) == is_for_cuda  # type: ignore[attr-defined]


# --- who is reached, and by whom


def test_its_ports_are_open_to_the_address_alone(kit: Kit):
    before = sockets_on_every_interface()
    kit.make("here")
    opened = sockets_on_every_interface() - before
    assert len(opened) == 2, "one for handshakes, one for bytes"
    for each in opened:
        with socket.create_connection(("127.0.0.1", each.port), timeout=5):
            pass
        with pytest.raises(TimeoutError), socket.create_connection(("127.0.0.2", each.port), timeout=0.3):
            pass


def test_a_wildcard_listens_everywhere():
    Kit("mooncake")
    before = sockets_on_every_interface()
    transport = MooncakeTransport("anywhere", host="0.0.0.0", advertised_host="127.0.0.1")
    try:
        for each in sockets_on_every_interface() - before:
            with socket.create_connection(("127.0.0.2", each.port), timeout=5):
                pass
    finally:
        transport.close()


def test_a_port_that_another_endpoint_had_is_refused(pair: Pair):
    """Mooncake keeps what it knew of it, the port for bytes above all."""
    true = PeerMetadata.decode(pair.there.transport.metadata())
    private = msgspec.msgpack.decode(true.private)
    private["name"] = "successor"
    other = msgspec.structs.replace(true, name="successor", private=msgspec.msgpack.encode(private))
    with pytest.raises(TransportError, match=rf"successor has the port that {pair.peer} had .*start either side anew"):
        pair.here.transport.connect(other.encode())
    pair.here.transport.notify(pair.peer, b"still here")
    arrivals(pair.there.transport, 1)


def test_nobody_at_the_address_is_an_error(kit: Kit):
    here, there = kit.end("here"), kit.end("there")
    metadata = there.transport.metadata()
    there.transport.close()
    peer = here.transport.connect(metadata)
    with pytest.raises(PeerDisconnectedError, match=r"there-\w+ does not answer Mooncake at 127.0.0.1:"):
        until("a refusal", lambda: here.transport.notify(peer, b"lost"))
    with pytest.raises(PeerDisconnectedError, match=r"there-\w+ does not answer"):
        here.transport.write(here.region, peer, there.region.address, b"")


def test_a_peer_that_does_not_answer_keeps_nobody_waiting(pair: Pair):
    """A frozen process: the system takes its connections, and nobody answers."""
    transport, memory = pair.here.transport, np.zeros(64, np.uint8)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        server = f"127.0.0.1:{mute.getsockname()[1]}"
        address = {"host": "127.0.0.1", "port": mute.getsockname()[1], "token": b""}
        frozen = PeerMetadata(
            name="frozen",
            device=Device(),
            regions=(Region(memory.ctypes.data, 64),),
            private=msgspec.msgpack.encode({"name": "frozen", "server": server, "messages": address}),
        )
        began_at = time.monotonic()
        transport.connect(frozen.encode())
        transport.notify("frozen", b"waits")
        transfer = transport.write(Region(pair.here.region.address, 64), "frozen", memory.ctypes.data, b"")
        for number in range(20):
            write_range(pair, 0, 64 * number, 64, b"%d" % number)
            assert transport.poll(transfer) is None
        assert time.monotonic() - began_at < 1
        arrivals(pair.there.transport, 20)
    with pytest.raises(PeerDisconnectedError, match="frozen does not answer Mooncake"):
        until("an end", lambda: transport.poll(transfer))


def test_connections_to_a_peer_that_has_gone_are_closed(kit: Kit):
    here = kit.end("here")

    def num_sockets() -> int:
        links = []
        for name in os.listdir("/proc/self/fd"):
            try:
                links.append(os.readlink(f"/proc/self/fd/{name}"))
            except OSError:
                continue
        return sum(link.startswith("socket:") for link in links)

    def is_gone(peer: str) -> bool:
        assert isinstance(here.transport, MooncakeTransport)
        return here.transport.connection(peer).is_lost

    before = num_sockets()
    for _ in range(3):
        there = kit.end("there")
        pair = Pair(kit, here, there, here.transport.connect(there.transport.metadata()))
        lists = pair.lists([(0, 4096, 8192, 64)], [(0, 4096, 8192, 64)])
        write(pair, lists, numbers(*range(64)), numbers(*range(64)))
        there.transport.close()
        until("the end is noticed", partial(is_gone, pair.peer))
        here.transport.disconnect(pair.peer)

    def closed() -> bool:
        here.transport.take_notifications()
        return num_sockets() <= before

    until("as many sockets as before", closed)


# --- what is installed, and how it was set


@pytest.mark.parametrize(
    ("version", "is_safe"), [("0.3.11.post1", False), ("0.3.12", True), ("0.10", True), ("1.0", True)]
)
def test_versions_that_say_too_early_that_a_write_has_ended_are_refused(
    version: str, is_safe: bool, monkeypatch: pytest.MonkeyPatch
):
    Kit("mooncake")
    monkeypatch.setattr(importlib.metadata, "version", lambda wheel: version)
    if is_safe:
        MooncakeTransport.check_available()
    else:
        with pytest.raises(
            TransportUnavailableError, match=rf"{version} says .*before its bytes have arrived.*0\.3\.12"
        ):
            MooncakeTransport.check_available()


def test_where_it_is_missing_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch):
    def missing(wheel: str) -> str:
        raise importlib.metadata.PackageNotFoundError(wheel)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(TransportUnavailableError, match=r"Mooncake is not installed: pip install mooncake"):
        MooncakeTransport.check_available()
    findings = list(MooncakeTransport.diagnosis.findings(Settings()))
    assert [each.severity for each in findings if each.about == "mooncake"] == [Severity.ERROR]


def test_where_a_library_of_the_system_is_missing_the_remedy_names_it(monkeypatch: pytest.MonkeyPatch):
    Kit("mooncake")
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    importing = importlib.import_module

    def failing(name: str) -> Any:
        if name == "mooncake.engine":
            raise ImportError("libibverbs.so.1: cannot open shared object file")
        return importing(name)

    monkeypatch.setattr(importlib, "import_module", failing)
    with pytest.raises(
        TransportUnavailableError, match=r"cannot be loaded: libibverbs.*apt-get install --no-install-recommends libib"
    ):
        MooncakeTransport.check_available()


def test_a_variable_that_makes_it_say_too_early_is_refused(monkeypatch: pytest.MonkeyPatch):
    Kit("mooncake")
    monkeypatch.setenv("MC_TCP_PROTO", "1")
    with pytest.raises(TransportUnavailableError, match=r"MC_TCP_PROTO=1 .*unset it"):
        MooncakeTransport("x")


def test_ipv6_wants_its_variable(monkeypatch: pytest.MonkeyPatch):
    Kit("mooncake")
    monkeypatch.delenv("MC_USE_IPV6", raising=False)
    with pytest.raises(TransportUnavailableError, match="::1 only if MC_USE_IPV6=1"):
        MooncakeTransport("x", host="::1")


def test_a_device_that_is_not_there_is_a_finding():
    Kit("mooncake")
    findings = list(MooncakeTransport.diagnosis.findings(Settings(mooncake_device="mlx5_0,mlx5_9")))
    (found,) = [each for each in findings if each.about == "devices"]
    assert found.severity is Severity.ERROR
    assert "mlx5_0, mlx5_9 (KVFERRY_MOONCAKE_DEVICE), which is not there" in found.what


def test_settings_make_it():
    Kit("mooncake")
    transport = MooncakeTransport.from_settings(
        Settings(host="127.0.0.3", advertise_host="localhost"), f"x-{uuid.uuid4().hex}", writes=True
    )
    try:
        assert transport.channel.address.host == "localhost"
        assert transport.server.startswith("localhost:")
    finally:
        transport.close()
