"""Starts the ranks' processes, asks them, and never leaves one behind."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

from kvferry.cli.bench import ranks
from kvferry.cli.bench.options import BenchOptions
from kvferry.errors import KVFerryError

_END_S = 10.0


class BenchError(KVFerryError):
    """A process of the benchmark failed; the message names it and quotes its error."""


@dataclass(frozen=True, slots=True, eq=False)
class Child:
    """One rank's process."""

    name: str
    process: BaseProcess
    connection: multiprocessing.connection.Connection


@dataclass(frozen=True, slots=True, eq=False)
class Children:
    """All processes, by side."""

    prefill: tuple[Child, ...]
    decode: tuple[Child, ...]

    @property
    def all(self) -> tuple[Child, ...]:
        """Both sides."""
        return self.prefill + self.decode


@contextmanager
def started(options: BenchOptions) -> Iterator[Children]:
    """The processes of all ranks, which are ended with the context, whatever happened."""
    context = multiprocessing.get_context("spawn")
    children: list[Child] = []
    try:
        for side, main in ((options.prefill, ranks.prefill_main), (options.decode, ranks.decode_main)):
            for coordinates in side.coordinates:
                name = f"{side.name} rank {coordinates.engine_rank}"
                ours, theirs = context.Pipe()
                process = context.Process(target=main, args=(theirs, options, coordinates), name=name, daemon=True)
                process.start()
                theirs.close()
                children.append(Child(name, process, ours))
        yield Children(tuple(children[: options.prefill.tp_size]), tuple(children[options.prefill.tp_size :]))
        deadline = time.monotonic() + _END_S
        for child in reversed(children):  # the decode side first, so that it misses nobody
            with suppress(OSError):
                child.connection.send(None)
            child.process.join(max(0.0, deadline - time.monotonic()))
    finally:
        for child in children:
            if child.process.is_alive():
                child.process.kill()
            child.process.join()
            child.connection.close()


def ask(commands: Sequence[tuple[Child, Any]], timeout_s: float, *, others: Sequence[Child] = ()) -> list[Any]:
    """Gives every process a command, then waits for all answers; returns them in the same order.

    Args:
        others: processes that must stay alive meanwhile.

    Raises:
        BenchError: if a process fails, dies or takes too long.
    """
    for child, command in commands:
        with suppress(OSError):  # if it died, its silence says so
            child.connection.send(command)
    waiting = {child.connection: (index, child) for index, (child, _) in enumerate(commands)}
    answers: list[Any] = [None] * len(commands)
    deadline = time.monotonic() + timeout_s
    alive = {child.process.sentinel: child for child in others}
    while waiting:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            names = ", ".join(child.name for _, child in waiting.values())
            command = type(commands[0][1]).__name__
            raise BenchError(f"no answer to {command} within {timeout_s:g} s from {names}")
        for connection in multiprocessing.connection.wait([*waiting, *alive], timeout=left_s):
            if isinstance(connection, int):
                _received(alive[connection])  # what it says last, or that it died
                raise BenchError(f"{alive[connection].name} ended before it was told to")
            assert isinstance(connection, multiprocessing.connection.Connection)
            index, child = waiting.pop(connection)
            answers[index] = _received(child)
    return answers


def _received(child: Child) -> Any:
    try:
        answer = child.connection.recv()
    except (EOFError, OSError):
        child.process.join(1.0)
        raise BenchError(f"{child.name} died with exit code {child.process.exitcode}") from None
    if isinstance(answer, ranks.Crashed):
        raise BenchError(f"{child.name} failed: {answer.error}\n{answer.details}")
    return answer
