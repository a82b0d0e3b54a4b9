"""The states of one transfer, what may follow what, which of them hold pages, and for how long at most.

This module is the whole truth about it: `sender` and `receiver` move only along these tables, the simulation holds
every transfer to these rows, and the diagrams and the table in the documentation are drawn from them. Callers see them
as `TransferState`: a room that has failed and still holds pages has failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType


class TransferState(Enum):
    """Where one side of a transfer stands."""

    BOOTSTRAPPING = "bootstrapping"
    WAITING_FOR_INPUT = "waiting for input"
    TRANSFERRING = "transferring"
    SUCCESS = "success"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        """Whether the state never changes again."""
        return self in (TransferState.SUCCESS, TransferState.FAILED)


class SideState(Enum):
    """Where a room stands on one side.

    Attributes:
        shown: as callers see it.
    """

    shown: TransferState

    def __new__(cls, words: str, shown: TransferState) -> SideState:
        """Makes a state whose value is what it is in words."""
        state = object.__new__(cls)
        state._value_ = words
        state.shown = shown
        return state

    @property
    def holds_pages(self) -> bool:
        """Whether the pages may still be read, or change, for the room."""
        return self.name not in ("SUCCEEDED", "FAILED")


class SenderState(SideState):
    """Where a room on a prefill rank stands."""

    BOOTSTRAPPING = "bootstrapping", TransferState.BOOTSTRAPPING
    WAITING_FOR_INPUT = "waiting for input", TransferState.WAITING_FOR_INPUT
    TRANSFERRING = "transferring", TransferState.TRANSFERRING
    SUCCEEDED = "succeeded", TransferState.SUCCESS
    DRAINING = "failed, and writes are on their way", TransferState.FAILED
    FAILED = "failed", TransferState.FAILED


class ReceiverState(SideState):
    """Where a room on a decode rank stands."""

    BOOTSTRAPPING = "bootstrapping", TransferState.BOOTSTRAPPING
    WAITING_FOR_INPUT = "waiting for input", TransferState.WAITING_FOR_INPUT
    TRANSFERRING = "transferring", TransferState.TRANSFERRING
    SUCCEEDED = "succeeded", TransferState.SUCCESS
    QUARANTINED = "failed, and somebody may still write to the pages", TransferState.FAILED
    SETTLING = "failed, and what failed writes had sent may arrive", TransferState.FAILED
    FAILED = "failed", TransferState.FAILED


class SenderTrigger(Enum):
    """What moves a sender."""

    ALL_RECEIVERS_OPEN = "every receiver has opened the room"
    WRITE_STARTED = "a chunk is written"
    ALL_FINISHED = "the last chunk is sent and every receiver notified"
    FAILURE = "abort, deadline or error"
    WRITES_ENDED = "no write is on its way"


class ReceiverTrigger(Enum):
    """What moves a receiver."""

    ALL_SENDERS_ASKED = "connected, and every prefill rank asked to send"
    CHUNK_ARRIVED = "a chunk has arrived"
    ALL_ARRIVED = "every writer has finished and all its chunks have arrived"
    FAILURE = "abort, deadline or error"
    ALL_ANSWERED = "no rank will write to the pages, and nothing is being put there"
    ALL_SETTLED = "what failed writes had sent has had time to arrive"


_S = SenderState
_R = ReceiverState

SENDER_TRANSITIONS: Mapping[SenderState, Mapping[SenderTrigger, SenderState]] = MappingProxyType(
    {
        _S.BOOTSTRAPPING: {
            SenderTrigger.ALL_RECEIVERS_OPEN: _S.WAITING_FOR_INPUT,
            SenderTrigger.FAILURE: _S.DRAINING,
        },
        _S.WAITING_FOR_INPUT: {
            SenderTrigger.WRITE_STARTED: _S.TRANSFERRING,
            SenderTrigger.ALL_FINISHED: _S.SUCCEEDED,
            SenderTrigger.FAILURE: _S.DRAINING,
        },
        _S.TRANSFERRING: {
            SenderTrigger.WRITE_STARTED: _S.TRANSFERRING,
            SenderTrigger.ALL_FINISHED: _S.SUCCEEDED,
            SenderTrigger.FAILURE: _S.DRAINING,
        },
        _S.SUCCEEDED: {},
        _S.DRAINING: {SenderTrigger.WRITES_ENDED: _S.FAILED},
        _S.FAILED: {},
    }
)

RECEIVER_TRANSITIONS: Mapping[ReceiverState, Mapping[ReceiverTrigger, ReceiverState]] = MappingProxyType(
    {
        _R.BOOTSTRAPPING: {
            ReceiverTrigger.ALL_SENDERS_ASKED: _R.WAITING_FOR_INPUT,
            ReceiverTrigger.FAILURE: _R.QUARANTINED,
        },
        _R.WAITING_FOR_INPUT: {
            ReceiverTrigger.CHUNK_ARRIVED: _R.TRANSFERRING,
            ReceiverTrigger.ALL_ARRIVED: _R.SUCCEEDED,
            ReceiverTrigger.FAILURE: _R.QUARANTINED,
        },
        _R.TRANSFERRING: {
            ReceiverTrigger.CHUNK_ARRIVED: _R.TRANSFERRING,
            ReceiverTrigger.ALL_ARRIVED: _R.SUCCEEDED,
            ReceiverTrigger.FAILURE: _R.QUARANTINED,
        },
        _R.SUCCEEDED: {},
        _R.QUARANTINED: {ReceiverTrigger.ALL_ANSWERED: _R.SETTLING},
        _R.SETTLING: {ReceiverTrigger.ALL_SETTLED: _R.FAILED},
        _R.FAILED: {},
    }
)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long each state of a transfer may last, in seconds. Every wait in the protocol sits under one of these.

    Attributes:
        bootstrap_s: from opening a room until both sides have found each other.
        waiting_s: without any progress, while it is the caller's or the peer's turn.
        write_s: while a write to a receiver is on its way, without any to it ending or progressing, of whichever room.
    """

    bootstrap_s: float
    waiting_s: float
    write_s: float


@dataclass(frozen=True, slots=True)
class Waits(Deadlines):
    """The settings that bound how long pages are held, in seconds.

    Attributes:
        peer_s: silence after which a peer counts as lost.
        heartbeat_s: time between two heartbeats.
        quarantine_s: how long the network may deliver what a dead process wrote, or a write that failed; likewise, how
            long a process that was frozen may take to read it from its sockets.
    """

    peer_s: float
    heartbeat_s: float
    quarantine_s: float


@dataclass(frozen=True, slots=True)
class Holding:
    """A row: pages of one side, whose state it is.

    Attributes:
        until: what ends it.
        terms: which of `Waits` add up to the longest that it may last without any progress.
        unless: what can make it last longer, and why that must be; empty if nothing can.
    """

    state: SenderState | ReceiverState
    until: str
    terms: tuple[str, ...]
    unless: str = ""

    def longest_s(self, waits: Waits) -> float:
        """Returns the longest that it may last without progress, in seconds."""
        total: float = sum(getattr(waits, term) for term in self.terms)
        return total


HOLDINGS: Sequence[Holding] = (
    Holding(
        _S.BOOTSTRAPPING,
        "every decode rank has opened the room",
        ("bootstrap_s",),
        unless="a decode rank says that a request waits there for it (`DecodeEndpoint.expect`), with every heartbeat: "
        "as long as that lasts",
    ),
    Holding(_S.WAITING_FOR_INPUT, "the next chunk is handed in", ("waiting_s",)),
    Holding(
        _S.TRANSFERRING,
        "a write to the same decode rank ends or progresses, of whichever room; with none on its way, one is posted, "
        "the next chunk is handed in or the receivers are notified",
        ("write_s", "waiting_s"),
    ),
    Holding(_S.SUCCEEDED, "at once", ()),
    Holding(
        _S.DRAINING,
        "the transport reports that every write has ended and, where one failed, what was sent of it has had time to "
        "arrive",
        ("quarantine_s",),
        unless="a write is on its way: to a rank that is frozen it may be for as long as that lasts, and nothing that "
        "this side can do makes the transport let go of the pages",
    ),
    Holding(_S.FAILED, "at once", ()),
    Holding(_R.BOOTSTRAPPING, "the prefill engine is found and every rank has attached", ("bootstrap_s",)),
    Holding(_R.WAITING_FOR_INPUT, "something arrives", ("waiting_s",)),
    Holding(_R.TRANSFERRING, "something arrives", ("waiting_s",)),
    Holding(_R.SUCCEEDED, "at once", ()),
    Holding(
        _R.QUARANTINED,
        "every prefill rank that writes to pages directly has reported that it is drained, was closed, or has ended "
        "as a process, and nothing is being scattered",
        ("write_s", "peer_s", "heartbeat_s", "heartbeat_s", "quarantine_s"),
        unless="such a rank is frozen or cut off: it may write when it is back, and there is no fence against that; or "
        "messages are lost: the time counts from the last of them. "
        "With staged transfers alone nobody but this rank writes to its pages, and they come back at once",
    ),
    Holding(
        _R.SETTLING, "where a write failed, what was sent of it has had time to arrive here, too", ("quarantine_s",)
    ),
    Holding(_R.FAILED, "at once", ()),
)


def longest_s(side: type[SideState], shown: TransferState, waits: Waits) -> float:
    """Returns the longest that a side may hold pages without progress in a state as callers see it, in seconds.

    Args:
        side: whose states they are.
    """
    return sum(row.longest_s(waits) for row in HOLDINGS if isinstance(row.state, side) and row.state.shown is shown)
