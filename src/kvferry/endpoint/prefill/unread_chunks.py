"""The chunks of a room that were handed in and may not be read yet, or that wait for others to join them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from kvferry.endpoint.runtime.callers_code import SIGNAL, Awaited, CallersCode
from kvferry.endpoint.runtime.workers import Worker
from kvferry.layout import Shard
from kvferry.plan.requests.chunks import HandedIn, components_by_group, joined


@dataclass(slots=True)
class ReadyChunk:
    """A chunk of which the pages hold what is to be sent.

    Attributes:
        chunk: the chunk, or several as one.
        ready_at: since when; if it is several, the first of them.
        last_ready_at: since when the last of them is.
        count: how many were handed in for it.
    """

    chunk: HandedIn
    ready_at: float
    last_ready_at: float
    count: int = 1


class UnreadChunks:
    """Those of a room, in the order in which they were handed in. Only the room's own turns use it.

    The first that has a signal waits for it, and the others wait for the first. Ranges of layers of the same pages are
    joined while earlier writes keep the wire busy: a range leaves by itself as soon as the wire has nothing else to do,
    and if layers are computed faster than they are sent, fewer and larger writes take them.
    """

    def __init__(self, room: int, shards: Sequence[Shard], came: Callable[[BaseException | None], None]) -> None:
        """Begins with none.

        Args:
            room: whose they are.
            shards: those of the rank's layout.
            came: called by a worker when the first signal has come, or with what looking at it has raised.
        """
        self._room = room
        self._came = came
        self._awaited: Awaited | None = None  # the signal of the first that is unready
        self._shards = shards
        self._ready: deque[ReadyChunk] = deque()
        self._unready: deque[HandedIn] = deque()

    def __bool__(self) -> bool:
        return bool(self._ready or self._unready)

    @property
    def has_ready(self) -> bool:
        """Whether there is any of which the pages may be read."""
        return bool(self._ready)

    @property
    def unready(self) -> HandedIn | None:
        """The first chunk whose pages are still being written. May be read from any thread."""
        return next(iter(list(self._unready)), None)

    def add(self, chunk: HandedIn) -> None:
        """Adds the next chunk that was handed in."""
        if self._unready or chunk.is_ready is not None:
            self._unready.append(chunk)
        else:
            self._add_ready(chunk, chunk.submitted_at)

    def await_signal(self, worker: Worker) -> None:
        """Has a worker look at the first signal, unless one does."""
        if self._awaited is None and self._unready:
            is_ready = self._unready[0].is_ready
            assert is_ready is not None
            self._awaited = Awaited(is_ready, self._came, self._room)
            worker.await_signal(self._awaited)

    def signalled(self, error: BaseException | None, now: float, code: CallersCode) -> BaseException | None:
        """Takes note that the first signal has come, and looks at those behind it.

        Args:
            error: what looking at it has raised.
            code: runs what looks at signals.

        Returns:
            What looking at any has raised.
        """
        self._awaited = None
        if not self._unready or error is not None:
            return error
        self._add_ready(self._unready.popleft(), now)
        try:
            while self._unready:
                is_ready = self._unready[0].is_ready
                if is_ready is not None and not code.run(SIGNAL, is_ready, self._room):
                    break
                self._add_ready(self._unready.popleft(), now)
        except BaseException as raised:  # the caller's code, or a device that has failed
            return raised
        return None

    def next(self, *, is_wire_busy: bool) -> ReadyChunk | None:
        """Takes out what is to be sent next; None if there is nothing, or more layers are to join what there is."""
        if not self._ready:
            return None
        is_joinable = len(self._ready) == 1 and not self._ready[0].chunk.completes
        return None if is_joinable and is_wire_busy else self._ready.popleft()

    def drop(self) -> int:
        """Drops all, and looks at no signal any more; returns how many were handed in."""
        if self._awaited is not None:
            self._awaited.is_dropped = True
            self._awaited = None
        count = len(self._unready) + sum(each.count for each in self._ready)
        self._unready.clear()
        self._ready.clear()
        return count

    @cached_property
    def _components(self) -> dict[str, frozenset[str]]:
        return components_by_group(self._shards)  # made where layers are handed in alone: few rooms need it

    def _add_ready(self, chunk: HandedIn, now: float) -> None:
        last = self._ready[-1] if self._ready else None
        together = joined(last.chunk, chunk, self._components) if last is not None else None
        if last is None or together is None:
            self._ready.append(ReadyChunk(chunk, now, now))
        else:
            last.chunk, last.last_ready_at = together, now
            last.count += 1
