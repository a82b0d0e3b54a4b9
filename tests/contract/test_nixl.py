"""What is particular to NIXL: backends, its errors, and memory on GPUs."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.support.transports import KINDS, NOTHING, POISON, End, Kit, Pair, arrivals, connected, numbers, write

from kvferry.errors import PeerDisconnectedError, RegistrationError, TransportError, TransportUnavailableError
from kvferry.layout import Device, MemoryKind, Region
from kvferry.transport import NixlTransport, PeerMetadata


@pytest.fixture(params=[name for name, kind in KINDS.items() if kind.of is NixlTransport])
def kit(request: pytest.FixtureRequest) -> Iterator[Kit]:
    kit = Kit(request.param)
    yield kit
    kit.close()


def test_an_unknown_backend_is_refused_with_those_that_are_there(kit: Kit):
    with pytest.raises(TransportUnavailableError, match=r"'NOSUCH' .*KVFERRY_NIXL_BACKEND.*UCX"):
        NixlTransport("x", backend="NOSUCH")


def test_a_connection_that_fails_half_way_can_be_tried_again(kit: Kit, monkeypatch: pytest.MonkeyPatch):
    here, there = kit.end("here"), kit.end("there")
    assert isinstance(here.transport, NixlTransport)
    metadata = there.transport.metadata()
    agent = here.transport._agent
    error = here.transport._nixl.nixlBackendError("planted")

    class Failing:
        def __getattr__(self, name: str) -> Any:
            return getattr(agent, name)

        def makeConnection(self, *arguments: Any) -> None:  # noqa: N802
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


@pytest.mark.parametrize("way", ["post", "write"])
def test_a_request_that_cannot_be_released_does_not_hide_why_it_was_not_posted(
    kit: Kit, way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    here, there = kit.end("here"), kit.end("there")
    assert isinstance(here.transport, NixlTransport)
    peer = here.transport.connect(there.transport.metadata())
    agent, nixl = here.transport._agent, here.transport._nixl

    class Failing:
        def __getattr__(self, name: str) -> Any:
            return getattr(agent, name)

        def postXferReq(self, *arguments: Any) -> None:  # noqa: N802
            raise nixl.nixlRemoteDisconnectError("the first")

        def releaseXferReq(self, handle: int) -> None:  # noqa: N802
            agent.releaseXferReq(handle)
            raise nixl.nixlBackendError("the second")

    local = here.transport.prepare(here.rows((0, 8, 8, 1)), None)
    remote = here.transport.prepare(there.rows((0, 8, 8, 1)), peer)
    one = np.zeros(1, np.int32)
    with monkeypatch.context() as patch:
        patch.setattr(here.transport, "_agent", Failing())
        call = {
            "post": lambda: here.transport.post(local, one, remote, one, b""),
            "write": lambda: here.transport.write(here.region, peer, there.region.address, b""),
        }[way]
        with pytest.raises(PeerDisconnectedError, match="the first"):
            call()
    assert "that was not posted could not be released: the second" in caplog.text


def test_a_region_without_length_is_refused(kit: Kit):
    with pytest.raises(RegistrationError, match="without address or length"):
        kit.make("x").register([Region(4096, 0)], Device())


def test_errors_of_the_library_are_kept_as_the_cause(kit: Kit):
    pair = connected(kit)
    lists = pair.lists([(0, 64, 64, 4)], [(0, 64, 64, 4)])
    with pytest.raises(TransportError, match=f"posting 1 descriptors to {pair.peer}.*INVALID_PARAM") as caught:
        pair.here.transport.post(lists[0], numbers(0), lists[1], numbers(0, 1), b"wrong")
    assert type(caught.value.__cause__).__name__ == "nixlInvalidParamError"


def test_another_backend_of_nixl_promises_nothing(kit: Kit):
    transport = NixlTransport(f"posix-{uuid.uuid4().hex[:8]}", backend="POSIX")
    kit.made.append(transport)
    assert transport.promises == NOTHING


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
