"""Recordings of what an endpoint does, span by span, as traces that viewers of Perfetto and Chrome open."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from kvferry.observe.records import Observer, ReceiverStats, SenderStats, WriteRecord
from kvferry.observe.status import Side

MOST_SPANS = 200_000
"""Largest number of spans in a window; of more, the earliest are left out, and counted."""

_THREADS = 1000
"""Largest number of rows of an endpoint, in the numbering of a trace."""

COLOURS: Mapping[str, str] = {
    "transfer": "grey",
    "queue": "terrible",
    "credit": "bad",
    "gather": "thread_state_running",
    "post": "thread_state_runnable",
    "wire": "rail_load",
    "arrival": "yellow",
    "scatter": "rail_response",
}
"""The colour of each phase, of those that trace viewers have names for."""


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Something that took time.

    Attributes:
        phase: what took the time; "transfer" is a whole room.
        row: the thread that did it, or where it was.
        room: for which room.
        begin_s: in seconds since 1970, by the clock of the machine.
        end_s: likewise.
        num_bytes: that it moved.
        what: more about it, in words.
    """

    phase: str
    row: str
    room: int
    begin_s: float
    end_s: float
    num_bytes: int = 0
    what: str = ""


class Window(msgspec.Struct, frozen=True):
    """What an endpoint has recorded.

    Attributes:
        side: prefill or decode.
        engine: the engine's name.
        rank: which of its ranks.
        endpoint: the endpoint's name, as peers know it.
        spans: everything that has ended within the window; what had begun before it as well.
        left_out: how many there was no space for.
    """

    side: Side
    engine: str
    rank: int
    endpoint: str
    spans: list[Span]
    left_out: int


class Recorder(Observer):
    """Keeps spans while `record` runs; at other times an event costs a look at a flag.

    Attributes:
        is_on: whether a recording runs.
    """

    def __init__(self) -> None:
        self.is_on = False
        # Guards the window: there is one recording at a time.
        self._lock = threading.Lock()
        self._spans: deque[Span] = deque(maxlen=MOST_SPANS)
        self._count = 0
        self._begun_at = self._unix_s = 0.0  # the window's begin; when the steady clock stood at zero

    def record(self, seconds: float) -> tuple[list[Span], int] | None:
        """Records for so many seconds.

        Returns:
            The spans that have ended meanwhile, and how many were left out; None if another recording runs.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            self._spans.clear()
            self._count = 0
            self._begun_at = time.monotonic()
            self._unix_s = time.time() - self._begun_at
            self.is_on = True
            try:
                time.sleep(seconds)
            finally:
                self.is_on = False
            spans = list(self._spans)
            return spans, self._count - len(spans)
        finally:
            self._lock.release()

    def _add(
        self, phase: str, row: str, room: int, begin: float, end: float, num_bytes: int = 0, what: str = ""
    ) -> None:
        if end > begin:
            self._count += 1
            self._spans.append(Span(phase, row, room, begin + self._unix_s, end + self._unix_s, num_bytes, what))

    def wrote(self, room: int, writes: Sequence[WriteRecord]) -> None:
        if not self.is_on:
            return
        for write in writes:
            if write.done_at >= self._begun_at:  # else it ended before the window
                self._add_write(room, write)

    def _add_write(self, room: int, write: WriteRecord) -> None:
        self._add("queue", "queue", room, write.submitted_at, write.posted_at)
        for part in write.parts:
            thread = part.thread
            self._add("credit", "credit", room, part.ready_at, part.begun_at, part.num_bytes, write.receiver)
            self._add("gather", thread, room, part.begun_at, part.gathered_at, part.num_bytes)
            self._add("post", thread, room, part.gathered_at, part.posted_at, part.num_bytes)
            what = f"{write.path.value} to {write.receiver}: {write.why}"
            self._add("wire", "wire", room, part.gathered_at, part.landed_at, part.num_bytes, what)

    def sent(self, room: int, stats: SenderStats, error: Exception | None) -> None:
        if self.is_on and stats.ended_at is not None:
            self._add("transfer", "rooms", room, stats.opened_at, stats.ended_at, stats.total_bytes, _end(error))

    def received(self, room: int, stats: ReceiverStats, error: Exception | None) -> None:
        if not self.is_on or stats.ended_at is None:
            return
        for placed in stats.placed:
            what = f"from prefill rank {placed.writer}"
            self._add("arrival", "arrival", room, placed.arrived_at, placed.begun_at, placed.num_bytes, what)
            self._add("scatter", placed.thread, room, placed.begun_at, placed.done_at, placed.num_bytes, what)
        self._add("transfer", "rooms", room, stats.opened_at, stats.ended_at, 0, _end(error))


def _end(error: Exception | None) -> str:
    return "success" if error is None else f"{type(error).__name__}: {error}"


def chrome_trace(windows: Sequence[Window]) -> dict[str, Any]:
    """Converts windows to trace events of Chrome and Perfetto: processes are endpoints, rows workers, colours phases.

    What overlaps on a row, as writes on a wire do, gets rows of its own. Times begin with the earliest. The format:
    "Trace Event Format" by the Chromium project.
    """
    begin_s = min((span.begin_s for window in windows for span in window.spans), default=0.0)
    events: list[dict[str, Any]] = []
    for process, window in enumerate(windows, 1):
        name = f"{window.side.value} {window.engine}/{window.rank}"
        events.append({"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}})
        # No thread has the number of its process: viewers would take it for the main thread, and show it first.
        for thread, (row, spans) in enumerate(_rows(window.spans), _THREADS * process + 1):
            events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": row}})
            events += [_event(span, process, thread, begin_s) for span in spans]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(span: Span, process: int, thread: int, begin_s: float) -> dict[str, Any]:
    # Both ends are rounded, to what viewers read exactly: Perfetto drops a piece that begins a nanosecond before its
    # predecessor on the row has ended.
    begin_us, end_us = (round((each - begin_s) * 1e6) for each in (span.begin_s, span.end_s))
    about: dict[str, Any] = {"room": span.room, "bytes": span.num_bytes, "what": span.what}
    if span.num_bytes:
        about["MB/s"] = round(span.num_bytes / 1e6 / (span.end_s - span.begin_s), 1)
    return {
        "ph": "X",
        "name": f"room {span.room}" if span.phase == "transfer" else span.phase,
        "cat": span.phase,
        "cname": COLOURS[span.phase],
        "pid": process,
        "tid": thread,
        "ts": begin_us,
        "dur": end_us - begin_us,
        "args": about,
    }


def _rows(spans: Sequence[Span]) -> Iterator[tuple[str, list[Span]]]:
    """Yields rows with their spans, in the order of their beginning; a name has as many rows as its spans overlap."""
    by_name: dict[str, list[list[Span]]] = {}
    for span in sorted(spans, key=lambda each: (each.begin_s, -each.end_s)):
        lanes = by_name.setdefault(span.row, [])
        lane = next((lane for lane in lanes if lane[-1].end_s <= span.begin_s), None)
        if lane is None:
            lanes.append([span])
        else:
            lane.append(span)
    for name in sorted(by_name):
        lanes = by_name[name]
        for number, lane in enumerate(lanes, 1):
            yield (name if len(lanes) == 1 else f"{name} {number}"), lane
