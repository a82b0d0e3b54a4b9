"""One room from opening to its end: states, waiting, aborts, causes, reuse of its pages and of its number."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.support.caches import Model, Shape
from tests.support.engines import WAIT_S, Requests
from tests.support.tiers import Tier
from tests.support.waiting import eventually

from kvferry import PrefillEndpoint, Receiver, Sender, TransferState
from kvferry.endpoint.prefill.room_actor import OpenReceived
from kvferry.endpoint.runtime.callers_code import Callbacks
from kvferry.endpoint.runtime.platform import SystemPlatform
from kvferry.endpoint.transfer import Transfer
from kvferry.errors import (
    ChunkError,
    PeerDisconnectedError,
    RoomExistsError,
    TransferAbortedError,
    TransferFailedError,
    TransferTimeoutError,
    TransportError,
    UnknownRoomError,
)
from kvferry.plan.requests.demands import GroupRequest
from kvferry.plan.requests.page_numbers import PageNumbers
from kvferry.protocol.links.link import LinkState
from kvferry.protocol.transfer.events import ReceiverMessage
from kvferry.protocol.wire import codec, field_types, messages
from kvferry.testing.probe import probe

S = TransferState


def nothing_left(requests: Requests) -> bool:
    """Whether no table of either side holds a room."""
    return all(
        endpoint.open_rooms == 0 and len(probe(endpoint).pending) == 0 for endpoint in requests.prefill.endpoints
    ) and all(
        endpoint.open_rooms == 0 and not probe(endpoint).rooms.open and not probe(endpoint).links.rooms_of
        for endpoint in requests.decode.endpoints
    )


def kept_pending(endpoint: PrefillEndpoint, room: int) -> list[messages.OpenRoom | messages.AbortRoom]:
    """The messages that a prefill rank keeps for a room."""
    pending = probe(endpoint).pending.of(room)
    return [message for kept in pending.values() for message in (kept.request, kept.abort) if message is not None]


# ---- states and waiting -----------------------------------------------------------------------------------------


def test_both_sides_pass_through_every_state(pair: Callable[..., Requests]):
    requests = pair()
    request = requests.new(1, 4)
    requests.open_prefill(request)
    sender = request.senders[0]
    assert (sender.state, sender.error, sender.pages_reusable) == (S.BOOTSTRAPPING, None, False)
    requests.open_decode(request)
    receiver = request.receivers[0]
    eventually("both wait for input", lambda: {sender.state, receiver.state} == {S.WAITING_FOR_INPUT})
    requests.submit(request, 0, 2, last=False)
    eventually("both transfer", lambda: {sender.state, receiver.state} == {S.TRANSFERRING})
    assert not sender.pages_reusable
    assert not receiver.pages_reusable
    assert receiver.aux == b""
    requests.submit(request, 2, 4)
    request.wait()
    for transfer in (sender, receiver):
        assert (transfer.state, transfer.error, transfer.pages_reusable) == (S.SUCCESS, None, True)
    assert receiver.aux == b"token"


def test_waiting_has_its_own_deadline(pair: Callable[..., Requests]):
    requests = pair()
    request = requests.new(1)
    requests.open_prefill(request)
    with pytest.raises(TimeoutError, match=r"room 1 is still bootstrapping after 0.05 s"):
        request.senders[0].wait(0.05)
    assert not request.senders[0].wait_pages_reusable(0.01)
    assert request.senders[0].state is S.BOOTSTRAPPING, "a wait that ends early does the transfer no harm"


def test_any_number_of_threads_may_wait(pair: Callable[..., Requests]):
    requests = pair()
    request = requests.new(1)
    requests.open_decode(request)
    requests.open_prefill(request)
    threads = [threading.Thread(target=request.wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    requests.submit(request)
    for thread in threads:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in threads)


def test_asyncio_can_wait_for_the_end(pair: Callable[..., Requests]):
    requests = pair()

    async def scenario() -> None:
        good, bad = requests.new(1), requests.new(2)
        for request in (good, bad):
            requests.open_decode(request)
            requests.open_prefill(request)
        waiting = asyncio.gather(*(each.completed() for each in (*good.senders, *good.receivers)))
        given_up = asyncio.ensure_future(good.receivers[0].completed())
        await asyncio.sleep(0)
        given_up.cancel()
        requests.submit(good)
        await asyncio.wait_for(waiting, WAIT_S)
        assert good.receivers[0].state is S.SUCCESS, "cancelling the wait did not abort the transfer"
        bad.senders[0].abort("the client went away")
        for transfer in (*bad.senders, *bad.receivers):
            with pytest.raises((TransferAbortedError, TransferFailedError), match="the client went away"):
                await asyncio.wait_for(transfer.completed(), WAIT_S)

    asyncio.run(scenario())


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_what_a_caller_sees_is_consistent_at_every_moment(pair: Callable[..., Requests], side: str):
    """A scheduler that polls sees no pages reusable before the end, and an end with everything in place."""
    requests = pair()
    for room in range(8):
        request = requests.new(room, 3)
        requests.open_decode(request)
        requests.open_prefill(request)
        transfer: Sender | Receiver = (request.senders if side == "prefill" else request.receivers)[0]
        requests.submit(request)
        while True:
            reusable, state = transfer.pages_reusable, transfer.state
            assert state.is_final or not reusable
            if reusable:
                break
        request.wait()


def test_the_end_is_published_in_an_order_that_never_misleads():
    from kvferry.endpoint.transfer import Transfer

    seen: list[Any] = []

    class Watched(Transfer):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "state" and hasattr(self, "_settled"):
                seen.append(("state", self.pages_reusable, self._ended.done(), self.error))

    transfer = Watched(1, lambda reason: None, AtOnce())
    probe(transfer).ended.add_done_callback(
        lambda _: seen.append(("ended", transfer.pages_reusable, transfer.state, None))
    )
    probe(transfer).update(S.SUCCESS, None, pages_reusable=True)
    assert seen == [("state", False, False, None), ("ended", True, S.SUCCESS, None)]


# ---- giving up --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("moment", ["alone", "open", "after a chunk", "while a write is on its way"])
def test_an_abort_reaches_both_sides(pair: Callable[..., Requests], side: str, moment: str):
    requests = pair(Model(), Shape(tp=2), Shape(tp=2))
    requests.connect()
    request = requests.new(1, 6)
    if moment != "alone" or side == "decode":
        requests.open_decode(request)
    if moment != "alone" or side == "prefill":
        requests.open_prefill(request)
    if moment not in ("alone", "open"):
        requests.submit(request, 0, 2, last=False)
        eventually("the chunk arrived", lambda: all(each.state is S.TRANSFERRING for each in request.receivers))
    if moment == "while a write is on its way":
        for transport in requests.prefill.transports:
            transport.held = True
        requests.submit(request, 2, 4, last=False)
        eventually("writes are on their way", lambda: all(each.in_flight for each in requests.prefill.transports))
    aborted = (request.senders if side == "prefill" else request.receivers)[0]
    aborted.abort("out of memory")
    if moment == "alone" and side == "prefill":  # the other side opens a room that is over already
        requests.open_decode(request)
    elif moment == "alone":
        requests.open_prefill(request)
    request.wait_ended()
    assert isinstance(aborted.error, TransferAbortedError)
    assert f"aborted by the {side} side: out of memory" in str(aborted.error)
    for transfer in (*request.senders, *request.receivers):
        assert transfer.state is S.FAILED
        assert "out of memory" in str(transfer.error)
        with pytest.raises((TransferAbortedError, TransferFailedError), match="out of memory"):
            transfer.wait(0)
    if moment == "while a write is on its way":
        assert not any(each.pages_reusable for each in (*request.senders, *request.receivers))
        written = [pool.touched_bytes(np.arange(32)) for pool in requests.decode.pools]
        for transport in requests.prefill.transports:
            transport.held = False
        for transfer in (*request.senders, *request.receivers):
            assert transfer.wait_pages_reusable(WAIT_S)
        assert [pool.touched_bytes(np.arange(32)) for pool in requests.decode.pools] > written, "the write went on"
    eventually("nothing is left of the room", lambda: nothing_left(requests))
    requests.run(1)


def test_no_byte_changes_after_the_decode_side_was_told_that_its_pages_are_free(pair: Callable[..., Requests]):
    requests = pair(Model(), Shape(tp=2), Shape(), workers=4, queues=2)
    requests.connect()
    pool = requests.decode.pools[0]
    for room in range(60):
        pool.wipe()
        request = requests.new(room, 12)
        requests.open_decode(request)
        requests.open_prefill(request)
        for start in range(0, 12, 2):
            requests.submit(request, start, start + 2, last=start == 10)
            if start == room % 12:
                request.receivers[0].abort()
        if request.receivers[0].wait_pages_reusable(WAIT_S):
            pool.wipe()
        request.wait_ended()
        assert pool.touched_bytes(np.arange(32)) == 0


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_abort_after_the_end_changes_nothing(pair: Callable[..., Requests], side: str):
    requests = pair()
    request = requests.run(1)
    transfer = (request.senders if side == "prefill" else request.receivers)[0]
    transfer.abort("too late")
    requests.run(1)
    assert (transfer.state, transfer.error) == (S.SUCCESS, None)
    assert nothing_left(requests)


def test_an_abort_of_an_earlier_use_of_the_number_does_not_touch_the_present_one(pair: Callable[..., Requests]):
    requests = pair()
    before = requests.run(1)
    request = requests.new(1)
    requests.open_decode(request)
    requests.open_prefill(request)
    before.receivers[0].abort("too late")
    before.senders[0].abort("too late")
    requests.submit(request)
    request.wait()
    requests.check(request)


def test_a_failed_room_takes_chunks_in_silence(pair: Callable[..., Requests]):
    requests = pair()
    request = requests.new(1)
    requests.open_prefill(request)
    sender = request.senders[0]
    sender.abort()
    eventually("it failed", lambda: sender.state is S.FAILED)
    sender.submit(request.source_pages[0][:2])
    sender.submit(request.source_pages[0][2:], last=True)
    with pytest.raises(ChunkError, match="room 1: a chunk after the last one"):
        sender.submit([0])


# ---- causes -----------------------------------------------------------------------------------------------------


class BrokenWireError(Exception):
    """What no transport should raise."""


@pytest.mark.parametrize("error", [TransportError("cable cut"), BrokenWireError("cable cut")])
@pytest.mark.parametrize("hook", ["on_post", "on_poll", "on_notify"])
def test_what_the_transport_raises_is_the_cause_on_both_sides(
    pair: Callable[..., Requests], hook: str, error: Exception
):
    requests = pair()
    transport = requests.prefill.transports[0]
    raised = 0

    def fail(_: str) -> None:
        nonlocal raised
        raised += 1
        if raised <= 2:
            raise error

    setattr(transport, hook, fail)
    request = requests.new(1)
    requests.open_decode(request)
    requests.open_prefill(request)
    requests.submit(request)
    request.wait_ended()
    sender, receiver = request.senders[0], request.receivers[0]
    assert sender.error is not None
    assert sender.error.__cause__ is error
    assert f"{type(error).__name__}: cable cut" in str(sender.error)
    assert isinstance(receiver.error, TransferFailedError)
    assert "prefill rank 0 failed with TransferFailedError" in str(receiver.error)
    assert "cable cut" in str(receiver.error)
    for transfer in (sender, receiver):
        assert transfer.wait_pages_reusable(WAIT_S)
    setattr(transport, hook, None)
    assert requests.prefill.endpoints[0].is_healthy
    requests.run(1)
    requests.run(2)
    assert transport.misused == []


def test_an_unexpected_error_while_polling_is_no_proof_that_the_write_has_ended(pair: Callable[..., Requests]):
    requests = pair()
    transport = requests.prefill.transports[0]
    is_broken = True

    def fail(_: str) -> None:
        if is_broken:
            raise BrokenWireError("who knows")

    transport.on_poll = fail
    request = requests.new(1)
    requests.open_decode(request)
    requests.open_prefill(request)
    requests.submit(request)
    request.wait_ended()
    assert not request.senders[0].pages_reusable
    assert not request.receivers[0].pages_reusable
    is_broken = False
    for transfer in (*request.senders, *request.receivers):
        assert transfer.wait_pages_reusable(WAIT_S)
    assert transport.misused == []


@pytest.mark.parametrize("path", ["direct", "staged"])
def test_what_a_failed_write_may_still_reach_is_nobodys_until_it_has_had_time_to_arrive(
    pair: Callable[..., Requests], path: str
):
    """The room fails at once. Neither its pages nor, on the staged path, the ring's span come back before."""
    requests = pair(quarantine_s=1.0, path=path)
    transport = requests.prefill.transports[0]
    transport.may_deliver_late = True
    requests.run(1)
    failed_at: list[float] = []

    def fail(_: str) -> None:
        failed_at.append(time.monotonic())
        raise TransportError("broken")

    transport.on_poll = fail
    request = requests.new(2)
    requests.open_decode(request)
    requests.open_prefill(request)
    requests.submit(request)
    request.wait_ended()
    transport.on_poll = None
    assert not request.senders[0].pages_reusable
    if path == "direct":
        assert not request.receivers[0].pages_reusable
    assert request.senders[0].wait_pages_reusable(WAIT_S)
    assert time.monotonic() - failed_at[0] >= 1.0
    # The decode rank may have been frozen all that time: it waits as long again, since it heard of it.
    decode = requests.decode.endpoints[0]
    if path == "direct":
        assert decode.status().quarantined_pages
    else:
        eventually("the span is released", lambda: decode.status().staging.used_bytes)
        eventually("it is given back", lambda: not decode.status().staging.used_bytes)
    assert request.receivers[0].wait_pages_reusable(WAIT_S)
    assert time.monotonic() - failed_at[0] >= 2.0
    assert decode.status().quarantined_pages == 0
    requests.run(3)
    assert transport.misused == []


def test_a_room_that_waits_for_a_failed_writes_span_is_not_given_up_for_that(pair: Callable[..., Requests]):
    """The ring is not free for longer than a write may take: that is not the receiver's fault, and passes."""
    requests = pair(
        quarantine_s=2.5, write_timeout_s=1.0, path="staged", staging_ring_mib=2**-8, staging_chunk_mib=2**-8
    )
    transport = requests.prefill.transports[0]
    requests.run(1)
    transport.may_deliver_late = True
    has_failed = False

    def fail(_: str) -> None:
        nonlocal has_failed
        if not has_failed:
            has_failed = True
            raise TransportError("broken")

    transport.on_poll = fail
    broken = requests.new(2)
    requests.open_decode(broken)
    requests.open_prefill(broken)
    requests.submit(broken)
    broken.wait_ended()
    failed_at = time.monotonic()
    requests.run(3)
    assert time.monotonic() - failed_at > 2.0, "it found room in the ring, and has not waited for the span"


def test_one_failing_write_spoils_only_its_room(pair: Callable[..., Requests]):
    requests = pair(workers=1)
    transport = requests.prefill.transports[0]
    all_requests = [requests.new(room, 1) for room in range(20)]
    for request in all_requests:
        requests.open_decode(request)
        requests.open_prefill(request)
    posted = 0

    def fail(_: str) -> None:
        nonlocal posted
        posted += 1
        if posted == 7:
            raise BrokenWireError("once")

    transport.on_poll = fail
    for request in all_requests:
        requests.submit(request)
    for request in all_requests:
        request.wait_ended()
    failed = [request.room for request in all_requests if request.senders[0].state is S.FAILED]
    assert len(failed) == 1
    assert [request.room for request in all_requests if request.receivers[0].state is S.FAILED] == failed
    assert transport.misused == []


def test_a_broken_inbox_fails_the_rooms_that_wait_for_it(pair: Callable[..., Requests]):
    requests = pair()
    transport = requests.decode.transports[0]
    request = requests.new(1)
    requests.open_decode(request)

    def fail() -> None:
        raise BrokenWireError("no inbox")

    eventually("it is connected", lambda: request.receivers[0].state is S.WAITING_FOR_INPUT)
    transport.on_take = fail
    with pytest.raises(TransferFailedError, match="BrokenWireError: no inbox") as caught:
        request.receivers[0].wait(WAIT_S)
    assert isinstance(caught.value.__cause__, BrokenWireError)
    transport.on_take = None
    assert requests.decode.endpoints[0].is_healthy
    requests.open_prefill(request)
    with pytest.raises(TransferAbortedError, match="BrokenWireError: no inbox"):
        request.senders[0].wait(WAIT_S)
    eventually("the abort is answered", lambda: nothing_left(requests))
    requests.run(1)


# ---- afterwards -------------------------------------------------------------------------------------------------


def test_a_number_is_free_as_soon_as_its_transfer_has_ended(pair: Callable[..., Requests], tier: Tier):
    requests = pair(Model(layers=1, heads=1), Shape(), Shape())
    source, destination = requests.prefill.endpoints[0], requests.decode.endpoints[0]
    pages = np.arange(2)
    for _ in range(tier.amount(quick=100, full=400, long=400)):
        receiver = destination.open(1, pages, engine=requests.prefill.name)
        sender = source.open(1)
        sender.submit(pages, last=True)
        receiver.wait(WAIT_S)
        again = destination.open(1, pages, engine=requests.prefill.name)
        sender.wait(WAIT_S)
        sender = source.open(1)
        sender.submit(pages, last=True)
        sender.wait(WAIT_S)
        again.wait(WAIT_S)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_number_is_free_in_the_very_moment_of_its_end(pair: Callable[..., Requests], side: str):
    requests = pair()
    endpoint = (requests.prefill if side == "prefill" else requests.decode).endpoints[0]
    request = requests.new(1)
    requests.open_decode(request)
    requests.open_prefill(request)
    again: list[object] = []

    def reopen(_: object) -> None:
        try:
            again.append(endpoint.open(1) if isinstance(endpoint, PrefillEndpoint) else endpoint.open(1, [0]))
        except RoomExistsError as error:
            again.append(error)

    probe((request.senders if side == "prefill" else request.receivers)[0]).ended.add_done_callback(reopen)
    requests.submit(request)
    request.wait()
    eventually("it was tried", lambda: again)
    assert isinstance(again[0], (Sender, Receiver))


@pytest.mark.parametrize("after", ["success", "failure"])
def test_the_decode_side_may_reuse_a_number_while_the_prefill_side_still_ends_it(
    pair: Callable[..., Requests], after: str
):
    requests = pair()
    transport = requests.prefill.transports[0]
    told, go_on = threading.Event(), threading.Event()

    def stall(_: str) -> None:
        told.set()
        go_on.wait(WAIT_S)

    transport.on_notified = stall
    first = requests.new(1)
    requests.open_decode(first)
    requests.open_prefill(first)
    requests.submit(first)
    first.receivers[0].wait(WAIT_S)
    assert told.wait(WAIT_S)
    second = requests.new(1)
    requests.open_decode(second)
    if after == "failure":
        second.receivers[0].abort("changed its mind")
        go_on.set()
        assert second.receivers[0].wait_pages_reusable(WAIT_S)
        second.receivers.clear()
        requests.open_decode(second)
    third = requests.new(2)  # travels behind it on the same connection
    requests.open_decode(third)
    eventually("the prefill side has read both", lambda: 2 in probe(requests.prefill.endpoints[0]).pending)
    go_on.set()
    first.senders[0].wait(WAIT_S)
    for request in (second, third):
        requests.open_prefill(request)
        requests.submit(request)
        request.wait()
        requests.check(request)
    eventually("nothing is left", lambda: nothing_left(requests))


def test_wishes_and_aborts_that_reach_a_room_at_its_very_end_are_kept_for_the_next(pair: Callable[..., Requests]):
    requests = pair()
    endpoint, name = requests.prefill.endpoints[0], requests.decode.transports[0].endpoint_name
    first = requests.new(1)
    requests.open_decode(first)
    requests.open_prefill(first)
    room = probe(endpoint).table.rooms[1]
    requests.submit(first)
    first.wait()
    attachment = probe(endpoint).ranks.attachment(name)
    assert attachment is not None
    for generation in (7, 8):
        nothing = GroupRequest("kv", held=0, start=0, stop=0, first_page=0, pages=PageNumbers())
        message = messages.OpenRoom(room=1, generation=generation, receivers=1, tokens=None, groups=(nothing,))
        room.post(OpenReceived(attachment, message))
        abort = messages.AbortRoom(room=1, generation=generation, reason="changed its mind")
        room.post(ReceiverMessage(name, abort))
        eventually("both are kept, in order", lambda *both: kept_pending(endpoint, 1) == list(both), message, abort)
    with pytest.raises(TransferAbortedError, match="changed its mind"):
        endpoint.open(1).wait(WAIT_S)


def test_a_room_that_is_over_leaves_nothing_behind(pair: Callable[..., Requests]):
    requests = pair(Model(), Shape(tp=2), Shape(tp=2))
    requests.connect()
    for room in range(20):
        request = requests.new(room)
        requests.open_decode(request)
        requests.open_prefill(request)
        if room % 3 == 1:
            request.receivers[0].abort()
        elif room % 3 == 2:
            request.senders[0].abort()
        else:
            requests.submit(request)
        request.wait_ended()
    eventually("nothing is left", lambda: nothing_left(requests))
    for endpoint in requests.prefill.endpoints:
        with pytest.raises(UnknownRoomError, match="room 3 is not open on prefill rank"):
            endpoint.sender(3)
    with pytest.raises(UnknownRoomError, match="room 3 is not open on decode rank 1"):
        requests.decode.endpoints[1].receiver(3)


def test_open_transfers_can_be_asked_for(pair: Callable[..., Requests]):
    requests = pair()
    request = requests.new(1)
    requests.open_decode(request)
    requests.open_prefill(request)
    assert requests.prefill.endpoints[0].sender(1) is request.senders[0]
    assert requests.decode.endpoints[0].receiver(1) is request.receivers[0]
    assert (requests.prefill.endpoints[0].open_rooms, requests.decode.endpoints[0].open_rooms) == (1, 1)


def test_a_room_cannot_be_opened_twice(pair: Callable[..., Requests]):
    requests = pair()
    request = requests.new(4)
    requests.open_decode(request)
    requests.open_prefill(request)
    with pytest.raises(RoomExistsError, match="room 4 is already open on prefill rank 0"):
        requests.open_prefill(request)
    with pytest.raises(RoomExistsError, match="room 4 is already open on decode rank 0"):
        requests.open_decode(request)
    requests.submit(request)
    request.wait()


# ---- the account of it ------------------------------------------------------------------------------------------


def test_the_account_of_a_room_adds_up(pair: Callable[..., Requests]):
    requests = pair()
    request = requests.new(1, 6)
    requests.open_decode(request)
    requests.open_prefill(request)
    eventually("the room is open", lambda: request.senders[0].state is S.WAITING_FOR_INPUT)
    requests.submit(request, 0, 2, last=False)
    eventually("the first has arrived", lambda: request.receivers[0].stats.chunks == 1)
    requests.submit(request, 2, 6)
    request.wait()
    sent, received = request.senders[0].stats, request.receivers[0].stats
    assert sent.ended_at is not None
    assert sent.last_submitted_at is not None
    assert received.first_arrival_at is not None
    assert received.ended_at is not None
    page_bytes = requests.prefill.pools[0].bytes_per_page
    assert [write.total_bytes for write in sent.writes] == [2 * page_bytes, 4 * page_bytes]
    assert (sent.total_bytes, received.chunks) == (6 * page_bytes, 2)
    assert sent.descriptors == sum(write.descriptors for write in sent.writes) > 0
    for write in sent.writes:
        assert write.receiver == requests.decode.transports[0].endpoint_name
        assert sent.opened_at <= write.submitted_at <= write.posted_at <= write.done_at <= sent.ended_at
        assert write.waiting_s >= 0
        assert write.latency_s >= write.waiting_s
    assert received.opened_at <= received.first_arrival_at <= received.ended_at


def test_chunks_that_come_before_the_receivers_are_not_said_to_have_waited_for_them(pair: Callable[..., Requests]):
    requests = pair()
    request = requests.new(1)
    requests.open_prefill(request)
    requests.submit(request)
    threading.Event().wait(0.2)
    came_at = probe(requests.prefill.endpoints[0]).now
    requests.open_decode(request)
    request.wait()
    (write,) = request.senders[0].stats.writes
    assert write.submitted_at >= came_at, "it counts from when the receivers came"


def test_a_repeated_notification_is_not_counted(pair: Callable[..., Requests]):
    requests = pair()
    deliver = requests.decode.transports[0].deliver

    def twice(sender: str, notification: bytes) -> None:
        deliver(sender, notification)
        deliver(sender, notification)

    requests.decode.transports[0].deliver = twice  # type: ignore[method-assign]
    request = requests.run(1, 6, cuts=(1, 2, 3))
    assert request.receivers[0].stats.chunks == 4


# ---- what comes long after -------------------------------------------------------------------------------------


def test_an_open_request_that_comes_again_when_its_number_stands_for_another_request_writes_nothing(
    pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch
):
    """A decode rank retransmits an open request when a connection broke; it may take as long as it likes to arrive."""
    requests = pair(bootstrap_timeout_s=1.5)
    requests.connect()
    endpoint, pool = requests.prefill.endpoints[0], requests.decode.pools[0]
    opens: list[tuple[str, bytes]] = []
    answers = probe(endpoint).driver.answers
    receive = answers.receive

    def note(identity: str, data: bytes, now: float) -> None:
        message = codec.decode_to_prefill(data)
        body = codec.decode_numbered_to_prefill(message.body) if isinstance(message, messages.Numbered) else None
        if isinstance(body, messages.OpenRoom):
            opens.append((identity, data))
        receive(identity, data, now)

    monkeypatch.setattr(answers, "receive", note)
    first = requests.new(1)
    requests.open_decode(first)
    requests.open_prefill(first)
    requests.submit(first)
    first.wait()
    ((identity, message),) = opens
    probe(endpoint).table.over.clear()  # as after so many other rooms: it is the channel that must notice
    pool.wipe_pages(first.destination_pages[0])
    second = requests.new(1)
    requests.open_prefill(second)
    requests.submit(second)
    answers.receive_one(identity, message, probe(endpoint).now)
    with pytest.raises(TransferTimeoutError, match="opened it within"):
        second.senders[0].wait(WAIT_S)
    assert pool.touched_bytes(first.destination_pages[0]) == 0
    requests.run(2)


def test_a_close_message_through_an_old_connection_ends_no_new_one(
    pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch
):
    """It is said when nothing needs the old one any more, and a link may have been begun by then."""
    requests = pair()
    requests.run(1)
    driver, endpoint = probe(requests.decode.endpoints[0]).driver, requests.prefill.endpoints[0]
    ((address, line),) = driver.rooms.links.connections.lines.items()
    (peer,) = probe(endpoint).peers
    said: list[field_types.Message] = []
    monkeypatch.setattr(line.connection, "send", lambda data: said.append(codec.decode_to_prefill(data)))
    closed = threading.Event()

    def close(now: float) -> None:
        driver.rooms.links.next_attempt()  # of a link that is still looked up
        driver.rooms.links.connections.hang_up(address)
        closed.set()

    driver.context.submit(close)
    assert closed.wait(WAIT_S)
    assert said == [messages.Detach(endpoint=peer.name, attempt=peer.attempt)]


def test_a_ring_that_a_living_rank_was_lost_with_is_given_up_for_a_new_one(pair: Callable[..., Requests]):
    """Nobody asks for that engine any more; what is left of the old ring would stay on both sides for ever."""
    requests = pair(path="staged", staging_ring_mib=1.0, staging_chunk_mib=0.25, heartbeat_interval_s=0.1)
    requests.run(1)
    driver = probe(requests.decode.endpoints[0]).driver
    (lost,) = driver.rooms.links.current
    driver.context.submit(lambda now: driver.rooms.links.fail(lost, PeerDisconnectedError("its queue was full"), now))
    eventually("it was lost", lambda: lost not in driver.rooms.links.current)
    eventually("it is connected anew", lambda: [link.state for link in driver.rooms.links.current] == [LinkState.READY])
    eventually("nobody is in doubt", lambda: len(driver.rooms.links.quarantine.lost) == 0)
    eventually("the old connections are closed", lambda: not driver.rooms.links.retired)


def test_a_lost_message_is_worth_a_line_if_somebody_may_miss_it(
    pair: Callable[..., Requests], caplog: pytest.LogCaptureFixture
):
    """A closed decode rank misses no answer to a heartbeat or close message; what has a number is sent again."""
    endpoint = pair().prefill.endpoints[0]
    name = endpoint.transport.endpoint_name
    probe(endpoint).driver.channel.send("whoever left", messages.Pong(endpoint=name, attached=True))
    probe(endpoint).driver.channel.send("whoever left", messages.Closed(endpoint=name))
    probe(endpoint).driver.channel.send(
        "whoever left", messages.RoomFailed(room=1, generation=1, writer=0, error="", reason="")
    )
    probe(endpoint).driver.channel.send("whoever left", messages.Drained(endpoint=name, room=1, generation=1, writer=0))
    eventually("the last was sent", lambda: "was lost" in caplog.text)
    assert [record.getMessage().split()[0] for record in caplog.records if "was lost" in record.message] == ["Drained"]


# ---- being called back ------------------------------------------------------------------------------------------


def test_every_change_of_either_side_calls_back_and_a_callback_that_raises_changes_nothing(
    pair: Callable[..., Requests], caplog: pytest.LogCaptureFixture
):
    requests = pair()
    request = requests.new(1, 4)
    requests.open_prefill(request)
    requests.open_decode(request)
    seen: dict[str, list[tuple[TransferState, bool]]] = {"sender": [], "receiver": []}

    def failing() -> None:
        raise ValueError("a callback's own mistake")

    def follow(name: str, transfer: Sender | Receiver) -> None:
        transfer.add_change_callback(failing)
        transfer.add_change_callback(lambda: seen[name].append((transfer.state, transfer.pages_reusable)))

    follow("sender", request.senders[0])
    follow("receiver", request.receivers[0])
    requests.submit(request)
    request.wait()
    for name in seen:
        eventually("the end is reported", lambda name: (S.SUCCESS, True) in seen[name], name)
    eventually("it is logged", lambda: "room 1: the change callback" in caplog.text)


class AtOnce(Callbacks):
    """Calls back where a change happens."""

    def __init__(self) -> None:
        super().__init__(SystemPlatform(), "nobody")

    def start(self) -> None:
        pass

    def post(self, work: Callable[[], None]) -> None:
        work()


def test_pages_that_come_back_after_a_failure_call_back():
    transfer = Transfer(1, lambda reason: None, AtOnce())
    seen: list[tuple[TransferState, bool]] = []
    transfer.add_change_callback(lambda: seen.append((transfer.state, transfer.pages_reusable)))
    error = TransferFailedError("it failed")
    for are_reusable in (False, False, True, True):
        probe(transfer).update(S.FAILED, error, pages_reusable=are_reusable)
    assert seen == [(S.FAILED, False), (S.FAILED, True)], "once for each change"
