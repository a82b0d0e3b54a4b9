"""How a failure is passed on: in words for a person, with the original exception as its cause."""

from __future__ import annotations

from kvferry.errors import TransferFailedError


def caused(what: str, cause: Exception) -> TransferFailedError:
    """Makes the error of a transfer that another exception ended; its message quotes that one's type and text."""
    error = TransferFailedError(f"{what}: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
