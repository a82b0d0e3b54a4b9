"""Writes by kernels into mapped memory, where the contract says nothing: refusals, launches, and when a mapping ends.

That it keeps the contract is in tests/contract, and that all of it is ordered in test_order_on_device.py.
"""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from proof.device import FakeDevice, FakeResources, FakeSharing, IllegalAddressError, UnorderedAccessError
from proof.device.device import Work
from tests.support.caches import Model, Shape, pool
from tests.support.engines import WAIT_S, new_engine_name
from tests.support.fake_driver import MAPPED_AT, FakeDriverLibrary
from tests.support.on_device import GPU, SETTINGS, FakePlatform, OnDevice, bytes_of
from tests.support.transports import arrivals
from tests.support.waiting import eventually

from kvferry import (
    DecodeEndpoint,
    InProcessNetwork,
    InProcessTransport,
    PrefillEndpoint,
    RankCoordinates,
    Settings,
    TransferState,
)
from kvferry.errors import (
    IncompatiblePeerError,
    PeerDisconnectedError,
    RegistrationError,
    TransportError,
    TransportUnavailableError,
)
from kvferry.layout import Device, Region
from kvferry.staging.cuda_driver import CudaDriver
from kvferry.staging.mapped import MappedTransport
from kvferry.staging.resources import MachineResources
from kvferry.staging.sharing import CudaSharing, SharedAllocation
from kvferry.transport import NixlTransport, PeerMetadata, PreparedList, TransferHandle

BYTES = 4096
MIB = 1 << 20


class HeldDevice(FakeDevice):
    """A device on which no copy into mapped memory is seen to end while it is held."""

    is_held = False

    def look(self, work: Work) -> bool:
        return not (self.is_held and work.operation.name.startswith("copy")) and super().look(work)


@dataclass(slots=True)
class Two:
    """Two endpoints' transports on one device, the first connected to the second."""

    device: HeldDevice = field(default_factory=HeldDevice)
    network: InProcessNetwork = field(default_factory=InProcessNetwork)
    here: Any = None
    there: Any = None
    memory: list[Any] = field(default_factory=list)
    peer: str = ""

    def __post_init__(self) -> None:
        self.here, self.there = self.make(offers=False), self.make(offers=True)
        self.peer = self.here.connect(self.there.metadata())

    def make(self, *, offers: bool, host: str = "this host") -> MappedTransport:
        made = MappedTransport(InProcessTransport(self.network), FakeResources(self.device, host), offers=offers)
        memory = np.random.default_rng(len(self.memory)).integers(0, 256, BYTES, np.uint8)
        self.memory.append(memory)
        made.register([Region(memory.ctypes.data, BYTES)], GPU)
        return made

    def lists(self, *lengths: int) -> list[PreparedList]:
        """Lists of descriptors of some lengths, each 1 KiB from the next."""
        made = []
        for memory, peer in zip(self.memory[:2], (None, self.peer), strict=True):
            rows = [(memory.ctypes.data + 1024 * row, length, 0, length, 1) for row, length in enumerate(lengths)]
            made.append(self.here.prepare(np.array(rows, np.uint64), peer))
        return made

    def post(self, *lengths: int, lists: list[PreparedList] | None = None) -> TransferHandle:
        """Posts all of such lists."""
        local, remote = lists or self.lists(*lengths)
        numbers = np.arange(local.count, dtype=np.int32)
        transfer: TransferHandle = self.here.post(local, numbers, remote, numbers, b"written")
        return transfer

    def finish(self, transfer: TransferHandle) -> Any:
        while (report := self.here.poll(transfer)) is None:
            pass
        return report


@pytest.fixture
def two() -> Two:
    return Two()


def test_the_peer_is_notified_once_the_kernel_was_seen_to_end_and_finds_every_byte(two: Two):
    two.device.is_held = True
    transfer = two.post(1024, 1024, 1000)
    two.device.finish()  # done, which nobody has seen
    assert two.here.poll(transfer) is None
    assert not two.there.take_notifications()
    two.device.is_held = False
    report = two.finish(transfer)
    assert (report.total_bytes, report.descriptors) == (3048, 3)
    assert two.there.take_notifications() == [(two.here.endpoint_name, b"written")]
    np.testing.assert_array_equal(two.memory[1][:3048], two.memory[0][:3048])
    two.device.verify()


@pytest.mark.parametrize(("lengths", "launches"), [((64, 64, 64), 1), ((64, 100, 64), 2), ((7, 64, 100, 7), 3)])
def test_a_write_is_one_upload_and_a_launch_for_each_length(two: Two, lengths: tuple[int, ...], launches: int):
    lists, counts = two.lists(*lengths), two.device.counts
    before = counts.uploads, counts.launches, counts.synchronizations
    two.finish(two.post(lists=lists))
    assert (counts.uploads, counts.launches, counts.synchronizations) == (
        before[0] + 1, before[1] + launches, before[2],
    )  # fmt: skip
    assert not counts.compiled_runs_late
    for row, length in enumerate(lengths):
        at = slice(1024 * row, 1024 * row + length)
        np.testing.assert_array_equal(two.memory[1][at], two.memory[0][at])


def test_a_misaligned_row_is_copied_by_itself(two: Two, monkeypatch: pytest.MonkeyPatch):
    launched: list[tuple[int, int, int]] = []
    stream_class = type(two.here.copies.streams.own())
    launch = stream_class.launch_runs

    def noted(stream: Any, copy: Any) -> None:
        launched.append((copy.count, copy.length, copy.alignment))
        launch(stream, copy)

    shifts = (0, 0, 4)
    bases = [memory.ctypes.data + -memory.ctypes.data % 16 for memory in two.memory[:2]]
    local, remote = (
        two.here.prepare(
            np.array([(base + 1024 * row + shift, 512, 0, 512, 1) for row, shift in enumerate(shifts)], np.uint64), peer
        )
        for base, peer in zip(bases, (None, two.peer), strict=True)
    )
    monkeypatch.setattr(stream_class, "launch_runs", noted)
    two.finish(two.post(lists=[local, remote]))
    assert sorted(launched) == [(1, 512, 4), (2, 512, 16)]
    assert not two.device.counts.compiled_runs_late
    for row, shift in enumerate(shifts):
        here, there = (
            memory[base - memory.ctypes.data + 1024 * row + shift :][:512]
            for memory, base in zip(two.memory[:2], bases, strict=True)
        )
        np.testing.assert_array_equal(here, there)


def test_lists_that_one_thread_has_prepared_another_may_use(two: Two):
    lists = two.lists(64, 100)
    with ThreadPoolExecutor(1) as other:
        transfer = other.submit(two.post, lists=lists).result()
    two.finish(transfer)
    two.device.verify()


def test_a_peer_that_is_disconnected_stays_mapped_until_its_kernels_have_ended(two: Two):
    two.device.is_held = True
    transfer = two.post(64)
    two.here.disconnect(two.peer)
    assert two.device.mappings.count == 1
    two.device.is_held = False
    with pytest.raises(PeerDisconnectedError):
        two.finish(transfer)  # it cannot be notified any more
    assert two.device.mappings.count == 0
    two.device.verify()
    with pytest.raises(PeerDisconnectedError):
        two.post(64)


def test_so_it_is_where_it_attaches_anew_and_where_the_transport_is_closed(two: Two):
    two.device.is_held = True
    transfer = two.post(64)
    two.here.connect(two.there.metadata())
    assert two.device.mappings.count == 2
    two.device.is_held = False
    two.finish(transfer)
    assert two.device.mappings.count == 1
    two.device.is_held = True
    transfer = two.post(64)
    two.here.close()
    assert two.device.mappings.count == 1
    two.device.finish()
    two.device.verify()


def test_without_writes_a_mapping_ends_with_its_connection(two: Two):
    two.finish(two.post(64))
    two.here.disconnect(two.peer)
    assert two.device.mappings.count == 0


def test_a_launch_that_fails_leaves_nothing_in_flight(two: Two, monkeypatch: pytest.MonkeyPatch):
    stream = two.here.copies.streams.own()

    def fail(*_: object) -> None:
        raise RuntimeError("no memory left")

    lists = two.lists(64, 100)
    with monkeypatch.context() as patched:
        patched.setattr(type(stream), "upload", fail)
        with pytest.raises(TransportError, match="could not be launched: no memory left"):
            two.post(lists=lists)
        with pytest.raises(TransportError, match="1 descriptor rows could not be prepared on the GPU: no memory left"):
            two.lists(64)
    two.here.disconnect(two.peer)
    assert two.device.mappings.count == 0, "the write counts as one in flight"


def test_one_of_which_a_part_was_launched_fails_when_that_has_ended(two: Two, monkeypatch: pytest.MonkeyPatch):
    stream, lists = two.here.copies.streams.own(), two.lists(64, 100)
    launched = []
    launch = type(stream).launch_runs

    def fail_later(self: Any, copy: Any) -> None:
        launched.append(copy)
        if len(launched) > 1:
            raise RuntimeError("no memory left")
        launch(self, copy)

    with monkeypatch.context() as patched:
        patched.setattr(type(stream), "launch_runs", fail_later)
        transfer = two.post(lists=lists)
    two.device.is_held = True
    assert two.here.poll(transfer) is None
    two.device.is_held = False
    with pytest.raises(TransportError, match=r"not all of a write .* was launched: no memory left"):
        two.finish(transfer)
    assert not two.there.take_notifications()


def test_what_the_device_raises_is_no_end_of_a_write(two: Two, monkeypatch: pytest.MonkeyPatch):
    """After a fault the context is lost, and while a graph is captured an event cannot be asked: neither is an end."""
    transfer: Any = two.post(64)

    def fault() -> bool:
        raise RuntimeError("an illegal memory access was encountered")

    with monkeypatch.context() as patched:
        patched.setattr(type(transfer.event), "query", lambda self: fault())
        with pytest.raises(RuntimeError, match="illegal memory access"):
            two.here.poll(transfer)
    two.here.disconnect(two.peer)
    assert two.device.mappings.count == 1


def test_an_aborted_rooms_pages_are_held_on_both_sides_until_its_kernel_has_ended(kvferry_registry_url: str):
    device = HeldDevice(4)
    device.is_held = True
    with OnDevice(kvferry_registry_url, device, path="mapped") as ranks:
        request = ranks.begin(1, tokens=24)
        eventually("a copy is on its way", lambda: any(name.startswith("copy") for _, name in list(device.log)))
        request.receiver.abort("nobody wants it any more")
        for side in (request.receiver, request.sender):
            eventually("both sides know", lambda side=side: side.state is TransferState.FAILED)
        assert not request.receiver.pages_reusable
        assert not request.sender.pages_reusable
        device.is_held = False
        eventually("the pages are this side's", lambda: request.receiver.pages_reusable)
        ranks.engine_of_decode.launch("another prompt", writes=bytes_of(ranks.target, request.target))
        ranks.overwrite(request)
    device.verify()


@pytest.mark.full
def test_nixl_notifies_although_no_memory_is_registered_with_it(two: Two):
    """As endpoints have both: the side that writes goes without NIXL's progress thread."""
    try:
        NixlTransport.check_available()
    except TransportUnavailableError as error:
        pytest.skip(str(error))
    two.here, two.there = (
        MappedTransport(
            NixlTransport.from_settings(Settings(path="mapped"), f"{name}-{uuid.uuid4().hex[:8]}", writes=not offers),
            FakeResources(two.device),
            offers=offers,
        )
        for name, offers in (("here", False), ("there", True))
    )
    for transport, memory in zip((two.here, two.there), two.memory, strict=False):
        transport.register([Region(memory.ctypes.data, BYTES)], GPU)
    two.peer = two.here.connect(two.there.metadata())
    two.finish(two.post(64, 100))
    assert arrivals(two.there, 1, sender=two.here) == [(two.here.endpoint_name, b"written")]
    two.here.close()
    two.there.close()
    two.device.verify()


# ---- the device without hardware


def test_a_mapping_that_is_closed_under_a_kernel_is_found():
    device = FakeDevice()
    handle = device.mappings.share(Region(4096, 64))
    address = device.mappings.map(handle)
    assert device.mappings.map(handle) == address
    places, (mapping,) = device.mappings.translated(np.array([address + 8]), 8)
    assert places.tolist() == [4104]
    mapping.used_by.append(device.stream("one").launch("a"))
    device.mappings.unmap(address)
    device.finish()
    with pytest.raises(UnorderedAccessError, match=r"is closed, and the host has not seen the end of a"):
        device.mappings.unmap(address)
    with pytest.raises(IllegalAddressError, match=rf"8 bytes at {4104:#x} are not mapped"):
        device.mappings.translated(np.array([4104]), 8)


# ---- refusals


def test_a_peer_on_another_host_is_refused(two: Two):
    other = two.make(offers=True, host="another host")
    with pytest.raises(TransportError, match=r"is on another host.*KVFERRY_PATH=mapped is for ranks of one host"):
        two.here.connect(other.metadata())
    with pytest.raises(PeerDisconnectedError):
        two.here.notify(other.endpoint_name, b"hello")


def test_nor_is_one_whose_host_nothing_shows(two: Two):
    two.here.copies.sharing.host = ""
    with pytest.raises(TransportError, match="nothing shows that it is on this"):
        two.here.connect(two.make(offers=True, host="").metadata())


def test_a_peer_that_offers_no_memory_is_refused(two: Two):
    with pytest.raises(TransportError, match="does not offer its memory at 0x"):
        two.here.connect(two.make(offers=False).metadata())


def test_what_cannot_be_mapped_is_refused_and_nothing_stays_mapped(two: Two, monkeypatch: pytest.MonkeyPatch):
    other = two.make(offers=True)
    more = np.zeros(64, np.uint8)
    other.register([Region(more.ctypes.data, 64)], GPU)
    maps = FakeSharing.map

    def refuse_one(self: FakeSharing, shared: SharedAllocation) -> int:
        if shared.memory.length == 64:
            raise TransportError("refused")
        return maps(self, shared)

    monkeypatch.setattr(FakeSharing, "map", refuse_one)
    before = two.device.mappings.count
    with pytest.raises(TransportError, match="refused"):
        two.here.connect(other.metadata())
    assert two.device.mappings.count == before


def test_a_pool_in_cpu_memory_is_refused_at_the_start():
    made = MappedTransport(InProcessTransport(InProcessNetwork()), MachineResources(), offers=True)
    with pytest.raises(TransportUnavailableError, match=r"maps pools of GPUs, and this one is on DRAM:0: take auto"):
        made.register([Region(4096, 64)], Device())


@pytest.mark.parametrize("sides", [("mapped", "auto"), ("auto", "mapped")])
def test_both_sides_must_take_it(kvferry_registry_url: str, sides: tuple[str, str]):
    device = FakeDevice()
    ranks = OnDevice(kvferry_registry_url, device, path=sides[0])
    network = InProcessNetwork()
    other = DecodeEndpoint(
        ranks.target.layout,
        settings=Settings(**{**SETTINGS, "registry_url": kvferry_registry_url, "path": sides[1]}),
        transport=InProcessTransport(network) if sides[1] == "mapped" else _VramTransport(network),
        platform=FakePlatform(device),
    )
    with ranks, other, pytest.raises(IncompatiblePeerError, match=r"transport: .*whether KVFERRY_PATH is mapped"):
        other.connect(ranks.name, timeout_s=WAIT_S)


class _VramTransport(InProcessTransport):
    memory_kinds = MappedTransport.memory_kinds


def test_an_endpoint_whose_pool_cannot_be_mapped_does_not_start(kvferry_registry_url: str):
    made = pool(Model(layers=1, heads=1, head_dim=8), Shape(pages=4), RankCoordinates())
    with pytest.raises(TransportUnavailableError, match="take auto, direct or staged"):
        PrefillEndpoint(
            made.layout,
            engine=new_engine_name("prefill"),
            settings=Settings(registry_url=kvferry_registry_url, path="mapped"),
            transport=InProcessTransport(InProcessNetwork()),
        )


# ---- CUDA's driver, which is a fake


@pytest.fixture
def library() -> FakeDriverLibrary:
    return FakeDriverLibrary()


def test_whole_allocations_are_offered_each_once(library: FakeDriverLibrary):
    driver = CudaDriver(library)
    taken = [driver.allocate(MIB, 3) for _ in range(2)]
    first, second = (each.address for each in taken)
    sharing = CudaSharing(3, driver)
    offered = sharing.offer([Region(first, 64), Region(first + 4096, 64), Region(0, 0), Region(second + 512, 64)])
    assert [each.memory for each in offered] == [Region(first, MIB), Region(second, MIB)]
    assert not library.current
    assert library.retained == {3: 2}, "nothing but the two allocations holds the context"


def test_another_processs_memory_is_mapped_as_often_as_it_is_and_the_context_with_it(library: FakeDriverLibrary):
    other_process = CudaDriver(FakeDriverLibrary())
    taken = other_process.allocate(MIB, 0)
    (shared,) = CudaSharing(0, other_process).offer([Region(taken.address, 64)])
    sharing = CudaSharing(3, CudaDriver(library))
    address = sharing.map(shared)
    assert address == taken.address + MAPPED_AT
    assert sharing.map(shared) == address
    assert library.mapped == {address: 2}
    assert library.retained == {3: 2}
    for _ in range(2):
        sharing.unmap(address)
    assert library.mapped == {address: 0}
    assert library.retained == {3: 0}
    with pytest.raises(TransportError, match="cannot be closed: cuIpcCloseMemHandle: CUDA_ERROR_INVALID_VALUE"):
        sharing.unmap(address)
    assert not library.current


def test_memory_of_ones_own_and_handles_of_another_kind_are_refused(library: FakeDriverLibrary):
    driver = CudaDriver(library)
    taken = driver.allocate(MIB, 0)
    sharing = CudaSharing(0, driver)
    (own,) = sharing.offer([Region(taken.address, 64)])
    with pytest.raises(TransportError, match=r"CUDA_ERROR_INVALID_CONTEXT.*It must be another process"):
        sharing.map(own)
    with pytest.raises(TransportError, match="has 64 bytes, not 3"):
        sharing.map(SharedAllocation(own.memory, b"abc"))
    assert library.retained == {0: 1}


def test_a_pool_that_cannot_be_mapped_is_refused_with_what_to_do(library: FakeDriverLibrary):
    driver = CudaDriver(library)
    taken = driver.allocate(MIB, 0)
    sharing = CudaSharing(0, driver)
    with pytest.raises(RegistrationError, match="not of the kind that CUDA shares"):
        sharing.offer([Region(taken.address + MIB - 8, 64)])
    library.virtual.add(taken.address)
    with pytest.raises(RegistrationError, match=r"expandable_segments.*KVFERRY_PATH=staged"):
        sharing.offer([Region(taken.address, 64)])
    with pytest.raises(RegistrationError, match="cannot be shared with other processes"):
        sharing.offer([Region(64, 64)])


def test_metadata_says_which_host_and_what_may_be_mapped(two: Two):
    metadata = PeerMetadata.decode(two.there.metadata())
    assert metadata.regions == (Region(two.memory[1].ctypes.data, BYTES),)
    assert b"this host" in metadata.private
