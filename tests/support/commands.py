"""Commands of `kvferry` without an interpreter each: what they print, how they end, which processes they start."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import subprocess
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeAlias

import psutil
import pytest
from tests.support.waiting import PATIENCE_S, eventually

from kvferry.cli import main

Completed: TypeAlias = subprocess.CompletedProcess[str]


def kvferry(*arguments: str | Path) -> Completed:
    """Runs a command in this process, for tests of what it says. Not for what starts processes or handles signals."""
    return called(main, "kvferry", *arguments)


def called(program: Callable[[], object], *command: str | Path) -> Completed:
    """Runs a program in this process, by a function that reads its arguments from `sys.argv`; as `kvferry` does."""
    arguments = [*map(str, command)]
    code = 0
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("sys.argv", arguments)
                program()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except Exception:
            traceback.print_exc()
            code = 1
    return subprocess.CompletedProcess(arguments, code, output.getvalue(), errors.getvalue())


class CommandProcess:
    """A process that runs one command after the other, for those that start processes.

    Their processes are forked from one, which imports torch and transformers for the first of them alone: half of what
    a demo takes of a processor.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,))
        self._process.start()
        theirs.close()

    def kvferry(self, *arguments: str | Path) -> Completed:
        """Runs a command."""
        self._connection.send(arguments)
        completed: Completed = self._connection.recv()
        return completed

    def close(self) -> None:
        """Ends it, and what it is at."""
        self._connection.close()
        self._process.join(10)
        self._process.kill()
        self._process.join()


def _serve(connection: Connection) -> None:
    with contextlib.suppress(EOFError):
        while True:
            connection.send(kvferry(*connection.recv()))


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
