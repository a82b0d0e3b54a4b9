"""The ranks of one side, wherever they are, and how they are asked. A team never leaves a process behind."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, TypeAlias, TypeVar

import zmq

from kvferry.applications.bench import commands, ranks
from kvferry.applications.bench.options import BenchOptions
from kvferry.errors import KVFerryError

_END_S = 10.0
_PRELOADED = [ranks.__name__]
_LONGEST_POLL_S = 0.5
_CAUSE_S = 2.0
"""How long a rank's error waits for a death to explain it: whoever wrote to a rank that died hears of it first."""

Pollable: TypeAlias = "int | zmq.Socket[bytes]"
Answer = TypeVar("Answer")
AnySpeaker = TypeVar("AnySpeaker", bound="Speaker")


class BenchError(KVFerryError):
    """A process of the benchmark failed; the message names it and quotes its error."""


class Speaker(Protocol):
    """Whom one can listen to."""

    def pollables(self) -> Collection[Pollable]:
        """What becomes readable when there is something to hear."""

    def hear(self, readable: Collection[Pollable]) -> list[tuple[int, bytes]]:
        """What was said: numbers of ranks, and what each said. Called at least twice a second, whatever is readable.

        Raises:
            BenchError: if somebody is gone.
        """


class Team(Speaker, Protocol):
    """The ranks of one side.

    Attributes:
        name: the side's.
        size: how many ranks.
    """

    name: str
    size: int

    def tell(self, rank: int, command: bytes) -> None:
        """Gives a rank a command."""


def begin_to_import() -> threading.Thread:
    """Begins to import what ranks need, which may take many seconds; once the thread has ended, teams start at once."""

    def run_nothing() -> None:
        process = _context().Process(target=int, daemon=True)
        process.start()
        process.join()

    thread = threading.Thread(target=run_nothing, name="kvferry-bench-import", daemon=True)
    thread.start()
    return thread


def _context() -> ForkServerContext:
    # A fork server imports once what every rank needs, before any thread exists.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


@dataclass(frozen=True, slots=True, eq=False)
class _Child:
    process: BaseProcess
    connection: multiprocessing.connection.Connection


class LocalTeam:
    """Ranks in processes of this one, which end with the context, whatever happened."""

    def __init__(
        self, name: str, planned: Sequence[BenchOptions], makers: Mapping[str, ranks.RankMaker] = ranks.RANKS
    ) -> None:
        """Starts the ranks of the side of that name, for all cases, which divide it alike.

        Args:
            makers: what their processes run, by the name of the side.
        """
        self.name = name
        side, context = planned[0].side(name), _context()
        self.size = side.tp_size
        self._children: list[_Child] = []
        try:
            for coordinates in side.coordinates:
                ours, theirs = context.Pipe()
                given = (theirs, makers[name], planned, coordinates)
                process = context.Process(target=ranks.serve, args=given, daemon=True)
                process.start()
                theirs.close()
                self._children.append(_Child(process, ours))
        except BaseException:
            self._end()
            raise

    def tell(self, rank: int, command: bytes) -> None:
        with suppress(OSError):  # if it died, its silence says so
            self._children[rank].connection.send_bytes(command)

    def pollables(self) -> Collection[Pollable]:
        return [each for child in self._children for each in (child.connection.fileno(), child.process.sentinel)]

    def hear(self, readable: Collection[Pollable]) -> list[tuple[int, bytes]]:
        answers = []
        for rank, child in enumerate(self._children):
            if child.connection.fileno() in readable:
                answers.append((rank, self._received(rank)))
            elif child.process.sentinel in readable:
                raise self._death(rank)
        return answers

    def _received(self, rank: int) -> bytes:
        try:
            return self._children[rank].connection.recv_bytes()
        except (EOFError, OSError):
            raise self._death(rank) from None

    def _death(self, rank: int) -> BenchError:
        process = self._children[rank].process
        process.join(1.0)
        return BenchError(f"{self.name} rank {rank} died with exit code {process.exitcode}")

    def __enter__(self) -> LocalTeam:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            for rank in range(self.size):
                self.tell(rank, commands.encode(commands.Leave()))
            deadline = time.monotonic() + _END_S
            for child in self._children:
                child.process.join(max(0.0, deadline - time.monotonic()))
        self._end()

    def _end(self) -> None:
        for child in self._children:
            if child.process.is_alive():
                child.process.kill()
            child.process.join()
            child.connection.close()


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One rank of a team."""

    team: Team
    rank: int

    def __str__(self) -> str:
        return f"{self.team.name} rank {self.rank}"


class Teams:
    """Both sides' ranks, asked together."""

    def __init__(self, prefill: Team, decode: Team) -> None:
        self._teams = prefill, decode
        self.prefill_ranks, self.decode_ranks = (
            [Member(team, rank) for rank in range(team.size)] for team in self._teams
        )
        self.all_ranks = self.prefill_ranks + self.decode_ranks

    def ask(
        self,
        members: Sequence[Member],
        command: commands.Command | Callable[[int], commands.Command],
        kind: type[Answer],
        timeout_s: float,
    ) -> list[Answer]:
        """Gives several ranks a command, then waits for all answers; returns them in the same order.

        Args:
            command: the same for all, or a function of their place among those asked.
            kind: what an answer must be.

        Raises:
            BenchError: if any rank of either side fails, dies or takes too long, or gives another answer.
        """
        answers = self.ask_for_any(members, command, timeout_s)
        for member, answer in zip(members, answers, strict=True):
            if not isinstance(answer, kind):
                raise BenchError(f"{member} answered with {answer}")
        return answers  # type: ignore[return-value]

    def ask_for_any(
        self,
        members: Sequence[Member],
        command: commands.Command | Callable[[int], commands.Command],
        timeout_s: float,
    ) -> list[commands.Answer]:
        """The same, whatever they answer."""
        for index, member in enumerate(members):
            each = command(index) if callable(command) else command
            member.team.tell(member.rank, commands.encode(each))
        waiting = {(member.team.name, member.rank): index for index, member in enumerate(members)}
        answers: list[Any] = [None] * len(members)
        deadline = time.monotonic() + timeout_s
        while waiting:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                names = ", ".join(f"{team} rank {rank}" for team, rank in waiting)
                raise BenchError(f"no answer within {timeout_s:g} s from {names}")
            for team, rank, said in listen(self._teams, left_s):
                answer = commands.decode_answer(said)
                if isinstance(answer, commands.Crashed):
                    self._listen_for_a_death()
                    raise BenchError(f"{team.name} rank {rank} failed: {answer.error}\n{answer.details}")
                if (team.name, rank) not in waiting:
                    raise BenchError(f"{team.name} rank {rank} answered without being asked: {answer}")
                answers[waiting.pop((team.name, rank))] = answer
        return answers

    def _listen_for_a_death(self) -> None:
        """Waits a moment for word that a rank is gone, and raises that."""
        deadline = time.monotonic() + _CAUSE_S
        while (left_s := deadline - time.monotonic()) > 0:
            listen(self._teams, left_s)


def listen(speakers: Sequence[AnySpeaker], timeout_s: float) -> list[tuple[AnySpeaker, int, bytes]]:
    """What several have said, once there is anything, or after a while at most.

    Raises:
        BenchError: if somebody is gone.
    """
    poller = zmq.Poller()
    for speaker in speakers:
        for pollable in speaker.pollables():
            poller.register(pollable, zmq.POLLIN)
    # A process that died shows as an error on its pipe, which counts as readable: there is its end to read.
    readable = {pollable for pollable, _ in poller.poll(int(1000 * min(timeout_s, _LONGEST_POLL_S)))}
    return [(speaker, rank, said) for speaker in speakers for rank, said in speaker.hear(readable)]
