"""Threads that do not die: what each does is a loop of turns, and a turn that fails is followed by the next."""

from __future__ import annotations

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

SLOW_TURN_S = 1.0
"""How long a turn may take while all is well: beside a thread that keeps the interpreter's lock, and gives it away only
after `sys.getswitchinterval`, each step that takes it waits for so long."""


class EndpointThread(threading.Thread):
    """A thread of any endpoint of this process; `may_block` is that of its loop."""

    may_block = False


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

    def __init__(self, name: str, loop: Loop) -> None:
        """Starts the thread."""
        self._name = name
        self._loop = loop
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
        while goes_on:
            try:
                goes_on = self._loop.turn(may_wait=True)
                pause_s = _SHORTEST_PAUSE_S
            except BaseException as error:  # SystemExit, too, would end the thread in silence
                self._failures += 1
                self._last_failure = type(error).__name__
                with suppress(BaseException):  # the error's text may be code that fails as well
                    self._last_failure += f": {error}"
                log.exception("thread %s goes on after an error", self._name)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
