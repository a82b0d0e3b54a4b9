"""On a device whose work waits, whatever kvferry reads was written by something that it has waited for.

The endpoints, rings, slots and kernels are the ones that run on a GPU. Of the device, only the hardware is missing: see
`proof.device`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from proof.device import FakeAccelerator, FakeDevice, UnorderedAccessError, ranges_of
from tests.support.engines import WAIT_S
from tests.support.on_device import OnDevice
from tests.support.waiting import eventually

from kvferry.errors import TransferTimeoutError
from kvferry.layout import Region
from kvferry.plan.lowering import PageSteps
from kvferry.plan.packing import BlockShape, PackedSide
from kvferry.staging.gpu import GpuKernels
from kvferry.staging.kernels import PackedBlocks

SOME = ranges_of(np.array([4096]), 64)
OTHERS = ranges_of(np.array([8192]), 64)
BOTH = ranges_of(np.array([4096, 8192]), 64)


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice(seed=3)


# ---- the checker -----------------------------------------------------------------------------------------------------


def test_what_one_stream_writes_another_may_not_read(device: FakeDevice):
    device.stream("one").launch("a", writes=SOME)
    with pytest.raises(
        UnorderedAccessError,
        match=r"b \(another, operation 1\) reads 64 bytes at 0x1000 which a \(one, operation 1\) writes, and nothing "
        r"orders the two: the host had not seen the end of a when it queued b, and another does not wait for an event",
    ):
        device.stream("another").launch("b", reads=BOTH)
    assert len(device.violations) == 1


def test_nor_may_it_overwrite_what_is_being_read(device: FakeDevice):
    device.stream("one").launch("a", reads=SOME)
    with pytest.raises(UnorderedAccessError, match=r"b .* writes 64 bytes at 0x1000 which a .* reads"):
        device.stream("another").launch("b", writes=SOME)


ORDERED: dict[str, Callable[[FakeDevice, Any, Any], object]] = {
    "the host waits for the stream": lambda device, one, other: one.synchronize(),
    "the host waits for an event": lambda device, one, other: one.record_event().synchronize(),
    "the host sees an event": lambda device, one, other: until(one.record_event().query),
    "the stream waits for an event": lambda device, one, other: other.wait_event(one.record_event()),
}


def until(holds: Callable[[], bool]) -> None:
    while not holds():
        pass


@pytest.mark.parametrize("order", ORDERED)
def test_what_orders_two_streams(device: FakeDevice, order: str):
    one, other = device.stream("one"), device.stream("another")
    done: list[str] = []
    one.launch("a", lambda: done.append("a"), writes=SOME)
    ORDERED[order](device, one, other)
    other.launch("b", lambda: done.append("b"), reads=SOME)
    device.finish()
    assert done == ["a", "b"]
    device.verify()


def test_two_may_read_and_one_stream_may_do_anything(device: FakeDevice):
    one, other = device.stream("one"), device.stream("another")
    one.launch("a", reads=SOME)
    other.launch("b", reads=SOME)
    other.launch("c", writes=OTHERS)
    one.launch("d", reads=SOME)
    other.launch("e", reads=BOTH)
    device.verify()


def test_an_event_orders_what_was_queued_before_it_and_nothing_later(device: FakeDevice):
    one, other = device.stream("one"), device.stream("another")
    one.launch("a", writes=SOME)
    event = one.record_event()
    one.launch("b", writes=OTHERS)
    other.wait_event(event)
    other.launch("c", reads=SOME)
    with pytest.raises(UnorderedAccessError, match=r"d .* reads .* which b .* writes"):
        other.launch("d", reads=OTHERS)


def test_a_write_is_ordered_with_what_the_host_has_seen_alone(device: FakeDevice):
    one = device.stream("one")
    one.launch("a", writes=SOME)
    with pytest.raises(UnorderedAccessError, match="reads 64 bytes at 0x1000 which a"):
        device.write("w", lambda: None, reads=SOME, writes=OTHERS)
    one.synchronize()
    work = device.write("w", lambda: None, reads=SOME, writes=OTHERS)
    with pytest.raises(UnorderedAccessError, match=r"b .* writes 64 bytes at 0x1000 which w .* reads"):
        one.launch("b", writes=SOME)
    until(lambda: device.look(work))
    one.launch("c", writes=BOTH)


def test_seeds_order_what_streams_leave_open():
    def order(seed: int) -> tuple[str, ...]:
        device = FakeDevice(seed)
        for name in "abc":
            stream = device.stream(name)
            stream.launch(f"{name}1")
            stream.launch(f"{name}2")
        device.finish()
        return tuple(name for what, name in device.log if what == "done")

    orders = {order(seed) for seed in range(50)}
    assert len(orders) > 20
    for each in orders:
        assert all(each.index(f"{name}1") < each.index(f"{name}2") for name in "abc")
    assert order(7) == order(7)


@pytest.mark.parametrize("length", [1, 24, 100])
def test_ranges_are_the_bytes_of_the_runs(length: int):
    starts = np.random.default_rng(length).permutation(1000)[:60] * 3
    found = {byte for first, stop in ranges_of(starts, length).tolist() for byte in range(first, stop)}
    assert found == {byte for start in starts.tolist() for byte in range(start, start + length)}
    assert all(stop < first for (_, stop), (first, _) in pairwise(ranges_of(starts, length).tolist()))


# ---- what kvferry does on it -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["staged", "direct", "mapped"])
@pytest.mark.parametrize("seed", range(2))
def test_everything_is_ordered(kvferry_registry_url: str, path: str, seed: int):
    device = FakeDevice(seed, waits=5)
    with OnDevice(kvferry_registry_url, device, path=path) as ranks:
        for room in range(1, 3):
            ranks.request(room, tokens=24)
    device.verify()
    assert not device.counts.unbound


@pytest.mark.parametrize("path", ["staged", "direct", "mapped"])
def test_pages_of_a_request_that_failed_are_reused_once_nobody_reads_them(kvferry_registry_url: str, path: str):
    device = FakeDevice(2)
    with OnDevice(kvferry_registry_url, device, path=path, polls=30) as ranks:
        request = ranks.begin(1, tokens=24)
        eventually(
            "a write is on its way", lambda: any(name.startswith(("write", "copy")) for _, name in list(device.log))
        )
        request.sender.abort("nobody wants it any more")
        ranks.overwrite(request)
    device.verify()


def test_the_next_sub_chunk_is_gathered_while_the_last_is_on_the_wire(kvferry_registry_url: str):
    device = FakeDevice(1)
    with OnDevice(kvferry_registry_url, device, polls=8) as ranks:
        ranks.request(1, tokens=40)
    on_the_wire = gathered = overlapping = 0
    for what, name in device.log:
        kind = name.split()[0]
        if kind == "write":
            on_the_wire += {"queued": 1, "done": 0, "seen": -1}[what]
        elif (what, kind) == ("queued", "gather"):
            gathered += 1
            overlapping += on_the_wire > 0
    assert overlapping >= gathered // 2 > 10


def test_nothing_is_done_on_the_device_before_a_rank_is_announced(kvferry_registry_url: str):
    device = FakeDevice(1)
    with OnDevice(kvferry_registry_url, device, announces=False) as ranks:
        with pytest.raises(TransferTimeoutError):
            ranks.decode.connect(ranks.name, timeout_s=0.3)
        assert not ranks.prefill.wait_registered(0)
        assert not device.log
        assert not device.counts.threads
        ranks.prefill.announce()
        ranks.prefill.announce()
        ranks.request(1, tokens=24)
        assert device.counts.launches
    device.verify()


def test_no_chunk_waits_until_a_kernel_is_compiled(kvferry_registry_url: str):
    device = FakeDevice(1)
    with OnDevice(kvferry_registry_url, device) as ranks:
        ranks.decode.connect(ranks.name, timeout_s=WAIT_S)
        compiled = set(device.counts.compiled)
        ranks.request(1, tokens=24)
        ranks.request(2, tokens=23)  # the last page is not full
    assert device.counts.compiled == compiled
    assert {is_gather for *_, is_gather in compiled} == {True, False}
    assert not device.counts.compiled_late


def test_a_chunk_that_is_better_aligned_than_all_that_there_are_need_not_compile_either(device: FakeDevice):
    tensor = np.zeros(4096, np.uint8)
    base = tensor.ctypes.data + -tensor.ctypes.data % 64
    kernels = GpuKernels([Region(base, 1024)], FakeAccelerator(device))
    side = PackedSide(np.array([base]), BlockShape((), 16), PageSteps(1, 24, 24), 40)
    kernels.prepare([side], is_gather=True)
    for pages in ([0, 2, 4], [0, 1, 2]):
        starts = side.starts(0, 1, np.zeros(3, np.int64), np.array(pages))
        kernels.gather(starts, side.shape, base + 2048)
    assert device.counts.compiled == {(8, 0, True), (16, 0, True)}
    assert not device.counts.compiled_late


def test_one_misaligned_block_is_copied_by_itself(device: FakeDevice):
    tensor = np.random.default_rng(0).integers(0, 256, 8192, np.uint8)
    base = tensor.ctypes.data + -tensor.ctypes.data % 64
    kernels, begin = GpuKernels([Region(base, 4096)], FakeAccelerator(device)), base - tensor.ctypes.data
    places = np.array([0, 64, 129, 256, 320])
    before = device.counts.launches
    kernels.gather(base + places, BlockShape((), 32), base + 4096)
    assert device.counts.launches - before == 3
    assert device.counts.compiled == {(16, 0, True), (1, 0, True)}
    expected = np.concatenate([tensor[begin + place :][:32] for place in places])
    np.testing.assert_array_equal(tensor[begin + 4096 :][: expected.size], expected)
    kernels.scatter(base + 4096, base + 2048 + places, BlockShape((), 32))
    np.testing.assert_array_equal(np.concatenate([tensor[begin + 2048 + place :][:32] for place in places]), expected)
    device.verify()


def test_an_error_waits_for_what_was_launched_before_it(device: FakeDevice, monkeypatch: pytest.MonkeyPatch):
    """Else pages and spans would come back under a kernel that goes on."""
    tensor = np.zeros(4096, np.uint8)
    base = tensor.ctypes.data + -tensor.ctypes.data % 64
    accelerator = FakeAccelerator(device)
    kernels = GpuKernels([Region(base, 1024)], accelerator)
    starts = np.array([base])
    blocks = [PackedBlocks(starts, BlockShape((), length), offset) for length, offset in ((16, 0), (32, 64))]
    accelerator.bind_thread()
    stream_class = type(accelerator.stream())
    launch, launched = stream_class.launch, list[int]()

    def fails_at_the_second(stream: Any, copy: Any) -> None:
        launched.append(copy.length)
        if len(launched) > 1:
            raise RuntimeError("no such kernel")
        launch(stream, copy)

    monkeypatch.setattr(stream_class, "launch", fails_at_the_second)
    before = device.counts.synchronizations
    with pytest.raises(RuntimeError, match="no such kernel"):
        kernels.scatter_all(base + 2048, blocks)
    assert (launched, device.counts.synchronizations - before) == ([16, 32], 1)


def test_calls_a_sub_chunk(kvferry_registry_url: str):
    """Bounds what the interpreter spends on each: the calls are what it costs, whatever the bytes."""
    device = FakeDevice(1)
    with OnDevice(kvferry_registry_url, device, staging_chunk_mib=32 / 1024, staging_ring_mib=128 / 1024) as ranks:
        ranks.decode.connect(ranks.name, timeout_s=WAIT_S)  # compiles, with an upload and a wait of its own
        before = replace(device.counts)
        sender = ranks.request(1, tokens=80)
        after = device.counts
    (write,) = sender.stats.writes
    sub_chunks = len(write.parts)
    assert sub_chunks == 3  # K and V of four layers, 10 KiB each: of 8 pieces several share a sub-chunk
    # Gathering uploads once for all sub-chunks; what arrives is uploaded when it has. The test itself waits twice.
    assert after.uploads - before.uploads == 1 + sub_chunks
    assert after.launches - before.launches == 2 * sub_chunks
    assert after.synchronizations - before.synchronizations == 2 * sub_chunks + 2
