"""What happens to a room on either side, as events, and what its machine wants done, as commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from kvferry.plan import Unit
from kvferry.plan.requests.chunks import Chunk
from kvferry.plan.requests.moves import Move, ReceiverRequest
from kvferry.protocol.wire.field_types import DecodeRank
from kvferry.protocol.wire.messages import AbortRoom, ChunkArrived, RefuseRoom, RoomFailed, RoomVerified, WriterFinished


@dataclass(frozen=True, slots=True)
class AbortRequested:
    """Our caller aborted the room."""

    reason: str


@dataclass(frozen=True, slots=True)
class Broke:
    """An unexpected error arose in this process, from no message and no write."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


# ---- what happens to a room on a prefill rank ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class ReceiverOpened:
    """A decode rank opened the room.

    Attributes:
        receiver: its endpoint's identity.
        expected_receivers: how many decode ranks will open it.
        request: what it requests from this rank.
        sends_aux: whether this rank sends it the aux data.
        rank: which decode rank it is.
        verifies: whether it compares digests, and then sends `RoomVerified`.
        held: tokens at the start of the request that it holds already.
    """

    receiver: str
    generation: int
    expected_receivers: int
    request: ReceiverRequest
    sends_aux: bool
    rank: DecodeRank
    verifies: bool = False
    held: int = 0


@dataclass(frozen=True, slots=True)
class RoomExpected:
    """A decode rank has said that a request waits there which will open the room.

    Attributes:
        said_at: when, the last time.
    """

    said_at: float


@dataclass(frozen=True, slots=True, eq=False)
class ChunkSubmitted:
    """The caller handed in the next chunk.

    Attributes:
        chunk: the chunk.
        is_followed: whether the next one is there already.
    """

    chunk: Chunk
    is_followed: bool = False


@dataclass(frozen=True, slots=True)
class TurnCame:
    """Others have had their turns since `AwaitTurn`."""


@dataclass(frozen=True, slots=True)
class WriteDeferred:
    """A write is not posted yet: it must wait until fewer bytes are on their way."""

    receiver: str
    sequence: int


@dataclass(frozen=True, slots=True)
class WriteAdmitted:
    """A write that was deferred is being posted."""

    receiver: str
    sequence: int


@dataclass(frozen=True, slots=True)
class WriteDone:
    """All bytes of one write are in the receiver's memory, and the source pages are no longer read for it."""

    receiver: str
    sequence: int


@dataclass(frozen=True, slots=True)
class WriteProgressed:
    """Writes to a receiver got on, or what they wait for did: a part of one arrived, or another room's write ended."""

    receiver: str


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """A write ended with an error, and our memory is no longer read for it.

    Attributes:
        may_arrive: whether what was sent of it may still land in the receiver's memory; the same event without this
            follows when it cannot.
    """

    receiver: str
    sequence: int
    error: Exception
    may_arrive: bool = False


@dataclass(frozen=True, slots=True)
class FinishSent:
    """A receiver was notified that this rank has finished.

    Attributes:
        error: why it could not be; None if it was.
    """

    receiver: str
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class ReceiverMessage:
    """A decode rank aborts the room, refuses to open it, or has verified all that came from this rank."""

    receiver: str
    message: AbortRoom | RefuseRoom | RoomVerified


@dataclass(frozen=True, slots=True)
class ReceiverLost:
    """A decode rank is gone."""

    receiver: str
    error: Exception


SenderEvent: TypeAlias = (
    ReceiverOpened
    | RoomExpected
    | ChunkSubmitted
    | TurnCame
    | WriteDeferred
    | WriteAdmitted
    | WriteDone
    | WriteProgressed
    | WriteFailed
    | FinishSent
    | ReceiverMessage
    | ReceiverLost
    | AbortRequested
    | Broke
    | Tick
)

# ---- what its machine wants done -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """Write these pages of ours to those of the receiver; answer with WriteDone or WriteFailed.

    Before that, it may be deferred (WriteDeferred), and dropped as long as it is (if the room fails).

    Attributes:
        chunk: the number of the submitted chunk, the first of those that leave together.
        sequence: the number of the write among those to this receiver.
        unit: what is moved together.
        moves: what to write, route by route.
    """

    receiver: str
    generation: int
    chunk: int
    sequence: int
    unit: Unit
    moves: tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class AwaitTurn:
    """More chunks are to be written; answer with TurnCame when others that wait for a turn have had one."""


@dataclass(frozen=True, slots=True)
class SendFinish:
    """Notify the receiver that this rank has finished; answer with FinishSent."""

    receiver: str
    generation: int
    chunks: int
    aux: bytes | None


@dataclass(frozen=True, slots=True)
class SendFailed:
    """Notify the receiver that the room failed here. No answer."""

    receiver: str
    generation: int
    error: Exception


@dataclass(frozen=True, slots=True)
class SendDrained:
    """Notify the receiver that no write of this rank can touch its pages any more. No answer.

    Attributes:
        after_failure: whether a write to it failed: a receiver that was frozen meanwhile may have to read from its
            sockets yet what had been sent.
        error: why the room failed here, in case `SendFailed` does not arrive; None if it did not.
    """

    receiver: str
    generation: int
    after_failure: bool = False
    error: Exception | None = field(default=None, compare=False)


SenderCommand: TypeAlias = Write | AwaitTurn | SendFinish | SendFailed | SendDrained


# ---- what happens to a room on a decode rank -----------------------------------------------------------------------


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

# ---- what its machine wants done -----------------------------------------------------------------------------------


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
