"""Chunks that wait for a turn leave in few writes, as large as a sub-chunk, and one that need not wait leaves alone."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from tests.support.engines import Request, Requests
from tests.support.waiting import eventually

from kvferry import TransferState
from kvferry.testing.probe import probe

PAGES = 12


def opened(requests: Requests, room: int = 1) -> Request:
    """A request of which both sides have opened the room."""
    request = requests.new(room, PAGES)
    requests.open_decode(request)
    requests.open_prefill(request)
    eventually("it is open", lambda: request.senders[0].state is TransferState.WAITING_FOR_INPUT)
    return request


def submit_each(requests: Requests, request: Request, first: int = 0) -> None:
    """Hands the request's pages in one by one."""
    for page in range(first, PAGES):
        requests.submit(request, page, page + 1, last=page == PAGES - 1)


def num_writes(requests: Requests, request: Request) -> int:
    """How many writes the request took, each of which was told of; all of its bytes have arrived."""
    request.wait()
    requests.check(request)
    count = len(request.senders[0].stats.writes)
    assert request.receivers[0].stats.chunks == count
    return count


@pytest.mark.parametrize("path", ["direct", "staged"])
def test_chunks_that_were_there_before_the_decode_side_leave_together(pair: Callable[..., Requests], path: str):
    requests = pair(path=path)
    request = requests.new(1, PAGES)
    requests.open_prefill(request)
    submit_each(requests, request)
    requests.open_decode(request)
    assert num_writes(requests, request) == 1


def test_chunks_that_are_handed_in_while_a_worker_is_busy_leave_together(pair: Callable[..., Requests]):
    requests = pair(workers=1)
    request, busy = opened(requests), opened(requests, 2)
    begun, gate = threading.Event(), threading.Event()

    def blocks() -> bool:
        begun.set()
        return gate.wait(10.0)

    busy.senders[0].submit(busy.source_pages[0], last=True, aux=b"token", ready=blocks)
    assert begun.wait(10.0)
    submit_each(requests, request)
    gate.set()
    assert num_writes(requests, request) == 1
    busy.wait()


def test_chunks_whose_signals_come_together_leave_together(pair: Callable[..., Requests]):
    requests, computed = pair(), threading.Event()
    request = opened(requests)
    request.senders[0].submit(request.source_pages[0][:1], ready=computed)
    submit_each(requests, request, first=1)
    eventually("all are taken", lambda: "chunk 0 is ready" in requests.prefill.endpoints[0].status().rooms[0].waits_for)
    computed.set()
    assert num_writes(requests, request) == 1


@pytest.mark.parametrize("pages", [1, 5])
@pytest.mark.parametrize("path", ["direct", "staged"])
def test_no_more_leave_together_than_a_write_should_have(pair: Callable[..., Requests], path: str, pages: int):
    """A sub-chunk, and a quarter of what may be on its way directly."""
    some_mib = pages * pair().prefill.pools[0].bytes_per_page / 2**20
    bound = {"direct_mib": 4 * some_mib} if path == "direct" else {"staging_chunk_mib": some_mib, "staging_ring_mib": 1}
    requests = pair(path=path, **bound)
    request = requests.new(1, PAGES)
    requests.open_prefill(request)
    submit_each(requests, request)
    requests.open_decode(request)
    assert num_writes(requests, request) == -(-PAGES // pages)


def test_a_chunk_that_nothing_follows_leaves_at_once(pair: Callable[..., Requests]):
    requests = pair()
    request = opened(requests)
    for page in range(PAGES):
        requests.let_leave(request, page)
        requests.submit(request, page, page + 1, last=page == PAGES - 1)
    assert num_writes(requests, request) == PAGES


def test_chunks_that_wait_together_are_dropped_together(pair: Callable[..., Requests]):
    requests = pair()
    request = requests.new(1, PAGES)
    requests.open_prefill(request)
    submit_each(requests, request)
    request.senders[0].abort("enough")
    requests.open_decode(request)
    request.wait_ended()
    assert request.senders[0].wait_pages_reusable(10.0)
    assert not probe(requests.prefill.endpoints[0]).table.rooms
