"""Threads that do not die: what each does is a loop of turns, and a turn that fails is followed by the next."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod

from kvferry.endpoint.runtime.rests import Rests, waits_of_this_thread
from kvferry.observe.status import ThreadStatus

log = logging.getLogger(__name__)

_SHORTEST_PAUSE_S = 1e-3
_LONGEST_PAUSE_S = 1.0


class Loop(ABC):
    """What a thread does, turn by turn. Only that thread calls `turn`.

    Attributes:
        reads_input: whether it reads sockets and notifications.
    """

    reads_input = False

    @abstractmethod
    def turn(self, *, may_wait: bool) -> bool:
        """Does what is due. Returns False when there is nothing left to do, ever.

        Args:
            may_wait: whether to wait, for as long as may be sensible, if there is nothing to do now.
        """

    @abstractmethod
    def has_work(self) -> bool:
        """Whether a turn would find something to do, sockets and transports apart. For the simulation."""

    def polls_writes(self) -> bool:
        """Whether a turn polls writes that are on their way. For the simulation."""
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
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def health(self) -> ThreadStatus:
        return ThreadStatus(
            name=self._name,
            is_alive=self._thread.is_alive(),
            failures=self._failures,
            last_failure=self._last_failure,
        )

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
                self._last_failure = f"{type(error).__name__}: {error}"
                log.exception("thread %s goes on after an error", self._name)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
