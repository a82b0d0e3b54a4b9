"""What `kvferry doctor` finds, and what a transport has found out about itself."""

from __future__ import annotations

from enum import IntEnum

import msgspec


class Severity(IntEnum):
    """How bad it is; also the exit code of the command."""

    GOOD = 0
    WARNING = 1
    ERROR = 2


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at.

    Attributes:
        about: a word for it: settings, wire, peers, the name of a transport, ...
        severity: how bad it is.
        what: what there is, a sentence.
        remedy: what to do; empty if nothing is to be done.
        lines: what is missing, ready to paste where `about` says.
    """

    about: str
    severity: Severity
    what: str
    remedy: str = ""
    lines: tuple[str, ...] = ()


def good(about: str, what: str) -> Finding:
    """All is well, or there is nothing to judge."""
    return Finding(about=about, severity=Severity.GOOD, what=what)


def warning(about: str, what: str, remedy: str, lines: tuple[str, ...] = ()) -> Finding:
    """It works, but not as it should."""
    return Finding(about=about, severity=Severity.WARNING, what=what, remedy=remedy, lines=lines)


def error(about: str, what: str, remedy: str, lines: tuple[str, ...] = ()) -> Finding:
    """It does not work."""
    return Finding(about=about, severity=Severity.ERROR, what=what, remedy=remedy, lines=lines)
