"""The staged path between whole endpoints: exact, shared fairly, and as safe as the direct one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from tests.support.caches import Model, Shape
from tests.support.engines import WAIT_S, Engines, Request, Requests
from tests.support.waiting import eventually

from kvferry import TransferState, interleaved
from kvferry.endpoint.runtime.calibration import Calibration
from kvferry.errors import (
    IncompatiblePeerError,
    LayoutError,
    SettingsError,
    TransferAbortedError,
    TransferFailedError,
    TransportError,
    TransportUnavailableError,
)
from kvferry.plan import PathCosts, TransferPath, Unit
from kvferry.staging import Kernels, resources
from kvferry.testing.probe import probe

S = TransferState
KIB = 1 / 1024  # of a MiB

ATTENTION = Model(layers=4, heads=4)
GROUPED = Model(layers=3, heads=2)
LATENT = Model(layers=4, latent_dim=24)
ODD = Model(layers=5, heads=6, head_dim=5, page_tokens=3, dtype="uint8")

SMALL_RUNS = Model(layers=8, heads=8, head_dim=8, page_tokens=16)

TIGHT: dict[str, Any] = {"path": "staged", "staging_chunk_mib": 0.5 * KIB, "staging_ring_mib": 1 * KIB}
"""Room for a few pages of a layer: every request goes many times round the rings."""


def rings_of(requests: Requests) -> list[Any]:
    """What prefill ranks know of the decode ranks' rings."""
    return [
        peer.attachment.paths.staged.peer.ring
        for endpoint in requests.prefill.endpoints
        for peer in probe(endpoint).peers
        if peer.attachment is not None and peer.attachment.paths.staged is not None
    ]


def all_rings_are_free(requests: Requests) -> bool:
    return all(ring.in_use == 0 and not ring.num_waiting for ring in rings_of(requests))


def decode_kernels(requests: Requests) -> Kernels:
    kernels = probe(requests.decode.endpoints[0]).context.staging.kernels
    assert kernels is not None
    return kernels


def paths_of(request: Any) -> set[TransferPath]:
    return {write.path for sender in request.senders for write in sender.stats.writes}


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("settings", [TIGHT, {"path": "staged"}], ids=["tight", "ample"])
@pytest.mark.parametrize(
    ("model", "prefill", "decode"),
    [
        pytest.param(ATTENTION, Shape(), Shape(), id="1-to-1"),
        pytest.param(ATTENTION, Shape(tp=2), Shape(), id="tp2-to-1"),
        pytest.param(ATTENTION, Shape(), Shape(tp=4), id="1-to-tp4"),
        pytest.param(ATTENTION, Shape(tp=4), Shape(tp=2), id="tp4-to-tp2"),
        pytest.param(ODD, Shape(tp=2), Shape(tp=3), id="tp2-to-tp3-odd-sizes"),
        pytest.param(GROUPED, Shape(tp=4), Shape(), id="replicated-heads-to-1"),
        pytest.param(LATENT, Shape(tp=3), Shape(), id="latent-tp3-to-1"),
        pytest.param(ODD, Shape(pp=2, stages=(2, 3)), Shape(pp=3, stages=(1, 3, 1)), id="uneven-pp2-to-pp3"),
        pytest.param(ATTENTION, Shape(tp=2, heads_first=True), Shape(pages=9), id="hnd-to-nhd"),
        pytest.param(ATTENTION, Shape(partition=interleaved(2)), Shape(tp=2), id="cp2-to-tp2"),
    ],
)
def test_every_byte_arrives_and_no_other_is_touched(
    pair: Callable[..., Requests], model: Model, prefill: Shape, decode: Shape, settings: dict[str, Any]
):
    requests = pair(model, prefill, decode, **settings)
    for room in range(3):
        requests.wipe()
        request = requests.run_tokens(room, 6 * model.page_tokens - 1, cuts=(model.page_tokens, 4 * model.page_tokens))
        assert paths_of(request) == {TransferPath.STAGED}
    sent = sum(sender.stats.total_bytes for sender in request.senders)
    expected = 6 * sum(pool.bytes_per_page for pool in requests.decode.pools)
    if prefill.partition.is_whole:  # else the last page's end does not travel
        assert sent == expected, "gaps between segments do not count"
    eventually("all staging memory is free again", all_rings_are_free, requests)


def test_a_prefix_inside_a_page_stays_as_it_is(pair: Callable[..., Requests]):
    requests = pair(ATTENTION, Shape(tp=2), Shape(), **TIGHT)
    for room, prefix in enumerate(range(2 * ATTENTION.page_tokens + 1)):
        requests.wipe()
        requests.run_tokens(room, 5 * ATTENTION.page_tokens - 2, prefix_tokens=prefix)


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("scatter_workers", [0, 2])
def test_many_rooms_share_a_ring_of_one_sub_chunk(pair: Callable[..., Requests], workers: int, scatter_workers: int):
    requests = pair(
        ATTENTION,
        Shape(tp=2, pages=256),
        Shape(pages=256),
        workers=workers,
        queues=2,
        scatter_workers=scatter_workers,
        path="staged",
        staging_chunk_mib=0.5 * KIB,
        staging_ring_mib=0.5 * KIB,
    )
    rooms = [requests.new(room, 6) for room in range(30)]
    for request in rooms:
        requests.open_decode(request)
        requests.open_prefill(request)
        requests.submit(request)
    for request in rooms:
        request.wait()
        requests.check(request)
    eventually("all staging memory is free again", all_rings_are_free, requests)


def test_rooms_at_once_end_one_after_the_other(pair: Callable[..., Requests]):
    """Where each got on a little in turn, all would end at the end."""
    requests = pair(ATTENTION, Shape(pages=256), Shape(pages=256), workers=1, queues=1, **TIGHT)
    requests.connect()
    rooms = [requests.new(room, 16) for room in range(8)]
    for request in rooms:
        requests.open_prefill(request)
        requests.submit(request)
    for request in rooms:
        requests.open_decode(request)
    for request in rooms:
        request.wait()
    posted = sorted(
        (part.posted_at, number)
        for number, request in enumerate(rooms)
        for write in request.senders[0].stats.writes
        for part in write.parts
    )
    parts = [number for _, number in posted]
    changes = sum(one != other for one, other in pairwise(parts))
    assert len(parts) > 20 * len(rooms), "too few to be interleaved"
    assert changes < 3 * len(rooms), parts


def test_a_receiver_that_does_not_read_holds_up_no_other(
    engines: Callable[..., Engines], monkeypatch: pytest.MonkeyPatch
):
    both = engines(workers=1, queues=1, **TIGHT)
    prefill = both.prefill(ATTENTION)
    slow, fast = (Requests(prefill, both.decode(ATTENTION)) for _ in range(2))
    for each in (slow, fast):
        each.connect()
    thaw = threading.Event()
    real = slow.decode.transports[0].take_notifications
    monkeypatch.setattr(slow.decode.transports[0], "take_notifications", lambda: real() if thaw.is_set() else [])
    stuck = [slow.new(room) for room in range(3)]
    for request in stuck:
        slow.open_decode(request)
        slow.open_prefill(request)
        slow.submit(request)
    for room in range(10, 16):
        fast.run(room)
    assert {request.senders[0].state for request in stuck} == {S.TRANSFERRING}
    thaw.set()
    for request in stuck:
        request.wait()


def test_writes_that_hang_take_few_slots_and_leave_the_rest_to_others(engines: Callable[..., Engines]):
    both = engines(workers=1, queues=1, path="staged", staging_chunk_mib=0.5 * KIB, staging_ring_mib=4 * KIB)
    prefill = both.prefill(ATTENTION)
    slow, fast = (Requests(prefill, both.decode(ATTENTION)) for _ in range(2))
    for each in (slow, fast):
        each.connect()
    prefill.transports[0].held = {slow.decode.transports[0].endpoint_name}
    stuck = [slow.new(room) for room in range(4)]
    for request in stuck:
        slow.open_decode(request)
        slow.open_prefill(request)
        slow.submit(request)
    eventually("some parts are on their way", lambda: prefill.transports[0].in_flight == 2)
    for room in range(10, 16):
        fast.run(room)
    assert prefill.transports[0].in_flight == 2
    prefill.transports[0].held = False
    for request in stuck:
        request.wait()


def test_a_part_that_fails_fails_its_room_and_gives_its_memory_back(pair: Callable[..., Requests]):
    requests = pair(ATTENTION, Shape(), Shape(), **TIGHT)
    requests.run(0)
    transport = requests.prefill.transports[0]
    posts = iter(range(100))

    def fail_third(peer: str) -> None:
        if next(posts) == 2:
            raise TransportError("the cable was pulled")

    transport.on_post = fail_third
    request = requests.new(1)
    requests.open_decode(request)
    requests.open_prefill(request)
    requests.submit(request)
    request.wait_ended()
    assert [each.state for each in (*request.senders, *request.receivers)] == [S.FAILED, S.FAILED]
    assert "the cable was pulled" in str(request.receivers[0].error)
    assert request.receivers[0].wait_pages_reusable(5)
    transport.on_post = None
    eventually("all staging memory is free again", all_rings_are_free, requests)
    for room in range(2, 6):
        requests.run(room)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_abort_leaves_the_rings_free_and_pages_alone(pair: Callable[..., Requests], side: str):
    requests = pair(ATTENTION, Shape(tp=2), Shape(), **TIGHT)
    requests.connect()
    for transport in requests.prefill.transports:
        transport.held = True
    request = requests.new(1)
    requests.open_decode(request)
    requests.open_prefill(request)
    requests.submit(request)
    eventually("parts are on their way", lambda: all(each.in_flight for each in requests.prefill.transports))
    (request.senders if side == "prefill" else request.receivers)[0].abort("the client went away")
    with pytest.raises((TransferAbortedError, TransferFailedError), match="the client went away"):
        request.receivers[0].wait(WAIT_S)
    for transport in requests.prefill.transports:
        transport.held = False
    assert request.receivers[0].wait_pages_reusable(5)
    touched = requests.decode.pools[0].touched_bytes(np.arange(32))
    after = requests.new(2)
    requests.open_decode(after)  # until then nobody looks at what arrives
    eventually("all staging memory is free again", all_rings_are_free, requests)
    assert requests.decode.pools[0].touched_bytes(np.arange(32)) == touched
    requests.open_prefill(after)
    requests.submit(after)
    after.wait()
    requests.check(after)


def being_scattered(requests: Requests, monkeypatch: pytest.MonkeyPatch) -> tuple[Request, threading.Event]:
    """Returns a request of which something is being scattered, and what lets that go on."""
    kernels = decode_kernels(requests)
    begun, go_on = threading.Event(), threading.Event()
    real = kernels.scatter_all

    def slowly(*arguments: Any) -> None:
        begun.set()
        assert go_on.wait(WAIT_S)
        real(*arguments)

    monkeypatch.setattr(kernels, "scatter_all", slowly)
    request = requests.new(1)
    requests.open_decode(request)
    requests.open_prefill(request)
    requests.submit(request)
    assert begun.wait(WAIT_S)
    return request, go_on


def test_pages_are_not_reusable_while_a_part_is_scattered(
    pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch
):
    requests = pair(ATTENTION, Shape(), Shape(), scatter_workers=1, path="staged")
    requests.connect()
    request, go_on = being_scattered(requests, monkeypatch)
    request.receivers[0].abort("enough")
    eventually("the prefill side has drained", lambda: request.senders[0].pages_reusable)
    eventually("the room has failed", lambda: request.receivers[0].state is S.FAILED)
    assert not request.receivers[0].wait_pages_reusable(0.3)
    go_on.set()
    assert request.receivers[0].wait_pages_reusable(5)


def test_pages_come_back_when_what_a_closing_rank_scatters_ends_late(
    pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch
):
    requests = pair(ATTENTION, Shape(), Shape(), scatter_workers=1, path="staged", close_timeout_s=0.1)
    requests.connect()
    endpoint = requests.decode.endpoints[0]
    request, go_on = being_scattered(requests, monkeypatch)
    scatterers, waits = probe(endpoint).rooms.arrivals.scatterers, threading.Event()
    real_stop = scatterers.stop

    def stop() -> None:
        real_stop()
        waits.set()

    monkeypatch.setattr(scatterers, "stop", stop)
    closing = threading.Thread(target=endpoint.close)
    closing.start()
    assert waits.wait(WAIT_S), "for the scatter alone: its own thread has ended"
    assert not request.receivers[0].pages_reusable
    go_on.set()
    closing.join(WAIT_S)
    assert request.receivers[0].pages_reusable


def test_what_cannot_be_scattered_fails_the_room_alone(pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch):
    requests = pair(ATTENTION, Shape(), Shape(), path="staged")
    requests.connect()
    kernels = decode_kernels(requests)
    real = kernels.scatter_all

    def fail(*arguments: Any) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(kernels, "scatter_all", fail)
    request = requests.new(1)
    requests.open_decode(request)
    requests.open_prefill(request)
    requests.submit(request)
    with pytest.raises(TransferFailedError, match=r"could not be put into its pages.*ZeroDivisionError"):
        request.receivers[0].wait(WAIT_S)
    monkeypatch.setattr(kernels, "scatter_all", real)
    eventually("all staging memory is free again", all_rings_are_free, requests)
    requests.run(2)


def test_only_threads_of_their_own_gather(pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch):
    """However many workers there are: copies that run at once only take each other's memory bandwidth."""
    requests = pair(ATTENTION, Shape(tp=2), Shape(), workers=8, queues=4, gather_workers=1, **TIGHT)
    requests.connect()
    names = set()
    for endpoint in requests.prefill.endpoints:
        for peer in probe(endpoint).peers:
            assert peer.attachment is not None
            assert peer.attachment.paths.staged is not None
            kernels = peer.attachment.paths.staged.kernels
            gather = kernels.gather

            def recording(*arguments: Any, gather: Any = gather) -> None:
                names.add(threading.current_thread().name)
                gather(*arguments)

            monkeypatch.setattr(kernels, "gather", recording)
    for room in range(1, 6):
        requests.run(room)
    assert names == {"kvferry-prefill-0-gather-0", "kvferry-prefill-1-gather-0"}


# ---- which way ------------------------------------------------------------------------------------------------------


def test_auto_measures_the_machine_and_says_why_it_chose(pair: Callable[..., Requests]):
    requests = pair(SMALL_RUNS, Shape(tp=2, pages=256), Shape(pages=256), path="auto")
    (write,) = requests.run(1, 100).senders[0].stats.writes
    attachment = probe(requests.prefill.endpoints[0]).peers[0].attachment
    assert attachment is not None
    assert attachment.paths.staged is not None
    costs = attachment.paths.staged.costs
    assert costs != PathCosts(), "measured, not assumed"
    assert min(costs.wire_bytes_per_s, costs.gather_bytes_per_s, costs.scatter_bytes_per_s) > 1e6
    assert "descriptors of 128 bytes" in write.why
    assert "faster than" in write.why or "not much slower than" in write.why


@pytest.mark.parametrize(
    ("seconds_per_descriptor", "path"), [(1e-2, TransferPath.STAGED), (1e-12, TransferPath.DIRECT)]
)
def test_auto_takes_what_the_measured_costs_make_faster(
    pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch, seconds_per_descriptor: float, path: TransferPath
):
    measured = PathCosts(seconds_per_descriptor=seconds_per_descriptor)
    monkeypatch.setattr(Calibration, "costs", lambda *arguments, **named: measured)
    requests = pair(SMALL_RUNS, Shape(tp=2, pages=256), Shape(pages=256), path="auto")
    assert paths_of(requests.run(1, 100)) == {path}


def test_a_pool_with_too_many_descriptors_is_served_through_staging_memory(
    pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("kvferry.plan.descriptors._MOST_DESCRIPTORS", 100)
    requests = pair(ATTENTION, Shape(tp=2), Shape(), path="auto")
    request = requests.run(1)
    assert paths_of(request) == {TransferPath.STAGED}
    assert "runs a page of the source" in caplog.text
    assert "can only go through staging memory" in caplog.text
    links = probe(requests.decode.endpoints[0]).links.current
    assert [rank.only_staged for link in links for rank in link.ranks.values()] == [True, True]


def test_only_parts_of_pages_are_where_single_tokens_are_too_many(
    pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Calibration, "costs", lambda *arguments, **named: PathCosts(seconds_per_descriptor=1e-12))
    first = pair(ATTENTION, Shape(), Shape(), path="auto")
    first.run(1)
    attachment = probe(first.prefill.endpoints[0]).peers[0].attachment
    assert attachment is not None
    whole = attachment.prepare(Unit.WHOLE)
    monkeypatch.setattr("kvferry.plan.descriptors._MOST_DESCRIPTORS", max(whole.local.count, whole.remote.count))
    requests = pair(ATTENTION, Shape(), Shape(), path="auto")
    assert paths_of(requests.run(1)) == {TransferPath.DIRECT}
    cut = requests.run_tokens(2, 5 * ATTENTION.page_tokens, prefix_tokens=1)
    assert TransferPath.STAGED in paths_of(cut)


@pytest.mark.parametrize("path", ["auto", "direct"])
def test_a_pool_with_too_many_descriptors_is_refused_where_there_is_no_staged_path(
    engines: Callable[..., Engines], path: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("kvferry.plan.descriptors._MOST_DESCRIPTORS", 100)
    both = engines(path=path)
    requests = Requests(both.prefill(ATTENTION, path="direct"), both.decode(ATTENTION))
    with pytest.raises(LayoutError, match="are more than can be prepared"):
        requests.connect()


def test_one_sides_setting_forces_the_path_on_both(engines: Callable[..., Engines]):
    for prefill_path, decode_path in (("auto", "staged"), ("staged", "auto")):
        both = engines(path="auto")
        requests = Requests(both.prefill(ATTENTION, path=prefill_path), both.decode(ATTENTION, path=decode_path))
        request = requests.run(1)
        assert paths_of(request) == {TransferPath.STAGED}
        assert request.senders[0].stats.writes[0].why == "KVFERRY_PATH is staged"


def test_sides_that_force_different_paths_refuse_each_other(engines: Callable[..., Engines]):
    both = engines()
    requests = Requests(both.prefill(ATTENTION, path="staged"), both.decode(ATTENTION, path="direct"))
    with pytest.raises(
        IncompatiblePeerError, match=r"prefill side forces staged \(KVFERRY_PATH\), the decode side dir"
    ):
        requests.connect()


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"staging_chunk_mib": 0.1 * KIB}, "KVFERRY_STAGING_CHUNK_MIB"),
        ({"staging_chunk_mib": 0.1 * KIB, "staging_ring_mib": 0.1 * KIB}, "KVFERRY_STAGING_RING_MIB"),
    ],
)
def test_staging_memory_that_is_too_small_for_a_page_is_named(
    pair: Callable[..., Requests], settings: dict[str, float], name: str
):
    forced = pair(ATTENTION, Shape(), Shape(), path="staged", **settings)
    with pytest.raises(IncompatiblePeerError, match=rf"one page of one layer takes \d+ bytes, more than.*{name}"):
        forced.connect()
    free = pair(ATTENTION, Shape(), Shape(), path="auto", **settings)
    request = free.run(1)
    assert paths_of(request) == {TransferPath.DIRECT}
    assert name in request.senders[0].stats.writes[0].why


def test_a_decode_ring_that_is_too_small_for_a_page_is_named(engines: Callable[..., Engines]):
    both = engines(path="staged")
    tiny: dict[str, Any] = {"staging_chunk_mib": 0.1 * KIB, "staging_ring_mib": 0.1 * KIB}
    requests = Requests(both.prefill(ATTENTION), both.decode(ATTENTION, **tiny))
    with pytest.raises(IncompatiblePeerError, match="bytes of the decode side's ring: raise KVFERRY_STAGING_RING_MIB"):
        requests.connect()


def test_prefill_ranks_beyond_the_decode_sides_staging_memory_write_directly(engines: Callable[..., Engines]):
    both = engines(path="auto")
    few: dict[str, Any] = {"staging_chunk_mib": 1.0, "staging_ring_mib": 1.0, "staging_memory_mib": 2.0}
    requests = Requests(both.prefill(ATTENTION, Shape(tp=4)), both.decode(ATTENTION, **few))
    request = requests.run(1)
    reasons = [sender.stats.writes[0].why for sender in request.senders]
    assert sum("KVFERRY_STAGING_MEMORY_MIB" in why for why in reasons) == 2


def test_memory_of_a_prefill_rank_that_was_closed_serves_the_next(engines: Callable[..., Engines]):
    both = engines(path="staged")
    decode = both.decode(ATTENTION, staging_chunk_mib=1.0, staging_ring_mib=1.0, staging_memory_mib=1.0)
    for room in range(3):
        prefill = both.prefill(ATTENTION)
        Requests(prefill, decode).run(room)
        prefill.endpoints[0].close()


def test_too_little_memory_for_the_workers_is_said_at_the_start(engines: Callable[..., Engines]):
    both = engines(gather_workers=4, staging_memory_mib=16, staging_ring_mib=8, staging_chunk_mib=1)
    with pytest.raises(SettingsError, match=r"4 workers .*\(KVFERRY_GATHER_WORKERS\) with 8 MiB.*STAGING_MEMORY_MIB"):
        both.prefill(ATTENTION, path="staged")
    request = Requests(both.prefill(ATTENTION, path="auto"), both.decode(ATTENTION, path="auto")).run(1)
    assert paths_of(request) == {TransferPath.DIRECT}
    assert "KVFERRY_GATHER_WORKERS" in request.senders[0].stats.writes[0].why


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_without_what_copies_the_direct_path_is_left(
    engines: Callable[..., Engines], monkeypatch: pytest.MonkeyPatch, side: str
):
    def missing(*arguments: Any) -> Any:
        raise TransportUnavailableError("Triton is not installed: pip install triton")

    both = engines(path="auto")
    make: dict[str, Any] = {"prefill": both.prefill, "decode": both.decode}
    other = make["decode" if side == "prefill" else "prefill"](ATTENTION)
    monkeypatch.setattr(resources, "kernels_for", missing)
    mine = make[side](ATTENTION)
    with pytest.raises(TransportUnavailableError, match="Triton is not installed"):
        make[side](ATTENTION, path="staged")
    pair: Any = (mine, other) if side == "prefill" else (other, mine)
    request = Requests(*pair).run(1)
    assert paths_of(request) == {TransferPath.DIRECT}
    assert "Triton is not installed" in request.senders[0].stats.writes[0].why
