"""What metrics cost: the same endpoints move the same requests with metrics and without, in turns.

`python -m benchmarks.observe_cost`. A turn takes a fraction of a second, so that whatever else the machine does meets
either alike, and the metrics are read as Prometheus would. What is switched is who is told of what happens; the server,
idle between two reads, is there all the time: `benchmarks.idle` with KVFERRY_OBSERVE_PORT=0 has its cost. Prints the
ratios of throughput and of processor time a byte, each with the range in which 95 % of medians lie if repetitions, with
processes of their own, and turns are drawn anew. Chance moves these by a few percent. A third turn therefore times the
calls where they are made, and the last column has their share of all processor time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import httpx
import msgspec
import numpy as np

from kvferry.applications.bench import commands, ranks
from kvferry.applications.bench.measure import Measurement, Place, Run
from kvferry.applications.bench.options import BenchArguments, BenchOptions, prepare
from kvferry.applications.bench.teams import LocalTeam, Teams
from kvferry.layout import RankCoordinates
from kvferry.observe.metrics import Metrics
from kvferry.observe.tracing import Recorder
from kvferry.testing.probe import probe

BASE_PORT = 9470
PATHS = ("direct", "staged")
OBSERVED = "-observed"
TIMED = "-timed"


@dataclass(frozen=True, slots=True)
class Turn:
    """The same work three times, one after the other: without metrics, with them, and with their calls timed.

    Attributes:
        throughput: bytes a second, with divided by without.
        processor_time: seconds of all processes a byte, with divided by without.
        calls: the processor time of the metrics' calls divided by that of all processes.
    """

    throughput: float
    processor_time: float
    calls: float


class TimedCall:
    """What somebody who observes is told with, and the processor time of every call."""

    def __init__(self, method: MethodType, spent_s: list[float]) -> None:
        self.__self__ = method.__self__
        self._method, self._spent_s = method, spent_s

    def __call__(self, *arguments: object) -> object:
        """Passes it on."""
        began = time.thread_time()
        try:
            return self._method(*arguments)
        finally:
            self._spent_s.append(time.thread_time() - began)


class SwitchedRank:
    """A rank whose endpoints all have metrics, which are told of what happens only in turns of such a name.

    In turns whose calls are timed its account of processor time has that of the calls.
    """

    def __init__(self, rank: ranks.PrefillRank | ranks.DecodeRank) -> None:
        self._rank = rank
        self._all: dict[str, dict[str, Any]] = {}
        self._is_timed = False
        self._spent_s: list[float] = []

    def answer(self, command: commands.Command) -> commands.Answer:
        """Does what a command says."""
        if isinstance(command, commands.Start):
            found = self._rank.answer(command)
            self._all = {path: dict(self._observer(path)) for path in self._rank.endpoints}
            return found
        if isinstance(command, commands.Open):
            path = command.variant.removesuffix(OBSERVED).removesuffix(TIMED)
            self._is_timed = command.variant.endswith(TIMED)
            self._switch(path, is_on=path != command.variant)
            command = msgspec.structs.replace(command, variant=path)
        answer = self._rank.answer(command)
        if self._is_timed and isinstance(answer, (commands.Sent, commands.Received)):
            spent_s, self._spent_s = self._spent_s, []
            answer = msgspec.structs.replace(answer, cpu_s=sum(spent_s))
        return answer

    def close(self) -> None:
        """Gives everything back."""
        self._rank.close()

    def _observer(self, path: str) -> dict[str, Any]:
        return probe(self._rank.endpoints[path]).telemetry.observer.__dict__

    def _switch(self, path: str, *, is_on: bool) -> None:
        self._observer(path).update(
            {
                about: tuple(
                    self._timed(each) if self._is_timed and _is_switched(each) else each
                    for each in told
                    if is_on or not _is_switched(each)
                )
                for about, told in self._all[path].items()
            }
        )

    def _timed(self, method: MethodType) -> TimedCall:
        return TimedCall(method, self._spent_s)


def _is_switched(told: MethodType) -> bool:
    return isinstance(told.__self__, (Metrics, Recorder))


def prefill_rank(options: Sequence[BenchOptions], coordinates: RankCoordinates) -> SwitchedRank:
    """What the process of a prefill rank runs."""
    return SwitchedRank(ranks.PrefillRank(options, coordinates))


def decode_rank(options: Sequence[BenchOptions], coordinates: RankCoordinates) -> SwitchedRank:
    """What the process of a decode rank runs."""
    return SwitchedRank(ranks.DecodeRank(options, coordinates))


def planned(preset: str, tokens: int, chunks: int, passes: int) -> list[BenchOptions]:
    """What is moved, in every turn."""
    return prepare(
        BenchArguments(
            preset=preset,
            variants=",".join(PATHS),
            tokens=tokens,
            chunks=chunks,
            requests=8,
            passes=passes,
            repetitions=1,
        )
    )


@contextmanager
def reading(every_s: float) -> Iterator[None]:
    """Meanwhile reads the metrics of every endpoint now and then; 0 for never."""
    over = threading.Event()

    def read() -> None:
        with httpx.Client(trust_env=False, timeout=1.0) as client:
            while not over.wait(every_s):
                for port in range(BASE_PORT, BASE_PORT + 2 * len(PATHS)):
                    try:
                        client.get(f"http://127.0.0.1:{port}/metrics")
                    except httpx.HTTPError:
                        continue  # nobody lives there

    reader = threading.Thread(target=read, daemon=True)
    if every_s:
        reader.start()
    yield
    over.set()
    if every_s:
        reader.join()


def measure(options: list[BenchOptions], turns: int) -> dict[str, list[Turn]]:
    """Turns in new processes, by path."""
    found: dict[str, list[Turn]] = {path: [] for path in PATHS}
    makers = {"prefill": prefill_rank, "decode": decode_rank}
    prefill, decode = (LocalTeam(name, options, makers) for name in makers)
    with prefill, decode:
        place = Place("both", None, shares_clock=True)
        measurement = Measurement(options, 0, Teams(prefill, decode), place, lambda _: None)
        measurement.start()
        for number in range(-1, turns):
            for path in PATHS:
                variants = (path, f"{path}{OBSERVED}", f"{path}{TIMED}")
                turn: dict[str, Run] = {}
                for variant in variants if number % 2 else variants[::-1]:  # none is always first
                    turn[variant], _ = measurement.run(variant, passes=options[0].passes)
                without, observed, timed = (turn[variant] for variant in variants)
                if number < 0:
                    continue  # that warmed up
                found[path].append(
                    Turn(
                        throughput=observed.bytes_per_s / without.bytes_per_s,
                        processor_time=_processor_time(observed) / _processor_time(without),
                        calls=timed.cpu_s / observed.cpu_s,
                    )
                )
    return found


def _processor_time(run: Run) -> float:
    return run.cpu_s / run.num_bytes


def shown(ratios: list[list[float]]) -> str:
    """The median of ratios, which come by repetition, and its range."""
    chance = np.random.default_rng(0)
    medians = []
    for _ in range(2000):
        drawn = [ratios[index] for index in chance.integers(len(ratios), size=len(ratios))]
        medians.append(np.median(np.concatenate([chance.choice(each, size=len(each)) for each in drawn])))
    low, high = np.percentile(medians, (2.5, 97.5))
    middle = statistics.median(ratio for each in ratios for ratio in each)
    return f"{middle:.4f} ({low:.4f} to {high:.4f})"


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=10, help="with new processes")
    parser.add_argument("--turns", type=int, default=20, help="of either kind in every repetition")
    parser.add_argument("--preset", default="small", help="the model: small ones write more often, and count more")
    parser.add_argument("--tokens", type=int, default=2048, help="of a request")
    parser.add_argument("--passes", type=int, default=4, help="eights of requests in a turn")
    parser.add_argument("--chunks", type=int, default=4, help="that a request is submitted in")
    parser.add_argument("--read-s", type=float, default=10.0, help="seconds between reads of the metrics; 0 for never")
    chosen = parser.parse_args()
    options = planned(chosen.preset, chosen.tokens, chosen.chunks, chosen.passes)
    os.environ["KVFERRY_OBSERVE_PORT"] = str(BASE_PORT)  # for the ranks' processes
    with reading(chosen.read_s):
        repetitions = [measure(options, chosen.turns) for _ in range(chosen.repetitions)]
    print("| path | throughput, with metrics / without | processor time a byte, with / without | their calls' share |")
    print("|---|---|---|---|")
    for path in PATHS:
        throughput = shown([[turn.throughput for turn in each[path]] for each in repetitions])
        processor_time = shown([[turn.processor_time for turn in each[path]] for each in repetitions])
        calls = shown([[turn.calls for turn in each[path]] for each in repetitions])
        print(f"| {path} | {throughput} | {processor_time} | {calls} |")


if __name__ == "__main__":
    main()
