"""A lonely prefill rank in a process of its own, and perhaps in a namespace of process numbers of its own.

    python -m tests.support.containers ENGINE

Its settings come from the environment. It opens each room that standard input names, a number a line, submits half of
its pages, and prints the room's number when the decode rank has opened it. It ends when it is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.caches import Model, Shape, pool
from tests.support.namespaces import unshare
from tests.support.waiting import eventually

from kvferry import PrefillEndpoint, RankCoordinates, TransferState

ROOT = Path(__file__).parent.parent.parent
OWN = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


@dataclass(slots=True)
class Container:
    """A process in a namespace of process numbers of its own."""

    process: subprocess.Popen[str]
    inside: int  # the number that the prefill rank has here

    def kill(self) -> None:
        """Ends all of it at once, as the kernel does."""
        os.kill(self.inside, signal.SIGKILL)
        self.process.wait()

    def say(self, line: str) -> str:
        """Writes a line to it, and returns its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@contextmanager
def container(engine: str, settings: dict[str, Any], begin: Sequence[str] = OWN) -> Iterator[Container]:
    """Runs a prefill rank in a container until the end.

    Args:
        begin: how its command line begins: with what makes the container, or enters one. Without any it runs here.
    """
    variables = {f"KVFERRY_{name.upper()}": str(value) for name, value in settings.items()}
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    if begin:
        unshare("--pid", "--fork", "--mount-proc")  # skips where it must not be made
    with subprocess.Popen(
        [*begin, sys.executable, "-m", "tests.support.containers", engine],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables, "PYTHONPATH": paths},
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == "registered"
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            yield Container(process, int(children[0]) if begin else process.pid)
        finally:
            process.kill()


def main() -> None:
    """Runs until it is killed."""
    its_pool = pool(Model(), Shape(), RankCoordinates())
    endpoint = PrefillEndpoint(its_pool.layout, engine=sys.argv[1], host_registry=False)
    eventually("it is registered", lambda: endpoint.wait_registered(1.0))
    sys.stdout.write("registered\n")
    sys.stdout.flush()
    for line in sys.stdin:
        sender = endpoint.open(int(line))
        eventually("both have it open", lambda: sender.state is not TransferState.BOOTSTRAPPING)  # noqa: B023
        sender.submit(np.arange(2))
        sys.stdout.write(line)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
