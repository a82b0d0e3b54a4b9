"""What an endpoint reports while it works: its events, and what is recorded of a transfer and of how it ended.

Times are seconds of the machine's steady clock.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import MethodType

from kvferry.errors import (
    ChecksumError,
    IncompatiblePeerError,
    PeerDisconnectedError,
    TransferAbortedError,
    TransferTimeoutError,
)
from kvferry.loggers import logger_of
from kvferry.plan import TransferPath


class Outcome(Enum):
    """How a transfer has ended."""

    SUCCESS = "success"
    ABORTED = "aborted"
    TIMED_OUT = "timed_out"
    PEER_LOST = "peer_lost"
    INCOMPATIBLE = "incompatible"
    WRONG_BYTES = "wrong_bytes"
    FAILED = "failed"


_OUTCOMES: tuple[tuple[type[Exception], Outcome], ...] = (
    (TransferAbortedError, Outcome.ABORTED),
    (TransferTimeoutError, Outcome.TIMED_OUT),
    (ChecksumError, Outcome.WRONG_BYTES),
    (PeerDisconnectedError, Outcome.PEER_LOST),
    (IncompatiblePeerError, Outcome.INCOMPATIBLE),
)


def outcome_of(error: BaseException | None) -> Outcome:
    """Returns the outcome of a transfer that failed with an error; None stands for success."""
    if error is None:
        return Outcome.SUCCESS
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        for kind, outcome in _OUTCOMES:
            if isinstance(error, kind):
                return outcome
        error = error.__cause__
    return Outcome.FAILED


@dataclass(frozen=True, slots=True)
class PartRecord:
    """What went to a receiver in one write of the transport: a chunk, or a sub-chunk through staging memory.

    Attributes:
        ready_at: when it could have begun, had there been staging memory; `begun_at` if there was enough.
        begun_at: when gathering began, or the selection of descriptors.
        gathered_at: when all was gathered, or selected, and the transport was given the write.
        posted_at: when the transport had taken it.
        landed_at: when its completion was noticed.
        num_bytes: bytes that it carried.
        runs: pieces that they lay in: descriptors before neighbours were merged, or blocks that were gathered.
        thread: the one that did the work.
    """

    ready_at: float
    begun_at: float
    gathered_at: float
    posted_at: float
    landed_at: float
    num_bytes: int
    runs: int
    thread: str = ""


@dataclass(frozen=True, slots=True)
class WriteRecord:
    """One write to one receiver, of a chunk or of several that left together.

    Attributes:
        receiver: the decode rank's endpoint.
        path: which path the bytes took.
        why: the reason for that path, in words.
        total_bytes: bytes that moved.
        descriptors: descriptors after neighbours were merged; through staging memory, bulk writes.
        submitted_at: when the caller handed its first chunk in; for one that came before the receivers, when those did.
        posted_at: when the transport was given the write.
        done_at: when the transport had completed it.
        transport_post_s: how long posting took, by the transport's own account.
        transport_transfer_s: the same of the whole write.
        parts: what it was written in.
    """

    receiver: str
    path: TransferPath
    why: str
    total_bytes: int
    descriptors: int
    submitted_at: float
    posted_at: float
    done_at: float
    transport_post_s: float
    transport_transfer_s: float
    parts: tuple[PartRecord, ...] = ()

    @property
    def runs(self) -> int:
        """Number of pieces that the bytes lay in."""
        return sum(part.runs for part in self.parts)

    @property
    def waiting_s(self) -> float:
        """Time between submission and posting."""
        return self.posted_at - self.submitted_at

    @property
    def latency_s(self) -> float:
        """Time between submission and completion."""
        return self.done_at - self.submitted_at


@dataclass(frozen=True, slots=True)
class SenderStats:
    """One rank's account of a room it sent.

    Attributes:
        opened_at: when the caller opened the room.
        last_submitted_at: when the last chunk was handed in; None before.
        ended_at: when the room ended; None before.
        writes: every write that completed, in the order of completion.
    """

    opened_at: float
    last_submitted_at: float | None
    ended_at: float | None
    writes: tuple[WriteRecord, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes that this rank sent."""
        return sum(write.total_bytes for write in self.writes)

    @property
    def descriptors(self) -> int:
        """Descriptors that this rank posted."""
        return sum(write.descriptors for write in self.writes)

    @property
    def busy_s(self) -> float:
        """Time during which at least one write was on its way, in seconds."""
        return busy_s(self.writes)


@dataclass(frozen=True, slots=True)
class PlacedRecord:
    """A part that was put into its pages, or a chunk that was verified there.

    Attributes:
        writer: the prefill rank that it came from.
        arrived_at: when we saw that it was in our memory.
        begun_at: when the putting or verifying began.
        done_at: when it ended.
        num_bytes: of a part, in staging memory; 0 for a chunk.
        thread: the one that did the work.
    """

    writer: int
    arrived_at: float
    begun_at: float
    done_at: float
    num_bytes: int
    thread: str = ""


@dataclass(frozen=True, slots=True)
class ReceiverStats:
    """One rank's account of a room it received.

    Attributes:
        opened_at: when the caller opened the room.
        first_arrival_at: when the first chunk had arrived; None before.
        ended_at: when the room ended; None before.
        chunks: writes that arrived, over all writers.
        placed: what was put into pages, or verified; empty until the room has ended.
        absent: components that this rank has and the prefill engine has not: nothing of them came.
    """

    opened_at: float
    first_arrival_at: float | None
    ended_at: float | None
    chunks: int
    placed: tuple[PlacedRecord, ...] = ()
    absent: frozenset[str] = frozenset()


MOST_INTERVALS = 4096


class BusyTime:
    """Adds up the time during which at least one of several things was going on.

    Bytes divided by it never exceed what the wire carries, however many writes overlap: time counts once. Intervals may
    come in any order. One thread at a time may use it.

    Attributes:
        begins: of what is remembered.
        ends: of the same.
    """

    def __init__(self, most_intervals: int = MOST_INTERVALS) -> None:
        """Begins with nothing counted.

        Args:
            most_intervals: that are remembered. Beyond that the older half is forgotten, and a write that began before
                those has their time counted again: busy too long rather than not long enough.
        """
        self._most_intervals = most_intervals
        # Disjoint, with gaps between them, in the order of time: where each begins, and where it ends.
        self.begins: list[float] = []
        self.ends: list[float] = []
        self._total_s = 0.0

    def add(self, begin: float, end: float) -> float:
        """Counts the time between two points; returns how much of it was not counted before, in seconds."""
        begins, ends = self.begins, self.ends
        first, stop = bisect_left(ends, begin), bisect_right(begins, end)  # those that it touches
        counted_s = 0.0
        if first < stop:
            counted_s = sum(ends[each] - begins[each] for each in range(first, stop))
            begin, end = min(begin, begins[first]), max(end, ends[stop - 1])
        begins[first:stop], ends[first:stop] = [begin], [end]
        if len(begins) > self._most_intervals:
            del begins[: len(begins) // 2], ends[: len(ends) // 2]
        new_s = max(0.0, end - begin - counted_s)
        self._total_s += new_s
        return new_s

    @property
    def total_s(self) -> float:
        """Seconds that were counted so far."""
        return self._total_s


def busy_s(writes: Sequence[WriteRecord]) -> float:
    """Returns for how long at least one of the writes was on its way, in seconds."""
    busy = BusyTime()
    for write in writes:
        busy.add(write.posted_at, write.done_at)
    return busy.total_s


log = logger_of(__name__)


class Retry(Enum):
    """What is retried."""

    LOOK_UP = "look-up"
    CONNECT = "connect"


class Observer:
    """Receives an endpoint's events, each on the thread where it happens; returns at once. This one ignores them."""

    def begin_receiving(self, room: int) -> str:
        """A caller opens a room on a decode rank. Returns the trace context to send with its open request, if any."""
        return ""

    def begin_sending(self, room: int) -> None:
        """A caller opens a room on a prefill rank."""

    def requested(self, room: int, trace_context: str) -> None:
        """A decode rank's open request for a room that is open here, with the trace context that came with it."""

    def submitted(self, seconds: Sequence[float]) -> None:
        """A caller has handed chunks in, which took so long each. May be called on the caller's thread."""

    def wrote(self, room: int, writes: Sequence[WriteRecord]) -> None:
        """Writes are complete: all since the last call. Called when the room ends at the latest, and then for each."""

    def write_failed(self, room: int, receiver: str, error: Exception) -> None:
        """A write failed."""

    def deferred(self, receiver: str) -> None:
        """A sub-chunk has to wait for staging memory, on this side or the receiver's."""

    def sent(self, room: int, stats: SenderStats, error: Exception | None) -> None:
        """A room that this rank sends has ended."""

    def received(self, room: int, stats: ReceiverStats, error: Exception | None) -> None:
        """A room that this rank receives has ended."""

    def refused(self, error: Exception) -> None:
        """Something was refused: a caller's request, a peer, or a peer's room."""

    def retried(self, what: Retry) -> None:
        """Something is retried."""

    def peer_lost(self, peer: str, error: Exception) -> None:
        """A peer is given up."""


class Several(Observer):
    """Passes events on to several observers. One that raises is logged, and neither the others nor transfers suffer.

    Attributes:
        observers: all of them. Those that ignore an event are not told of it: most do, and writes are many.
    """

    def __init__(self, *observers: Observer) -> None:
        self.observers = observers
        for event, ignores in vars(Observer).items():
            if not event.startswith("_"):
                told = [getattr(each, event) for each in observers if getattr(type(each), event) is not ignores]
                setattr(self, event, partial(_notify, told))


def _notify(told: Sequence[MethodType], *arguments: object) -> str:
    """Tells all; returns what the one says that traces, if any does."""
    said = ""
    for each in told:
        try:
            said = each(*arguments) or said
        except BaseException:
            log.exception("%s met an error; what it shows may be wrong", type(each.__self__).__name__)
    return said
