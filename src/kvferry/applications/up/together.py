"""Runs a command as one with everything that it starts: when it has ended, nothing of it is left.

A server of vLLM's that is killed leaves its engine behind, which goes on under the name that its successor wants. What
the command starts stays in our process group; whoever starts us makes us its leader, as supervisord does. When that one
has ended, all of it ends as well: nobody would start it again, or stop it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys

_SIGNAL_WHEN_PARENT_ENDS = 1  # PR_SET_PDEATHSIG (linux/prctl.h)


def main() -> None:
    """Runs the command that is our one argument, a list in JSON, and ends as that does."""
    if os.getpgrp() != os.getpid():
        sys.exit("kvferry.applications.up.together must lead a process group: it ends all of it")
    _guard()
    ctypes.CDLL(None).prctl(_SIGNAL_WHEN_PARENT_ENDS, signal.SIGKILL)
    # Whoever stops us in order tells the whole group; the command ends as it likes, and we after it.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    sys.exit(subprocess.call(json.loads(sys.argv[1])))  # noqa: S603 - whoever starts us says what


def _guard() -> None:
    """Starts a process, outside the group, that ends all of the group when we have ended, however we have."""
    leader = os.getpid()
    reading, writing = os.pipe()  # the command does not inherit it
    guard = os.fork()
    # Out of the group before anybody can stop that: by whichever of the two comes first, as shells do it.
    os.setpgid(guard, guard)  # in the guard itself the number is 0, which stands for its own
    if guard != 0:
        os.close(reading)
        return
    os.close(writing)
    os.read(reading, 1)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
