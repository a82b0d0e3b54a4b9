"""A thread that computes loses the interpreter's lock only so often, and nobody rests where the lock is free."""

from __future__ import annotations

import sys
import threading
import time

import pytest
from tests.support.waiting import eventually

from kvferry.endpoint.runtime.threads import _WAITS_OF_A_TAKE, Loop, Rests, SupervisedThread, waits_of_this_thread

SWITCH_S = sys.getswitchinterval()
KEPT_S = 1.1 * SWITCH_S  # how late a thread gets a lock that another keeps


class Machine:
    """Threads of an endpoint that take turns, each with a clock of its own, beside one that may keep the lock.

    Attributes:
        late_s: how late they get the lock after a rest.
        kept_by_others: whether it is no endpoint's thread that keeps it.
        rests: how long they rested.
        rest_ends: when each rest was to end.
    """

    def __init__(self, late_s: float = 0.0, threads: int = 1) -> None:
        self.late_s = late_s
        self.kept_by_others = True
        self.rests: list[float] = []
        self.rest_ends: list[float] = []
        self._taken_at: set[float] = set()
        self._clocks = [100.0] * threads
        self._waits = [0] * threads
        self._counted = [0] * threads  # of these, up to their last rest
        self._turn_of = 0

    @property
    def now_s(self) -> float:
        """The clock of the thread that runs."""
        return self._clocks[self._turn_of]

    @property
    def takes(self) -> int:
        """How often they have taken the lock from the other thread: those that do so at one moment, once."""
        return len(self._taken_at)

    @property
    def uncounted(self) -> list[int]:
        """The waits of each thread that are to be accounted for after its next turn."""
        return [waits - counted for waits, counted in zip(self._waits, self._counted, strict=True)]

    def rests_for(self, most_takes_per_s: float) -> Rests:
        return Rests(
            most_takes_per_s,
            now=lambda: self.now_s,
            sleep=self.sleep,
            waits=lambda: self._waits[self._turn_of],
            computed=lambda: (0.0, self.now_s) if self.kept_by_others else (self.now_s, 0.0),
        )

    def sleep(self, seconds: float) -> None:
        self.rests.append(seconds)
        self._clocks[self._turn_of] += seconds
        self.rest_ends.append(round(self.now_s, 6))
        if self.late_s >= SWITCH_S:
            self._take()
        else:
            self._clocks[self._turn_of] += self.late_s
            self._waits[self._turn_of] += 1

    def _take(self) -> None:
        self._clocks[self._turn_of] += KEPT_S
        self._waits[self._turn_of] += _WAITS_OF_A_TAKE
        self._taken_at.add(round(self.now_s, 6))

    def run(self, seconds: float, rests: Rests, *, takes: int) -> None:
        """Lets threads have turns, each with so many takes."""
        ends_at = self.now_s + seconds
        while min(self._clocks) < ends_at:
            self.turn(rests, takes=takes)

    def turn(self, rests: Rests, *, takes: int) -> None:
        """Lets the thread whose clock is the earliest have a turn."""
        self._turn_of = self._clocks.index(min(self._clocks))
        for _ in range(takes):
            self._take()
        self._counted[self._turn_of], _ = rests.after(self._counted[self._turn_of])


@pytest.mark.parametrize("most", [20.0, 40.0, 80.0])
@pytest.mark.parametrize("takes", [1, 3, 10])
@pytest.mark.parametrize("threads", [1, 6])
def test_threads_take_a_lock_that_another_keeps_only_so_often(most: float, takes: int, threads: int):
    machine = Machine(KEPT_S, threads)
    machine.run(60.0, machine.rests_for(most), takes=takes)
    least = 0.8 if threads == 1 else 0.15  # six whose turns begin together wait six times as often as they take it
    assert least * most < machine.takes / 60.0 < 1.1 * most


def test_threads_that_rest_come_back_together():
    machine = Machine(KEPT_S, threads=6)
    rests = machine.rests_for(20.0)
    machine.run(2.0, rests, takes=1)
    machine.rest_ends.clear()
    machine.run(60.0, rests, takes=1)
    assert len(set(machine.rest_ends)) < len(machine.rest_ends) / 5, "all six at most moments"
    assert machine.takes / 62.0 < 20.0


def test_what_it_takes_to_come_back_counts_for_the_first_of_those_that_do_so_together():
    machine = Machine(KEPT_S, threads=6)
    rests = machine.rests_for(20.0)
    machine.run(5.0, rests, takes=1)
    so_far = len(machine.rest_ends)
    while len(machine.rest_ends) < so_far + 6:
        machine.turn(rests, takes=1)
    assert len(set(machine.rest_ends[so_far:])) == 1
    assert sorted(machine.uncounted) == [0, 0, 0, 0, 0, _WAITS_OF_A_TAKE]


@pytest.mark.parametrize("late_s", [0.0, SWITCH_S / 2])
def test_nobody_rests_where_the_lock_is_free_or_given_away_by_itself(late_s: float):
    machine = Machine(late_s)
    machine.run(10.0, machine.rests_for(20.0), takes=3)
    assert 0 < len(machine.rests) < 100, "ten trials a second, and no more"
    assert max(machine.rests) < 1e-3


def test_nobody_rests_where_an_endpoints_own_thread_keeps_the_lock():
    machine = Machine(KEPT_S, threads=3)
    machine.kept_by_others = False
    machine.run(10.0, machine.rests_for(20.0), takes=3)
    assert max(machine.rests) < 1e-3


def test_a_request_now_and_then_is_not_delayed():
    machine = Machine(KEPT_S)
    rests = machine.rests_for(100.0)
    machine.run(1.0, rests, takes=5)
    machine.rests.clear()
    for _ in range(20):
        machine.sleep(0.5)
        machine.rests.remove(0.5)
        machine.run(SWITCH_S, rests, takes=8)
    assert machine.rests == []


def test_nobody_rests_any_more_once_some_rests_ended_in_time():
    machine = Machine(KEPT_S)
    rests = machine.rests_for(50.0)
    machine.run(1.0, rests, takes=5)
    machine.rests.clear()
    machine.late_s = 0.0
    machine.run(10.0, rests, takes=5)
    assert len([rest for rest in machine.rests if rest > 1e-3]) == 2


def test_one_rest_that_ends_in_time_does_not_say_that_the_lock_is_free():
    """It does so, too, where another thread of the endpoint had just asked for the lock."""
    machine = Machine()
    rests = machine.rests_for(50.0)
    for turn in range(4000):
        machine.late_s = 0.0 if turn % 3 == 0 else KEPT_S
        machine.run(SWITCH_S, rests, takes=5)
    assert machine.takes / (machine.now_s - 100.0) < 1.1 * 50.0


def test_threads_that_come_back_together_say_once_that_they_did_so_in_time():
    """They all do where another thread of the endpoint had asked for the lock a moment before."""
    machine = Machine(KEPT_S, threads=6)
    rests = machine.rests_for(20.0)
    machine.run(5.0, rests, takes=1)
    machine.late_s = 0.0
    so_far = len(machine.rests)
    while len(machine.rests) < so_far + 6:
        machine.turn(rests, takes=1)
    assert len(set(machine.rest_ends[so_far:])) == 1
    machine.late_s = KEPT_S
    so_far = len(machine.rests)
    machine.run(5.0, rests, takes=1)
    assert min(machine.rests[so_far:]) > 1e-3, "none was a trial"


def test_one_rest_that_ends_late_does_not_say_that_the_lock_is_kept():
    """It does so, too, where a processor is short."""
    machine = Machine()
    rests = machine.rests_for(50.0)
    for turn in range(4000):
        machine.late_s = KEPT_S if turn % 3 == 0 else 0.0
        machine.run(SWITCH_S, rests, takes=5)
    assert max(machine.rests) < 1e-3


def test_that_threads_rest_is_said_once(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    for _ in range(2):
        free, kept = Machine(), Machine(KEPT_S)
        free.run(2.0, free.rests_for(100.0), takes=5)
        kept.run(2.0, kept.rests_for(100.0), takes=5)
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
    assert "100 times a second at most (KVFERRY_INTERPRETER_TAKES_PER_S)" in caplog.text


def test_without_a_bound_nobody_rests():
    machine = Machine(KEPT_S)
    machine.run(10.0, machine.rests_for(float("inf")), takes=5)
    assert machine.rests == []


class Looks(Loop):
    """Waits a moment in each turn, until it is stopped."""

    def __init__(self) -> None:
        self.turns = 0
        self.waits = 0
        self.is_stopping = False

    def has_work(self) -> bool:
        return True

    def turn(self, *, may_wait: bool) -> bool:
        time.sleep(1e-4)
        self.turns += 1
        self.waits = waits_of_this_thread()
        return not self.is_stopping


class MayWait(Looks):
    """Notes which turns may wait."""

    def __init__(self) -> None:
        super().__init__()
        self.may_wait: list[bool] = []

    def turn(self, *, may_wait: bool) -> bool:
        self.may_wait.append(may_wait)
        return super().turn(may_wait=may_wait)


def test_a_thread_that_has_rested_does_not_wait_in_the_turn_after():
    """It would give the lock away once more before it looks at what has come."""

    class RestsAfterEverySecondTurn(Rests):
        def after(self, counted: int) -> tuple[int, bool]:
            return counted, len(loop.may_wait) % 2 == 0

    loop = MayWait()
    thread = SupervisedThread("a thread", loop, RestsAfterEverySecondTurn(20.0))
    eventually("it has had some turns", lambda: loop.turns > 6)
    loop.is_stopping = True
    eventually("it has ended", lambda: not thread.is_alive)
    assert loop.may_wait[:6] == [True, True, False, True, False, True]


class Computes(Looks):
    """Keeps the lock in each turn, until it is asked for it."""

    def turn(self, *, may_wait: bool) -> bool:
        self.turns += 1
        return not self.is_stopping


@pytest.mark.parametrize("endpoints", [1, 2])
def test_a_thread_does_not_rest_beside_one_of_an_endpoint_that_computes(endpoints: int):
    """A worker with much to do: of the same endpoint, or of another one in the process."""
    rests = [Rests(20.0) for _ in range(endpoints)]
    computes, looks = Computes(), Looks()
    threads = [SupervisedThread("busy", computes, rests[0]), SupervisedThread("a thread", looks, rests[-1])]
    threading.Event().wait(1.0)  # as long as another thread is noticed in
    before, begun_at = looks.turns, time.monotonic()
    threading.Event().wait(2.0)
    turns_per_s = (looks.turns - before) / (time.monotonic() - begun_at)
    computes.is_stopping = looks.is_stopping = True
    eventually("they have ended", lambda: not any(thread.is_alive for thread in threads))
    assert turns_per_s > 40.0  # up to 200; 10 or 20 with rests


def test_a_thread_rests_beside_one_that_computes_and_not_without():
    loop = Looks()
    thread = SupervisedThread("a thread", loop, Rests(20.0))
    eventually("it looks as often as it likes", lambda: loop.turns > 1000)
    assert loop.waits >= loop.turns, "each sleep is a wait"
    is_over = threading.Event()
    computing = threading.Thread(target=lambda: [None for _ in iter(is_over.is_set, True)])
    computing.start()
    try:
        threading.Event().wait(1.0)  # until that is noticed
        before, begun_at = loop.turns, time.monotonic()
        threading.Event().wait(2.0)
        assert (loop.turns - before) / (time.monotonic() - begun_at) < 40.0  # up to 200 without rests
    finally:
        is_over.set()
        computing.join()
    before = loop.turns
    eventually("it does not rest any more", lambda: loop.turns > before + 1000)
    loop.is_stopping = True
    eventually("it has ended", lambda: not thread.is_alive)
