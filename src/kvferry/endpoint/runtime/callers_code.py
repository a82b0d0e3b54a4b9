"""The code of its caller's that an endpoint runs: change callbacks, and signals that pages are ready.

It may raise anything, and it may block, though it should not. What it raises is the loss of the room that it is about;
what blocks holds up the one thread that runs it, and is named in the log and in the status while it does. Signals are
looked at on workers, every millisecond. Callbacks have a thread of their own, which nothing else waits for.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Protocol, TypeAlias, TypeVar

from kvferry.endpoint.runtime.platform import Closing, Platform
from kvferry.endpoint.runtime.threads import Loop, RunningLoop
from kvferry.errors import UsageError
from kvferry.loggers import logger_of

log = logger_of(__name__)

_LONG_S = 1.0
"""Code that returns at once has returned by then, also on a busy machine."""

_LAST_CALLBACKS_S = 2.0
"""The longest that closing waits for callbacks: more than `_LONG_S`, so that one that blocks can be named."""

_Result = TypeVar("_Result")


def name_of(code: object) -> str:
    """Returns the name of a callable, for people. Runs nothing of it."""
    while isinstance(code, partial | MethodType):
        code = code.func if isinstance(code, partial) else code.__func__
    named = code if isinstance(code, FunctionType | BuiltinFunctionType | type) else type(code)
    return f"{named.__module__}.{named.__qualname__}" if named.__module__ else named.__qualname__


class CallersCode:
    """What one thread runs of the caller's code, and which of it the thread is in. Read from any thread.

    Signals are looked at thousands of times a second: so a look takes no time, and a call is as old as it was seen by
    whoever reports it.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        """Begins in none.

        Args:
            now: the time, in seconds of a steady clock.
        """
        self._now = now
        self._running: tuple[str, object, int] | None = None
        self._seen: tuple[str, object, int] | None = None  # kept, so that no later call can be taken for it
        self._seen_at = 0.0
        self._is_reported = False

    def run(self, kind: str, code: Callable[[], _Result], room: int) -> _Result:
        """Runs code of the caller's, and lets out whatever it raises.

        Args:
            kind: what it is, in words.
            room: which it is about.
        """
        self._running = kind, code, room
        try:
            return code()
        finally:
            self._running = None

    @property
    def held_up_by(self) -> str:
        """Which code the thread has been in for long, in words; empty if there is none."""
        seen, seconds = self._seen, self._now() - self._seen_at
        if seen is None or seen is not self._running or seconds < _LONG_S:
            return ""
        kind, code, room = seen
        return f"{kind} {name_of(code)} of room {room}, for {seconds:.1f} s"

    def report(self) -> None:
        """Logs, once, that the thread is held up. To be called several times a second, by one thread."""
        if self._running is not self._seen:
            self._seen_at, self._is_reported = self._now(), False
            self._seen = self._running
        elif not self._is_reported and (held_up_by := self.held_up_by):
            self._is_reported = True
            log.warning(
                "a thread of kvferry's has been held up by %s: it must return at once, and what else it would do waits",
                held_up_by,
            )


class Callbacks(Loop):
    """Calls the caller back on a thread of its own, which begins with the first callback that is added."""

    may_block = True

    def __init__(self, platform: Platform, name: str) -> None:
        """Begins without a thread.

        Args:
            name: that of the endpoint's threads.
        """
        self._platform = platform
        self._name = f"{name}-callbacks"
        self._code = CallersCode(platform.now)
        # Guards that one thread is started, and none once it was stopped.
        self._lock = threading.Lock()
        self._is_stopped = False
        self._is_in_close = False
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.threads: tuple[RunningLoop, ...] = ()

    # ---- from any thread ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread, unless it runs or nobody will be called back any more."""
        with self._lock:
            if not (self.threads or self._is_stopped):
                self.threads = (self._platform.start(self._name, self),)

    def post(self, work: Callable[[], None]) -> None:
        """Has the thread do something, soon. Returns at once."""
        self._work.put(work)

    @property
    def held_up_by(self) -> str:  # type: ignore[override]
        return self._code.held_up_by

    def report(self) -> None:
        """Logs, once, that a callback does not return."""
        self._code.report()

    def stop(self) -> None:
        """Ends the thread when all is done that was posted before. May be called again."""
        with self._lock:
            if not self._is_stopped:
                self._is_stopped = True
                self._work.put(None)

    def note_close(self) -> None:
        """Takes note if a callback closes the endpoint: then nobody who closes it waits for the thread."""
        self._is_in_close |= any(thread.is_current for thread in self.threads)

    def closing(self) -> Closing:
        """Ends the thread: yields what to wait for, and until when. One that is held up goes on alone."""
        self.stop()
        yield self._is_over, self._platform.now() + _LAST_CALLBACKS_S
        if not self._is_over():
            log.warning("closing does not wait for %s", self.held_up_by or "the change callbacks that are left")

    def _is_over(self) -> bool:
        """Whether closing need not wait for the thread, which nobody else looks after by then."""
        self.report()
        return self._is_in_close or not any(thread.is_alive for thread in self.threads)

    # ---- the thread ---------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        return not self._work.empty()

    def turn(self, *, may_wait: bool) -> bool:
        try:
            work = self._work.get(block=may_wait)
        except queue.Empty:
            return True
        if work is not None:
            work()
        return work is not None

    def call(self, callback: Callable[[], None], room: int) -> None:
        """Calls a callback; what it raises is logged. For what was posted."""
        try:
            self._code.run("the change callback", callback, room)
        except BaseException:
            log.exception("room %d: the change callback %s failed; all else goes on", room, name_of(callback))


SIGNAL = "the signal"
"""What looking at one is called in the log."""


class DeviceEvent(Protocol):
    """Such as a `torch.cuda.Event` that was recorded behind the kernels that write the pages."""

    def query(self) -> bool:
        """Returns whether all work before it is done. Does not wait."""


class Flag(Protocol):
    """Such as a `threading.Event`."""

    def is_set(self) -> bool:
        """Returns whether it is set."""


Ready: TypeAlias = "DeviceEvent | Flag | Callable[[], bool]"
"""Says whether pages hold what is to be sent; once it has said so it must go on saying so. It must not wait."""


def look_of(ready: Ready, *, where: str) -> Callable[[], bool]:
    """Returns how to look at a signal.

    Raises:
        UsageError: if it is none of the kinds there are.
    """
    look: Callable[[], bool] | None = getattr(ready, "query", None) or getattr(ready, "is_set", None)
    look = look or (ready if callable(ready) else None)
    if look is None:
        raise UsageError(
            f"{where}: ready is {ready!r}: it must be an event of a device, with query(), a threading.Event, or a "
            "callable that returns whether the pages may be read"
        )
    return look


@dataclass(eq=False, slots=True)
class Awaited:
    """A signal that somebody waits for.

    Attributes:
        look: returns whether it has come.
        came: called once when it has, or with what looking at it has raised. Raises nothing.
        room: which waits for it.
        is_dropped: whether nobody waits any more. May be set from any thread.
    """

    look: Callable[[], bool]
    came: Callable[[BaseException | None], None]
    room: int
    is_dropped: bool = False


class AwaitedSignals:
    """Those that one worker looks at. For that worker's thread only."""

    def __init__(self, code: CallersCode, bind_thread: Callable[[], None] = lambda: None) -> None:
        """Looks at nothing yet.

        Args:
            code: runs what looks at a signal.
            bind_thread: called before the first signal is looked at, which may be an event of a device.
        """
        self._all: list[Awaited] = []
        self._code = code
        self._bind_thread = bind_thread
        self._is_bound = False

    def __len__(self) -> int:
        return len(self._all)

    def add(self, signal: Awaited) -> None:
        """Looks at a signal from now on, until it has come or is dropped."""
        self._all.append(signal)

    def look(self) -> bool:
        """Looks at each; returns whether any has come."""
        if not self._is_bound:
            self._is_bound = True
            self._bind_thread()
        awaited, self._all = self._all, []
        has_any_come = False
        for signal in awaited:
            if signal.is_dropped:
                continue
            try:
                has_come = self._code.run(SIGNAL, signal.look, signal.room)
            except BaseException as error:  # the caller's code, or a device that has failed
                signal.came(error)
                has_any_come = True
                continue
            if has_come:
                signal.came(None)
                has_any_come = True
            else:
                self._all.append(signal)
        return has_any_come
