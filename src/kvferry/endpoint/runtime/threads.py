"""Threads that do not die, and rest beside a thread that keeps the interpreter for itself, such as an engine's.

What each does is a loop of turns, and a turn that fails is followed by the next.

A thread that computes without a pause gives Python's interpreter lock away only when it is asked to, after 5 ms
(`sys.getswitchinterval`), and loses 0.2 to 0.4 ms each time: it stops, another thread has to wake up and run, and it
has to wake up itself. Transfers at full speed would ask whenever they may, 60 to 170 times a second. So beside such a
thread an endpoint's threads take the lock only so many times a second, all of them together, and rest when they have.
They end their rests together, too: those that wait for the lock get it one after the other, and take it once.

How often they take it is the operating system's account of their waits: those for the lock, and those for input and
for time, after which the lock must be taken as well. Those that come back together take it once, and count it once.
Where several wait at once in their turns each waits more often than it takes the lock, and so they take it less often
than they may. Whether another thread keeps it shows in when a rest ends, and in that threads that are no endpoint's
have computed meanwhile: a busy worker keeps the lock just as long, of this endpoint or of another one in the process,
and sparing it helps nobody. Nobody rests for long where the lock is free, or is given away before anyone has to ask
for it.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from kvferry.errors import UsageError
from kvferry.loggers import logger_of
from kvferry.observe.status import ThreadStatus

log = logger_of(__name__)

_WAITS_OF_A_TAKE = 2
"""So many the operating system counts at least for each time that a thread takes the lock: for the 5 ms until it asks,
and until it gets it. A third is for the input or the time that it waited for before, if it did."""

_SAVED_UP_S = 0.5
"""Takes for so much time may come at once: those for a request now and then delay it by nothing."""

_TRIAL_S = 1e-4
"""A rest that shows whether the lock is kept: long enough for a thread that waits for it to wake up, and take it."""

_FREE_S = 0.1
"""After a trial that found the lock free no wait counts, and nobody rests."""

LONGEST_S = 1.0
"""How long a rest is at most, and so by how much a look may come later than it should while all is well."""

_SUSPICIONS = 4
_MOST_SUSPICIONS = 5
"""One rest alone says little: it ends late also where a processor is short, and a trial in time also where another
thread of the endpoint had asked for the lock. So one that ends late adds a suspicion, and one that ends in time takes
one away.
"""


_LEAST_SHARE = 0.5
"""So much must others have computed of what endpoints' threads have, for them to have kept the lock."""

_CLOCK_OF_THREAD = 6
"""Linux numbers the clock of a thread's processor time by the thread's own number and this. Of one that has ended there
is none; `time.pthread_getcpuclockid` must not be asked of such a thread."""


class EndpointThread(threading.Thread):
    """A thread of any endpoint of this process, which no endpoint spares; `may_block` is that of its loop."""

    may_block = False


def waits_of_this_thread() -> int:
    """Returns how often the calling thread has waited for anything, since it began."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def computed() -> tuple[float, float]:
    """Returns how much processor time threads of endpoints have used in this process, and all others, in seconds."""
    ours = 0.0
    for thread in threading.enumerate():
        if isinstance(thread, EndpointThread) and thread.native_id is not None:
            with contextlib.suppress(OSError):  # it ends just now
                ours += time.clock_gettime(~thread.native_id << 3 | _CLOCK_OF_THREAD)
    return ours, time.process_time() - ours


class Rests:
    """Says when threads of one endpoint rest, and how long."""

    def __init__(
        self,
        most_takes_per_s: float,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        waits: Callable[[], int] = waits_of_this_thread,
        computed: Callable[[], tuple[float, float]] = computed,
    ) -> None:
        """Begins as if the lock were free.

        Args:
            most_takes_per_s: by all threads, of the lock that another one keeps.
        """
        self._most_takes_per_s = most_takes_per_s
        self._wait_s = 1 / (most_takes_per_s * _WAITS_OF_A_TAKE)
        self._now = now
        self._sleep = sleep
        self._waits = waits
        self._computed = computed
        # No lock guards them: where two threads change them at once, a few takes are not counted, or a rest is short.
        self._paid_until = 0.0
        self._free_until = 0.0
        self._rests_until = 0.0
        self._judged_until = 0.0  # up to which rests have shown whether the lock is kept
        self._suspicions = 0  # that another thread keeps the lock
        self._has_said = False

    def after(self, counted: int) -> tuple[int, bool]:
        """Rests, if it is time to. For every thread, after each of its turns.

        Args:
            counted: up to which of the thread's waits are accounted for: `waits_of_this_thread` before its first turn,
                then what this has returned.

        Returns:
            That for the next turn, and whether the thread has rested.
        """
        waits, now = self._waits(), self._now()
        if now < self._free_until:
            return waits, False
        self._paid_until = max(self._paid_until, now - _SAVED_UP_S) + (waits - counted) * self._wait_s
        if self._paid_until <= now:
            return waits, False
        if self._suspicions < _SUSPICIONS:
            until = now + _TRIAL_S
        else:
            self._say_once()
            # All come back at the same moment: those that wait for the lock together take it once. And they do so when
            # as much is saved up again: few long rests cost fewer takes than many short ones.
            if self._rests_until <= now:
                self._rests_until = now + min(self._paid_until - now + _SAVED_UP_S, LONGEST_S)
            until = self._rests_until
        before = self._computed()
        self._sleep(max(0.0, until - now))
        if until <= self._judged_until:  # others were back before: it was taken by then, and counts as theirs
            return self._waits(), True
        self._judge(until, before)
        return waits, True

    def _judge(self, until: float, before: tuple[float, float]) -> None:
        """Takes from when the first thread is back whether another keeps the lock; later ones find it asked for.

        Args:
            before: what `computed` had returned when it began to rest.
        """
        self._judged_until = until
        now = self._now()
        if now - until >= sys.getswitchinterval() and self._others_computed(before):
            self._suspicions = min(self._suspicions + 1, _MOST_SUSPICIONS)
            return
        self._suspicions = max(0, self._suspicions - 1)
        if not self._suspicions:
            self._free_until = now + _FREE_S
            self._paid_until = 0.0

    def _others_computed(self, before: tuple[float, float]) -> bool:
        """Whether threads of no endpoint may have kept the lock: with ours they would have shared it, half and half."""
        ours_s, others_s = (now - then for now, then in zip(self._computed(), before, strict=True))
        return others_s >= ours_s * _LEAST_SHARE

    def _say_once(self) -> None:
        if not self._has_said:
            self._has_said = True
            log.info(
                "another thread of this process keeps Python's interpreter lock: transfers take it from there %g times "
                "a second at most (KVFERRY_INTERPRETER_TAKES_PER_S), which spares that thread and slows them down",
                self._most_takes_per_s,
            )


@dataclass(frozen=True, slots=True)
class SleepBounds:
    """How long sleeps are.

    Attributes:
        shortest_s: right after something has happened.
        of_quiet: of the time that nothing has: what happens is noticed that much later than it might be.
        longest_s: after a long time.
    """

    shortest_s: float
    of_quiet: float
    longest_s: float

    def next_s(self, quiet_s: float) -> float:
        """Returns how long to sleep.

        Args:
            quiet_s: since when nothing has happened.
        """
        return min(max(self.shortest_s, quiet_s * self.of_quiet), self.longest_s)


THREADS_END_S = 10.0
"""The longest that closing waits for threads that have nothing left to do: more than they take on a busy machine."""

_SHORTEST_PAUSE_S = 1e-3
_LONGEST_PAUSE_S = 1.0

_Item = TypeVar("_Item")


class Loop(ABC):
    """What a thread does, turn by turn. Only that thread calls `turn`.

    Attributes:
        reads_input: whether it reads sockets and notifications.
        may_block: whether its turns may wait for other threads of the endpoint, which then never wait for it.
        held_up_by: what of the caller's code a turn has been in for long, in words; empty if nothing.
    """

    reads_input = False
    may_block = False
    held_up_by = ""

    @abstractmethod
    def turn(self, *, may_wait: bool) -> bool:
        """Does what is due. Returns False when there is nothing left to do, ever.

        Args:
            may_wait: whether to wait, for as long as may be sensible, if there is nothing to do now.
        """

    @abstractmethod
    def has_work(self) -> bool:
        """Whether a turn would find something to do, sockets and what it polls apart. For the simulation."""

    def polls(self) -> bool:
        """Whether a turn looks at what ends by itself: writes, what settles, signals. For the simulation."""
        return False


class RunningLoop(ABC):
    """A loop that has a thread."""

    @property
    @abstractmethod
    def health(self) -> ThreadStatus:
        """The health of the thread. May be read from any thread."""

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self.health.is_alive

    @property
    def is_current(self) -> bool:
        """Whether it is the thread that asks."""
        return False


def check_may_wait(what: str) -> None:
    """Checks that the calling thread may wait for an endpoint: what it waits for may need the endpoint's own threads.

    Raises:
        UsageError: on a thread of an endpoint's, unless it calls change callbacks.
    """
    thread = threading.current_thread()
    if isinstance(thread, EndpointThread) and not thread.may_block:
        raise UsageError(
            f"{what} waits, and this is kvferry's own thread {thread.name}, without which nothing ends: call it on a "
            "thread of your own, or in a change callback"
        )


def do_each(items: Iterable[_Item], do: Callable[[_Item], object], what: str) -> None:
    """Does something with each item; what it raises with one is logged, and the others have their turn.

    For what was taken out of where it waited: whoever stops half-way has lost the rest.

    Args:
        what: names an item in the log.
    """
    for item in items:
        try:
            do(item)
        except BaseException:
            log.exception("%s met an unexpected error; the others go on", what)


class SupervisedThread(RunningLoop):
    """A thread of this process that runs a loop, whatever happens in a turn.

    A turn that raises is logged and counted, and the loop goes on with the next: at once after a single failure, and
    ever slower, up to once a second, while every turn fails.
    """

    def __init__(self, name: str, loop: Loop, rests: Rests) -> None:
        """Starts the thread.

        Args:
            rests: says when it rests between two turns.
        """
        self._name = name
        self._loop = loop
        self._rests = rests
        self._failures = 0
        self._last_failure = ""
        self._thread = EndpointThread(target=self._run, name=name, daemon=True)
        self._thread.may_block = loop.may_block
        self._thread.start()

    @property
    def health(self) -> ThreadStatus:
        return ThreadStatus(
            name=self._name,
            is_alive=self._thread.is_alive(),
            failures=self._failures,
            last_failure=self._last_failure,
            held_up_by=self._loop.held_up_by,
        )

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        pause_s = _SHORTEST_PAUSE_S
        goes_on = True
        counted, has_rested = waits_of_this_thread(), False
        while goes_on:
            try:
                goes_on = self._loop.turn(may_wait=not has_rested)
                pause_s = _SHORTEST_PAUSE_S
                if goes_on:
                    counted, has_rested = self._rests.after(counted)
            except BaseException as error:  # SystemExit, too, would end the thread in silence
                self._failures += 1
                self._last_failure = type(error).__name__
                with suppress(BaseException):  # the error's text may be code that fails as well
                    self._last_failure += f": {error}"
                log.exception("thread %s goes on after an error", self._name)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
