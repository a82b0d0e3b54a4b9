"""Who goes first: whoever needs least to end, and whoever waits is passed by others for a bounded time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise

from tests.support.engines import WAIT_S, Requests
from tests.support.waiting import eventually

from kvferry import TransferState
from kvferry.endpoint.prefill.admission import due_at
from kvferry.endpoint.runtime.run_queue import Actor, RunQueue

GB = 10**9


def test_of_what_is_handed_in_at_once_the_least_is_due_first_and_what_has_got_on_before_what_has_not():
    assert due_at(5.0, 10) < due_at(5.0, 11)
    assert due_at(5.0, GB // 2) < due_at(5.1, GB // 2)


def test_a_large_request_is_passed_by_small_ones_until_it_is_due_and_then_by_none():
    large = due_at(0.0, 2 * GB)
    assert due_at(1.9, 0) < large < due_at(2.1, 0)


class Named(Actor):
    """Has one event, and is due when that says."""

    def __init__(self, run_queue: RunQueue, due_at: float) -> None:
        super().__init__(run_queue)
        self.post(due_at)

    def _line_up(self, event: float) -> None:
        self._run_queue.put(self, event)

    def handle(self, event: float, worker: list[float]) -> None:
        worker.append(event)

    def broke(self, error: BaseException, worker: list[float]) -> None:
        raise error


def test_actors_have_their_turns_in_the_order_in_which_they_are_due_and_a_worker_stops_after_them():
    run_queue = RunQueue()
    run_queue.put(None)
    for each in (3.0, 1.0, 2.0, 1.0):
        Named(run_queue, each)
    turns: list[float] = []
    while (actor := run_queue.take(0.0)) is not None:
        actor.take_turn(turns)
    assert turns == [1.0, 1.0, 2.0, 3.0]


def test_of_rooms_that_are_handed_in_at_once_each_ends_before_the_next_is_posted(pair: Callable[..., Requests]):
    """Else all of them end when the last one does."""
    requests = pair(workers=1, path="direct")
    first, *others = [requests.new(room, 1) for room in range(1, 6)]
    for each in (first, *others):
        requests.open_decode(each)
        requests.open_prefill(each)
        eventually("it is open", lambda each=each: each.senders[0].state is TransferState.WAITING_FOR_INPUT)
    looked, all_are_in = threading.Event(), threading.Event()

    def holds_the_worker_up() -> bool:
        looked.set()
        return all_are_in.wait(WAIT_S)

    first.senders[0].submit(first.source_pages[0], last=True, ready=holds_the_worker_up)
    assert looked.wait(WAIT_S)
    for each in others:
        requests.submit(each)
    all_are_in.set()
    for each in others:
        each.wait(WAIT_S)
    for one, following in pairwise(each.senders[0].stats for each in others):
        assert one.ended_at is not None
        assert one.ended_at <= following.writes[0].posted_at
