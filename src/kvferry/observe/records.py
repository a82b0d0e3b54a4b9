"""What is recorded of a transfer while it runs, and how it ended. Times are seconds of the machine's steady clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvferry.errors import (
    ChecksumError,
    IncompatiblePeerError,
    PeerDisconnectedError,
    TransferAbortedError,
    TransferTimeoutError,
)
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


def busy_s(writes: Sequence[WriteRecord]) -> float:
    """Time during which at least one of the writes was on its way: the union of their intervals.

    Bytes divided by this never exceed what the wire carries, whatever overlapped.
    """
    total, reached = 0.0, float("-inf")
    for write in sorted(writes, key=lambda write: write.posted_at):
        if write.done_at > reached:
            total += write.done_at - max(write.posted_at, reached)
            reached = write.done_at
    return total
