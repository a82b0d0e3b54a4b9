"""What happens to a room on a decode rank, as events, and what its machine wants done, as commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from kvferry.protocol.transfer.both_sides import AbortRequested, Broke, Tick
from kvferry.protocol.wire.messages import RoomFailed
from kvferry.protocol.wire.notifications import ChunkArrived, WriterFinished

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
class PartArrived:
    """A part of a chunk that does not count yet: it is in staging memory, or its digests have to be compared.

    A notification `StagedArrived`; or `ChunkArrived` with digests, which is the only part of its chunk.

    Attributes:
        work: what puts it into its pages, or compares the digests; comes back with `Place`, or with `Drop`.
    """

    writer: int
    sequence: int
    part: int = 0
    is_last: bool = True
    work: object = None


@dataclass(frozen=True, slots=True)
class PartPlaced:
    """A part is in its pages and right, or nothing more will be done with it there.

    Attributes:
        error: why it does not count; None if it does.
        purpose: what was to be done with it, in words that follow "could not be".
    """

    writer: int
    sequence: int
    error: BaseException | None = None
    purpose: str = ""


@dataclass(frozen=True, slots=True)
class SenderDrained:
    """A prefill rank will not write for this generation again.

    Attributes:
        after_failure: whether one of its writes failed: what had been sent of it may arrive yet.
        error: as `RoomFailed` would have said; "" where it is not known to have failed there.
        reason: likewise.
    """

    writer: int
    after_failure: bool = False
    error: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SenderSettled:
    """What had been sent of a prefill rank's failed writes has had time to arrive; see `AwaitArrival`."""

    writer: int


@dataclass(frozen=True, slots=True)
class AnswersOverdue:
    """Ranks that were asked to stop have not answered for so long that they are not waited for any more.

    Pages that one of them may write to stay held all the same.
    """


ReceiverEvent: TypeAlias = (
    Connected
    | ConnectFailed
    | ChunkArrived
    | PartArrived
    | PartPlaced
    | WriterFinished
    | RoomFailed
    | SenderDrained
    | SenderSettled
    | AnswersOverdue
    | AbortRequested
    | Broke
    | Tick
)
"""What prefill ranks say of the room is an event as it comes; of a `ChunkArrived` with digests, see `PartArrived`."""

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
class Place:
    """Put a part into its pages, or compare its digests there; answer with PartPlaced."""

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


ReceiverCommand: TypeAlias = SendOpen | SendAbort | SendVerified | Place | Drop | AwaitArrival
