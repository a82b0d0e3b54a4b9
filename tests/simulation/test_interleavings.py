"""Tables that threads share keep their laws under every schedule of a few threads with up to two preemptions.

The simulation runs whole turns; what two threads do to one table within a turn is tried here, by an explorer of
schedules (`tests.support.schedules`). The laws are those that a caller sees: nothing is lost, nothing comes twice, the
order is kept, whoever waits is woken.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Callable
from queue import Empty
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.caches import Model, Shape, pool
from tests.support.schedules import Check, FoundError, Schedule, ScheduledLock, explore
from tests.support.tiers import Tier

from kvferry.endpoint import transfer
from kvferry.endpoint.prefill import admission
from kvferry.endpoint.prefill.admission import Admission, Admitted
from kvferry.endpoint.runtime import run_queue
from kvferry.endpoint.runtime.callers_code import Callbacks
from kvferry.endpoint.runtime.run_queue import Actor, RunQueue, Waker
from kvferry.endpoint.transfer import RoomReport, Sender
from kvferry.errors import QueueFullError
from kvferry.observe.records import Observer
from kvferry.plan.requests.chunks import ChunkSequence, HandedIn

NOTHING: Any = None
LAYOUT = pool(Model(layers=1, heads=1, head_dim=1, page_tokens=1), Shape(pages=8), Shape().coordinates()[0]).layout


def deep(tier: Tier) -> int:
    """Preemptions of scenarios with many steps: of these, nearly all faults need one."""
    return tier.amount(quick=1, full=1, long=2)


class Bell:
    """What a thread waits at until another one has rung it, once for each time."""

    def __init__(self, schedule: Schedule) -> None:
        self._is_quiet = ScheduledLock(schedule)
        self._is_quiet.acquire()

    def ring(self) -> None:
        if self._is_quiet.locked():
            self._is_quiet.release()

    def wait(self) -> None:
        self._is_quiet.acquire()


# ---- what the explorer finds


class Counter:
    """Counts, with a lock or without."""

    def __init__(self, *, is_locked: bool) -> None:
        self.count = 0
        self._lock: Any = threading.Lock() if is_locked else contextlib.nullcontext()

    def add(self) -> None:
        with self._lock:
            self.count += 1


@pytest.mark.parametrize("is_locked", [True, False])
def test_an_update_between_another_ones_read_and_write_is_found_where_no_lock_keeps_it_out(is_locked: bool):
    def scenario(schedule: Schedule) -> Check:
        counter = Counter(is_locked=is_locked)
        for _ in range(2):
            schedule.thread(counter.add)

        def check() -> None:
            assert counter.count == 2

        return check

    with contextlib.nullcontext() if is_locked else pytest.raises(FoundError, match="assert 1 == 2"):
        assert explore(scenario, instructions=[sys.modules[__name__]]) > 1


def take_both(first: Any, second: Any) -> None:
    first.acquire()
    second.acquire()
    second.release()
    first.release()


@pytest.mark.parametrize("order", [1, -1])
def test_threads_that_wait_for_each_other_are_found(order: int):
    def scenario(schedule: Schedule) -> Check:
        locks = ScheduledLock(schedule), ScheduledLock(schedule)
        schedule.thread(lambda: take_both(*locks))
        schedule.thread(lambda: take_both(*locks[::order]))
        return lambda: None

    with contextlib.nullcontext() if order == 1 else pytest.raises(FoundError, match="nobody wakes those who wait"):
        explore(scenario, lines=[sys.modules[__name__]])


def test_a_wait_with_a_deadline_ends_in_time_and_without():
    """Two threads meet, or the one that waits gives up: before the other comes, or as nobody else can go on."""
    ends: set[bool] = set()

    def scenario(schedule: Schedule) -> Check:
        came = ScheduledLock(schedule)
        came.acquire()
        schedule.thread(lambda: ends.add(came.acquire(timeout=1.0)))
        schedule.thread(came.release)
        return lambda: None

    explore(scenario)
    assert ends == {True, False}


def meeting(schedule: Schedule) -> Callable[[], None]:
    """Where two threads wait for each other."""
    first_came: list[Bell] = []

    def meet() -> None:
        if first_came:
            first_came[0].ring()
        else:
            first_came.append(Bell(schedule))
            first_came[0].wait()

    return meet


# ---- actors, and the queues of workers


class Recorder(Actor):
    """Records the events that it handles, and stops the workers with the last that is to come."""

    def __init__(self, queue: RunQueue, schedule: Schedule, events: int, stop: Callable[[], None]) -> None:
        super().__init__(queue)
        self.handled: list[int] = []
        self._schedule = schedule
        self._expected = events
        self._stop = stop
        self._is_in_turn = False

    def handle(self, event: Any, worker: Any) -> None:
        assert not self._is_in_turn, "no two workers ever run it at once"
        self._is_in_turn = True
        self._schedule.point()
        self._is_in_turn = False
        self.handled.append(event)
        if len(self.handled) == self._expected:
            self._stop()

    def broke(self, error: BaseException, worker: Any) -> None:
        raise error


def work(queue: RunQueue) -> None:
    """What a worker does, until it is stopped."""
    while (actor := queue.take(None)) is not None:
        actor.take_turn(None)


def stopping(queue: RunQueue, workers: int) -> Callable[[], None]:
    def stop() -> None:
        for _ in range(workers):
            queue.put(None)

    return stop


def test_every_event_of_an_actor_is_handled_once_in_order_by_one_worker_at_a_time(tier: Tier):
    def scenario(schedule: Schedule) -> Check:
        queue = RunQueue()
        actor = Recorder(queue, schedule, 2, stopping(queue, 2))

        def post() -> None:
            actor.post(1)
            actor.post(2)

        def check() -> None:
            assert actor.handled == [1, 2]

        for each in (post, lambda: work(queue), lambda: work(queue)):
            schedule.thread(each)
        return check

    explore(scenario, lines=[run_queue], preemptions=deep(tier))


def test_an_event_that_is_posted_while_the_turn_before_ends_is_handled(tier: Tier):
    def scenario(schedule: Schedule) -> Check:
        queue = RunQueue()
        actor = Recorder(queue, schedule, 3, stopping(queue, 1))
        actor.post(1)
        for event in (2, 3):
            schedule.thread(lambda event=event: actor.post(event))  # type: ignore[misc]
        schedule.thread(lambda: work(queue))

        def check() -> None:
            assert sorted(actor.handled) == [1, 2, 3]

        return check

    explore(scenario, lines=[run_queue], preemptions=deep(tier))


def test_what_is_handed_in_while_several_workers_look_stays_in_order(tier: Tier):
    def scenario(schedule: Schedule) -> Check:
        queue = RunQueue()
        actor = Recorder(queue, schedule, 2, stopping(queue, 2))
        for event in (1, 2):
            queue.hand_in(actor, event)
        for _ in range(2):
            schedule.thread(lambda: work(queue))

        def check() -> None:
            assert actor.handled == [1, 2]

        return check

    explore(scenario, lines=[run_queue], preemptions=deep(tier))


def test_a_worker_that_gives_up_takes_no_call_along_that_another_one_waits_for(tier: Tier):
    """When its time is over somebody may be about to wake it."""

    def scenario(schedule: Schedule) -> Check:
        queue = RunQueue()
        actor = Recorder(queue, schedule, 1, stopping(queue, 1))

        def work_once() -> None:
            with contextlib.suppress(Empty):
                taken = queue.take(1.0)
                if taken is None:
                    queue.put(None)  # for the other one
                else:
                    taken.take_turn(None)

        for each in (lambda: work(queue), work_once, lambda: actor.post(1)):
            schedule.thread(each)

        def check() -> None:
            assert actor.handled == [1]

        return check

    explore(scenario, lines=[run_queue], preemptions=deep(tier))


def test_what_is_handed_in_is_found_though_all_workers_and_the_waker_rest(tier: Tier):
    def scenario(schedule: Schedule) -> Check:
        queue = RunQueue()
        waker = Waker([queue])

        def stop() -> None:
            queue.put(None)
            waker.stop()

        actor = Recorder(queue, schedule, 1, stop)

        def wake() -> None:
            while waker.turn(may_wait=True):
                pass

        for each in (wake, lambda: queue.hand_in(actor, 1), lambda: work(queue)):
            schedule.thread(each)

        def check() -> None:
            assert actor.handled == [1]

        return check

    explore(scenario, lines=[run_queue], preemptions=deep(tier))


def test_a_waker_finds_what_is_handed_in_while_it_goes_to_rest():
    def scenario(schedule: Schedule) -> Check:
        handed_in: list[int] = []

        def rouse() -> None:
            if handed_in:
                waker.stop()

        queue: Any = SimpleNamespace(rouse=rouse)
        waker = Waker([queue])

        def wake() -> None:
            while waker.turn(may_wait=True):
                pass

        def hand_in() -> None:
            handed_in.append(1)
            waker.look()

        schedule.thread(wake)
        schedule.thread(hand_in)
        return lambda: None

    explore(scenario, lines=[run_queue])


# ---- chunks of a caller


class AtOnce(Callbacks):
    """Calls back where the change is made: which thread does is nothing that this module is about."""

    def __init__(self) -> None:
        pass

    def start(self) -> None:
        pass

    def post(self, work: Callable[[], None]) -> None:
        work()

    def call(self, callback: Callable[[], None], room: int) -> None:
        callback()


def sender(hand_in: Callable[[HandedIn], None]) -> Sender:
    observer = Observer()
    return Sender(
        1,
        ChunkSequence(1, LAYOUT.groups, LAYOUT.shards),
        hand_in,
        lambda reason: None,
        AtOnce(),
        now=lambda: 0.0,
        observer=observer,
        report=RoomReport(1, observer, 0.0),
    )


def test_chunks_of_two_callers_are_handed_on_in_the_order_of_their_numbers():
    def scenario(schedule: Schedule) -> Check:
        handed_in: list[HandedIn] = []
        room = sender(handed_in.append)
        for page in range(2):
            schedule.thread(lambda page=page: room.submit([page]))  # type: ignore[misc]

        def check() -> None:
            assert [chunk.number for chunk in handed_in] == [0, 1]

        return check

    explore(scenario, lines=[transfer])


def test_a_caller_whose_chunk_was_refused_is_called_when_there_is_room(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(transfer, "MOST_WAITING_CHUNKS", 1)

    def scenario(schedule: Schedule) -> Check:
        handed_in: deque[HandedIn] = deque()
        room = sender(handed_in.append)
        has_room, has_chunk = Bell(schedule), Bell(schedule)
        room.add_change_callback(has_room.ring)

        def submit() -> None:
            for page in range(2):
                while True:
                    try:
                        room.submit([page])
                    except QueueFullError:
                        has_room.wait()
                    else:
                        break
                has_chunk.ring()

        def take() -> None:
            for handled in (1, 2):
                while not handed_in:
                    has_chunk.wait()
                handed_in.popleft()
                room._proceed(handled, waiting=0, is_drained=True)

        schedule.thread(submit)
        schedule.thread(take)
        return lambda: None

    explore(scenario, lines=[transfer])


# ---- who may write


class Writer:
    """Writes once to a receiver, if `meet` is given after another one has been admitted as well."""

    def __init__(
        self,
        admission: Admission,
        schedule: Schedule,
        receiver: str,
        size: int,
        meet: Callable[[], None] = lambda: None,
    ) -> None:
        self._admission, self._receiver, self._size, self._meet = admission, receiver, size, meet
        self._schedule = schedule
        self._got: list[Admitted] = []
        self._bell = Bell(schedule)

    def admitted(self, admitted: Admitted) -> None:
        self._got.append(admitted)
        self._bell.ring()

    def write(self) -> None:
        leave = self._admission.admit(self._receiver, self._size, self)
        if leave is None:
            self._bell.wait()
            leave = self._got.pop()
        assert self._admission.use(leave)
        self._schedule.point()
        self._meet()
        self._admission.give_back(leave)


class Withdraws:
    """Gives up, and returns at once what it is given nevertheless, as a room does."""

    def __init__(self, admission: Admission) -> None:
        self.admitted = admission.give_back


def checked_admission() -> tuple[Admission, Check]:
    made = Admission(most_bytes=10, most_bytes_of_one=6, stalls_after_s=1.0, now=lambda: 0.0)

    def check() -> None:
        assert (made.num_bytes, made.num_waiting) == (0, 0)
        assert made.admit("another", 10, NOTHING) is not None, "all of it can be admitted again"

    return made, check


def test_whoever_waits_to_be_admitted_is_and_all_is_given_back(tier: Tier):
    def scenario(schedule: Schedule) -> Check:
        made, check = checked_admission()
        for receiver in ("d0", "d0", "d1"):
            schedule.thread(Writer(made, schedule, receiver, 6).write)
        return check

    explore(scenario, lines=[admission], preemptions=deep(tier))


def test_all_are_admitted_for_whom_there_is_room_at_one_moment(tier: Tier):
    def scenario(schedule: Schedule) -> Check:
        made, check = checked_admission()
        first = made.admit("d0", 6, NOTHING)
        assert first is not None
        meet = meeting(schedule)
        schedule.thread(lambda: made.give_back(first))
        for _ in range(2):
            schedule.thread(Writer(made, schedule, "d0", 3, meet).write)
        return check

    explore(scenario, lines=[admission], preemptions=deep(tier))


def test_a_writer_that_withdraws_is_admitted_or_not_and_holds_up_nobody(tier: Tier):
    def scenario(schedule: Schedule) -> Check:
        made, check = checked_admission()
        first = made.admit("d0", 6, NOTHING)
        assert first is not None
        withdraws = Withdraws(made)
        assert made.admit("d0", 6, withdraws) is None
        schedule.thread(lambda: made.give_back(first))
        schedule.thread(lambda: made.withdraw("d0", withdraws))
        schedule.thread(Writer(made, schedule, "d0", 6).write)
        return check

    explore(scenario, lines=[admission], preemptions=deep(tier))


def test_a_writer_that_withdraws_lets_those_behind_it_go_for_whom_there_is_room(tier: Tier):
    def scenario(schedule: Schedule) -> Check:
        made, check = checked_admission()
        first = made.admit("d0", 3, NOTHING)
        assert first is not None
        withdraws = Withdraws(made)
        assert made.admit("d0", 6, withdraws) is None
        meet = meeting(schedule)

        def end() -> None:
            meet()
            made.give_back(first)

        schedule.thread(end)
        schedule.thread(lambda: made.withdraw("d0", withdraws))
        schedule.thread(Writer(made, schedule, "d0", 3, meet).write)
        return check

    explore(scenario, lines=[admission], preemptions=deep(tier))


def test_bytes_on_their_way_are_counted_whoever_counts_meanwhile():
    def scenario(schedule: Schedule) -> Check:
        made, check = checked_admission()
        for _ in range(2):
            schedule.thread(Writer(made, schedule, "d0", 3).write)
        return check

    explore(scenario, instructions=[admission], preemptions=1)
