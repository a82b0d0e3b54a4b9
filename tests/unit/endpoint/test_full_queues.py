"""What is too much is refused by name, and loses nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.support.caches import Shape
from tests.support.engines import Requests
from tests.support.waiting import eventually

from kvferry.control.ends import ZmqConnection
from kvferry.errors import MessageError, PeerDisconnectedError, QueueFullError, TransferFailedError
from kvferry.protocol.links.link import Link
from kvferry.protocol.links.rank_link import Send
from kvferry.protocol.wire import codec, messages


def test_more_rooms_than_may_be_are_refused_on_either_side(pair: Callable[..., Requests]):
    requests = pair(max_rooms=1)
    first = requests.new(1)
    requests.open_prefill(first)
    requests.open_decode(first)
    with pytest.raises(QueueFullError, match=r"room 2: 1 rooms are open on prefill rank 0 .*KVFERRY_MAX_ROOMS"):
        requests.prefill.endpoints[0].open(2)
    with pytest.raises(QueueFullError, match=r"room 2: 1 rooms are open on decode rank 0 .*KVFERRY_MAX_ROOMS"):
        requests.decode.endpoints[0].open(2, np.arange(2), engine=requests.prefill.name)
    requests.submit(first)
    first.wait()
    requests.check(first)
    eventually("both have forgotten it", lambda: requests.decode.endpoints[0].open_rooms == 0)
    eventually("both have forgotten it", lambda: requests.prefill.endpoints[0].open_rooms == 0)
    requests.run(2)


def test_more_chunks_than_may_wait_are_refused_and_the_room_goes_on(
    pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("kvferry.endpoint.transfer.MOST_WAITING_CHUNKS", 3)
    requests = pair()
    request = requests.new(1, 6)
    requests.open_prefill(request)  # nobody asks for them yet, so that they wait
    pages = request.source_pages[0]
    sender = request.senders[0]
    for page in range(3):
        sender.submit(pages[page : page + 1])
    with pytest.raises(QueueFullError, match=r"room 1: 3 chunks wait to be written already: submit this one when"):
        sender.submit(pages[3:4])
    requests.open_decode(request)
    eventually("the chunks arrived, in one write", lambda: request.receivers[0].stats.chunks == 1)
    sender.submit(pages[3:], last=True, aux=b"token")
    request.wait()
    requests.check(request)


def test_who_was_refused_is_called_back_when_there_is_room(
    pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("kvferry.endpoint.transfer.MOST_WAITING_CHUNKS", 2)
    requests = pair()
    request = requests.new(1, 6)
    requests.open_prefill(request)
    sender, pages = request.senders[0], request.source_pages[0]
    left, refusals = list(range(6)), 0

    def submit() -> None:
        nonlocal refusals
        try:
            while left:
                sender.submit(
                    pages[left[0] : left[0] + 1], last=len(left) == 1, aux=b"token" if len(left) == 1 else None
                )
                del left[0]
        except QueueFullError:
            refusals += 1

    submit()
    assert (left, refusals) == ([2, 3, 4, 5], 1)
    sender.add_change_callback(submit)
    requests.open_decode(request)
    eventually("all were taken", lambda: not left)
    request.wait()
    requests.check(request)


def test_where_one_rank_cannot_be_asked_no_other_is_asked_after_it_was_told_to_stop(
    pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch
):
    requests = pair(prefill=Shape(tp=2))
    requests.connect()
    request = requests.new(1)
    asked: list[int] = []
    told: list[int] = []
    right, right_tells = Link.send, Link.send_unnumbered

    def send(link: Link, rank: int, message: messages.NumberedToPrefill) -> list[Send]:
        if rank == 0:
            raise MessageError("OpenRoom is too large")
        asked.append(rank)
        return right(link, rank, message)

    def tell(link: Link, rank: int, message: messages.AbortRoom) -> list[Send]:
        told.append(rank)
        return right_tells(link, rank, message)

    monkeypatch.setattr(Link, "send", send)
    monkeypatch.setattr(Link, "send_unnumbered", tell)
    requests.open_decode(request)
    receiver = request.receivers[0]
    with pytest.raises(TransferFailedError, match="MessageError: OpenRoom is too large"):
        receiver.wait(10)
    assert receiver.wait_pages_reusable(10)
    eventually("it is over", lambda: requests.decode.endpoints[0].open_rooms == 0)
    assert 1 in told
    assert not asked


def test_what_finds_a_full_queue_is_sent_again_with_a_heartbeat(
    pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch
):
    requests = pair(heartbeat_interval_s=0.1)
    requests.connect()
    request = requests.new(1)
    lost: list[bytes] = []
    right = ZmqConnection.send

    def send(connection: ZmqConnection, data: bytes) -> None:
        if isinstance(codec.decode_to_prefill(data), messages.Numbered) and not lost:
            lost.append(data)
            raise PeerDisconnectedError("its queue is full")
        right(connection, data)

    monkeypatch.setattr(ZmqConnection, "send", send)
    requests.open_prefill(request)
    requests.open_decode(request)
    requests.submit(request)
    request.wait()
    requests.check(request)
    assert lost
