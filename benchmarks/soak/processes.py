"""The processes: ranks, told what to do through a pipe, and a registry."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.context
import os
import re
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.soak.ranks import run_rank
from benchmarks.soak.watch import Look, look

_END_S = 15.0


def context() -> multiprocessing.context.ForkServerContext:
    """Where processes are copies of one that has everything imported and nothing started."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["benchmarks.soak.ranks", "httpx", "nixl_cu13._bindings"])
    return found


class RankProcess:
    """One rank, in one process after the other.

    Attributes:
        role: prefill or decode.
        number: of its engine among those of its role.
        connection: to the process.
        is_up: whether its endpoint is, and it is not frozen.
        lives: what every process of it held, as far as it was looked at.
        reunions: how often the present process may have lost and found again a peer that lived.
    """

    def __init__(self, role: str, number: int, settings: dict[str, Any], slots: int, seed: int) -> None:
        self.role, self.number = role, number
        self.is_up = False
        self.lives: list[list[Look]] = []
        self.reunions = 0
        self._arguments = (role, number, settings, slots)
        self._seed = seed
        self.start()

    @property
    def name(self) -> str:
        """Of the rank and its process."""
        return f"{self.role} {self.number}, process {len(self.lives)}"

    def start(self) -> None:
        """Starts a process."""
        self._seed += 1
        self.connection: Connection
        self.connection, theirs = context().Pipe()
        self._process = context().Process(target=run_rank, args=(theirs, *self._arguments, self._seed), daemon=True)
        self._process.start()
        theirs.close()
        self.lives.append([])
        self.reunions = 0

    def kill(self) -> None:
        """Ends the process in the middle of whatever it does."""
        self._signal(signal.SIGKILL)
        self._process.join(_END_S)
        self.connection.close()
        self.is_up = False

    def freeze(self) -> None:
        """Stops it."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Lets it go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        with contextlib.suppress(ProcessLookupError):  # it ended by itself, which is found where its pipe ends
            os.kill(self._process.pid, number)

    def look(self, at: float) -> None:
        """Notes what it holds."""
        assert self._process.pid is not None
        found = look(self._process.pid, at)
        if found is not None:
            self.lives[-1].append(found)

    def hang_up(self) -> None:
        """Tells it to end."""
        self.connection.close()

    def end(self) -> bool:
        """Whether it ends by itself; it ends in any case."""
        self._process.join(_END_S)
        ended = not self._process.is_alive()
        if not ended:
            self._process.kill()
            self._process.join(_END_S)
        return ended


class RegistryProcess:
    """`kvferry registry`, always on the same port.

    Attributes:
        url: where it answers.
    """

    def __init__(self, *, lease_s: float) -> None:
        self._command = [sys.executable, "-m", "kvferry", "registry", "--lease-s", str(lease_s), "--port"]
        self._process, self.url = self._started("0")

    def _started(self, port: str) -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen([*self._command, port], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        said = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
        if said is None:
            raise RuntimeError("the registry did not start")
        return process, said[0]

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()
        self._process.wait(_END_S)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def start(self) -> None:
        """Starts it again; returns when it answers."""
        self._process, self.url = self._started(self.url.rpartition(":")[2])
