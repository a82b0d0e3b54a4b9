"""A request's cache from every rank of one engine to every rank of another: shapes, chunks, prefixes, aux data."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.support.caches import Model, Shape
from tests.support.engines import Engines, Requests
from tests.support.waiting import eventually

from kvferry import TransferState
from kvferry.testing.probe import probe

ATTENTION = Model(layers=4, heads=4)
GROUPED = Model(layers=3, heads=2)
LATENT = Model(layers=4, latent_dim=24)
ODD = Model(layers=5, heads=6, head_dim=5, page_tokens=3, dtype="uint8")


@pytest.mark.parametrize(
    ("model", "prefill", "decode"),
    [
        pytest.param(ATTENTION, Shape(), Shape(), id="1-to-1"),
        pytest.param(ATTENTION, Shape(tp=2), Shape(), id="tp2-to-1"),
        pytest.param(ATTENTION, Shape(), Shape(tp=4), id="1-to-tp4"),
        pytest.param(ATTENTION, Shape(tp=4), Shape(tp=2), id="tp4-to-tp2"),
        pytest.param(ODD, Shape(tp=2), Shape(tp=3), id="tp2-to-tp3-odd-sizes"),
        pytest.param(GROUPED, Shape(tp=4), Shape(), id="replicated-heads-to-1"),
        pytest.param(GROUPED, Shape(tp=2), Shape(tp=4), id="tp2-to-replicated-heads"),
        pytest.param(LATENT, Shape(tp=2), Shape(tp=2), id="latent-tp2-to-tp2"),
        pytest.param(LATENT, Shape(tp=3), Shape(), id="latent-tp3-to-1"),
        pytest.param(ATTENTION, Shape(pp=2), Shape(), id="pp2-to-1"),
        pytest.param(ODD, Shape(pp=2, stages=(2, 3)), Shape(pp=3, stages=(1, 3, 1)), id="uneven-pp2-to-pp3"),
        pytest.param(ODD, Shape(pp=3, stages=(0, 4, 1)), Shape(tp=2), id="a-stage-without-layers"),
        pytest.param(LATENT, Shape(tp=2, pp=2, stages=(3, 1)), Shape(pp=2, stages=(1, 3)), id="latent-tp-and-pp"),
        pytest.param(ATTENTION, Shape(tp=2, heads_first=True), Shape(pages=9), id="hnd-to-nhd"),
    ],
)
def test_every_byte_arrives(pair: Callable[..., Requests], model: Model, prefill: Shape, decode: Shape):
    requests = pair(model, prefill, decode)
    for room in range(4):
        request = requests.run(room, 6, cuts=(1, 4), aux=b"token %d" % room)
        assert [receiver.aux for receiver in request.receivers] == [b"token %d" % room] * len(request.receivers)
    sent = sum(sender.stats.total_bytes for sender in request.senders)
    assert sent == 6 * sum(pool.bytes_per_page for pool in requests.decode.pools), (
        "every byte that the decode ranks hold travels once"
    )


def test_pages_of_other_requests_are_not_touched(pair: Callable[..., Requests]):
    requests = pair(ATTENTION, Shape(tp=2), Shape())
    request = requests.run(3, 5)
    others = np.setdiff1d(np.arange(32), request.destination_pages[0])
    assert requests.decode.pools[0].touched_bytes(others) == 0
    assert requests.decode.pools[0].touched_bytes(request.destination_pages[0]) > 0


@pytest.mark.parametrize(("prefill_dp_rank", "decode_dp_rank"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_requests_travel_between_any_two_data_parallel_groups(
    engines: Callable[..., Engines], prefill_dp_rank: int, decode_dp_rank: int
):
    both = engines()
    prefill, decode = both.prefill(ATTENTION, Shape(tp=2, dp=2)), both.decode(ATTENTION, Shape(dp=2))
    requests = Requests(prefill, decode, prefill_dp_rank=prefill_dp_rank, decode_dp_rank=decode_dp_rank)
    requests.run(11)
    for pool in prefill.pools + decode.pools:
        in_use = pool.coordinates.dp_rank == (prefill_dp_rank if pool in prefill.pools else decode_dp_rank)
        assert (pool.touched_bytes(np.arange(32)) > 0) == in_use


def test_each_request_of_data_parallel_attention_comes_whole_to_one_rank(engines: Callable[..., Engines]):
    both = engines()
    prefill, decode = both.prefill(ATTENTION, Shape(tp=4)), both.decode(ATTENTION, Shape(dp=4))
    for dp_rank in range(4):
        Requests(prefill, decode, decode_dp_rank=dp_rank).run(20 + dp_rank)
        touched = [int(pool.touched_bytes(np.arange(32))) > 0 for pool in decode.pools]
        assert touched == [rank <= dp_rank for rank in range(4)]


@pytest.mark.parametrize("chunks_before", [0, 1, 2, 3])
def test_chunks_may_come_before_the_decode_side_opens(pair: Callable[..., Requests], chunks_before: int):
    requests = pair(ATTENTION, Shape(tp=2), Shape(tp=2))
    request = requests.new(5, 6)
    requests.open_prefill(request)
    for number in range(3):
        if number == chunks_before:
            requests.open_decode(request)
        requests.submit(request, 2 * number, 2 * number + 2, last=number == 2)
    if chunks_before == 3:
        requests.open_decode(request)
    request.wait()
    requests.check(request)


def test_the_decode_side_may_be_first(pair: Callable[..., Requests]):
    requests = pair(ATTENTION, Shape(tp=2), Shape(tp=2))
    request = requests.new(5, 6)
    requests.open_decode(request)
    pending = [len(probe(endpoint).pending) for endpoint in requests.prefill.endpoints]
    eventually(
        "every prefill rank keeps the room",
        lambda: [len(probe(endpoint).pending) for endpoint in requests.prefill.endpoints] == [1, 1],
    )
    assert pending in ([0, 0], [0, 1], [1, 0], [1, 1])
    requests.open_prefill(request)
    assert [len(probe(endpoint).pending) for endpoint in requests.prefill.endpoints] == [0, 0]
    requests.submit(request)
    request.wait()
    requests.check(request)


def test_only_pages_behind_the_prefix_are_sent(pair: Callable[..., Requests]):
    requests = pair(ATTENTION, Shape(tp=2), Shape())
    request = requests.run(7, 6, prefix_pages=4, cuts=(2, 3, 5))
    page_bytes = requests.decode.pools[0].bytes_per_page
    assert sum(sender.stats.total_bytes for sender in request.senders) == 2 * page_bytes
    assert [len(sender.stats.writes) for sender in request.senders] == [2, 2], "chunks inside the prefix take no write"
    others = np.setdiff1d(np.arange(32), request.destination_pages[0])
    assert len(others) == 30
    assert requests.decode.pools[0].touched_bytes(others) == 0


def test_a_request_that_is_cached_whole_takes_no_write(pair: Callable[..., Requests]):
    requests = pair(ATTENTION, Shape(tp=2), Shape(tp=2))
    request = requests.run(7, 6, prefix_pages=6, cuts=(3,), aux=b"first token")
    assert [transport.posted for transport in requests.prefill.transports] == [0, 0]
    assert [receiver.aux for receiver in request.receivers] == [b"first token"] * 2
    assert all(pool.touched_bytes(np.arange(32)) == 0 for pool in requests.decode.pools)


def test_the_first_chunk_may_start_behind_a_prefix_that_both_sides_know_of(pair: Callable[..., Requests]):
    requests = pair()
    request = requests.new(7, 6, prefix_pages=4)
    requests.open_decode(request)
    requests.open_prefill(request)
    request.senders[0].submit(request.source_pages[0][3:], start=3, last=True)
    request.wait()
    requests.check(request)


@pytest.mark.parametrize(
    ("model", "prefill", "decode"),
    [
        pytest.param(ATTENTION, Shape(), Shape(), id="1-to-1"),
        pytest.param(ATTENTION, Shape(tp=2), Shape(tp=4), id="several-receivers"),
        pytest.param(LATENT, Shape(tp=3), Shape(), id="ranks-that-send-nothing"),
        pytest.param(ODD, Shape(pp=3, stages=(0, 4, 1)), Shape(), id="a-stage-without-layers"),
    ],
)
def test_every_prefill_rank_is_told_what_the_decode_side_holds(
    pair: Callable[..., Requests], model: Model, prefill: Shape, decode: Shape
):
    requests = pair(model, prefill, decode)
    page_tokens = model.page_tokens
    for room in (0, 4):
        request = requests.new(room, 6, prefix_pages=room)
        requests.open_prefill(request)
        assert [sender.prefix_tokens for sender in request.senders] == [None] * len(request.senders)
        requests.open_decode(request)
        eventually(
            "all ranks know it",
            lambda senders: [each.prefix_tokens for each in senders] == [room * page_tokens] * len(senders),  # noqa: B023
            request.senders,
        )
        requests.submit(request)
        request.wait()
        requests.check(request)


def test_a_prefix_that_no_chunk_covers_up_to_is_refused(pair: Callable[..., Requests]):
    requests = pair()
    request = requests.new(7, 6, prefix_pages=2)
    requests.open_decode(request)
    requests.open_prefill(request)
    request.senders[0].submit(request.source_pages[0][3:], start=3, last=True)
    request.wait_ended()
    for transfer in (*request.senders, *request.receivers):
        assert "starts at page 3" in str(transfer.error)
        assert "needs what comes before, from page 2 on" in str(transfer.error)


def test_aux_data_is_whole_whatever_its_size(pair: Callable[..., Requests]):
    requests = pair(ATTENTION, Shape(tp=2, pp=2), Shape(tp=2))
    for room, aux in enumerate((b"", b"\0", bytes(range(256)) * 4096)):
        request = requests.run(room, aux=aux)
        assert {receiver.aux for receiver in request.receivers} == {aux}


def test_the_last_chunk_may_be_empty(pair: Callable[..., Requests]):
    requests = pair(ATTENTION, Shape(tp=2), Shape())
    request = requests.new(1, 4)
    requests.open_decode(request)
    requests.open_prefill(request)
    requests.submit(request, 0, 4, last=False)
    requests.submit(request, 4, 4, last=True)
    request.wait()
    requests.check(request)
    assert len(request.senders[0].stats.writes) == 1


def test_ranks_that_are_elected_for_nothing_succeed(pair: Callable[..., Requests]):
    requests = pair(LATENT, Shape(tp=4), Shape())
    writers = set()
    for room in range(40):
        request = requests.run(room)
        wrote = [sender.room == room and len(sender.stats.writes) > 0 for sender in request.senders]
        assert sum(wrote) == 1, "one of the four writes, the others have nothing to do"
        assert all(sender.state is TransferState.SUCCESS for sender in request.senders)
        writers.add(wrote.index(True))
    assert writers == {0, 1, 2, 3}, "and everyone has a turn"


def test_room_numbers_may_be_as_large_as_they_can(pair: Callable[..., Requests]):
    requests = pair(ATTENTION, Shape(tp=2), Shape())
    for room in (0, 2**31, 2**63 - 1):
        requests.run(room)


def test_several_engines_exchange_with_one_another(engines: Callable[..., Engines]):
    both = engines()
    prefills = [both.prefill(ATTENTION, Shape(tp=2)), both.prefill(ATTENTION, Shape(tp=1, pp=2))]
    decodes = [both.decode(ATTENTION, Shape(tp=4)), both.decode(ATTENTION, Shape())]
    for number, (prefill, decode) in enumerate((prefill, decode) for prefill in prefills for decode in decodes):
        Requests(prefill, decode).run(100 + number)
