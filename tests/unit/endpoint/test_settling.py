"""What was sent of a write that failed has time to arrive, and that time must have passed for this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from threading import Event
from typing import Any

import pytest
from msgspec import structs
from tests.support.engines import WAIT_S, Requests
from tests.support.transports import NOTHING
from tests.support.watched import Watched

from kvferry.endpoint.runtime.run_queue import RunQueue
from kvferry.endpoint.runtime.workers import Settling, Worker
from kvferry.errors import TransportError
from kvferry.protocol.wire.messages import Attached
from kvferry.testing.probe import probe
from kvferry.transport import TransferHandle

SETTLE_S = 0.2


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def looked(settling: Settling, clock: Clock, seconds: float, *, every_s: float = 0.01) -> None:
    for _ in range(round(seconds / every_s)):
        clock.now += every_s
        settling.look()


def test_each_write_settles_by_itself_once(clock: Clock):
    settling, settled = Settling(SETTLE_S, clock), list[str]()
    settling.add(lambda: settled.append("first"))
    looked(settling, clock, 0.1)
    settling.add(lambda: settled.append("second"))
    looked(settling, clock, 0.09)
    assert settled == []
    looked(settling, clock, 0.02)
    assert settled == ["first"]
    assert settling
    looked(settling, clock, 0.5)
    assert settled == ["first", "second"]
    assert not settling


@pytest.mark.parametrize(("every_s", "takes_s"), [(0.001, 2.0), (0.1, 2.0), (0.5, 2.0), (1.0, 4.0)])
def test_a_write_settles_by_the_clock_unless_looks_are_more_than_half_a_second_apart(
    clock: Clock, every_s: float, takes_s: float
):
    """As they may be, up to a second, beside a thread that keeps the interpreter's lock."""
    settling, times = Settling(2.0, clock), list[float]()
    settling.add(lambda: times.append(clock.now))
    looked(settling, clock, 5.0, every_s=every_s)
    assert times == [pytest.approx(100.0 + takes_s, abs=1.01 * every_s)]


@pytest.mark.parametrize(
    ("settle_s", "freezes", "awake_s"), [(2.0, 1, 1.5), (2.0, 2, 1.0), (9.0, 2, 8.0), (0.2, 2, 0.1)]
)
def test_whoever_froze_meanwhile_waits_for_most_of_the_time_all_the_same(
    clock: Clock, settle_s: float, freezes: int, awake_s: float
):
    settling, settled = Settling(settle_s, clock), list[str]()
    settling.add(lambda: settled.append("first"))
    looked(settling, clock, freezes * 1000.0, every_s=1000.0)
    looked(settling, clock, 0.9 * awake_s)
    assert settled == []
    looked(settling, clock, 0.2 * awake_s)
    assert settled == ["first"]


@pytest.mark.parametrize("jump_s", [10.0, 1e9, -10.0])
def test_time_that_this_process_did_not_see_pass_hardly_counts(clock: Clock, jump_s: float):
    settling, settled = Settling(SETTLE_S, clock), list[str]()
    clock.now += 1e6  # nobody looked before, either
    settling.add(lambda: settled.append("first"))
    clock.now += jump_s
    assert not settling.look()
    looked(settling, clock, 0.14)
    assert settled == []
    looked(settling, clock, 0.2)
    assert settled == ["first"]


def test_a_write_that_fails_while_others_settle_does_not_count_their_time(clock: Clock):
    settling, times = Settling(SETTLE_S, clock), list[float]()
    for _ in range(5):
        settling.add(lambda: times.append(clock.now))
        looked(settling, clock, 0.05)
    looked(settling, clock, 1.0)
    assert [later - earlier for earlier, later in pairwise(times)] == pytest.approx([0.05] * 4)
    assert times[0] == pytest.approx(100.0 + SETTLE_S, abs=0.02)


class Failing:
    """A transport whose writes fail when they are polled."""

    def __init__(self, *, may_deliver_late: bool, posts_all_or_nothing: bool = False) -> None:
        self.may_deliver_late = may_deliver_late
        self.promises = replace(NOTHING, posts_all_or_nothing=posts_all_or_nothing)
        self.released = 0

    def poll(self, transfer: Any) -> None:
        raise TransportError("broken")

    def release(self, transfer: Any) -> None:
        self.released += 1


def unexpected(what: object) -> None:
    raise AssertionError(what)


def noted(notes: list[tuple[str, str]], what: str) -> Callable[..., None]:
    return lambda error, **how: notes.append((" and ".join([what, *(key for key in how if how[key])]), str(error)))


@pytest.mark.parametrize("may_deliver_late", [True, False])
def test_a_worker_says_at_once_that_a_write_failed_and_later_that_nothing_of_it_arrives(
    clock: Clock, may_deliver_late: bool
):
    transport, notes = Failing(may_deliver_late=may_deliver_late), list[tuple[str, str]]()
    queue = RunQueue()
    worker = Worker(queue, transport, Settling(SETTLE_S, clock))  # type: ignore[arg-type]
    failed, settled = noted(notes, "failed"), noted(notes, "settled")
    worker.watch(Watched(TransferHandle(), "peer", done=unexpected, failed=failed, broke=unexpected, settled=settled))
    assert notes == [("failed" if may_deliver_late else "settled", "broken")]
    assert transport.released == 1
    assert worker.polls() is may_deliver_late
    queue.put(None)  # it is to stop, and does not as long as something may arrive
    turns = 0
    while worker.turn(may_wait=False):
        clock.now += 0.01
        turns += 1
    assert notes == [("failed", "broken"), ("settled", "broken")][-1 - may_deliver_late :]
    assert transport.released == 1
    assert turns >= 20 if may_deliver_late else turns <= 1


@pytest.mark.parametrize("promises", [True, False])
def test_a_write_whose_post_raises_may_arrive_and_be_read_unless_the_transport_promises_that_nothing_was_posted(
    clock: Clock, promises: bool
):
    transport, notes = Failing(may_deliver_late=False, posts_all_or_nothing=promises), list[tuple[str, str]]()
    worker = Worker(RunQueue(), transport, Settling(SETTLE_S, clock))  # type: ignore[arg-type]
    failed, settled = noted(notes, "failed"), noted(notes, "settled")
    write = Watched(TransferHandle(), "peer", done=unexpected, failed=failed, broke=unexpected, settled=settled)
    worker.post_raised(write, OSError("half-way"))
    assert notes == [("settled" if promises else "failed and is_read", "half-way")]
    for _ in range(30):
        clock.now += 0.01
        worker.turn(may_wait=False)
    assert notes[1:] == ([] if promises else [("settled", "half-way")])
    assert transport.released == 0


def test_a_rank_that_attaches_waits_for_its_last_failed_write_and_for_no_earlier_one(pair: Callable[..., Requests]):
    requests = pair(quarantine_s=0.3)
    context = probe(requests.decode.endpoints[0]).context
    quarantine = probe(requests.decode.endpoints[0]).links.quarantine
    attached = Attached(endpoint="p0", attempt=1, only_staged=False, last_failure=1)
    another = structs.replace(attached, attempt=2, last_failure=2)
    assert quarantine.has_settled(structs.replace(attached, last_failure=0))
    assert not quarantine.has_settled(attached)
    has_settled = Event()
    context.submit(lambda _: quarantine.settle(attached, has_settled.set))
    assert has_settled.wait(WAIT_S)
    assert quarantine.has_settled(attached)
    assert not quarantine.has_settled(another), "what that write had sent may still arrive"
