"""The states of one transfer, what may follow what, and which of them hold pages.

This module is the whole truth about transitions: `sender` and `receiver` move only along these tables, and the diagrams
in the documentation are drawn from them. Callers see them as `TransferState`: a room that has failed and still holds
pages has failed.
"""

from __future__ import annotations

from collections.abc import Mapping
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
