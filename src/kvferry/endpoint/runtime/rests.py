"""How often an endpoint's threads take Python's interpreter lock from a thread that keeps it, such as an engine's.

A thread that computes without a pause gives the lock away only when it is asked to, after 5 ms
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
from collections.abc import Callable

from kvferry.loggers import logger_of

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
