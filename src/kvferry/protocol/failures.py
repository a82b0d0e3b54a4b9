"""How a failure is handed on: in words for a person, with the original exception as its cause."""

from __future__ import annotations

from kvferry.errors import TransferFailedError


def caused(what: str, cause: Exception) -> TransferFailedError:
    """The end of a transfer because of another exception, whose type and text become part of the message."""
    error = TransferFailedError(f"{what}: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
