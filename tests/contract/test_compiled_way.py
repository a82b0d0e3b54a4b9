"""Compiled code that writes with a transport that lends it a way: between two real ends, as the interpreter would."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest
from msgspec.structs import replace
from tests.support.transports import KINDS, Kit, Pair, arrivals, connected, in_tiers, nixl_of, until

from kvferry.errors import PeerDisconnectedError, TransportError
from kvferry.layout import Device, MemoryKind, Region
from kvferry.plan.packing import BlockShape
from kvferry.staging import compiled_runs
from kvferry.staging.compiled_runs import SLICE_BYTES, CompiledRuns
from kvferry.staging.host import HostKernels, fastest
from kvferry.staging.kernels import PackedBlocks
from kvferry.staging.runs import Comings, Step
from kvferry.transport import NixlTransport, PeerMetadata
from kvferry.transport.compiled_posts import Posted

STEP, BLOCK = 1 << 12, 1 << 8


@pytest.fixture(params=in_tiers(name for name, kind in KINDS.items() if kind.of is NixlTransport))
def kit(request: pytest.FixtureRequest) -> Iterator[Kit]:
    kit = Kit(request.param)
    yield kit
    kit.close()


class Run:
    """Two steps, from a pool through registered memory into a peer's."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.pool = np.random.default_rng(1).integers(0, 256, 64 * BLOCK, np.uint8)
        order = np.random.default_rng(2).permutation(64)[: 2 * STEP // BLOCK]
        kernels = HostKernels([Region(self.pool.ctypes.data, self.pool.size)], fastest()[0])
        self.runs = CompiledRuns(kernels, pair.here.transport, time.monotonic)
        self.steps = []
        self.expected = self.pool.reshape(64, BLOCK)[order].reshape(2, STEP)
        for number, which in enumerate(np.split(order, 2)):
            blocks = PackedBlocks(self.pool.ctypes.data + which.astype(np.int64) * BLOCK, BlockShape((), BLOCK), 0)
            source = Region(pair.here.region.address + number * STEP, STEP)
            to = pair.there.region.address + number * STEP
            self.steps.append(Step([blocks], source, to, f"step {number}".encode()))

    def go(self) -> int:
        return self.runs.run(self.steps, self.pair.peer, Comings())

    def end(self, step: Step) -> int:
        transport, transfer = self.pair.here.transport, step.transfer
        assert transfer is not None
        try:
            return int(until("end of the write", lambda: transport.poll(transfer)).total_bytes)
        finally:
            transport.release(transfer)


def test_nixl_lends_compiled_code_a_way_and_none_to_memory_of_another_kind(kit: Kit):
    pair = connected(kit)
    transport = pair.here.transport
    assert transport.has_compiled_ways
    assert transport.compiled_way(pair.peer) is not None
    peer = PeerMetadata.decode(pair.there.transport.metadata())
    transport.connect(replace(peer, device=Device(MemoryKind.VRAM, 1)).encode())
    assert transport.compiled_way(pair.peer) is None


def test_there_is_no_way_to_a_peer_that_was_disconnected(kit: Kit):
    pair = connected(kit)
    assert pair.here.transport.compiled_way(pair.peer) is not None
    pair.here.transport.disconnect(pair.peer)
    with pytest.raises(PeerDisconnectedError):
        pair.here.transport.compiled_way(pair.peer)


def test_an_agent_lasts_as_long_as_a_way_by_it_and_no_longer(kit: Kit):
    pair = connected(kit)
    assert isinstance(pair.here.transport, NixlTransport)
    agent, _ = nixl_of(pair.here.transport)
    way = pair.here.transport.compiled_way(pair.peer)
    assert way is not None
    pair.here.transport.close()
    kept = sys.getrefcount(agent)
    del way
    assert sys.getrefcount(agent) == kept - 1


def test_whether_posts_copy_is_remembered_of_a_connection_and_not_of_the_next(kit: Kit):
    pair = connected(kit)
    transport = pair.here.transport

    def copies_as_it_posts() -> bool:
        way = transport.compiled_way(pair.peer)
        assert way is not None
        return way.copies_as_it_posts

    assert copies_as_it_posts()
    way = transport.compiled_way(pair.peer)
    assert way is not None
    way.adopt(Posted(0, 0, 0.0, [0], is_notified=True, is_made=True, is_half_posted=False), b"")
    assert not copies_as_it_posts()
    transport.connect(pair.there.transport.metadata())
    assert copies_as_it_posts()


def test_nobody_waits_for_notifications_while_compiled_code_posts(kit: Kit):
    run = Run(connected(kit))
    here, there = run.pair.here.transport, run.pair.there.transport
    way = here.compiled_way(run.pair.peer)
    assert way is not None
    calls = way.wire.calls.contents
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    post = prototype(calls.post_xfer_req)
    taken = []

    def take_and_post(agent: int, request: int, options: int) -> int:
        for _ in range(1000):
            taken.extend(here.take_notifications())
        result: int = post(agent, request, options)
        return result

    kept = prototype(take_and_post)
    calls.post_xfer_req = ctypes.cast(kept, ctypes.c_void_p).value
    there.notify(there.connect(here.metadata()), b"beside")
    assert run.go() == 2
    assert taken == []
    assert arrivals(here, 1) == [(run.pair.peer, b"beside")]


def test_any_error_of_what_was_half_posted_is_that_of_the_write(kit: Kit, monkeypatch: pytest.MonkeyPatch):
    pair = connected(kit)
    assert isinstance(pair.here.transport, NixlTransport)
    agent, bindings = nixl_of(pair.here.transport)

    def fails(*_: object) -> None:
        raise bindings.nixlNoTelemetryError("planted")

    way = pair.here.transport.compiled_way(pair.peer)
    assert way is not None
    with monkeypatch.context() as patch:
        patch.setattr(type(agent), "getXferStatus", fails)
        transfer = way.adopt(Posted(0, 0, 0.0, [0], is_notified=True, is_made=True, is_half_posted=True), b"")
    with pytest.raises(TransportError, match="nixlNoTelemetryError"):
        until("end of the write", lambda: pair.here.transport.poll(transfer))


@pytest.mark.parametrize("slice_bytes", [BLOCK + 1, SLICE_BYTES])
def test_what_compiled_code_writes_arrives_and_each_step_is_told_of(
    kit: Kit, slice_bytes: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(compiled_runs, "SLICE_BYTES", slice_bytes)
    run = Run(connected(kit))
    assert run.go() == 2
    assert [step.error for step in run.steps] == [None, None]
    assert [run.end(step) for step in run.steps] == [STEP, STEP]
    there = run.pair.there
    told = arrivals(there.transport, 2, sender=run.pair.here.transport)
    assert sorted(told) == [(run.pair.name, b"step 0"), (run.pair.name, b"step 1")]
    assert np.array_equal(there.memory[: 2 * STEP].reshape(2, STEP), run.expected)


def test_to_a_peer_that_has_gone_nothing_is_written_and_the_error_says_so(kit: Kit):
    run = Run(connected(kit))
    run.pair.there.transport.close()
    failed: list[Exception] = []
    for _ in range(2):  # the first may pass for a write to somebody who is slow
        run.go()
        step = run.steps[0]
        if step.error is not None:
            failed.append(step.error)
            continue
        with pytest.raises(TransportError) as caught:
            run.end(step)
        failed.append(caught.value)
    assert all(isinstance(error, TransportError) for error in failed)
    assert any(isinstance(error, PeerDisconnectedError) for error in failed)


def test_to_a_peer_that_was_never_connected_the_interpreter_says_so(kit: Kit):
    run = Run(connected(kit))
    run.pair.peer = "nobody"
    assert run.go() == 1
    assert isinstance(run.steps[0].error, PeerDisconnectedError)
    assert run.steps[0].transfer is None
