"""Deadlines that pass, writes that hang, and messages that nobody should have sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from tests.support.caches import Model, Shape
from tests.support.engines import WAIT_S, Engines, Requests
from tests.support.waiting import eventually

from kvferry import TransferState
from kvferry.endpoint.prefill.control_channel import ControlChannel
from kvferry.errors import (
    IncompatiblePeerError,
    PeerDisconnectedError,
    TransferAbortedError,
    TransferFailedError,
    TransferTimeoutError,
    TransportError,
)
from kvferry.protocol.wire import codec, field_types, messages
from kvferry.testing.probe import probe

S = TransferState


def decode_name(requests: Requests, rank: int = 0) -> str:
    return requests.decode.transports[rank].endpoint_name


def generation(requests: Requests, room: int) -> int:
    return probe(requests.decode.endpoints[0]).rooms.open[room].generation


# ---- deadlines --------------------------------------------------------------------------------------------------


def test_a_room_that_no_decode_rank_opens_ends(pair: Callable[..., Requests]):
    requests = pair(bootstrap_timeout_s=1)
    requests.connect()
    request = requests.new(1)
    requests.open_prefill(request)
    requests.submit(request)
    with pytest.raises(TransferTimeoutError, match=r"0 of an unknown number of decode ranks .* within 1 s"):
        request.senders[0].wait(WAIT_S)
    assert "KVFERRY_BOOTSTRAP_TIMEOUT_S" in str(request.senders[0].error)
    assert request.senders[0].pages_reusable
    requests.open_decode(request)
    with pytest.raises(TransferFailedError, match="prefill rank 0 failed with TransferTimeoutError"):
        request.receivers[0].wait(WAIT_S)


def test_a_room_that_only_some_decode_ranks_open_ends_for_all(engines: Callable[..., Engines]):
    both = engines(bootstrap_timeout_s=1.5)
    prefill, decode = both.prefill(Model()), both.decode(Model(), Shape(tp=2))
    Requests(prefill, decode).connect()
    first = decode.endpoints[0].open(1, np.arange(3), engine=prefill.name)
    sender = prefill.endpoints[0].open(1)
    sender.submit(np.arange(3), last=True)
    with pytest.raises(TransferTimeoutError, match="1 of 2 decode ranks opened it within"):
        sender.wait(WAIT_S)
    with pytest.raises(TransferFailedError, match="1 of 2 decode ranks"):
        first.wait(WAIT_S)
    late = decode.endpoints[1].open(1, np.arange(3), engine=prefill.name)
    with pytest.raises(TransferFailedError, match="1 of 2 decode ranks"):
        late.wait(WAIT_S)


def test_a_room_that_the_prefill_side_never_opens_ends(pair: Callable[..., Requests]):
    requests = pair(Model(), Shape(tp=2), Shape(), bootstrap_timeout_s=0.3)
    requests.connect()
    request = requests.new(1)
    requests.open_decode(request)
    with pytest.raises(TransferFailedError, match=r"prefill rank . was not asked to send room 1 within 0.3 s"):
        request.receivers[0].wait(WAIT_S)
    assert "KVFERRY_BOOTSTRAP_TIMEOUT_S" in str(request.receivers[0].error)
    assert request.receivers[0].wait_pages_reusable(WAIT_S)
    for endpoint in requests.prefill.endpoints:
        eventually("nothing is kept any more", lambda endpoint: len(probe(endpoint).pending) == 0, endpoint)


def test_a_caller_who_never_submits_ends_the_room_on_both_sides(pair: Callable[..., Requests]):
    requests = pair(waiting_timeout_s=1.0)
    request = requests.new(1)
    requests.open_decode(request)
    requests.open_prefill(request)
    requests.submit(request, 0, 2, last=False)
    request.wait_ended()
    whys = [str(transfer.error) for transfer in (*request.senders, *request.receivers)]
    assert any("no chunk was submitted for 1 s" in why or "nothing came for 1 s" in why for why in whys)
    assert all("KVFERRY_WAITING_TIMEOUT_S" in why for why in whys)
    for transfer in (*request.senders, *request.receivers):
        assert transfer.wait_pages_reusable(WAIT_S)


def test_a_write_that_hangs_fails_the_room_but_keeps_the_pages(pair: Callable[..., Requests]):
    requests = pair(write_timeout_s=0.3)
    transport = requests.prefill.transports[0]
    request = requests.begin_held()
    with pytest.raises(TransferTimeoutError, match=r"did not end within 0.3 s \(KVFERRY_WRITE_TIMEOUT_S\)"):
        request.senders[0].wait(WAIT_S)
    with pytest.raises(TransferFailedError, match="KVFERRY_WRITE_TIMEOUT_S"):
        request.receivers[0].wait(WAIT_S)
    assert not request.senders[0].wait_pages_reusable(0.3)
    assert not request.receivers[0].pages_reusable
    assert requests.prefill.endpoints[0].open_rooms == requests.decode.endpoints[0].open_rooms == 1
    transport.held = False
    for transfer in (*request.senders, *request.receivers):
        assert transfer.wait_pages_reusable(WAIT_S)
        assert transfer.state is S.FAILED
    requests.run(1)


def test_the_deadline_of_a_write_counts_for_each_write(pair: Callable[..., Requests]):
    requests = pair(write_timeout_s=2.0)
    transport = requests.prefill.transports[0]
    request = requests.new(1, 6)
    requests.open_decode(request)
    requests.open_prefill(request)
    for start in range(0, 6, 2):
        transport.held = True
        requests.submit(request, start, start + 2, last=start == 4)
        eventually("the write is on its way", lambda: transport.in_flight == 1)
        threading.Event().wait(0.8)
        transport.held = False
        eventually("it has arrived", lambda: transport.in_flight == 0)
    request.wait()
    requests.check(request)


# ---- writes that hang -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3])
def test_a_write_that_hangs_holds_up_nobody_else(engines: Callable[..., Engines], workers: int):
    both = engines(workers=workers, queues=1)
    prefill = both.prefill(Model())
    slow, fast = (Requests(prefill, both.decode(Model())) for _ in range(2))
    stuck = slow.new(1)
    slow.open_decode(stuck)
    slow.open_prefill(stuck)
    hung = threading.Event()
    transport = prefill.transports[0]
    first: list[Any] = []

    def hold_first(transfer: Any) -> Any:
        if not first:
            first.append(transfer)
        return None if transfer is first[0] and not hung.is_set() else poll(transfer)

    poll = transport.poll
    transport.poll = hold_first  # type: ignore[method-assign]
    slow.submit(stuck)
    eventually("it is on its way", lambda: first)
    for room in range(2, 12):
        fast.run(room)
        slow.run(100 + room)
    assert stuck.senders[0].state is S.TRANSFERRING
    hung.set()
    stuck.wait()


def test_a_room_waits_for_none_of_its_writes_before_the_next(pair: Callable[..., Requests]):
    requests = pair()
    transport = requests.prefill.transports[0]
    request = requests.new(1, 6)
    requests.open_decode(request)
    requests.open_prefill(request)
    transport.held = True
    for start in range(6):
        requests.let_leave(request, start)
        requests.submit(request, start, start + 1, last=start == 5)
    eventually("all of them are on their way together", lambda: transport.in_flight == 6)
    assert request.receivers[0].stats.chunks == 0
    transport.held = False
    request.wait()
    requests.check(request)


# ---- messages that nobody should have sent ----------------------------------------------------------------------


def opened(requests: Requests, room: int = 1) -> Any:
    """A room that waits for input."""
    request = requests.new(room, 2)
    requests.open_decode(request)
    requests.open_prefill(request)
    eventually("the room is open", lambda: request.senders[0].state is S.WAITING_FOR_INPUT)
    eventually("on both sides", lambda: request.receivers[0].state is S.WAITING_FOR_INPUT)
    return request


def forged_notifications(room: int, generation: int, writer: int) -> list[bytes]:
    arrived = messages.ChunkArrived(room=room, generation=generation, writer=writer, sequence=0)
    finished = messages.WriterFinished(room=room, generation=generation, writer=writer, chunks=1, aux=b"forged")
    return [codec.encode(arrived), codec.encode(finished)]


@pytest.mark.parametrize("what", ["generation", "room", "writer", "stranger", "garbage", "version", "control message"])
def test_a_notification_that_is_not_the_rooms_never_counts(pair: Callable[..., Requests], what: str):
    requests = pair(Model(), Shape(tp=2), Shape())
    request = opened(requests)
    target, now = requests.decode.transports[0], generation(requests, 1)
    genuine = [transport.endpoint_name for transport in requests.prefill.transports]
    forged: list[tuple[str, bytes]] = []
    for writer in (0, 1):
        sender, other = genuine[writer], genuine[1 - writer]
        good = forged_notifications(1, now, writer)
        forged += {
            "generation": [(sender, each) for each in forged_notifications(1, now ^ 1, writer)],
            "room": [(sender, each) for each in forged_notifications(2, now, writer)],
            "writer": [(other, each) for each in good],
            "stranger": [("somebody", each) for each in good],
            "garbage": [(sender, b""), (sender, b"\xff" * 40), (sender, good[0][:-3]), (sender, good[0][6:])],
            "version": [(sender, good[0][:4] + b"\x09\x09" + good[0][6:])],
            "control message": [
                (sender, codec.encode(messages.Drained(endpoint="x", room=1, generation=now, writer=writer)))
            ],
        }[what]
    for sender, data in forged:
        target.deliver(sender, data)
    eventually("they were taken", lambda: not probe(target).untaken)
    assert request.receivers[0].state is S.WAITING_FOR_INPUT
    requests.submit(request, aux=b"genuine")
    request.wait()
    requests.check(request)
    assert request.receivers[0].aux == b"genuine"
    assert requests.decode.endpoints[0].is_healthy


def test_late_notifications_of_an_earlier_use_of_the_number_never_count(pair: Callable[..., Requests]):
    requests = pair()
    target = requests.decode.transports[0]
    stolen: list[tuple[str, bytes]] = []
    deliver = target.deliver
    target.deliver = lambda sender, data: (stolen.append((sender, data)), deliver(sender, data))  # type: ignore[assignment, method-assign, func-returns-value]
    requests.run(1, 2)
    target.deliver = deliver  # type: ignore[method-assign]
    assert len(stolen) == 2
    request = opened(requests)
    for sender, data in stolen * 3:
        target.deliver(sender, data)
    eventually("they were taken", lambda: not probe(target).untaken)
    assert request.receivers[0].state is S.WAITING_FOR_INPUT
    requests.submit(request)
    request.wait()
    requests.check(request)


@pytest.mark.parametrize("kind", ["failed", "drained"])
@pytest.mark.parametrize("what", ["generation", "room", "writer"])
def test_a_prefill_rank_speaks_only_for_itself_and_for_the_present(pair: Callable[..., Requests], what: str, kind: str):
    requests = pair(Model(), Shape(tp=2), Shape())
    for transport in requests.prefill.transports:
        transport.held = True
    request = opened(requests)
    requests.submit(request, 0, 1, last=False)
    eventually("writes are on their way", lambda: all(each.in_flight for each in requests.prefill.transports))
    now = generation(requests, 1)
    if kind == "drained":
        request.receivers[0].abort()
    room = {"room": 2}.get(what, 1)
    forged_generation = now ^ 1 if what == "generation" else now
    for rank, endpoint in enumerate(requests.prefill.endpoints):
        writer = 1 - rank if what == "writer" else rank
        if kind == "failed":
            probe(endpoint).driver.channel.send(
                decode_name(requests),
                messages.RoomFailed(room=room, generation=forged_generation, writer=writer, error="E", reason="forged"),
            )
        else:
            probe(endpoint).driver.channel.send(
                decode_name(requests),
                messages.Drained(
                    endpoint=endpoint.transport.endpoint_name, room=room, generation=forged_generation, writer=writer
                ),
            )
    threading.Event().wait(0.1)
    assert not request.receivers[0].pages_reusable
    is_over = request.receivers[0].state.is_final
    for transport in requests.prefill.transports:
        transport.held = False
    if kind == "failed":
        assert not is_over
        requests.submit(request, 1, 2)
        request.wait()
        requests.check(request)


def test_a_rank_that_closes_after_a_write_failed_is_believed_once_what_was_sent_has_had_time(
    pair: Callable[..., Requests],
):
    requests = pair(quarantine_s=0.8)
    (transport,), (endpoint,) = requests.prefill.transports, requests.prefill.endpoints
    transport.held = True
    request = opened(requests)
    requests.submit(request, 0, 1, last=False)
    eventually("a write is on its way", lambda: transport.in_flight)
    request.receivers[0].abort()
    eventually("it is aborted", lambda: request.receivers[0].state.is_final)
    told_at = time.monotonic()
    for _ in range(2):
        probe(endpoint).driver.channel.send(
            decode_name(requests), messages.Closed(endpoint=transport.endpoint_name, after_failure=True)
        )
    assert request.receivers[0].wait_pages_reusable(WAIT_S)
    assert time.monotonic() - told_at >= 0.6, "less by what counts at once"
    transport.held = False


def test_a_rank_to_which_a_write_failed_connects_anew_once_what_was_sent_has_had_time(
    pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch
):
    """Where the decode rank was frozen it may have that in its sockets yet, and its staging memory is used again."""
    requests = pair(quarantine_s=0.8)
    endpoint, driver = requests.prefill.endpoints[0], probe(requests.decode.endpoints[0]).driver
    probe(endpoint).context.broken_off.add(decode_name(requests))
    told_at = time.monotonic()
    requests.connect()
    assert time.monotonic() - told_at >= 0.6, "less by what counts at once"
    requests.run(1)

    waits: list[object] = []
    monkeypatch.setattr(driver.context.settling, "add", waits.append)
    probe(endpoint).driver.channel.send(
        decode_name(requests), messages.Attached(endpoint="another", attempt=1, only_staged=False, last_failure=9)
    )
    probe(endpoint).driver.dismissals.give_up(decode_name(requests), PeerDisconnectedError("planted"))
    eventually("the decode rank has heard of it", lambda: not driver.rooms.links.current)
    requests.run(2)
    assert not waits, "it has waited for that write"


def test_a_write_that_fails_while_two_ranks_measure_is_waited_for_like_any_other(pair: Callable[..., Requests]):
    requests = pair(path="auto", staging_ring_mib=1.0, staging_chunk_mib=0.25, quarantine_s=0.8)
    transport = requests.prefill.transports[0]

    def breaks(peer: str) -> None:
        raise TransportError(f"the connection to {peer} was reset")

    transport.on_post = breaks
    with pytest.raises(TransportError, match="was reset"):
        requests.connect()
    transport.on_post = None
    failed_at = time.monotonic()
    requests.connect()
    assert time.monotonic() - failed_at >= 0.6, "less by what counts at once"
    requests.run(1)


def numbered(message: messages.NumberedToPrefill) -> bytes:
    return codec.encode(messages.Numbered(epoch=1, number=1, body=codec.encode_body(message)))


def garbage() -> list[bytes]:
    header = codec.encode(messages.Ping())[:6]
    deep = b"\x91" * 5000
    return [
        b"",
        b"\0" * 100,
        b"GET / HTTP/1.1\r\n\r\n",
        header,
        header + b"\xc1",
        header + deep,
        header + msgspec.msgpack.encode({"type": "Nonsense"}),
        header + msgspec.msgpack.encode({"type": "Ping", "endpoint": "x"}).replace(b"\xa1x", b"\xa1\xff"),
        header + msgspec.msgpack.encode({"type": "OpenRoom", "room": -1, "generation": 0}),
        b"kvfy\x63\x00" + msgspec.msgpack.encode({"type": "Ping", "endpoint": "x"}),
        numbered(messages.OpenRoom(room=1, generation=1, receivers=0, tokens=-1, groups=())),
        numbered(messages.OpenRoom(room=2**64 - 1, generation=1, receivers=1, tokens=None, groups=())),
        codec.encode(messages.AbortRoom(room=1, generation=1, reason="no")),
        codec.encode(messages.Detach(endpoint="x")),
        codec.encode(messages.Drained(endpoint="x", room=1, generation=1, writer=0)),
    ]


def test_whatever_comes_to_the_control_port_hurts_nobody(pair: Callable[..., Requests]):
    requests = pair()
    request = opened(requests)
    context: zmq.Context[Any] = zmq.Context()
    identities = [b"stranger", b"\xff\xfe", b"x" * 255]
    try:
        strangers = []
        for identity in identities:
            stranger = context.socket(zmq.DEALER)
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.setsockopt(zmq.IDENTITY, identity)
            stranger.connect(requests.prefill.endpoints[0].control_address)
            strangers.append(stranger)
            for data in garbage():
                stranger.send(data)
                stranger.send_multipart([data, data, data])
            stranger.send(codec.encode(messages.Ping()))
        for stranger, identity in zip(strangers, identities, strict=True):
            answers: list[Any] = []
            while stranger.poll(200 if answers else 3000):
                answers.append(codec.decode_to_decode(stranger.recv()))
            if identity != b"\xff\xfe":  # whose name cannot be answered
                assert messages.Pong(endpoint=requests.prefill.transports[0].endpoint_name, attached=False) in answers
    finally:
        context.destroy(0)
    requests.submit(request)
    request.wait()
    requests.check(request)
    assert requests.prefill.endpoints[0].is_healthy
    assert len(probe(requests.prefill.endpoints[0]).peers) == 1


def test_an_unexpected_error_over_one_message_costs_no_other(
    pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch
):
    requests = pair()
    requests.connect()
    endpoint = requests.prefill.endpoints[0]
    open_room = probe(endpoint).rooms.take_open

    def trip(receiver: str, message: messages.OpenRoom) -> None:
        if message.room == 1:
            raise ZeroDivisionError
        open_room(receiver, message)

    monkeypatch.setattr(probe(endpoint).rooms, "take_open", trip)
    both = [requests.new(room) for room in (1, 2)]
    for request in both:
        requests.open_decode(request)
        requests.open_prefill(request)
        requests.submit(request)
    both[1].wait()
    assert endpoint.is_healthy


def test_a_stranger_cannot_end_the_connection_of_another(pair: Callable[..., Requests]):
    requests = pair()
    requests.connect()
    identity = probe(requests.decode.endpoints[0]).context.identity
    attach = messages.Attach(
        endpoint="stranger",
        attempt=1,
        engine=identity.engine,
        coordinates=identity.coordinates,
        layout=identity.layout,
        pieces=(),
        transport=identity.transport,
        transport_metadata=requests.decode.transports[0].metadata(),
    )
    context: zmq.Context[Any] = zmq.Context()
    try:
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.IDENTITY, b"stranger")
        stranger.connect(requests.prefill.endpoints[0].control_address)
        stranger.send(codec.encode(attach))
        assert stranger.poll(3000)
        answer = codec.decode_to_decode(stranger.recv())
        assert isinstance(answer, messages.Refused)
        assert "sent the transport metadata of" in answer.reason
        stranger.send(codec.encode(msgspec.structs.replace(attach, endpoint=identity.endpoint)))
        assert stranger.poll(3000)
        answer = codec.decode_to_decode(stranger.recv())
        assert isinstance(answer, messages.Refused)
        assert "speaks through the connection of 'stranger'" in answer.reason
    finally:
        context.destroy(0)
    requests.run(1)


def test_an_abort_is_repeated_until_it_is_answered(engines: Callable[..., Engines], monkeypatch: pytest.MonkeyPatch):
    send = ControlChannel.send
    lost: list[field_types.Message] = []

    def lose(channel: ControlChannel, receiver: str, message: field_types.Message) -> None:
        if isinstance(message, messages.Drained) and not lost:
            lost.append(message)
        else:
            send(channel, receiver, message)

    monkeypatch.setattr(ControlChannel, "send", lose)
    both = engines(heartbeat_interval_s=0.05, peer_timeout_s=5)
    requests = Requests(both.prefill(Model()), both.decode(Model()))
    request = opened(requests)
    request.receivers[0].abort("enough")
    assert request.receivers[0].wait_pages_reusable(WAIT_S)
    assert lost
    with pytest.raises(TransferAbortedError, match="enough"):
        request.senders[0].wait(WAIT_S)


def test_too_many_rooms_in_advance_are_refused(engines: Callable[..., Engines]):
    both = engines()
    prefill = both.prefill(Model(), max_rooms=3)  # six rooms may wait, of which a decode rank has three
    requests = Requests(prefill, both.decode(Model()))
    requests.connect()
    all_requests = [requests.new(room, 1) for room in range(5)]
    for request in all_requests:
        requests.open_decode(request)
    eventually("two are refused", lambda: sum(each.receivers[0].state is S.FAILED for each in all_requests) == 2)
    for request in all_requests[3:]:
        error = str(request.receivers[0].error)
        assert "3 rooms wait for the prefill side already" in error
        assert "KVFERRY_MAX_ROOMS of the prefill side" in error
    for request in all_requests[:3]:
        requests.open_prefill(request)
        requests.submit(request)
        request.wait()


def test_too_many_page_numbers_in_advance_are_refused(pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvferry.endpoint.prefill.rooms.MOST_EARLY_PAGE_BYTES", 100)
    requests = pair()
    requests.connect()
    all_requests = [requests.new(room, 6) for room in range(4)]  # in no order, so that a room takes 48 bytes
    for request in all_requests:
        requests.open_decode(request)
    eventually("two are refused", lambda: sum(each.receivers[0].state is S.FAILED for each in all_requests) == 2)
    for request in all_requests[2:]:
        error = str(request.receivers[0].error)
        assert "have 96 bytes of page numbers already" in error
        assert "more than 100: try again when some have been opened" in error
    for request in all_requests[:2]:
        requests.open_prefill(request)
        requests.submit(request)
        request.wait()


def test_rooms_that_failed_alone_are_forgotten_in_time(pair: Callable[..., Requests]):
    requests = pair(bootstrap_timeout_s=2.0, max_rooms=5)
    endpoint = requests.prefill.endpoints[0]
    for room in range(20):
        endpoint.open(room).abort("never mind")
        eventually("it is over", lambda: endpoint.open_rooms == 0)
    assert len(probe(endpoint).table.failed_alone) == 5, "no more than max_rooms are kept"
    keeper = endpoint.open(99)
    eventually("they are forgotten", lambda: not probe(endpoint).table.failed_alone)
    keeper.abort()


def test_pages_are_counted_alike_on_both_sides_or_the_room_fails(pair: Callable[..., Requests]):
    requests = pair(Model(), Shape(tp=2), Shape())
    for room, (sent, awaited) in enumerate([(4, 3), (4, 5), (4, 0), (0, 1)]):
        receiver = requests.decode.endpoints[0].open(room, np.arange(awaited), engine=requests.prefill.name)
        senders = [endpoint.open(room) for endpoint in requests.prefill.endpoints]
        for sender in senders:
            sender.submit(np.arange(sent), last=True)
        with pytest.raises(TransferFailedError) as caught:
            receiver.wait(WAIT_S)
        assert f"{sent} pages of 4 tokens of the request where the receiver has room for {awaited}" in str(caught.value)
        assert "failed with PageError" in str(caught.value)
        assert receiver.wait_pages_reusable(WAIT_S)


def test_two_engines_that_use_one_number_at_a_time_are_told(engines: Callable[..., Engines]):
    both = engines()
    prefill, pages = both.prefill(Model()), np.arange(2)
    one, other = both.decode(Model()).endpoints[0], both.decode(Model(), Shape(tp=2)).endpoints[0]
    sender = prefill.endpoints[0].open(1)
    first = one.open(1, pages, engine=prefill.name)
    eventually("the first has it", lambda: sender.state is S.WAITING_FOR_INPUT)
    second = other.open(1, pages, engine=prefill.name)
    for receiver in (first, second):
        with pytest.raises(
            TransferFailedError, match=r"failed with IncompatiblePeerError: .* use the same room number?"
        ):
            receiver.wait(WAIT_S)
    with pytest.raises(IncompatiblePeerError, match="use the same room number"):
        sender.wait(WAIT_S)


def test_a_connection_for_bytes_that_broke_is_made_anew_although_both_ranks_live(pair: Callable[..., Requests]):
    """No transport mends it by itself, and the ranks go on hearing of one another."""
    requests = pair(heartbeat_interval_s=0.1)
    requests.run(1)
    transport = requests.prefill.transports[0]
    connect = transport.connect

    def breaks(peer: str) -> None:
        raise PeerDisconnectedError(f"the connection to {peer} was reset")

    def connects(metadata: bytes) -> str:
        transport.on_post = None
        return connect(metadata)

    transport.on_post = breaks
    transport.connect = connects  # type: ignore[method-assign]
    broken = requests.new(2)
    requests.open_decode(broken)
    requests.open_prefill(broken)
    requests.submit(broken)
    broken.wait_ended()
    for transfer in (*broken.senders, *broken.receivers):
        assert isinstance(transfer.error, TransferFailedError)
        assert transfer.wait_pages_reusable(WAIT_S)
    driver = probe(requests.decode.endpoints[0]).driver
    eventually("the decode rank has heard of it", lambda: not driver.rooms.links.current)
    requests.run(3)
    assert not transport.misused
