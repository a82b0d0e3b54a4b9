"""Processes that a command has started, and that may end at any moment."""

from __future__ import annotations

import psutil
from tests.support.waiting import PATIENCE_S, eventually


def command_line(process: psutil.Process) -> str:
    """Returns what it was started with; nothing if it has ended."""
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def _threads(process: psutil.Process) -> int:
    try:
        return process.num_threads()
    except psutil.NoSuchProcess:
        return 0


def wait_for_ranks(parent: int, count: int) -> list[psutil.Process]:
    """Returns the ranks of `kvferry bench`, once all of them have threads of endpoints.

    Before them, the fork server starts a process that does nothing.
    """
    found: list[psutil.Process] = []

    def all_run() -> bool:
        servers = [child for child in psutil.Process(parent).children() if "forkserver" in command_line(child)]
        found[:] = [rank for server in servers for rank in server.children() if _threads(rank) > 1]
        return len(found) == count

    eventually(f"{count} ranks run", all_run)
    return found


def assert_gone(processes: list[psutil.Process]) -> None:
    """Waits until all of them have ended."""
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert not alive
