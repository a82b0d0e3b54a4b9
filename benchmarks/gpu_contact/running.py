"""Runs a command for no longer than it may take, with all it prints in a file.

A command gets a process group of its own. When its time is nearly up the group is interrupted, as by Ctrl-C, so that it
can say what it knows; then it is killed. What hangs costs its limit and no more, also if it cannot be killed: a process
that waits inside a driver is left behind, and that is said.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

GRACE_S = 3.0
"""Between the interruption and the end, of the command's own time."""

_KILL_S = 2.0
"""How long a killed process may take to go before it is left behind."""

_TAIL_LINES = 25


class Outcome(Enum):
    """How a command ended."""

    DONE = "done"
    FAILED = "failed"
    OVERTIME = "not through in time"
    LEFT_OUT = "left out"


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a command.

    Attributes:
        outcome: how it ended.
        seconds: how long it took.
        why: why there is nothing, or not all; "" if all is well.
        result: the last line of JSON that it printed, also if it failed afterwards.
        tail: the last lines that it printed.
    """

    outcome: Outcome
    seconds: float = 0.0
    why: str = ""
    result: Mapping[str, Any] | None = None
    tail: tuple[str, ...] = ()


def run(command: Sequence[str], log: Path, *, limit_s: float, cwd: Path, environment: Mapping[str, str]) -> Answer:
    """Runs a command to its end, or to that of its time. For the main thread, which alone may say what a signal does.

    Args:
        command: the program and its arguments.
        log: gets all that it prints.
        limit_s: how long it may take, being interrupted and killed included.
        cwd: where it runs.
        environment: all of it.
    """
    begun_at = time.monotonic()
    process: subprocess.Popen[bytes] | None = None
    why = ""
    try:
        with log.open("wb") as output, _heeding_interruptions():
            process = subprocess.Popen(
                list(command),
                cwd=cwd,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        process.wait(max(0.1, limit_s - min(GRACE_S, limit_s / 2)))
    except OSError as error:
        return Answer(Outcome.FAILED, why=f"could not be started: {error}")
    except subprocess.TimeoutExpired:
        assert process is not None
        why = f"not through after {limit_s:g} s: interrupted" + _end(process, begun_at + limit_s)
    finally:
        if process is not None:
            _signal(process, signal.SIGKILL)  # whatever of the group is left, also where the whole run is cut off
    said = log.read_text(errors="replace").splitlines()
    outcome = Outcome.OVERTIME if why else Outcome.DONE if process.returncode == 0 else Outcome.FAILED
    if outcome is Outcome.FAILED:
        why = f"exit code {process.returncode}: {_last_words(said)}"
    return Answer(outcome, time.monotonic() - begun_at, why, last_json(said), tuple(said[-_TAIL_LINES:]))


@contextmanager
def _heeding_interruptions() -> Iterator[None]:
    """Heeds SIGINT meanwhile: what is started in the background of a shell ignores it, and whom it starts as well."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(process: subprocess.Popen[bytes], deadline: float) -> str:
    """Interrupts, and then kills; returns what that took, in words."""
    _signal(process, signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(max(0.1, deadline - time.monotonic()))
        return ""
    _signal(process, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_KILL_S)
        return " and killed"
    return f", killed, and still there as process {process.pid}: it waits inside a driver"


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):  # all have gone; or their group's number is another's by now
        os.killpg(process.pid, number)


def _last_words(said: Sequence[str]) -> str:
    return next((line.strip() for line in reversed(said) if line.strip()), "nothing said")


def last_json(said: Sequence[str]) -> Mapping[str, Any] | None:
    """Returns the last line that is a JSON object, whatever libraries print around it."""
    for line in reversed(said):
        if line.startswith("{"):
            with suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    return found
    return None
