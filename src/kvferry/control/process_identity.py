"""Which process this is, and whether another one is gone: the proof that nothing writes on its behalf any more.

Only Linux gives that proof. A process number is used again, so its start time goes with it (`proc(5)`, field 22 of
`stat`); it means something within one namespace of one machine between two boots, so these go with it, too.

What is not shown is not gone: `/proc` hides the processes of other users where it is mounted with `hidepid`, and may
be that of another namespace. Only `kill` says for every number whether a process has it.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from kvferry.errors import UsageError
from kvferry.protocol.wire.field_types import ProcessIdentity

_PROC = Path("/proc")
_START_TIME = 19  # of the fields that follow the name, which may hold anything but a last parenthesis
_STATE = 0


@dataclass(frozen=True, slots=True)
class Sight:
    """What this process sees of a process number.

    Attributes:
        is_in_use: False only if the system says that no process has the number.
        started: when the process that has it was started; None if that is hidden.
        has_ended: whether that process is known to have ended, with all its threads, and only waits for its parent.
    """

    is_in_use: bool
    started: int | None = None
    has_ended: bool = False

    def proves_end_of(self, process: ProcessIdentity) -> bool:
        """Whether a process that had the number has ended. What cannot be known is not an end."""
        if not self.is_in_use:
            return True
        if self.started is None or not process.started:
            return False
        return self.has_ended or self.started != process.started


def this_process() -> ProcessIdentity:
    """Returns this process. Where the system does not identify it, its machine is one that no other process is on.

    Its start time is 0 where `/proc` does not tell.
    """
    pid = os.getpid()
    return ProcessIdentity(machine=this_machine() or f"unknown, process {pid}", pid=pid, started=_see(pid).started or 0)


def is_gone(process: ProcessIdentity, machine: str) -> bool:
    """Whether a process of this machine has ended, with all its threads. False if it may be on another machine.

    Args:
        machine: this one, as `this_machine` says. A process never leaves it.
    """
    return bool(machine) and process.machine == machine and _see(process.pid).proves_end_of(process)


def this_machine() -> str:
    """Returns the machine since its boot, and the namespaces of this process's number and time; empty if unknown.

    A namespace's number is used again only once it is gone, with all processes that had numbers in it.
    """
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        numbers = os.stat(_PROC / "self/ns/pid").st_ino
    except OSError:
        return ""
    with contextlib.suppress(OSError):  # start times count from the boot as the reader's namespace has it
        return f"{boot} {numbers} {os.stat(_PROC / 'self/ns/time').st_ino}"
    return f"{boot} {numbers}"


def _see(pid: int) -> Sight:
    try:
        # Another namespace's numbers are other processes.
        is_ours = os.readlink(_PROC / "self") == str(os.getpid())
        text = (_PROC / str(pid) / "stat").read_text() if is_ours else ""
        fields = text[text.rindex(")") + 2 :].split()
        has_ended = fields[_STATE] in ("Z", "X") and not _may_have_other_threads(pid)
        return Sight(_is_in_use(pid), int(fields[_START_TIME]), has_ended)
    except (OSError, ValueError, IndexError):
        return Sight(_is_in_use(pid))


def _is_in_use(pid: int) -> bool:
    """Whether some process may have a number, be it visible or not."""
    if pid <= 0:
        return True  # `kill` takes that for a group of processes
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # a process that may not be signalled, first of all
        return True
    return True


def _may_have_other_threads(pid: int) -> bool:
    """Whether threads of a process may run on although its first one has ended."""
    try:
        return len(os.listdir(_PROC / str(pid) / "task")) > 1
    except OSError:
        return True


class OwningProcess:
    """The process that made this object, and no child that was forked from it."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_this(self) -> bool:
        """Whether this is that process."""
        return os.getpid() == self._pid

    def check(self, what: str) -> None:
        """Checks that this is that process. Takes no lock: in a forked child nobody may be left to release one.

        Args:
            what: begins the error's sentence, such as "this endpoint".

        Raises:
            UsageError: if it is a child of it.
        """
        if not self.is_this:
            raise UsageError(
                f"{what} belongs to process {self._pid}, and this is process {os.getpid()}, forked from it: its "
                "threads and connections are the parent's. Make it after the fork, or start processes by spawn"
            )
