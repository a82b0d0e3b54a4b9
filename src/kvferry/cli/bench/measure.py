"""Leads the processes through the rounds. In each, every variant and the limits have their turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.cli.bench.memory import needed_bytes
from kvferry.cli.bench.options import VARIANTS, BenchOptions
from kvferry.cli.bench.pattern import Checked
from kvferry.cli.bench.processes import Children, ask, started
from kvferry.cli.bench.ranks import (
    Aim,
    Allocate,
    Bulk,
    Check,
    CopyMemory,
    Listen,
    Open,
    Received,
    Sent,
    Start,
    Transfer,
)

_STEP_S = 60.0
_SLOWEST_BYTES_PER_S = 20e6
"""A machine that is slower than this in any step is given up."""


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One variant's turn.

    Attributes:
        num_bytes: that moved.
        seconds: from the first submit to the last arrival.
        latencies_s: of every request, from its first submit on any rank to its arrival on every rank.
        submit_s: of every submit.
        cpu_s: of all ranks' processes.
        descriptors: of every request, over all ranks.
    """

    num_bytes: int
    seconds: float
    latencies_s: tuple[float, ...]
    submit_s: tuple[float, ...]
    cpu_s: float
    descriptors: tuple[int, ...]

    @property
    def bytes_per_s(self) -> float:
        """Throughput."""
        return self.num_bytes / self.seconds


@dataclass(slots=True, eq=False)
class Round:
    """Everything that was measured side by side; throughputs in bytes a second."""

    runs: dict[str, Run] = field(default_factory=dict)
    bulk_whole: float = 0.0
    bulk_blocks: float = 0.0
    memory_copy: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """One case. What was checked includes the untimed first round."""

    options: BenchOptions
    rounds: tuple[Round, ...]
    checked: dict[str, Checked]


def measure(options: BenchOptions, on_progress: Callable[[str], None]) -> Measured:
    """Measures one case.

    Args:
        on_progress: told what is done next.

    Raises:
        BenchError: if a process fails, dies or takes too long.
    """
    on_progress(f"{options.name}: starting")
    with started(options) as children:
        return _Measurement(options, children, on_progress).measure()


class _Measurement:
    def __init__(self, options: BenchOptions, children: Children, on_progress: Callable[[str], None]) -> None:
        self._options = options
        self._children = children
        self._on_progress = on_progress
        self._next_room = 0
        self._step_s = _STEP_S + needed_bytes(options) / _SLOWEST_BYTES_PER_S
        self._request_bytes = 0
        self._checked = {variant.name: Checked() for variant in VARIANTS}

    def measure(self) -> Measured:
        self._start()
        options, rounds = self._options, list[Round]()
        self._on_progress(f"{options.name}: first round, not timed")
        for number in range(len(VARIANTS)):
            _, accounts = self._run(number)
        self._aim(*accounts)
        started_at = time.monotonic()
        while len(rounds) < options.repetitions or time.monotonic() < started_at + options.seconds:
            self._on_progress(f"{options.name}: round {len(rounds) + 1}")
            rounds.append(self._round(len(rounds)))
        return Measured(options, tuple(rounds), self._checked)

    def _start(self) -> None:
        first, *others = self._children.all
        ask([(child, Allocate()) for child in self._children.all], self._step_s)
        (registry_url,) = ask([(first, Start(None))], self._step_s)
        ask([(child, Start(registry_url)) for child in others], self._step_s, others=[first])

    def _aim(self, sent: list[Sent], received: list[Received]) -> None:
        """Lets every prefill rank write in bulk to every decode rank what it sent to it in one repetition."""
        decode = self._children.decode
        listening = ask([(child, Listen()) for child in decode], self._step_s)
        filled = [0] * len(decode)
        commands = []
        for child, account in zip(self._children.prefill, sent, strict=True):
            targets = []
            for index, peer in enumerate(received):
                lengths = tuple(filter(None, (request.get(peer.endpoint, 0) for request in account.sent_bytes)))
                if lengths:
                    targets.append((listening[index], filled[index], lengths))
                    filled[index] += sum(lengths)
            commands.append((child, Aim(tuple(targets))))
        ask(commands, self._step_s)

    def _round(self, number: int) -> Round:
        measured = Round()

        def limits() -> None:
            measured.bulk_whole = self._bulk(is_in_blocks=False)
            measured.bulk_blocks = self._bulk(is_in_blocks=True)
            (seconds,) = ask([(self._children.decode[0], CopyMemory(self._request_bytes))], self._step_s)
            measured.memory_copy = 1 / seconds

        def run(index: int) -> None:
            measured.runs[VARIANTS[index].name], _ = self._run(index)

        turns: list[Callable[[], None]] = [limits, *(lambda index=index: run(index) for index in range(len(VARIANTS)))]
        first = number % len(turns)
        for turn in turns[first:] + turns[:first]:  # whoever comes first in one round comes last in the next
            turn()
        return measured

    def _bulk(self, *, is_in_blocks: bool) -> float:
        command = Bulk(is_in_blocks, self._step_s)
        times = ask([(child, command) for child in self._children.prefill], self._step_s)
        seconds = max(each.ended_at for each in times) - min(each.started_at for each in times)
        return float(sum(each.num_bytes for each in times) / seconds)

    def _run(self, variant: int) -> tuple[Run, tuple[list[Sent], list[Received]]]:
        options, children = self._options, self._children
        rooms, self._next_room = self._next_room, self._next_room + options.requests
        # The decode side comes first: it is what the prefill side waits for.
        together = (*children.decode, *children.prefill)
        ask([(child, Open(variant, rooms, self._step_s)) for child in together], self._step_s)
        answers = ask([(child, Transfer(self._step_s)) for child in together], self._step_s)
        received, sent = answers[: len(children.decode)], answers[len(children.decode) :]
        for checked in ask([(child, Check()) for child in children.decode], self._step_s):
            self._checked[VARIANTS[variant].name] += checked
        result = combined(sent, received)
        self._request_bytes = result.num_bytes // options.requests
        return result, (sent, received)


def combined(sent: list[Sent], received: list[Received]) -> Run:
    """One variant's turn, from what its ranks say."""
    begun = [min(times) for times in zip(*(account.submitted_at for account in sent), strict=True)]
    ended = [max(times) for times in zip(*(account.ended_at for account in received), strict=True)]
    return Run(
        num_bytes=sum(sum(request.values()) for account in sent for request in account.sent_bytes),
        seconds=max(ended) - min(begun),
        latencies_s=tuple(end - begin for begin, end in zip(begun, ended, strict=True)),
        submit_s=tuple(seconds for account in sent for seconds in account.submit_s),
        cpu_s=sum(account.cpu_s for account in sent) + sum(account.cpu_s for account in received),
        descriptors=tuple(sum(counts) for counts in zip(*(account.descriptors for account in sent), strict=True)),
    )
