"""What is recorded of a transfer while it runs. Times are in seconds of the machine's steady clock."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.plan import Path


@dataclass(frozen=True, slots=True)
class WriteRecord:
    """One chunk's write to one receiver.

    Attributes:
        receiver: the decode rank's endpoint.
        path: which way the bytes went.
        why: why they went that way, in words.
        total_bytes: bytes that moved.
        descriptors: descriptors after neighbours were merged; through staging memory, bulk writes.
        submitted_at: when the caller handed the chunk in; for chunks that came before the receivers, when those did.
        posted_at: when the transport was given the write.
        done_at: when the transport was through with it.
        transport_post_s, transport_transfer_s: the transport's own account of posting and of the whole write.
    """

    receiver: str
    path: Path
    why: str
    total_bytes: int
    descriptors: int
    submitted_at: float
    posted_at: float
    done_at: float
    transport_post_s: float
    transport_transfer_s: float

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


@dataclass(frozen=True, slots=True)
class ReceiverStats:
    """One rank's account of a room it received.

    Attributes:
        opened_at: when the caller opened the room.
        first_arrival_at: when the first chunk had arrived; None before.
        ended_at: when the room ended; None before.
        chunks: chunks that arrived, over all writers.
    """

    opened_at: float
    first_arrival_at: float | None
    ended_at: float | None
    chunks: int


def busy_s(writes: list[WriteRecord]) -> float:
    """Time during which at least one of the writes was on its way: the union of their intervals.

    Bytes divided by this never exceed what the wire carries, whatever overlapped.
    """
    total, reached = 0.0, float("-inf")
    for write in sorted(writes, key=lambda write: write.posted_at):
        if write.done_at > reached:
            total += write.done_at - max(write.posted_at, reached)
            reached = write.done_at
    return total
