"""The states of one transfer, and what may follow what.

This module is the whole truth about transitions: `sender` and `receiver` move only along these tables, and the diagrams
in the documentation are drawn from them.
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


class SenderTrigger(Enum):
    """What moves a sender."""

    ALL_RECEIVERS_OPEN = "every receiver has opened the room"
    WRITE_STARTED = "a chunk is written"
    ALL_FINISHED = "the last chunk is sent and every receiver notified"
    FAILURE = "abort, deadline or error"


class ReceiverTrigger(Enum):
    """What moves a receiver."""

    ALL_SENDERS_ASKED = "connected, and every prefill rank asked to send"
    CHUNK_ARRIVED = "a chunk has arrived"
    ALL_ARRIVED = "every writer has finished and all its chunks have arrived"
    FAILURE = "abort, deadline or error"


_S = TransferState

SENDER_TRANSITIONS: Mapping[TransferState, Mapping[SenderTrigger, TransferState]] = MappingProxyType(
    {
        _S.BOOTSTRAPPING: {
            SenderTrigger.ALL_RECEIVERS_OPEN: _S.WAITING_FOR_INPUT,
            SenderTrigger.FAILURE: _S.FAILED,
        },
        _S.WAITING_FOR_INPUT: {
            SenderTrigger.WRITE_STARTED: _S.TRANSFERRING,
            SenderTrigger.ALL_FINISHED: _S.SUCCESS,
            SenderTrigger.FAILURE: _S.FAILED,
        },
        _S.TRANSFERRING: {
            SenderTrigger.WRITE_STARTED: _S.TRANSFERRING,
            SenderTrigger.ALL_FINISHED: _S.SUCCESS,
            SenderTrigger.FAILURE: _S.FAILED,
        },
        _S.SUCCESS: {},
        _S.FAILED: {},
    }
)

RECEIVER_TRANSITIONS: Mapping[TransferState, Mapping[ReceiverTrigger, TransferState]] = MappingProxyType(
    {
        _S.BOOTSTRAPPING: {
            ReceiverTrigger.ALL_SENDERS_ASKED: _S.WAITING_FOR_INPUT,
            ReceiverTrigger.FAILURE: _S.FAILED,
        },
        _S.WAITING_FOR_INPUT: {
            ReceiverTrigger.CHUNK_ARRIVED: _S.TRANSFERRING,
            ReceiverTrigger.ALL_ARRIVED: _S.SUCCESS,
            ReceiverTrigger.FAILURE: _S.FAILED,
        },
        _S.TRANSFERRING: {
            ReceiverTrigger.CHUNK_ARRIVED: _S.TRANSFERRING,
            ReceiverTrigger.ALL_ARRIVED: _S.SUCCESS,
            ReceiverTrigger.FAILURE: _S.FAILED,
        },
        _S.SUCCESS: {},
        _S.FAILED: {},
    }
)


def mermaid(
    table: Mapping[TransferState, Mapping[SenderTrigger, TransferState]]
    | Mapping[TransferState, Mapping[ReceiverTrigger, TransferState]],
) -> str:
    """Renders a transition table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {TransferState.BOOTSTRAPPING.name}"]
    for state, moves in table.items():
        lines += [f"    {state.name} --> {target.name}: {trigger.value}" for trigger, target in moves.items()]
        if state.is_final:
            lines.append(f"    {state.name} --> [*]")
    return "\n".join(lines)
