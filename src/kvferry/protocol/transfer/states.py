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


class SenderState(Enum):
    """Where a room on a prefill rank stands."""

    BOOTSTRAPPING = "bootstrapping"
    WAITING_FOR_INPUT = "waiting for input"
    TRANSFERRING = "transferring"
    SUCCEEDED = "succeeded"
    DRAINING = "failed, and writes are on their way"
    FAILED = "failed"

    @property
    def shown(self) -> TransferState:
        """As callers see it."""
        return _SENDER_SHOWN[self]

    @property
    def holds_pages(self) -> bool:
        """Whether the pages may still be read for the room."""
        return self not in (SenderState.SUCCEEDED, SenderState.FAILED)


class ReceiverState(Enum):
    """Where a room on a decode rank stands."""

    BOOTSTRAPPING = "bootstrapping"
    WAITING_FOR_INPUT = "waiting for input"
    TRANSFERRING = "transferring"
    SUCCEEDED = "succeeded"
    QUARANTINED = "failed, and somebody may still write to the pages"
    SETTLING = "failed, and what failed writes had sent may arrive"
    FAILED = "failed"

    @property
    def shown(self) -> TransferState:
        """As callers see it."""
        return _RECEIVER_SHOWN[self]

    @property
    def holds_pages(self) -> bool:
        """Whether the pages may still change for the room."""
        return self not in (ReceiverState.SUCCEEDED, ReceiverState.FAILED)


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


_SENDER_SHOWN: Mapping[SenderState, TransferState] = MappingProxyType(
    {
        SenderState.BOOTSTRAPPING: TransferState.BOOTSTRAPPING,
        SenderState.WAITING_FOR_INPUT: TransferState.WAITING_FOR_INPUT,
        SenderState.TRANSFERRING: TransferState.TRANSFERRING,
        SenderState.SUCCEEDED: TransferState.SUCCESS,
        SenderState.DRAINING: TransferState.FAILED,
        SenderState.FAILED: TransferState.FAILED,
    }
)

_RECEIVER_SHOWN: Mapping[ReceiverState, TransferState] = MappingProxyType(
    {
        ReceiverState.BOOTSTRAPPING: TransferState.BOOTSTRAPPING,
        ReceiverState.WAITING_FOR_INPUT: TransferState.WAITING_FOR_INPUT,
        ReceiverState.TRANSFERRING: TransferState.TRANSFERRING,
        ReceiverState.SUCCEEDED: TransferState.SUCCESS,
        ReceiverState.QUARANTINED: TransferState.FAILED,
        ReceiverState.SETTLING: TransferState.FAILED,
        ReceiverState.FAILED: TransferState.FAILED,
    }
)

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


def mermaid(
    table: Mapping[SenderState, Mapping[SenderTrigger, SenderState]]
    | Mapping[ReceiverState, Mapping[ReceiverTrigger, ReceiverState]],
) -> str:
    """Renders a transition table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {TransferState.BOOTSTRAPPING.name}"]
    for state, moves in table.items():
        lines += [f"    {state.name} --> {target.name}: {trigger.value}" for trigger, target in moves.items()]
        if not moves:
            lines.append(f"    {state.name} --> [*]")
    return "\n".join(lines)
