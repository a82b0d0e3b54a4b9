"""For how long each state of a transfer may hold pages, at most.

This module is the whole truth about it: the simulation holds every transfer to these rows, and the table in the
documentation is drawn from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.protocol.transfer.both_sides import Deadlines
from kvferry.protocol.transfer.states import ReceiverState, SenderState, SideState, TransferState


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


_S = SenderState
_R = ReceiverState

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
        unless="such a rank is frozen or cut off: it may write when it is back, and there is no fence against that. "
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
