"""Chunks whose pages are still being computed when they are handed in: read only once a signal says that they are."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from tests.support.caches import Model
from tests.support.engines import WAIT_S, Engines, Request, Requests
from tests.support.waiting import eventually

from kvferry import TransferState
from kvferry.endpoint.runtime.callers_code import Ready
from kvferry.errors import QueueFullError, TransferFailedError, TransferTimeoutError, UsageError
from kvferry.testing import KnownContents


class DeviceEvent:
    """As torch's events of a device are."""

    def __init__(self, flag: threading.Event) -> None:
        self._flag = flag

    def query(self) -> bool:
        return self._flag.is_set()


KINDS: dict[str, Callable[[threading.Event], Ready]] = {
    "an event of a device": DeviceEvent,
    "a threading.Event": lambda flag: flag,
    "a callable": lambda flag: flag.is_set,
}


def opened(requests: Requests, room: int, pages: int = 6) -> Request:
    """A request that both sides have opened, and of which nothing is computed yet."""
    request = requests.new(room, pages)
    requests.prefill.pools[0].wipe()
    requests.open_decode(request)
    requests.open_prefill(request)
    eventually("both sides have opened it", lambda: request.senders[0].state is TransferState.WAITING_FOR_INPUT)
    return request


def compute(requests: Requests, request: Request) -> None:
    requests.prefill.pools[0].fill(KnownContents(request.room), request.source[0], tokens=request.tokens)


def waits_for(requests: Requests) -> str:
    (room,) = requests.prefill.endpoints[0].status().rooms
    return room.waits_for


@pytest.mark.parametrize("path", ["direct", "staged"])
@pytest.mark.parametrize("kind", KINDS)
def test_pages_are_read_once_the_signal_says_so(pair: Callable[..., Requests], kind: str, path: str):
    requests, flag = pair(path=path), threading.Event()
    request = opened(requests, 1)
    request.senders[0].submit(request.source_pages[0], last=True, aux=b"token", ready=KINDS[kind](flag))
    eventually("it is said", lambda: waits_for(requests) == "the caller's signal that chunk 0 is ready")
    assert not request.senders[0].is_at_rest
    compute(requests, request)
    flag.set()
    request.wait(WAIT_S)
    requests.check(request)
    assert request.receivers[0].aux == b"token"


def test_chunks_behind_one_that_is_not_ready_wait_for_it_and_keep_their_order(pair: Callable[..., Requests]):
    requests, flags = pair(), [threading.Event() for _ in range(3)]
    request = opened(requests, 1)
    sender, pages = request.senders[0], request.source_pages[0]
    compute(requests, request)
    sender.submit(pages[:1])
    eventually("the first is through", lambda: sender.is_at_rest)
    sender.submit(pages[1:2], ready=flags[1])
    sender.submit(pages[2:3])
    sender.submit(pages[3:], last=True, aux=b"token", ready=flags[2])
    flags[2].set()
    eventually("the second is awaited", lambda: waits_for(requests) == "the caller's signal that chunk 1 is ready")
    assert request.receivers[0].stats.chunks <= 1
    flags[1].set()
    request.wait(WAIT_S)
    requests.check(request)


def test_others_are_served_meanwhile(pair: Callable[..., Requests]):
    requests, flag = pair(workers=1), threading.Event()
    waiting = opened(requests, 1, 2)
    waiting.senders[0].submit(waiting.source_pages[0], last=True, aux=b"token", ready=flag)
    for room in range(2, 6):
        requests.run(room, 2)
    compute(requests, waiting)
    flag.set()
    waiting.wait(WAIT_S)
    requests.check(waiting)


def test_a_signal_that_raises_fails_the_room_and_is_named_as_the_cause(pair: Callable[..., Requests]):
    requests = pair()
    request = opened(requests, 1)

    def broken() -> bool:
        raise ZeroDivisionError("the device is lost")

    request.senders[0].submit(request.source_pages[0], last=True, ready=broken)
    with pytest.raises(TransferFailedError) as failed:
        request.senders[0].wait(WAIT_S)
    assert isinstance(failed.value.__cause__, ZeroDivisionError)
    request.wait_ended()
    assert "the device is lost" in str(request.receivers[0].error)
    assert request.senders[0].wait_pages_reusable(WAIT_S)
    assert request.receivers[0].wait_pages_reusable(WAIT_S)
    requests.run(2)


def test_a_signal_that_never_comes_ends_with_the_rooms_deadline(engines: Callable[..., Engines]):
    both = engines()
    requests = Requests(both.prefill(Model(), waiting_timeout_s=0.5), both.decode(Model()))
    request = opened(requests, 1)
    request.senders[0].submit(request.source_pages[0], last=True, ready=lambda: False)
    with pytest.raises(TransferTimeoutError, match="or the next one was not ready"):
        request.senders[0].wait(WAIT_S)
    request.wait_ended()
    assert request.senders[0].wait_pages_reusable(WAIT_S)


def test_an_abort_does_not_wait_for_a_signal_and_nobody_looks_at_it_any_more(pair: Callable[..., Requests]):
    requests, looks = pair(), list[None]()
    request = opened(requests, 1)

    def look() -> bool:
        looks.append(None)
        return False

    sender = request.senders[0]
    sender.submit(request.source_pages[0][:2], ready=look)
    sender.submit(request.source_pages[0][2:], last=True)
    eventually("it is looked at", lambda: len(looks) > 2)
    sender.abort("not needed any more")
    request.wait_ended()
    assert sender.wait_pages_reusable(WAIT_S)
    assert request.receivers[0].wait_pages_reusable(WAIT_S)
    requests.run(2)  # whoever looks between two others has looked for the last time now
    seen = len(looks)
    for room in range(3, 6):
        requests.run(room)
    assert len(looks) == seen
    assert requests.prefill.endpoints[0].open_rooms == 0


def test_an_endpoint_closes_although_a_signal_has_not_come(pair: Callable[..., Requests]):
    requests = pair()
    request = opened(requests, 1)
    request.senders[0].submit(request.source_pages[0], last=True, ready=lambda: False)
    requests.prefill.endpoints[0].close()
    assert request.senders[0].state is TransferState.FAILED
    assert request.senders[0].pages_reusable


def test_what_is_no_signal_is_refused_and_costs_nothing(pair: Callable[..., Requests]):
    requests = pair()
    request = opened(requests, 1)
    compute(requests, request)
    with pytest.raises(UsageError, match=r"room 1: ready is 7: it must be an event of a device, with query\(\), a"):
        request.senders[0].submit(request.source_pages[0], last=True, ready=7)  # type: ignore[arg-type]
    requests.submit(request)
    request.wait(WAIT_S)
    requests.check(request)


def test_a_chunk_that_waits_counts_among_those_that_may_wait(
    pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("kvferry.endpoint.transfer.MOST_WAITING_CHUNKS", 2)
    requests, flag = pair(), threading.Event()
    request = opened(requests, 1, 4)
    sender, pages = request.senders[0], request.source_pages[0]
    sender.submit(pages[:1], ready=flag)
    sender.submit(pages[1:2], ready=flag)
    with pytest.raises(QueueFullError, match="2 chunks wait to be written already"):
        sender.submit(pages[2:3])
    compute(requests, request)
    flag.set()
    eventually("there is room again", lambda: sender.is_at_rest)
    sender.submit(pages[2:], last=True, aux=b"token")
    request.wait(WAIT_S)
    requests.check(request)
