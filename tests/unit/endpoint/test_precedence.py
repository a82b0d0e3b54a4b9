"""Who goes first: whoever needs least to end, and whoever waits is passed by others for a bounded time."""

from __future__ import annotations

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
