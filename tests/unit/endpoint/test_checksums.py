"""Checksums between whole endpoints: whatever both sides lay out differently they agree, and every fault is found.

Faults are planted where real ones would be: in what the wire has delivered, in what was scattered, in what was read.
Bytes are then changed, or pages and heads changed places, in the decode rank's pool, so that the error must name what
the test chose.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tests.support.caches import Model, Shape
from tests.support.engines import WAIT_S, Engines, Request, Requests
from tests.support.waiting import eventually

from kvferry import (
    DecodeEndpoint,
    InProcessNetwork,
    InProcessTransport,
    RankCoordinates,
    Settings,
    ShardedComponent,
    TransferState,
    attention_components,
    contiguous,
    interleaved,
    zigzag,
)
from kvferry.errors import (
    ChecksumError,
    SettingsError,
    TransferAbortedError,
    TransferFailedError,
)
from kvferry.layout import Device, MemoryKind, VirtualPools, virtual_layout
from kvferry.pools.places import Pages
from kvferry.pools.pool import Pool
from kvferry.protocol.wire import codec, messages
from kvferry.protocol.wire.codec import decode_notification
from kvferry.protocol.wire.messages import ChunkArrived, StagedArrived
from kvferry.staging.digests import verify_chunk, verify_segment
from kvferry.staging.kernels import PackedBlocks, StartArray
from kvferry.staging.rings import Span
from kvferry.testing.probe import probe

S = TransferState
KIB = 1 / 1024  # of a MiB
ATTENTION = Model(layers=4, heads=4)  # a page of one layer has 512 bytes
PAGE_TOKENS = ATTENTION.page_tokens
WAYS = ("direct", "staged")
TIGHT: dict[str, Any] = {"staging_chunk_mib": 0.5 * KIB, "staging_ring_mib": 1 * KIB}

Tamper = Callable[[], None]


@pytest.fixture(params=WAYS)
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# ---- where nothing is wrong -----------------------------------------------------------------------------------------

GROUPED = Model(layers=3, heads=2)
LATENT = Model(layers=2, latent_dim=7, dtype="float32")
ODD = Model(layers=5, heads=6, head_dim=5, page_tokens=3, dtype="uint8")
HYBRID = Model(layers=3, heads=4, head_dim=2, window_tokens=9, has_state=True, dtype="float16")
PACKED = Model(layers=2, heads=4, head_dim=2, is_packed=True, dtype="uint8")


@pytest.mark.sampled(one_in=10)
@pytest.mark.parametrize(
    ("model", "prefill", "decode"),
    [
        pytest.param(ATTENTION, Shape(), Shape(), id="1-to-1"),
        pytest.param(ATTENTION, Shape(tp=2), Shape(heads_first=True), id="tp2-to-1-hnd"),
        pytest.param(ATTENTION, Shape(heads_first=True), Shape(tp=4), id="hnd-to-tp4"),
        pytest.param(ATTENTION, Shape(tp=4), Shape(tp=2), id="tp4-to-tp2"),
        pytest.param(ATTENTION, Shape(page_tokens=16), Shape(page_tokens=4), id="pages-16-to-4"),
        pytest.param(ATTENTION, Shape(page_tokens=4), Shape(page_tokens=12, tp=2), id="pages-4-to-12"),
        pytest.param(ATTENTION, Shape(page_tokens=5, tp=2), Shape(page_tokens=7), id="pages-5-to-7"),
        pytest.param(ODD, Shape(tp=2), Shape(tp=3), id="tp2-to-tp3-odd-sizes"),
        pytest.param(ODD, Shape(pp=2, stages=(2, 3)), Shape(pp=3, stages=(1, 3, 1)), id="uneven-stages"),
        pytest.param(GROUPED, Shape(tp=4), Shape(), id="replicated-heads"),
        pytest.param(LATENT, Shape(tp=3), Shape(page_tokens=6), id="latent"),
        pytest.param(HYBRID, Shape(tp=2, pp=2, stages=(1, 2)), Shape(page_tokens=6), id="windows-and-state"),
        pytest.param(PACKED, Shape(tp=2), Shape(), id="packed"),
        pytest.param(ATTENTION, Shape(partition=interleaved(2)), Shape(tp=2), id="cp2-to-tp2"),
        pytest.param(ATTENTION, Shape(partition=zigzag(2), pages=40), Shape(partition=contiguous(2)), id="zigzag"),
        pytest.param(ATTENTION, Shape(is_aliased=True, pages=40), Shape(is_aliased=True, pages=40), id="aliased"),
    ],
)
def test_both_sides_digest_the_same_whatever_their_layouts_are(
    pair: Callable[..., Requests], path: str, model: Model, prefill: Shape, decode: Shape
):
    requests = pair(model, prefill, decode, path=path, checksums=True)
    for room, tokens in enumerate((1, 17, 29)):
        prefix = 0 if model.is_packed else tokens // 3
        for prefix_tokens in {0, prefix}:
            requests.run_tokens(100 * room + prefix_tokens, tokens, prefix_tokens=prefix_tokens, cuts=(4, 13))


def test_parts_that_cut_pages_and_layers_anywhere(pair: Callable[..., Requests]):
    requests = pair(ATTENTION, Shape(tp=2), Shape(heads_first=True), path="staged", checksums=True, **TIGHT)
    for room in range(3):
        requests.run_tokens(room, 23, prefix_tokens=3 * room, cuts=(5, 16))


def test_what_is_only_verified_is_not_shown_as_staged(pair: Callable[..., Requests], path: str):
    requests = pair(ATTENTION, path=path, checksums=True)
    request = requests.new(1)
    requests.open_decode(request)
    requests.open_prefill(request)
    requests.submit(request, 0, 3, last=False)
    decode = requests.decode.endpoints[0]
    eventually("the first chunk was verified", lambda: [room.chunks for room in decode.status().rooms] == [1])
    (room,) = decode.status().rooms
    assert (room.path, room.moved_bytes > 0) == (("staged", True) if path == "staged" else ("", False))
    requests.submit(request, 3, 6)
    request.wait()


def test_the_same_number_may_be_used_again(pair: Callable[..., Requests], path: str):
    requests = pair(ATTENTION, Shape(tp=2), Shape(tp=2), path=path, checksums=True)
    for _ in range(5):
        requests.run_tokens(7, 13)


# ---- who asks -------------------------------------------------------------------------------------------------------


class Notified:
    """Everything that arrives at a decode rank, before anybody reads it.

    Attributes:
        seen: the messages.
        before: called with each, when its bytes are there and nobody knows yet.
        times: how often each is delivered.
    """

    def __init__(self, requests: Requests, monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> None:
        self.seen: list[messages.Notification] = []
        self.before: Callable[[str, messages.Notification], None] | None = None
        self.change: Callable[[messages.Notification], messages.Notification] | None = None
        self.times = 1
        transport = requests.decode.transports[rank]
        self._deliver = transport.deliver
        monkeypatch.setattr(transport, "deliver", self._take)

    def _take(self, sender: str, data: bytes) -> None:
        message = decode_notification(data)
        self.seen.append(message)
        if self.before is not None:
            self.before(sender, message)
        if self.change is not None:
            data = codec.encode(self.change(message))
        for _ in range(self.times):
            self._deliver(sender, data)


@pytest.mark.parametrize(("prefill", "decode"), [(False, False), (True, False), (False, True)])
def test_the_decode_sides_setting_is_enough_and_off_nothing_travels(
    engines: Callable[..., Engines], monkeypatch: pytest.MonkeyPatch, path: str, prefill: bool, decode: bool
):
    both = engines(path=path)
    requests = Requests(both.prefill(ATTENTION, checksums=prefill), both.decode(ATTENTION, checksums=decode))
    notified = Notified(requests, monkeypatch)
    requests.run(1)
    chunks = [each for each in notified.seen if isinstance(each, ChunkArrived | StagedArrived)]
    segments = [segment for each in chunks for segment in each.segments]
    assert chunks
    if decode:
        assert segments
        assert all(segment.digests is not None for segment in segments)
    elif path == "direct":
        assert not segments
    else:
        assert all(segment.digests is None for segment in segments)


def test_a_gpu_pool_is_refused_at_the_start():
    attention = [
        ShardedComponent(component=each, layers=(0,))
        for each in attention_components(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float16")
    ]
    layout = virtual_layout(
        attention, RankCoordinates(), VirtualPools(layers_per_stage=(1,)), device=Device(MemoryKind.VRAM, 1)
    )
    with pytest.raises(SettingsError, match=r"KVFERRY_CHECKSUMS of the decode side\) are for pools in CPU memory"):
        DecodeEndpoint(layout, settings=Settings(checksums=True), transport=InProcessTransport(InProcessNetwork()))


def test_a_sender_that_forgets_its_digests_is_found_out(
    pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch, path: str
):
    requests = pair(ATTENTION, path=path, checksums=True)

    def without(message: messages.Notification) -> messages.Notification:
        if isinstance(message, ChunkArrived):
            return replace(message, segments=())
        if isinstance(message, StagedArrived):
            return replace(message, segments=tuple(replace(each, digests=None) for each in message.segments))
        return message

    Notified(requests, monkeypatch).change = without
    with pytest.raises(ChecksumError, match="prefill rank 0 sent no digests, though they were requested"):
        submitted(requests, 1).receivers[0].wait(WAIT_S)


def test_digests_that_are_too_few_fail_the_room(
    pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch, path: str
):
    requests = pair(ATTENTION, path=path, checksums=True)

    def fewer(message: messages.Notification) -> messages.Notification:
        if not isinstance(message, ChunkArrived | StagedArrived):
            return message
        segments = []
        for each in message.segments:
            assert each.digests is not None
            segments.append(replace(each, digests=replace(each.digests, values=each.digests.values[8:])))
        return replace(message, segments=tuple(segments))

    Notified(requests, monkeypatch).change = fewer
    with pytest.raises(TransferFailedError, match="40 bytes of digests for 6 rows"):
        submitted(requests, 1).receivers[0].wait(WAIT_S)


# ---- faults ---------------------------------------------------------------------------------------------------------


def submitted(requests: Requests, room: int, pages: int = 6, **options: Any) -> Request:
    request = requests.new(room, pages, **options)
    requests.open_decode(request)
    requests.open_prefill(request)
    requests.submit(request)
    return request


def decode_kernels(requests: Requests, rank: int = 0) -> Any:
    checks = probe(requests.decode.endpoints[rank]).context.staging.checks
    assert checks is not None
    return checks.memory.kernels


class Planted:
    """Changes the decode rank's pages once, when some of it is in them and is about to be compared.

    Args:
        at: waits until a block that begins there is; by default until any is.
    """

    def __init__(
        self,
        requests: Requests,
        monkeypatch: pytest.MonkeyPatch,
        tamper: Tamper,
        *,
        rank: int = 0,
        at: int | None = None,
    ) -> None:
        self._tamper, self._is_done, self._at = tamper, False, at
        kernels = decode_kernels(requests, rank)
        self._gather = kernels.gather
        monkeypatch.setattr(kernels, "gather", self._tampered)

    def _tampered(self, starts: Any, *arguments: Any) -> None:
        if not self._is_done and (self._at is None or self._at in starts.tolist()):
            self._is_done = True
            self._tamper()
        self._gather(starts, *arguments)


def view(pool: Pool, component: int, layer: int) -> np.ndarray:
    """Elements of a component's layer: page, token, head, dim."""
    found: np.ndarray = pool.elements(pool.layout.shards[component], layer)
    return found


def flip(pool: Pool, component: int, layer: int, *where: int) -> None:
    view(pool, component, layer)[where] ^= 1


def failure(request: Request, writer: int = 0) -> str:
    """What both sides failed with, which must be a wrong checksum. Other writers may have succeeded before."""
    request.wait_ended()
    assert {type(each.error) for each in (*request.receivers, request.senders[writer])} == {ChecksumError}
    assert {type(each.error) for each in request.senders} <= {ChecksumError, type(None)}
    assert request.receivers[0].wait_pages_reusable(5)
    assert all(sender.wait_pages_reusable(5) for sender in request.senders)
    assert str(request.receivers[0].error) in str(request.senders[writer].error)
    return str(request.receivers[0].error)


@pytest.mark.parametrize(("component", "layer", "order", "token"), [(0, 0, 0, 0), (1, 3, 5, 3), (0, 2, 3, 1)])
def test_a_flipped_bit_is_found_and_named(
    pair: Callable[..., Requests],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    component: int,
    layer: int,
    order: int,
    token: int,
):
    requests = pair(ATTENTION, path=path, checksums=True)
    requests.run(1)
    request = requests.new(2)
    page = int(request.destination_pages[0][order])
    pool = requests.decode.pools[0]
    Planted(requests, monkeypatch, lambda: flip(pool, component, layer, page, token, 2, 5))
    requests.open_decode(request)
    requests.open_prefill(request)
    requests.submit(request)
    said = failure(request)
    assert said.startswith(
        f"room 2: '{'kv'[component]}' layer [0, 4) head [0, 4) dim [0, 8) in page {page} (page {order} of"
    )
    assert f"group 'kv'), tokens {4 * order} to {4 * order + 3}, written by prefill rank 0: the digest of what" in said
    assert "more of the" not in said
    requests.run(3)


def test_it_names_the_rank_and_the_heads_that_it_wrote(
    pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch, path: str
):
    requests = pair(ATTENTION, Shape(tp=2), Shape(pp=2, stages=(1, 3)), path=path, checksums=True)
    requests.connect()
    request = requests.new(2)
    page = int(request.destination_pages[1][4])
    pool = requests.decode.pools[1]
    theirs = view(pool, 1, 2)[page, :, 2:].ctypes.data
    Planted(requests, monkeypatch, lambda: flip(pool, 1, 2, page, 0, 3, 0), rank=1, at=theirs)
    requests.open_decode(request)
    requests.open_prefill(request)
    requests.submit(request)
    request.wait_ended()
    said = str(request.receivers[1].error)
    assert f"'v' layer [1, 4) head [2, 4) dim [0, 8) in page {page} (page 4 of the" in said
    assert "tokens 16 to 19, written by prefill rank 1: " in said
    assert type(request.receivers[1].error) is ChecksumError
    assert type(request.senders[1].error) is ChecksumError


def flip_at(address: int) -> None:
    ctypes.c_uint8.from_address(address).value ^= 0x80


def test_what_the_wire_changes_is_found(pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch, path: str):
    requests = pair(ATTENTION, path=path, checksums=True)
    request = requests.new(2)
    driver, pool = probe(requests.decode.endpoints[0]).driver, requests.decode.pools[0]
    page = int(request.destination_pages[0][0])

    def spoil(sender: str, message: messages.Notification) -> None:
        if isinstance(message, ChunkArrived):
            flip(pool, 0, 0, page, 0, 0, 0)
        elif isinstance(message, StagedArrived):
            ring = driver.context.staging.ring(sender, message.epoch)
            assert ring is not None
            flip_at(ring.address(Span(message.start, message.begin, message.stop)))

    Notified(requests, monkeypatch).before = spoil
    requests.open_decode(request)
    requests.open_prefill(request)
    requests.submit(request)
    assert f"'k' layer [0, 4) head [0, 4) dim [0, 8) in page {page} (page 0 of" in failure(request)


def test_a_source_that_changes_while_it_is_read_is_found(pair: Callable[..., Requests]):
    """After it was digested, and before it crosses. The staged way reads the source once: docs/design/faults.md."""
    requests = pair(ATTENTION, path="direct", checksums=True)
    requests.connect()
    request = requests.new(2)
    pool, source = requests.prefill.pools[0], request.source_pages[0]
    requests.prefill.transports[0].on_post = lambda peer: flip(pool, 1, 3, int(source[2]), 0, 0, 0)
    requests.open_decode(request)
    requests.open_prefill(request)
    requests.submit(request)
    said = failure(request)
    assert f"'v' layer [0, 4) head [0, 4) dim [0, 8) in page {request.destination_pages[0][2]} (page 2 of" in said


def swapped_pages(pool: Pool, pages: Pages) -> Tamper:
    def swap() -> None:
        elements = view(pool, 0, 1)
        elements[[pages[1], pages[4]]] = elements[[pages[4], pages[1]]]

    return swap


def swapped_heads(pool: Pool, pages: Pages) -> Tamper:
    def swap() -> None:
        elements = view(pool, 0, 1)
        elements[pages[1], :, [0, 3]] = elements[pages[1], :, [3, 0]]

    return swap


def swapped_layers(pool: Pool, pages: Pages) -> Tamper:
    def swap() -> None:
        one, other = view(pool, 0, 1), view(pool, 0, 2)
        one[pages[1]], other[pages[1]] = other[pages[1]].copy(), one[pages[1]].copy()

    return swap


@pytest.mark.parametrize(
    ("swap", "more"), [(swapped_pages, "1 more of the 6"), (swapped_heads, ""), (swapped_layers, "")]
)
def test_what_has_changed_places_is_found(
    pair: Callable[..., Requests],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    swap: Callable[[Pool, Pages], Tamper],
    more: str,
):
    requests = pair(ATTENTION, path=path, checksums=True)
    requests.connect()
    request = requests.new(2)
    pages = request.destination_pages[0]
    Planted(requests, monkeypatch, swap(requests.decode.pools[0], pages))
    requests.open_decode(request)
    requests.open_prefill(request)
    requests.submit(request)
    said = failure(request)
    assert f"'k' layer [0, 4) head [0, 4) dim [0, 8) in page {pages[1]} (page 1 of" in said
    assert more in said


def exchanged(starts: StartArray) -> StartArray:
    """The same blocks, of which two have changed places."""
    starts = starts.copy()
    starts[[0, 3]] = starts[[3, 0]]
    return starts


@pytest.mark.parametrize("wrong", ["another page", "nothing"])
def test_a_scatter_that_goes_wrong_is_found(pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch, wrong: str):
    requests = pair(ATTENTION, path="staged", checksums=True)
    requests.connect()
    kernels = decode_kernels(requests)
    real = kernels.scatter_all

    def scatter_all(address: int, blocks: Sequence[PackedBlocks]) -> None:
        if wrong == "another page":
            real(address, [PackedBlocks(exchanged(each.starts), each.shape, each.offset) for each in blocks])

    monkeypatch.setattr(kernels, "scatter_all", scatter_all)
    request = submitted(requests, 2)
    said = failure(request)
    assert f"'k' layer [0, 4) head [0, 4) dim [0, 8) in page {request.destination_pages[0][0]} (page 0 of" in said
    assert f"{1 if wrong == 'another page' else 5} more of the 6 digests" in said


def test_equal_pages_with_equal_faults_do_not_cancel_out(
    pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch, path: str
):
    """Two chunks that hold the same."""
    requests = pair(ATTENTION, path=path, checksums=True)
    requests.connect()
    request = requests.new(2, 4)
    source, pool, pages = requests.prefill.pools[0], requests.decode.pools[0], request.destination_pages[0]
    for component, shard in enumerate(source.layout.shards):
        for layer in range(len(shard.addresses)):
            elements = view(source, component, layer)
            elements[request.source_pages[0][2:]] = elements[request.source_pages[0][:2]]
    for page in map(int, pages[[0, 2]]):
        first = view(pool, 0, 0)[page].ctypes.data
        Planted(requests, monkeypatch, partial(flip, pool, 0, 0, page, 1, 1, 1), at=first)
    requests.open_decode(request)
    requests.open_prefill(request)
    requests.submit(request, 0, 2, last=False)
    requests.submit(request, 2, 4)
    failure(request)


def test_pages_behind_a_prefix_are_named_by_their_place_in_the_request(
    pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch, path: str
):
    requests = pair(ATTENTION, Shape(tp=2), Shape(), path=path, checksums=True)
    requests.connect()
    request = requests.request(2, 22, prefix_tokens=6)
    kept = request.destination[0]["kv"]
    assert kept.start == 1
    pool, page = requests.decode.pools[0], int(kept.pages[0])
    first = view(pool, 0, 3)[page, 2:].ctypes.data
    Planted(requests, monkeypatch, lambda: flip(pool, 0, 3, page, 3, 0, 0), at=first)
    requests.open_decode(request, says_tokens=True)
    requests.open_prefill(request)
    requests.advance(request, 13)
    requests.advance(request, 22)
    said = failure(request)
    assert f"'k' layer [0, 4) head [0, 2) dim [0, 8) in page {page} (page 1 of the request" in said
    assert "tokens 6 to 7, written by prefill rank 0" in said


def test_a_fault_in_a_later_chunk_is_found(pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch, path: str):
    requests = pair(ATTENTION, Shape(), Shape(page_tokens=8), path=path, checksums=True)
    request = requests.new(2, 6)
    requests.open_decode(request)
    requests.open_prefill(request)
    requests.submit(request, 0, 3, last=False)
    eventually("the first chunk has arrived", lambda: request.receivers[0].stats.chunks == 1)
    pool, page = requests.decode.pools[0], int(request.destination_pages[0][1])
    Planted(requests, monkeypatch, lambda: flip(pool, 1, 0, page, 5, 0, 0))
    requests.submit(request, 3, 6)
    said = failure(request)
    assert f"in page {page} (page 1 of the request on this rank, group 'kv'), tokens 12 to 15, " in said


def test_a_slot_is_named_as_one(pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch, path: str):
    requests = pair(HYBRID, path=path, checksums=True)
    requests.connect()
    request = requests.request(2, 17)
    pool = requests.decode.pools[0]
    number = next(n for n, shard in enumerate(pool.layout.shards) if shard.component.name == "conv k")
    slot = int(request.destination[0]["state"].pages[0])
    Planted(requests, monkeypatch, lambda: flip(pool, number, 1, slot, 0, 0))
    requests.open_decode(request, says_tokens=True)
    requests.open_prefill(request)
    requests.advance(request, 17)
    assert f"'conv k' layer [0, 3) channel [0, 4) width [0, 3) in slot {slot}, written by" in failure(request)


def test_a_room_that_fails_fails_no_other(pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch, path: str):
    requests = pair(ATTENTION, Shape(tp=2, pages=64), Shape(pages=64), path=path, checksums=True)
    requests.connect()
    pool = requests.decode.pools[0]
    rooms = [requests.new(room) for room in range(8)]
    page = int(rooms[3].destination_pages[0][0])
    kernels = decode_kernels(requests)
    real = kernels.gather

    def spoil(starts: Any, shape: Any, address: int) -> None:
        view(pool, 0, 0)[page] = 77
        real(starts, shape, address)

    monkeypatch.setattr(kernels, "gather", spoil)
    for request in rooms:
        requests.open_decode(request)
        requests.open_prefill(request)
        requests.submit(request)
    for request in rooms:
        if request.room == 3:
            assert f"in page {page} (page 0" in failure(request)
        else:
            request.wait()
            requests.check(request)


# ---- repeated, late, aborted ----------------------------------------------------------------------------------------


class Counted:
    """How often digests were compared."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.segments = 0
        monkeypatch.setattr("kvferry.staging.receiving.verify_segment", self._verify)

        def verify(message: ChunkArrived, *arguments: Any, **named: Any) -> None:
            self.segments += len(message.segments)
            verify_chunk(message, *arguments, **named)

        monkeypatch.setattr("kvferry.endpoint.decode.arrivals.verify_chunk", verify)

    def _verify(self, *arguments: Any, **named: Any) -> None:
        self.segments += 1
        verify_segment(*arguments, **named)


def test_repeated_and_late_notifications_are_verified_once(
    pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch, path: str
):
    requests = pair(ATTENTION, path=path, checksums=True, staging_chunk_mib=1 * KIB, staging_ring_mib=64 * KIB)
    counted = Counted(monkeypatch)
    notified = Notified(requests, monkeypatch)
    notified.times = 3
    first = requests.run(1, cuts=(2,))
    chunks = [each for each in notified.seen if isinstance(each, ChunkArrived | StagedArrived)]
    expected = sum(len(each.segments) for each in chunks)
    assert counted.segments == expected
    notified.times = 1
    other = requests.new(2)
    requests.open_decode(other)  # so that somebody looks at what arrives
    for transport, rank in ((requests.decode.transports[0], requests.prefill.transports[0]),):
        for each in chunks:
            transport.deliver(rank.endpoint_name, codec.encode(each))
    requests.open_prefill(other)
    notified.seen.clear()
    requests.submit(other)
    other.wait()
    chunks = [each for each in notified.seen if isinstance(each, ChunkArrived | StagedArrived)]
    assert counted.segments == expected + sum(len(each.segments) for each in chunks)
    assert first.receivers[0].state is S.SUCCESS


class Blocked:
    """Comparing digests takes as long as it is told to."""

    def __init__(self, requests: Requests, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        kernels = decode_kernels(requests)
        self._gather = kernels.gather
        monkeypatch.setattr(kernels, "gather", self._wait)

    def _wait(self, *arguments: Any) -> None:
        self.begun.set()
        assert self.go_on.wait(WAIT_S)
        self._gather(*arguments)


def test_both_sides_wait_until_digests_were_compared(
    pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch, path: str
):
    requests = pair(ATTENTION, path=path, checksums=True)
    requests.connect()
    blocked = Blocked(requests, monkeypatch)
    request = submitted(requests, 1)
    assert blocked.begun.wait(WAIT_S)
    other = requests.new(2)
    requests.open_decode(other)
    other.receivers[0].abort("the driver is not held up")
    eventually("another room ends meanwhile", lambda: other.receivers[0].state is S.FAILED)
    assert (request.receivers[0].state.is_final, request.receivers[0].pages_reusable) == (False, False)
    assert (request.senders[0].state.is_final, request.senders[0].pages_reusable) == (False, False)
    blocked.go_on.set()
    request.wait()
    requests.check(request)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_abort_while_digests_are_compared_keeps_the_pages_until_they_are(
    pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch, path: str, side: str
):
    requests = pair(ATTENTION, path=path, checksums=True)
    requests.connect()
    blocked = Blocked(requests, monkeypatch)
    request = submitted(requests, 1)
    assert blocked.begun.wait(WAIT_S)
    (request.senders if side == "prefill" else request.receivers)[0].abort("the client went away")
    eventually("the prefill side has drained", lambda: request.senders[0].pages_reusable)
    eventually("the room has failed", lambda: request.receivers[0].state is S.FAILED)
    assert isinstance(request.receivers[0].error, TransferAbortedError | TransferFailedError)
    assert not request.receivers[0].wait_pages_reusable(0.2)
    blocked.go_on.set()
    assert request.receivers[0].wait_pages_reusable(5)
    requests.run(2)


def test_what_a_broken_connection_has_lost_is_sent_again_and_counts_once(
    pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch
):
    requests = pair(ATTENTION, Shape(tp=2), Shape(), checksums=True, heartbeat_interval_s=0.1, peer_timeout_s=5.0)
    requests.connect()
    driver = probe(requests.prefill.endpoints[1]).driver
    verified = driver.rooms.verified
    lost = lose_the_first_verified(driver, monkeypatch)
    taken: list[int] = []

    def counted(identity: str, message: messages.RoomVerified) -> None:
        taken.append(message.room)
        verified(identity, message)

    monkeypatch.setattr(driver.rooms, "verified", counted)
    submitted(requests, 1).wait()
    assert lost
    requests.run(2)
    assert taken == [1, 2]


def test_a_decode_rank_that_closes_sends_again_what_may_be_lost(
    pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch
):
    """Else the prefill side hears of the close first, and calls failed what has arrived, verified."""
    requests = pair(ATTENTION, checksums=True, heartbeat_interval_s=5.0)
    requests.connect()
    lost = lose_the_first_verified(probe(requests.prefill.endpoints[0]).driver, monkeypatch)
    request = submitted(requests, 1)
    request.receivers[0].wait(WAIT_S)
    eventually("the prefill side has not heard of it", lambda: bool(lost))
    assert request.senders[0].state is S.TRANSFERRING
    requests.decode.endpoints[0].close()
    request.senders[0].wait(WAIT_S)


def lose_the_first_verified(driver: Any, monkeypatch: pytest.MonkeyPatch) -> list[messages.Numbered]:
    """Has a prefill rank never get the first word that a room was verified; returns what is lost."""
    right = driver.answers.take_numbered
    lost: list[messages.Numbered] = []

    def lose(identity: str, message: messages.Numbered) -> None:
        if isinstance(codec.decode_numbered_to_prefill(message.body), messages.RoomVerified) and not lost:
            lost.append(message)
        else:
            right(identity, message)

    monkeypatch.setattr(driver.answers, "take_numbered", lose)
    return lost
