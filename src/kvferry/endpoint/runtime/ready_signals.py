"""Signals that say when pages hold what is to be sent: what callers may give, and the ones that a worker looks at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from kvferry.endpoint.runtime.callers_code import CallersCode
from kvferry.errors import UsageError

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


class Awaited:
    """A signal that somebody waits for.

    Attributes:
        is_dropped: whether nobody waits any more. May be set from any thread.
    """

    __slots__ = ("came", "is_dropped", "look", "room")

    def __init__(self, look: Callable[[], bool], came: Callable[[BaseException | None], None], room: int) -> None:
        """Nobody looks at it yet.

        Args:
            look: returns whether it has come.
            came: called once when it has, or with what looking at it has raised. Raises nothing.
            room: which waits for it.
        """
        self.look = look
        self.came = came
        self.room = room
        self.is_dropped = False


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
