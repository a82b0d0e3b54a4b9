"""Leads the ranks through the rounds. In each, every variant and the limits have their turn."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvferry.applications.bench import commands
from kvferry.applications.bench.options import BenchOptions
from kvferry.applications.bench.pattern import Checked
from kvferry.applications.bench.pool import needed_bytes
from kvferry.applications.bench.teams import BenchError, Teams

_STEP_S = 60.0
_SLOWEST_BYTES_PER_S = 20e6
"""A machine that is slower than this in any step is given up."""


@dataclass(frozen=True, slots=True)
class Place:
    """What runs on this machine.

    Attributes:
        role: "both" sides, or "prefill" or "decode" alone.
        registry_url: where the registry answers; None has the benchmark run one.
        shares_clock: whether the other side runs on this machine, too.
    """

    role: str
    registry_url: str | None
    shares_clock: bool

    @property
    def side_names(self) -> tuple[str, ...]:
        """The sides that run here."""
        return ("prefill", "decode") if self.role == "both" else (self.role,)


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One variant's turn.

    Attributes:
        num_bytes: that moved.
        seconds: from the first submit to the last arrival.
        latencies_s: of every transfer, from its first submit on any rank to its arrival on every rank. Where the two
            sides share no clock both are counted from when the decode side asked; see `combined`.
        exposed_s: of every transfer, from its last submit on any rank to its arrival on every rank. Empty where the two
            sides share no clock.
        submit_s: of every submit.
        cpu_s: of all ranks' processes.
        interpreter_s: of that, what the interpreters' threads have taken; None where nobody says.
        descriptors: of every transfer, over all ranks.
        writes: of every transfer, over all ranks; one may carry several chunks.
        ways: how the bytes travelled.
    """

    num_bytes: int
    seconds: float
    latencies_s: tuple[float, ...]
    exposed_s: tuple[float, ...]
    submit_s: tuple[float, ...]
    cpu_s: float
    interpreter_s: float | None
    descriptors: tuple[int, ...]
    writes: tuple[int, ...]
    ways: tuple[commands.Way, ...]

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
    """One case.

    Attributes:
        rounds: those that were timed.
        checked: what was found, by variant, the untimed first round included.
        refused: why a variant cannot do it, by its name.
    """

    options: BenchOptions
    rounds: tuple[Round, ...]
    checked: dict[str, Checked]
    refused: dict[str, str]


class Measurement:
    """Measures one case."""

    def __init__(
        self,
        planned: Sequence[BenchOptions],
        case: int,
        teams: Teams,
        place: Place,
        on_progress: Callable[[str], None],
    ) -> None:
        """Takes what is to be measured; `measure` does it.

        Args:
            on_progress: told what is done next.
        """
        self._options = planned[case]
        self._case = case
        self._teams = teams
        self._place = place
        self._on_progress = on_progress
        self._next_room = 0
        self._step_s = _STEP_S + needed_bytes(self._options) * self._options.passes / _SLOWEST_BYTES_PER_S
        self._request_bytes = 0
        self._checked = {name: Checked() for name in self._options.variants}
        self._refused: dict[str, str] = {}

    def measure(self) -> Measured:
        """All rounds.

        Raises:
            BenchError: if a process fails, dies or takes too long.
        """
        options, rounds = self._options, list[Round]()
        self.start()
        self._on_progress(f"{options.name}: first round, not timed")
        accounts = None
        for variant in self._able:
            try:
                _, accounts = self.run(variant, passes=1)
            except VariantFailedError as error:
                self._refused[variant] = str(error)
        if accounts is not None and self._able:
            self._aim(*accounts)
            started_at = time.monotonic()
            while len(rounds) < options.repetitions or time.monotonic() < started_at + options.seconds:
                self._on_progress(f"{options.name}: round {len(rounds) + 1}")
                rounds.append(self._round(len(rounds)))
        return Measured(options, tuple(rounds), self._checked, self._refused)

    @property
    def _able(self) -> tuple[str, ...]:
        """The variants that nobody refused."""
        return tuple(name for name in self._options.variants if name not in self._refused)

    def start(self) -> None:
        """Fills the memory and connects the ranks.

        Raises:
            BenchError: if a process fails, dies or takes too long.
        """
        teams, run = self._teams, secrets.token_hex(4)
        self._on_progress(f"{self._options.name}: filling memory")
        teams.ask(teams.all_ranks, commands.Prepare(self._case), commands.Done, self._step_s)
        self._on_progress(f"{self._options.name}: connecting")
        first, *others = teams.prefill_ranks
        command = commands.Start(self._place.registry_url, run, self._able)
        (hosting,) = teams.ask([first], command, commands.Started, self._step_s)
        self._refused |= hosting.refused
        for members in (others, teams.decode_ranks):
            command = commands.Start(hosting.registry_url, run, self._able)
            if self._able:
                for started in teams.ask(members, command, commands.Started, self._step_s):
                    self._refused |= started.refused

    def _aim(self, sent: list[commands.Sent], received: list[commands.Received]) -> None:
        """Lets every prefill rank write in bulk to every decode rank what it sends to it of all requests."""
        teams, requests = self._teams, self._options.requests
        listening = teams.ask(teams.decode_ranks, commands.Listen(), commands.Listening, self._step_s)
        filled = [0] * len(received)
        aims = []
        for account in sent:
            targets = []
            for index, peer in enumerate(received):
                amounts = (transfer.get(peer.endpoint, 0) for transfer in account.sent_bytes[:requests])
                lengths = tuple(filter(None, amounts))
                if lengths:
                    targets.append(commands.Target(listening[index].metadata, filled[index], lengths))
                    filled[index] += sum(lengths)
            aims.append(commands.Aim(tuple(targets)))
        teams.ask(teams.prefill_ranks, aims.__getitem__, commands.Done, self._step_s)

    def _round(self, number: int) -> Round:
        measured = Round()

        def limits() -> None:
            measured.bulk_whole = self._bulk(is_in_blocks=False)
            measured.bulk_blocks = self._bulk(is_in_blocks=True)
            command = commands.CopyMemory(self._request_bytes)
            (copied,) = self._teams.ask(self._teams.decode_ranks[:1], command, commands.Copied, self._step_s)
            measured.memory_copy = 1 / copied.seconds_per_byte

        def run(variant: str) -> None:
            try:
                measured.runs[variant], _ = self.run(variant, passes=self._options.passes)
            except VariantFailedError as error:
                raise BenchError(f"{self._options.name}, {variant}, failed in round {number + 1}: {error}") from error

        turns: list[Callable[[], None]] = [limits, *(lambda variant=variant: run(variant) for variant in self._able)]
        first = number % len(turns)
        for turn in turns[first:] + turns[:first]:  # whoever comes first in one round comes last in the next
            turn()
        return measured

    def _bulk(self, *, is_in_blocks: bool) -> float:
        command = commands.Bulk(is_in_blocks, self._step_s)
        times = self._teams.ask(self._teams.prefill_ranks, command, commands.BulkTimes, self._step_s)
        seconds = max(each.ended_at for each in times) - min(each.started_at for each in times)
        return float(sum(each.num_bytes for each in times) / seconds)

    def run(self, variant: str, *, passes: int) -> tuple[Run, tuple[list[commands.Sent], list[commands.Received]]]:
        """One variant's turn.

        Raises:
            VariantFailedError: with the reason, if a transfer fails.
        """
        options, teams = self._options, self._teams
        transfers = passes * options.requests
        rooms, self._next_room = self._next_room, self._next_room + transfers
        # The decode side comes first: it is what the prefill side waits for.
        together = (*teams.decode_ranks, *teams.prefill_ranks)
        opened = commands.Open(variant, rooms, passes, self._step_s)
        teams.ask(together, opened, commands.Done, self._step_s)
        asked_at = time.monotonic()
        answers = teams.ask_for_any(together, commands.Transfer(self._step_s), 2 * self._step_s)
        failures = [answer.reason for answer in answers if isinstance(answer, commands.Failed)]
        if failures:
            raise VariantFailedError(failures[0])
        received = [answer for answer in answers if isinstance(answer, commands.Received)]
        sent = [answer for answer in answers if isinstance(answer, commands.Sent)]
        for found in teams.ask(teams.decode_ranks, commands.Check(), commands.Found, self._step_s):
            self._checked[variant] = self._checked.get(variant, Checked()) + found.checked
        result = combined(
            sent,
            received,
            in_flight=options.at_a_time,
            asked_at=None if self._place.shares_clock else asked_at,
        )
        self._request_bytes = result.num_bytes // transfers
        return result, (sent, received)


class VariantFailedError(Exception):
    """A transfer failed, and the ranks go on."""


def combined(
    sent: Sequence[commands.Sent], received: Sequence[commands.Received], *, in_flight: int, asked_at: float | None
) -> Run:
    """One variant's turn, from what its ranks say.

    Args:
        in_flight: transfers that are on their way at a time.
        asked_at: when the decode side asked for all of it, by its own clock; None where both sides share one. Then a
            transfer begins when that was asked for, or when the one arrived whose place in flight it takes.
    """
    ended = [max(times) for times in zip(*(account.ended_at for account in received), strict=True)]
    if asked_at is None:
        begun = [min(times) for times in zip(*(account.submitted_at for account in sent), strict=True)]
    else:
        begun = [asked_at if number < in_flight else ended[number - in_flight] for number in range(len(ended))]
    interpreters = [*(account.interpreter_s for account in sent), *(account.interpreter_s for account in received)]
    computed = [max(times) for times in zip(*(account.computed_at for account in sent), strict=True)]
    return Run(
        num_bytes=sum(sum(transfer.values()) for account in sent for transfer in account.sent_bytes),
        seconds=max(ended) - min(begun),
        # What two ranks see of one moment differs a little: a transfer never takes less than nothing.
        latencies_s=tuple(max(0.0, end - begin) for begin, end in zip(begun, ended, strict=True)),
        exposed_s=()
        if asked_at is not None
        else tuple(max(0.0, end - through) for through, end in zip(computed, ended, strict=True)),
        submit_s=tuple(seconds for account in sent for seconds in account.submit_s),
        cpu_s=sum(account.cpu_s for account in sent) + sum(account.cpu_s for account in received),
        interpreter_s=None if None in interpreters else sum(each for each in interpreters if each is not None),
        descriptors=tuple(sum(counts) for counts in zip(*(account.descriptors for account in sent), strict=True)),
        writes=tuple(sum(counts) for counts in zip(*(account.writes for account in sent), strict=True)),
        ways=tuple(way for account in sent for way in account.ways),
    )
