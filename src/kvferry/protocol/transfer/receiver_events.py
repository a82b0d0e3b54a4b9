"""What happens to a room on a decode rank, as events, and what its machine wants done, as commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

# ---- events -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connected:
    """Every prefill rank of the group is ready to send.

    Attributes:
        ranks: engine ranks of the whole group; the room is requested from each, since each waits for its receivers.
        writers: those elected to send bytes to this rank, and the names of the groups of pages that each fills.
        into_pages: those of them that may write to the pages themselves; what the others send goes through our staging
            memory, and only we put it into pages.
        aux_writer: the one that sends the aux data.
        verifies: whether writers wait for `RoomVerified`.
    """

    ranks: frozenset[int]
    writers: Mapping[int, frozenset[str]]
    into_pages: frozenset[int]
    aux_writer: int
    verifies: bool = False


@dataclass(frozen=True, slots=True)
class ConnectFailed:
    """The prefill engine could not be reached, or refused."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Arrived:
    """A notification `ChunkArrived` from the rank that it names."""

    writer: int
    sequence: int


@dataclass(frozen=True, slots=True)
class ArrivedUnverified:
    """A notification `ChunkArrived` with digests, which have to be compared.

    Attributes:
        work: what compares them; comes back with `Verify`, or with `Drop`.
    """

    writer: int
    sequence: int
    work: object = None


@dataclass(frozen=True, slots=True)
class Verified:
    """The digests of a chunk were compared, and its pages are no longer read.

    Attributes:
        error: why the chunk does not count as arrived; None if it does.
    """

    writer: int
    sequence: int
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class PartArrived:
    """A notification `StagedArrived`: a part of a chunk is in staging memory.

    Attributes:
        work: what puts it into its pages; comes back with `Scatter`, or with `Drop`.
    """

    writer: int
    sequence: int
    part: int
    is_last: bool
    work: object = None


@dataclass(frozen=True, slots=True)
class PartScattered:
    """A part is in its pages, or will not be written there any more.

    Attributes:
        error: why it could not be scattered; None if it was.
    """

    writer: int
    sequence: int
    part: int
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """A notification `WriterFinished` from the rank that it names."""

    writer: int
    chunks: int
    aux: bytes | None


@dataclass(frozen=True, slots=True)
class SenderFailed:
    """A prefill rank cannot complete the room."""

    writer: int
    error: str
    reason: str


@dataclass(frozen=True, slots=True)
class SenderDrained:
    """A prefill rank will not write for this generation again.

    Attributes:
        after_failure: whether one of its writes failed: what had been sent of it may arrive yet.
    """

    writer: int
    after_failure: bool = False


@dataclass(frozen=True, slots=True)
class SenderSettled:
    """What had been sent of a prefill rank's failed writes has had time to arrive; see `AwaitArrival`."""

    writer: int


@dataclass(frozen=True, slots=True)
class ReceiverAbortRequested:
    """Our caller aborted the room."""

    reason: str


@dataclass(frozen=True, slots=True)
class ReceiverBroke:
    """An unexpected error arose in this process, not from a message."""

    error: Exception


@dataclass(frozen=True, slots=True)
class ReceiverTick:
    """Time has passed."""


ReceiverEvent: TypeAlias = (
    Connected
    | ConnectFailed
    | Arrived
    | ArrivedUnverified
    | Verified
    | PartArrived
    | PartScattered
    | Finished
    | SenderFailed
    | SenderDrained
    | SenderSettled
    | ReceiverAbortRequested
    | ReceiverBroke
    | ReceiverTick
)

# ---- commands ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendOpen:
    """Request the room from a prefill rank.

    Attributes:
        groups: the groups of pages that it fills: it needs to know no page numbers of the others.
    """

    rank: int
    groups: frozenset[str]


@dataclass(frozen=True, slots=True)
class SendAbort:
    """Ask a prefill rank to stop and to answer with `Drained`.

    Attributes:
        error: the name of the exception that the room failed with, if that rank should fail with the same.
    """

    rank: int
    reason: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class SendVerified:
    """Confirm to a prefill rank that all of its digests are right."""

    rank: int


@dataclass(frozen=True, slots=True)
class Verify:
    """Compare the digests of a chunk that is in its pages; answer with Verified."""

    work: object


@dataclass(frozen=True, slots=True)
class Scatter:
    """Put a part that is in staging memory into its pages; answer with PartScattered."""

    work: object


@dataclass(frozen=True, slots=True)
class Drop:
    """What has arrived is not wanted."""

    work: object


@dataclass(frozen=True, slots=True)
class AwaitArrival:
    """Wait until what a failed write had sent has had time to arrive here; answer with SenderSettled.

    Only time in which this process runs counts: while it is frozen nobody reads its sockets.
    """

    writer: int


ReceiverCommand: TypeAlias = SendOpen | SendAbort | SendVerified | Verify | Scatter | Drop | AwaitArrival
