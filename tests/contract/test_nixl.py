"""What is particular to NIXL: backends, its errors, and memory on GPUs."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.support.transports import (
    KINDS,
    NOTHING,
    POISON,
    End,
    Kit,
    Pair,
    arrivals,
    connected,
    in_tiers,
    nixl_of,
    numbers,
    until,
    write,
)

from kvferry.errors import PeerDisconnectedError, RegistrationError, TransportError, TransportUnavailableError
from kvferry.layout import Device, MemoryKind, Region
from kvferry.transport import NixlTransport, PeerMetadata, TransferHandle
from kvferry.transport.nixl.shares import NixlHandle


@pytest.fixture(params=in_tiers(name for name, kind in KINDS.items() if kind.of is NixlTransport))
def kit(request: pytest.FixtureRequest) -> Iterator[Kit]:
    kit = Kit(request.param)
    yield kit
    kit.close()


def test_an_unknown_backend_is_refused_with_those_that_are_there(kit: Kit):
    with pytest.raises(TransportUnavailableError, match=r"'NOSUCH' .*KVFERRY_NIXL_BACKEND.*UCX"):
        NixlTransport("x", backend="NOSUCH")


@pytest.mark.parametrize("fails", ["makeConnection", "createXferReq"])  # the latter only where there are lanes
def test_a_connection_that_fails_half_way_can_be_tried_again(kit: Kit, monkeypatch: pytest.MonkeyPatch, fails: str):
    fails = fails if "threads" in kit.name else "makeConnection"
    here, there = kit.end("here"), kit.end("there")
    assert isinstance(here.transport, NixlTransport)
    metadata = there.transport.metadata()
    agent, bindings = nixl_of(here.transport)
    error = bindings.nixlBackendError("planted")

    class Failing:
        def __getattr__(self, name: str) -> Any:
            return self._fail if name == fails else getattr(agent, name)

        def _fail(self, *arguments: Any) -> None:
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(here.transport, "_agent", Failing())
        with pytest.raises(TransportError, match=r"connecting to there.*planted") as caught:
            here.transport.connect(metadata)
    assert caught.value.__cause__ is error
    there.transport.close()
    reborn = End(
        kit.make(PeerMetadata.decode(metadata).name), np.zeros(64, np.uint8)
    )  # known to NIXL under other metadata
    peer = here.transport.connect(reborn.transport.metadata())
    here.transport.notify(peer, b"hello")
    arrivals(reborn.transport, 1, sender=here.transport)


def test_a_peer_that_shows_metadata_of_another_leaves_that_ones_connection_alone(kit: Kit):
    pair = connected(kit)
    forged = msgspec.structs.replace(PeerMetadata.decode(pair.there.transport.metadata()), name="another").encode()
    with pytest.raises(TransportError, match="'another' sent the metadata of"):
        pair.here.transport.connect(forged)
    transfer = posted(pair, "write")
    until("end of the write", lambda: pair.here.transport.poll(transfer))
    pair.here.transport.release(transfer)


class Library:
    """NIXL, whose posts fail and whose writes last as a test says.

    Attributes:
        raises: what posts raise, in order, once all was posted; None lets one through.
        is_held: whether no request ends.
        held: those that do not.
        failed: what the status of others raises.
        releases: what releasing one raises, if anything.
    """

    def __init__(self, transport: NixlTransport) -> None:
        self._agent, self.nixl = nixl_of(transport)
        self.raises: list[Exception | None] = []
        self.is_held = False
        self.held: set[int] = set()
        self.failed: dict[int, Exception] = {}
        self.releases: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def postXferReq(self, handle: int, notification: bytes) -> Any:  # noqa: N802
        error = self.raises.pop(0) if self.raises else None
        if error is None or isinstance(error, self.nixl.nixlBackendError):
            status = self._agent.postXferReq(handle, b"" if error is not None else notification)
        if error is not None:
            raise error
        return self.nixl.NIXL_IN_PROG if self._is_held(handle) else status

    def _is_held(self, handle: int) -> bool:
        return self.is_held or handle in self.held

    def getXferStatus(self, handle: int) -> Any:  # noqa: N802
        if self._is_held(handle):
            return self.nixl.NIXL_IN_PROG
        if handle in self.failed:
            raise self.failed[handle]
        return self._agent.getXferStatus(handle)

    def releaseXferReq(self, handle: int) -> None:  # noqa: N802
        self._agent.releaseXferReq(handle)
        if self.releases is not None:
            raise self.releases


def library_of(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Library:
    transport = pair.here.transport
    assert isinstance(transport, NixlTransport)
    library = Library(transport)
    monkeypatch.setattr(transport, "_agent", library)
    return library


def posted(pair: Pair, way: str, count: int = 256) -> TransferHandle:
    """A write that was posted, of so many descriptors or of a range."""
    transport = pair.here.transport
    if way == "write":
        return transport.write(pair.here.region, pair.peer, pair.there.region.address, b"")
    order = np.random.default_rng(0).permutation(count).astype(np.int32)
    lists = pair.lists([(0, 64, 64, count)], [(0, 64, 64, count)])
    return transport.post(lists[0], order, lists[1], order, b"")


@pytest.mark.parametrize("way", ["post", "write"])
def test_a_post_that_raises_since_the_connection_is_gone_has_ended_and_says_so_when_it_is_polled(
    kit: Kit, way: str, monkeypatch: pytest.MonkeyPatch
):
    pair = connected(kit)
    with monkeypatch.context() as patch:
        library = library_of(pair, patch)
        library.raises = [library.nixl.nixlRemoteDisconnectError("the first")] * 2
        transfer = posted(pair, way)
        for _ in range(2):
            with pytest.raises(PeerDisconnectedError, match="the first"):
                pair.here.transport.poll(transfer)
    pair.here.transport.release(transfer)


@pytest.mark.parametrize("way", ["post", "write"])
def test_what_was_half_posted_has_ended_when_a_write_of_no_bytes_behind_it_has(
    kit: Kit, way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    pair = connected(kit)
    with monkeypatch.context() as patch:
        patch.setattr(f"{NixlTransport.__module__}._FLUSH_AGAIN_S", 0.0)
        library = library_of(pair, patch)
        library.raises = [library.nixl.nixlBackendError("half-way")] * 4  # of each share, and of some that flush
        library.releases = library.nixl.nixlBackendError("nor released")
        library.is_held = True
        transfer = posted(pair, way)
        assert isinstance(transfer, NixlHandle)
        while any(share.flush is None for share in transfer.shares):
            assert pair.here.transport.poll(transfer) is None
        assert "may go on: writing to" in caplog.text
        assert "that was not posted could not be released: nor released" in caplog.text
        library.releases = None
        for _ in range(3):
            assert pair.here.transport.poll(transfer) is None
        library.is_held = False
        with pytest.raises(TransportError, match="half-way"):
            until("end of what was half posted", lambda: pair.here.transport.poll(transfer))
        pair.here.transport.release(transfer)


def test_what_was_half_posted_has_not_ended_because_the_peer_was_disconnected(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
):
    """NIXL was measured to deliver all of it after that; whether by an earlier connection cannot be asked any more."""
    pair = connected(kit)
    with monkeypatch.context() as patch:
        library = library_of(pair, patch)
        library.raises = [library.nixl.nixlBackendError("half-way")] * 4
        transfer = posted(pair, "write")
        metadata = pair.there.transport.metadata()
        for again in (lambda: pair.here.transport.disconnect(pair.peer), lambda: pair.here.transport.connect(metadata)):
            again()
            with pytest.raises(RuntimeError, match="may go on"):
                pair.here.transport.poll(transfer)
    pair.here.transport.release(transfer)


@pytest.mark.parametrize("fails", [False, True], ids=["completes", "fails"])
@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize(
    "name", in_tiers(name for name, kind in KINDS.items() if kind.of is NixlTransport and kind.cuts)
)
def test_a_write_that_threads_share_has_ended_when_each_share_has(
    name: str, last: int, fails: bool, monkeypatch: pytest.MonkeyPatch
):
    kit = Kit(name)
    pair = connected(kit)
    with monkeypatch.context() as patch:
        library = library_of(pair, patch)
        library.is_held = True
        transfer = posted(pair, "post")
        library.is_held = False
        assert isinstance(transfer, NixlHandle)
        handles = [share.handle for share in transfer.shares]
        assert len(handles) == 2
        library.held = {handles[last]}
        if fails:
            library.failed[handles[1 - last]] = library.nixl.nixlRemoteDisconnectError("one of two")
        for _ in range(3):
            assert pair.here.transport.poll(transfer) is None
        library.held.clear()
        if fails:
            with pytest.raises(PeerDisconnectedError, match="one of two"):
                until("end of the write", lambda: pair.here.transport.poll(transfer))
        else:
            assert until("end of the write", lambda: pair.here.transport.poll(transfer)).total_bytes == 256 * 64
        pair.here.transport.release(transfer)
    kit.close()


def test_a_region_without_length_is_refused(kit: Kit):
    with pytest.raises(RegistrationError, match="without address or length"):
        kit.make("x").register([Region(4096, 0)], Device())


def test_errors_of_the_library_are_kept_as_the_cause(kit: Kit):
    pair = connected(kit)
    lists = pair.lists([(0, 64, 64, 4)], [(0, 64, 64, 4)])
    with pytest.raises(TransportError, match=f"posting 1 descriptors to {pair.peer}.*INVALID_PARAM") as caught:
        pair.here.transport.post(lists[0], numbers(0), lists[1], numbers(0, 1), b"wrong")
    assert type(caught.value.__cause__).__name__ == "nixlInvalidParamError"


def test_of_another_backend_of_nixl_nothing_is_promised_but_what_is_our_own_doing(kit: Kit):
    transport = NixlTransport(f"posix-{uuid.uuid4().hex[:8]}", backend="POSIX")
    kit.made.append(transport)
    assert transport.promises == replace(NOTHING, posts_all_or_nothing=True)


@pytest.mark.parametrize(
    ("source", "destination"),
    [
        ("cpu", "cpu"),
        pytest.param("cuda", "cuda", marks=pytest.mark.gpu),
        pytest.param("cuda", "cpu", marks=pytest.mark.gpu),
        pytest.param("cpu", "cuda", marks=pytest.mark.gpu),
    ],
)
def test_torch_tensors_travel_between_devices(source: str, destination: str):
    torch = pytest.importorskip("torch")
    if "cuda" in (source, destination) and not torch.cuda.is_available():
        pytest.skip("no CUDA device: torch.cuda.is_available() is False; the cpu twin runs")
    kit = Kit("nixl")
    try:
        ends = []
        for name, device in (("here", source), ("there", destination)):
            memory = torch.full((1 << 20,), POISON, dtype=torch.uint8, device=device)
            where = Device(MemoryKind.VRAM, memory.device.index or 0) if device == "cuda" else Device()
            ends.append(End(kit.make(f"{name}-{uuid.uuid4().hex[:8]}"), memory, where))
        here, there = ends
        here.memory.copy_(torch.arange(1 << 20).remainder(199).to(torch.uint8))
        if "cuda" in (source, destination):
            torch.cuda.synchronize()
        pair = Pair(kit, here, there, here.transport.connect(there.transport.metadata()))
        lists = pair.lists([(0, 512, 1024, 1024)], [(0, 512, 1024, 1024)])
        order = np.arange(1024, dtype=np.int32)
        write(pair, lists, order, order[::-1].copy())
        expected = torch.full((1024, 1024), POISON, dtype=torch.uint8)
        expected[:, :512] = here.memory.cpu().view(1024, 1024).flip(0)[:, :512]
        assert torch.equal(there.memory.cpu().view(1024, 1024), expected)
        assert arrivals(there.transport, 1) == [(pair.name, b"written")]
    finally:
        kit.close()
