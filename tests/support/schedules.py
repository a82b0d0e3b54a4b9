"""Runs a few threads on real code in every order that a bounded number of preemptions makes: a schedule explorer.

The simulation runs whole turns, one after the other. What two threads do to a table that they share within a turn it
cannot see. Here each thread stops before every line, or every instruction, of the code that is watched, and a schedule
says who goes on. One runs at a time. It goes on until it ends, waits for a lock, or is preempted; and all schedules
with so many preemptions are tried, since nearly all faults of this kind need one or two (as CHESS does it).

Code that is watched sees the locks and the clock of the schedule, under the names `threading` and `time` of its module.
Whoever waits for a lock lets others go on. A deadline passes where all wait, or as a preemption. Where all wait, and
none has a deadline, somebody was not woken: a finding, as are exceptions and what the check says.
"""

from __future__ import annotations

import contextlib
import dis
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FrameType, ModuleType
from typing import Any

Check = Callable[[], None]
"""Called when all threads have ended; what it raises is a finding."""

LONGEST_S = 20.0
"""A thread that stands still for so long waits for something outside of the schedule."""

_SHARED = ("ATTR", "SUBSCR", "METHOD", "CALL", "CONTAINS", "FOR_ITER")
"""Parts of the names of instructions that may touch what others touch; of a thread's own variables is no choice."""


class FoundError(AssertionError):
    """A schedule under which something is wrong."""


class _StoppedError(BaseException):
    """Ends the threads of a schedule in which something was found already."""


def _held() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass(eq=False)
class _Task:
    number: int
    work: Callable[[], object]
    baton: threading.Lock = field(default_factory=lambda: _held())  # its thread waits for it
    has_begun: bool = False
    waits_for: ScheduledLock | None = None
    deadline: float | None = None  # of that wait
    has_ended: bool = False
    at: tuple[str, int] = "its beginning", 0  # the function, and the line

    @property
    def where(self) -> str:
        return f"{self.at[0]}, line {self.at[1]}"


class ScheduledLock:
    """A lock of the code that is watched; like `threading.Lock`, it may be released by another thread."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.is_held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self.is_held and not (blocking and self._schedule.wait(self, None if timeout < 0 else timeout)):
            return False
        self.is_held = True
        return True

    def release(self) -> None:
        if not self.is_held:
            raise RuntimeError("release unlocked lock")
        self.is_held = False

    def locked(self) -> bool:
        return self.is_held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _Shown:
    """A module in which some names mean something else."""

    def __init__(self, module: ModuleType, **shown: Any) -> None:
        self._module = module
        self.__dict__.update(shown)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Crew:
    """Threads that run those of one schedule after the other."""

    def __init__(self) -> None:
        self._work: list[queue.SimpleQueue[Callable[[], None]]] = []

    def run(self, number: int, work: Callable[[], None]) -> None:
        while len(self._work) <= number:
            self._work.append(queue.SimpleQueue())
            threading.Thread(target=self._loop, args=(self._work[-1],), daemon=True).start()
        self._work[number].put(work)

    def _loop(self, work: queue.SimpleQueue[Callable[[], None]]) -> None:
        with contextlib.suppress(SystemExit):
            while True:
                work.get()()

    def dismiss(self) -> None:
        for work in self._work:
            work.put(sys.exit)


class Schedule:
    """One run: its threads, and who goes on where.

    Attributes:
        now: the time.
        choices: at each point at which several could go on, in order: who else could, each with whether it would have
            been a preemption.
    """

    def __init__(self, crew: _Crew, watched: Mapping[str, bool], turns: Mapping[int, int]) -> None:
        """Begins with no threads.

        Args:
            crew: runs them.
            watched: files in which threads can be preempted: before each line, or each instruction.
            turns: by the number of a choice, which thread goes on there; else the one that runs, if it can.
        """
        self.now = 0.0
        self.choices: list[tuple[tuple[int, bool], ...]] = []
        self._crew = crew
        self._watched = watched
        self._turns = turns
        self._tasks: list[_Task] = []
        self._running: _Task | None = None
        self._is_over = _held()
        self._found: BaseException | None = None
        self._steps: list[str] = []

    def thread(self, work: Callable[[], object]) -> None:
        """Adds a thread. To be called before the run."""
        self._tasks.append(_Task(len(self._tasks), work))

    def run(self, check: Check) -> None:
        """Runs the threads until all have ended.

        Raises:
            FoundError: if something is wrong.
        """
        self._go_on()
        if not self._is_over.acquire(timeout=LONGEST_S):
            raise FoundError(f"a thread waits outside of the schedule, at {self._where()}")
        try:
            if self._found is not None:
                raise self._found
            check()
        except Exception as error:
            raise FoundError(f"{type(error).__name__}: {error}\n" + "\n".join(self._steps)) from error

    # ---- for the threads ----------------------------------------------------------------------------------------

    def _work(self, task: _Task) -> None:
        try:
            sys.settrace(self._trace)
            task.work()
        except _StoppedError:
            pass
        except BaseException as error:
            self._found = self._found or error
        finally:
            sys.settrace(None)
            task.has_ended = True
            self._go_on()

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        grain = self._watched.get(frame.f_code.co_filename)
        if grain is None:
            return None
        if grain:
            frame.f_trace_lines, frame.f_trace_opcodes = False, True
            return self._before_instruction
        return self._before_line

    def _before_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self._point(frame)
        return self._before_line

    def _before_instruction(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode" and frame.f_lasti in _shared_instructions(frame.f_code):
            self._point(frame)
        return self._before_instruction

    def _point(self, frame: FrameType) -> None:
        assert self._running is not None
        self._running.at = frame.f_code.co_name, frame.f_lineno
        self.point()

    def point(self) -> None:
        """Lets others go on, perhaps. For code that is not watched."""
        self._go_on()
        if self._found is not None:
            raise _StoppedError

    def wait(self, lock: ScheduledLock, timeout_s: float | None) -> bool:
        """Lets others go on until a lock is free; returns False if it is not in time."""
        task = self._running
        assert task is not None, "nobody may wait for a lock outside of the run"
        task.waits_for, task.deadline = lock, None if timeout_s is None else self.now + timeout_s
        self._go_on()
        task.waits_for = task.deadline = None
        if self._found is not None:
            raise _StoppedError
        return not lock.is_held

    def sleep(self, seconds: float) -> None:
        """Lets others go on until all of them wait."""
        never = ScheduledLock(self)
        never.is_held = True
        self.wait(never, seconds)

    # ---- who goes on --------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Hands the run to whoever goes on, which may be the caller."""
        before = self._running
        following = self._next(before)
        if following is before:
            return
        self._running = following
        if following is None:
            self._is_over.release()
            return
        if before is not None and not before.has_ended and self._found is None:
            self._steps.append(f"thread {before.number} stops before {before.where}")
        if following.has_begun:
            following.baton.release()
        else:
            following.has_begun = True
            self._crew.run(following.number, partial(self._work, following))
        if before is not None and not before.has_ended:
            before.baton.acquire()

    def _next(self, before: _Task | None) -> _Task | None:
        if self._found is not None:  # all are to end
            return next((task for task in self._tasks if task.has_begun and not task.has_ended), None)
        able: list[_Task] = []
        late: list[_Task] = []
        for task in self._tasks:
            if not task.has_ended and (task.waits_for is None or not task.waits_for.is_held):
                able.append(task)
            elif task.deadline is not None:
                late.append(task)
        if not able:
            return self._after_a_wait()
        if len(able) == 1 and not late:
            return able[0]
        is_preempted = before in able
        default = before if before is not None and is_preempted else able[0]
        chosen = self._tasks[self._turns.get(len(self.choices), default.number)]
        assert chosen in able or chosen in late, "the scenario is another than before"
        others = [(task.number, is_preempted) for task in able] + [(task.number, True) for task in late]
        self.choices.append(tuple(each for each in others if each[0] != chosen.number))
        if chosen in late:
            self.now = max(self.now, chosen.deadline or 0.0)
        return chosen

    def _after_a_wait(self) -> _Task | None:
        waiting = [task for task in self._tasks if not task.has_ended]
        in_time = [task for task in waiting if task.deadline is not None]
        if in_time:
            first = min(in_time, key=lambda task: task.deadline or 0.0)
            self.now = max(self.now, first.deadline or 0.0)
            return first
        if waiting:
            self._found = FoundError(f"nobody wakes those who wait: {self._where()}")
            return waiting[0]
        return None

    def _where(self) -> str:
        return ", ".join(f"thread {task.number} at {task.where}" for task in self._tasks if not task.has_ended)


_instructions: dict[CodeType, frozenset[int]] = {}  # a cache: code does not change


def _shared_instructions(code: CodeType) -> frozenset[int]:
    if code not in _instructions:
        _instructions[code] = frozenset(
            each.offset for each in dis.get_instructions(code) if any(part in each.opname for part in _SHARED)
        )
    return _instructions[code]


@contextlib.contextmanager
def _scheduled(schedule: Schedule, modules: Sequence[ModuleType]) -> Iterator[None]:
    """Has modules see the schedule's locks and clock."""
    shown = {
        "threading": _Shown(threading, Lock=lambda: ScheduledLock(schedule)),
        "time": _Shown(time, monotonic=lambda: schedule.now, sleep=schedule.sleep),
    }
    before = [(module, name, vars(module)[name]) for module in modules for name in shown if name in vars(module)]
    try:
        for module, name, _ in before:
            setattr(module, name, shown[name])
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def explore(
    scenario: Callable[[Schedule], Check],
    *,
    lines: Sequence[ModuleType] = (),
    instructions: Sequence[ModuleType] = (),
    preemptions: int = 2,
    most: int = 200_000,
) -> int:
    """Runs a scenario under every schedule with so many preemptions; returns how many there were.

    Args:
        scenario: makes what the threads share, adds them, and returns the check; called anew for every schedule.
        lines: modules in whose code threads can be preempted before every line.
        instructions: those in which they can before every instruction that may touch what others touch, too.
        most: schedules, more of which mean that the scenario is too large.

    Raises:
        FoundError: with the first schedule under which something is wrong.
    """
    modules = [*lines, *instructions]
    watched = {str(module.__file__): module in instructions for module in modules}
    left: list[tuple[dict[int, int], int]] = [({}, 0)]  # with how many preemptions they have
    count = 0
    crew = _Crew()
    with contextlib.ExitStack() as undo:
        undo.callback(crew.dismiss)
        while left:
            turns, so_far = left.pop()
            schedule = Schedule(crew, watched, turns)
            with _scheduled(schedule, modules):
                schedule.run(scenario(schedule))
            count += 1
            assert count <= most, f"more than {most} schedules: watch less, or preempt less often"
            for point in range(max(turns, default=-1) + 1, len(schedule.choices)):
                for number, is_preemption in schedule.choices[point]:
                    if so_far + is_preemption <= preemptions:
                        left.append(({**turns, point: number}, so_far + is_preemption))
    return count
