"""For how long the threads of a rank's process have had the interpreter's lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from kvferry.endpoint.runtime.platform import SystemPlatform
from kvferry.staging.resources import MachineResources

_THREADS = Path("/proc/self/task")

P = ParamSpec("P")
Returned = TypeVar("Returned")


class WithoutLock:
    """Counts what threads take of processors in calls that run without the interpreter's lock.

    Attributes:
        seconds: of CPU time, of all threads.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lock = threading.Lock()

    def watch(self, call: Callable[P, Returned], /) -> Callable[P, Returned]:
        """Returns a call that does the same, and is counted."""

        def watched(*given: P.args, **named: P.kwargs) -> Returned:
            before = time.thread_time()
            try:
                return call(*given, **named)
            finally:
                taken_s = time.thread_time() - before
                with self._lock:
                    self.seconds += taken_s

        return watched


_WITHOUT_LOCK = WithoutLock()  # one, as there is one interpreter in a rank's process


def counted_platform() -> SystemPlatform:
    """Returns this machine, on which endpoints' compiled copies and posts and waits for a GPU are counted."""
    platform = SystemPlatform()
    platform.staging = MachineResources(_WITHOUT_LOCK.watch)
    return platform


def interpreter_cpu_s() -> float | None:
    """Returns the CPU time for which Python's threads have had the interpreter's lock; None where nobody says.

    Threads of a transport, of CUDA or of torch are none of them. Compiled copies, posts in the same call and waits for
    a GPU, which spin, run without the lock: it is what an engine's own Python loses. Other calls of a transport count.
    """
    nanoseconds = -_WITHOUT_LOCK.seconds * 1e9
    for thread in threading.enumerate():
        if thread.native_id is None:
            continue
        try:
            nanoseconds += int((_THREADS / str(thread.native_id) / "schedstat").read_text(encoding="ascii").split()[0])
        except (OSError, ValueError, IndexError):
            return None
    return nanoseconds / 1e9


def taken_since(before: float | None) -> float | None:
    """Returns how much more it has become; None where nobody says."""
    now = interpreter_cpu_s()
    return None if before is None or now is None else max(0.0, now - before)
