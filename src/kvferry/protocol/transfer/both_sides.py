"""What both sides of a transfer have in common: how long they wait, what may happen to either, and how it fails."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.errors import TransferFailedError


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


def caused(what: str, cause: BaseException) -> TransferFailedError:
    """Makes the error of a transfer that another exception ended; its message quotes that one's type and text."""
    try:
        text = str(cause)
    except BaseException as problem:  # code of whoever has raised it
        text = f"(its text raises {type(problem).__name__})"
    error = TransferFailedError(f"{what}: {type(cause).__name__}: {text}")
    error.__cause__ = cause
    return error
