"""What happens to a room on a prefill rank, as events, and what its machine wants done, as commands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from kvferry.plan import Unit
from kvferry.plan.requests.chunks import Chunk
from kvferry.plan.requests.moves import Move, ReceiverRequest
from kvferry.protocol.transfer.both_sides import AbortRequested, Broke, Tick
from kvferry.protocol.wire.messages import AbortRoom, RefuseRoom, RoomVerified
from kvferry.protocol.wire.rank_identity import DecodeRank

# ---- events -----------------------------------------------------------------------------------------------------


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
    """The caller handed in the next chunk."""

    chunk: Chunk


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

# ---- commands ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """Write these pages of ours to those of the receiver; answer with WriteDone or WriteFailed.

    Before that, it may be deferred (WriteDeferred), and dropped as long as it is (if the room fails).

    Attributes:
        chunk: the number of the submitted chunk.
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
