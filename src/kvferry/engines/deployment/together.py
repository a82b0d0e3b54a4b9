"""Runs a command as one with everything that it starts: when it has ended, nothing of it is left.

A server of vLLM's that is killed leaves its engine behind, which goes on under the name that its successor wants. What
the command starts stays in our process group; whoever starts us makes us its leader, as supervisord does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys


def main() -> None:
    """Runs the command on our command line, waits for its end, and ends the group."""
    # Whoever stops us in order tells the whole group; the command ends as it likes, and we after it.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    subprocess.call(sys.argv[1:])  # noqa: S603 - whoever starts us says what
    os.killpg(os.getpgrp(), signal.SIGKILL)  # ourselves too


if __name__ == "__main__":
    if os.getpgrp() != os.getpid():
        sys.exit("kvferry.engines.deployment.together must lead a process group: it ends all of it")
    main()
