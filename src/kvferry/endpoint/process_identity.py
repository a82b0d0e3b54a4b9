"""Which process this is, and whether another one is gone: the proof that nothing writes on its behalf any more.

Only Linux gives that proof. A process number is used again, so its start time goes with it (`proc(5)`, field 22 of
`stat`); it means something within one namespace of one machine between two boots, so these go with it, too.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvferry.protocol.messages import ProcessIdentity

_PROC = Path("/proc")
_START_TIME = 19  # of the fields that follow the name, which may hold anything but a last parenthesis
_STATE = 0


def this_process() -> ProcessIdentity:
    """Returns this process. Where the system does not identify it, its machine is one that no other process is on."""
    pid = os.getpid()
    fields = _stat_fields(pid)
    started = int(fields[_START_TIME]) if fields else 0
    return ProcessIdentity(machine=_machine() or f"unknown, process {pid}", pid=pid, started=started)


def is_gone(process: ProcessIdentity) -> bool:
    """Whether a process of this machine has ended, with all its threads. False if it may be on another machine."""
    if process.machine != _machine():
        return False
    fields = _stat_fields(process.pid)
    if fields is None or int(fields[_START_TIME]) != process.started:
        return True
    return fields[_STATE] in ("Z", "X") and not _has_other_threads(process.pid)


def _machine() -> str:
    """Returns the machine since its boot, and the namespace of this process's number; empty if unknown."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat(_PROC / 'self/ns/pid').st_ino}"
    except OSError:
        return ""


def _stat_fields(pid: int) -> list[str] | None:
    """Returns the fields of a process's `stat` that follow its name; None if there is no such process."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(")") + 2 :].split()


def _has_other_threads(pid: int) -> bool:
    """Whether threads of a process run on although its first one has ended."""
    try:
        return len(os.listdir(_PROC / str(pid) / "task")) > 1
    except (FileNotFoundError, ProcessLookupError):
        return False
