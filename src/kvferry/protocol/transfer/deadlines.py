"""How long each state of a transfer may last. Every wait in the protocol sits under one of these."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Longest waits, in seconds.

    Attributes:
        bootstrap_s: from opening a room until both sides have found each other.
        waiting_s: without any progress, while it is the caller's or the peer's turn.
        write_s: while a write to a receiver is on its way, without any to it ending or progressing, of whichever room.
    """

    bootstrap_s: float
    waiting_s: float
    write_s: float
