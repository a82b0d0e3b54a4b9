"""Who refuses a room, or gives it up before it began, tells the other side: both end at once, and say why."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from tests.support.caches import Model, Shape
from tests.support.engines import WAIT_S, Engines, PrefillEngine, Requests, new_engine_name
from tests.support.waiting import eventually

from kvferry import DecodeEndpoint, Sender, TransferState
from kvferry.errors import (
    KVFerryError,
    PageError,
    TransferFailedError,
    UsageError,
)
from kvferry.plan.requests.demands import GroupRequest
from kvferry.plan.requests.page_numbers import PageNumbers
from kvferry.protocol.wire import messages
from kvferry.testing.probe import probe

SOON_S = 2.0
"""By when both sides have ended; alone, a side waits for its deadline of 60 s."""

OTHER = Model(head_dim=16)


def open_all(prefill: PrefillEngine, room: int) -> list[Sender]:
    return [endpoint.open(room) for endpoint in prefill.endpoints]


def assert_ended_soon(senders: list[Sender], reason: str) -> None:
    """All have failed for that reason, soon, and their pages are free."""
    until = time.monotonic() + SOON_S
    for sender in senders:
        with pytest.raises(KVFerryError, match=reason):
            sender.wait(max(0.0, until - time.monotonic()))
        assert sender.wait_pages_reusable(SOON_S)


def wait_told(*endpoints: DecodeEndpoint) -> None:
    """Waits until decode ranks have nothing more to tell, and no link is open for that."""
    for each in endpoints:
        is_taken = threading.Event()

        def take(_: float, taken: threading.Event = is_taken) -> None:
            taken.set()

        probe(each).context.submit(take)  # behind what was queued before
        assert is_taken.wait(WAIT_S)
    eventually(
        "all was told",
        lambda: not any(probe(each).rooms.refusals.unheard or probe(each).links.retired for each in endpoints),
    )


# ---- the decode side refuses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_layouts_that_differ_end_the_room_on_both_sides(
    engines: Callable[..., Engines], prefill_tp: int, decode_tp: int
):
    both = engines()
    prefill, decode = both.prefill(Model(), Shape(tp=prefill_tp)), both.decode(OTHER, Shape(tp=decode_tp))
    senders = open_all(prefill, 1)
    receivers = [endpoint.open(1, [0], engine=prefill.name) for endpoint in decode.endpoints]
    for receiver in receivers:
        with pytest.raises(TransferFailedError, match="IncompatiblePeerError"):
            receiver.wait(WAIT_S)
    assert_ended_soon(senders, f"room 1: decode rank . of '{decode.name}' refused it: IncompatiblePeerError: .*dim")
    wait_told(*decode.endpoints)
    assert not any(endpoint.open_rooms for endpoint in prefill.endpoints)
    assert not any(endpoint.open_rooms for endpoint in decode.endpoints)


def test_what_a_prefill_rank_refuses_when_a_decode_rank_attaches_ends_there_too(engines: Callable[..., Engines]):
    """Each side forces a path, and only the prefill rank sees that they differ."""
    both = engines()
    prefill, decode = both.prefill(Model(), Shape(tp=2), path="direct"), both.decode(Model(), path="staged")
    senders = open_all(prefill, 1)
    receiver = decode.endpoints[0].open(1, [0], engine=prefill.name)
    with pytest.raises(TransferFailedError, match="the prefill side forces direct"):
        receiver.wait(WAIT_S)
    assert_ended_soon(senders, "refused it: IncompatiblePeerError: prefill rank . of .* refused: path: .* forces")


def test_a_room_that_the_decode_caller_gives_up_while_it_connects_ends_there_too(engines: Callable[..., Engines]):
    """One of the prefill engine's ranks is there, the other is missed: it was never greeted."""
    both = engines(heartbeat_interval_s=0.1)
    name = new_engine_name("half")
    prefill = both.prefill(Model(), Shape(tp=2), name=name, ranks=[1])
    decode = both.decode(Model()).endpoints[0]
    senders = open_all(prefill, 1)
    receiver = decode.open(1, [0], engine=name)
    eventually("the engine was looked up", lambda: any(link.problem for link in probe(decode).links.current))
    receiver.abort("the client went away")
    assert_ended_soon(senders, "decode rank 0 of .* refused it: .*the client went away")
    late = both.prefill(Model(), Shape(tp=2), name=name, ranks=[0])
    assert_ended_soon(open_all(late, 1), "the client went away")


def test_a_connection_through_which_a_refusal_was_told_is_closed_when_all_know(engines: Callable[..., Engines]):
    """The rank may be found at another address next, and nobody would close it any more."""
    both = engines(heartbeat_interval_s=0.1, bootstrap_timeout_s=60.0)
    name = new_engine_name("half")
    prefill = both.prefill(Model(), Shape(tp=2), name=name, ranks=[1])
    decode = both.decode(Model()).endpoints[0]
    senders, lines = open_all(prefill, 1), probe(decode).links.connections.lines
    receiver = decode.open(1, [0], engine=name)
    eventually("the engine was looked up", lambda: any(link.problem for link in probe(decode).links.current))
    receiver.abort("the client went away")
    assert_ended_soon(senders, "the client went away")
    eventually("the connection is closed", lambda: not lines)
    assert probe(decode).links.current, "the link still waits for the other rank"


def test_where_nobody_was_found_nothing_is_left_to_tell(engines: Callable[..., Engines]):
    decode = engines(bootstrap_timeout_s=0.2).decode(Model()).endpoints[0]
    receiver = decode.open(1, [0], engine=new_engine_name("missing"))
    with pytest.raises(TransferFailedError, match="nobody of that name is there"):
        receiver.wait(WAIT_S)
    wait_told(decode)


def test_the_caller_of_a_decode_rank_refuses_a_room_that_it_cannot_open(pair: Callable[..., Requests]):
    requests = pair()
    decode, name = requests.decode.endpoints[0], requests.prefill.name
    senders = open_all(requests.prefill, 1)
    with pytest.raises(PageError) as found:
        decode.open(1, [99], engine=name)
    decode.refuse(1, str(found.value), engine=name)
    assert_ended_soon(senders, f"decode rank 0 of '{requests.decode.name}' refused it: .*99")
    wait_told(decode)
    requests.run(2)


@pytest.mark.parametrize("first", ["refusal", "room"])
def test_a_refusal_that_comes_before_the_prefill_caller_counts_once(pair: Callable[..., Requests], first: str):
    requests = pair(bootstrap_timeout_s=30.0)
    requests.connect()
    decode, (prefill,) = requests.decode.endpoints[0], requests.prefill.endpoints
    if first == "room":
        (sender,) = open_all(requests.prefill, 1)
    decode.refuse(1, "no memory", engine=requests.prefill.name)
    wait_told(decode)
    if first == "refusal":
        (sender,) = open_all(requests.prefill, 1)
    assert_ended_soon([sender], "refused it: no memory")
    assert prefill.open_rooms == 0
    # The number rests as after any room that failed before it was opened on the other side: but this rank knows.
    requests.run(1)


def test_a_refusal_is_kept_no_longer_than_an_open_request_is(pair: Callable[..., Requests]):
    requests = pair(bootstrap_timeout_s=1.0)
    requests.connect()
    decode = requests.decode.endpoints[0]
    decode.refuse(1, "no memory", engine=requests.prefill.name)
    wait_told(decode)
    table = probe(requests.prefill.endpoints[0]).table
    assert len(table.refusals) == 1
    eventually("it was forgotten", lambda: not len(table.refusals))
    requests.run(1)


def test_one_decode_rank_that_refuses_ends_the_room_for_all(engines: Callable[..., Engines]):
    """The others learn of it, whether they have opened the room or come later."""
    both = engines()
    prefill, decode = both.prefill(Model(), Shape(tp=2)), both.decode(Model(), Shape(tp=2))
    first, second = decode.endpoints
    for endpoint in decode.endpoints:
        endpoint.connect(prefill.name, timeout_s=WAIT_S)
    for room, comes_first in ((1, True), (2, False)):
        senders = open_all(prefill, room) if comes_first else []
        opened = [first.open(room, [0], engine=prefill.name)] if comes_first else []
        second.refuse(room, "no memory", engine=prefill.name)
        wait_told(second)
        opened += [] if comes_first else [first.open(room, [0], engine=prefill.name)]
        for receiver in opened:  # also where the prefill side's caller has not come yet
            with pytest.raises(TransferFailedError, match=r"decode rank 1 of .* refused it: no memory"):
                receiver.wait(SOON_S)
        assert_ended_soon(senders or open_all(prefill, room), "decode rank 1 of .* refused it: no memory")


@pytest.mark.parametrize("is_connected", [True, False])
def test_a_number_that_is_in_use_on_the_decode_rank_is_not_refused_from_under_it(
    pair: Callable[..., Requests], is_connected: bool
):
    """As with a request that is opened twice: the transfer that has the number goes on, opened or about to be."""
    requests = pair()
    if is_connected:
        requests.connect()
    request = requests.new(1)
    requests.open_prefill(request)
    requests.open_decode(request)
    requests.decode.endpoints[0].refuse(1, "room 1 is already open", engine=requests.prefill.name)
    requests.submit(request)
    request.wait()
    requests.check(request)


def test_a_decode_engine_that_has_no_part_in_a_room_cannot_end_it(engines: Callable[..., Engines]):
    """Once one of the room's own decode ranks has opened it."""
    both = engines()
    prefill, decode = both.prefill(Model()), both.decode(Model(), Shape(tp=2))
    stranger = both.decode(Model()).endpoints[0]
    (sender,) = open_all(prefill, 1)
    receivers = [decode.endpoints[0].open(1, np.arange(2), engine=prefill.name)]
    eventually("one has opened it", lambda: bool(prefill.endpoints[0].status().rooms[0].peers))
    stranger.refuse(1, "not mine", engine=prefill.name)
    wait_told(stranger)
    receivers.append(decode.endpoints[1].open(1, np.arange(2), engine=prefill.name))
    sender.submit(np.arange(2), last=True)
    for transfer in (sender, *receivers):
        transfer.wait(WAIT_S)


def test_a_room_that_all_have_opened_is_refused_by_nobody(pair: Callable[..., Requests]):
    requests = pair()
    request = requests.new(1)
    requests.open_decode(request)
    requests.open_prefill(request)
    eventually("it is open", lambda: request.senders[0].state is TransferState.WAITING_FOR_INPUT)
    prefill = requests.prefill.endpoints[0]
    refusal = messages.RefuseRoom(
        endpoint=prefill.transport.endpoint_name,
        engine=requests.decode.name,
        coordinates=requests.decode.endpoints[0].coordinates,
        room=1,
        generation=7,
        reason="late",
    )
    probe(prefill).rooms.refused("a stale start of the decode rank", refusal)
    requests.submit(request)
    request.wait()


def test_an_open_request_that_cannot_be_met_ends_the_room_on_both_sides(pair: Callable[..., Requests]):
    requests = pair()
    requests.connect()
    prefill, decode = requests.prefill.endpoints[0], requests.decode.endpoints[0]
    impossible = GroupRequest("nowhere", held=0, start=0, stop=4, first_page=0, pages=PageNumbers.of(np.arange(1)))
    opened = messages.OpenRoom(room=1, generation=7, receivers=1, tokens=None, groups=(impossible,))
    name = decode.transport.endpoint_name
    senders = open_all(requests.prefill, 1)
    probe(prefill).rooms.take_open(name, opened)
    assert_ended_soon(senders, "decode rank 0 of .* refused it: .*nowhere")
    probe(prefill).rooms.take_open(name, opened)  # the same again
    requests.run(1)


def test_a_refusal_that_comes_twice_counts_once(pair: Callable[..., Requests]):
    requests = pair()
    requests.connect()
    prefill, decode = requests.prefill.endpoints[0], requests.decode.endpoints[0]
    refusal = messages.RefuseRoom(
        endpoint=prefill.transport.endpoint_name,
        engine=requests.decode.name,
        coordinates=decode.coordinates,
        room=1,
        generation=7,
        reason="no memory",
    )
    name = decode.transport.endpoint_name
    probe(prefill).rooms.refused(name, refusal)
    assert_ended_soon(open_all(requests.prefill, 1), "no memory")
    probe(prefill).rooms.refused(name, refusal)
    requests.run(1)


def test_a_refusal_for_an_earlier_start_of_the_rank_ends_nothing(pair: Callable[..., Requests]):
    requests = pair()
    prefill = requests.prefill.endpoints[0]
    refusal = messages.RefuseRoom(
        endpoint="an-earlier-start",
        engine=requests.decode.name,
        coordinates=requests.decode.endpoints[0].coordinates,
        room=1,
        generation=7,
        reason="no memory",
    )
    probe(prefill).rooms.refused("d0", refusal)
    requests.run(1)


# ---- the prefill side refuses -----------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["refusal", "room"])
def test_a_prefill_rank_that_cannot_open_a_room_ends_it_on_the_other_side(pair: Callable[..., Requests], first: str):
    requests = pair()
    prefill, decode = requests.prefill.endpoints[0], requests.decode.endpoints[0]
    receivers = []
    if first == "room":
        receivers.append(decode.open(1, [0], engine=requests.prefill.name))
        eventually("it was asked for", lambda: len(probe(prefill).pending) == 1)
    prefill.refuse(1, "the request was given up before it was computed")
    if first == "refusal":
        receivers.append(decode.open(1, [0], engine=requests.prefill.name))
    with pytest.raises(TransferFailedError, match="refused by the prefill side: the request was given up before"):
        receivers[0].wait(SOON_S)
    assert receivers[0].wait_pages_reusable(SOON_S)
    requests.run(1)


def test_a_refusal_of_a_number_that_is_in_use_is_for_its_next_use(pair: Callable[..., Requests]):
    requests = pair()
    prefill, decode = requests.prefill.endpoints[0], requests.decode.endpoints[0]
    request = requests.new(1)
    requests.open_decode(request)
    requests.open_prefill(request)
    prefill.refuse(1, "room 1 is already open")
    requests.submit(request)
    request.wait()
    with pytest.raises(TransferFailedError, match="room 1 is already open"):
        decode.open(1, [0], engine=requests.prefill.name).wait(SOON_S)


def test_refusals_of_endpoints_that_are_closed_or_of_impossible_numbers(pair: Callable[..., Requests]):
    requests = pair()
    prefill, decode = requests.prefill.endpoints[0], requests.decode.endpoints[0]
    for endpoint in (prefill, decode):
        with pytest.raises(UsageError, match="room -1 is not an integer"):
            endpoint.refuse(-1, "no")
        endpoint.close()
        endpoint.refuse(1, "no")
