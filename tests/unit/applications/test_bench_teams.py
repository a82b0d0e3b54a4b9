"""How ranks are asked, and how a round is led, with teams that answer from a script."""

from __future__ import annotations

import dataclasses
import os
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.unit.applications.test_bench_options import ARGUMENTS, options

from kvferry.applications.bench import commands
from kvferry.applications.bench.measure import Measured, Measurement, Place
from kvferry.applications.bench.options import BenchOptions, prepare
from kvferry.applications.bench.pattern import Checked
from kvferry.applications.bench.remote import difference
from kvferry.applications.bench.run import agreed
from kvferry.applications.bench.teams import BenchError, Pollable, Teams
from kvferry.errors import MessageError

Script = Callable[[int, commands.Command], commands.Answer | None]


class ScriptedTeam:
    """Answers each command at once, as a function says; None is silence."""

    def __init__(self, name: str, size: int, script: Script) -> None:
        self.name = name
        self.size = size
        self.told: list[tuple[int, commands.Command]] = []
        self._script = script
        self._answers: deque[tuple[int, bytes]] = deque()
        self._reading, self._writing = os.pipe()

    def tell(self, rank: int, command: bytes) -> None:
        self.told.append((rank, commands.decode_command(command)))
        answer = self._script(*self.told[-1])
        if answer is not None:
            self.say(rank, answer)

    def say(self, rank: int, answer: commands.Answer) -> None:
        self._answers.append((rank, commands.encode(answer)))
        os.write(self._writing, b"!")

    def pollables(self) -> Collection[Pollable]:
        return [self._reading]

    def hear(self, readable: Collection[Pollable]) -> list[tuple[int, bytes]]:
        if self._reading in readable:
            os.read(self._reading, 4096)
        deduplication, self._answers = list(self._answers), deque()
        return deduplication

    def close(self) -> None:
        os.close(self._reading)
        os.close(self._writing)


@contextmanager
def scripted(prefill: Script, decode: Script, *, sizes: tuple[int, int] = (2, 1)) -> Iterator[tuple[Any, Any, Teams]]:
    teams = ScriptedTeam("prefill", sizes[0], prefill), ScriptedTeam("decode", sizes[1], decode)
    try:
        yield *teams, Teams(*teams)
    finally:
        for team in teams:
            team.close()


def done(rank: int, command: commands.Command) -> commands.Answer:
    return commands.Copied(float(rank))


def test_answers_come_in_the_order_of_those_asked():
    with scripted(done, done, sizes=(3, 2)) as (prefill, _, teams):
        members = (*teams.decode_ranks, *reversed(teams.prefill_ranks))
        answers = teams.ask(members, lambda index: commands.CopyMemory(index), commands.Copied, 5)
        assert [answer.seconds_per_byte for answer in answers] == [0, 1, 2, 1, 0]
        assert prefill.told == [(2, commands.CopyMemory(2)), (1, commands.CopyMemory(3)), (0, commands.CopyMemory(4))]


@pytest.mark.parametrize(
    ("prefill", "decode", "said"),
    [
        (
            done,
            lambda *_: commands.Crashed("ValueError: no", "traceback"),
            "decode rank 0 failed: ValueError: no\ntraceback",
        ),
        (lambda *_: commands.Done(), done, "prefill rank 0 answered with Done"),
        (lambda rank, _: commands.Copied(1.0) if rank else None, done, "no answer within 0.2 s from prefill rank 0"),
    ],
)
def test_a_rank_that_crashes_is_silent_or_says_something_else_ends_it_by_name(
    prefill: Script, decode: Script, said: str
):
    with scripted(prefill, decode) as (_, _, teams), pytest.raises(BenchError, match=re.escape(said)):
        teams.ask(teams.all_ranks, commands.Check(), commands.Copied, 0.2)


def test_an_answer_that_nobody_asked_for_ends_it():
    with scripted(done, lambda *_: None) as (prefill, _, teams):
        prefill.say(1, commands.Done())
        with pytest.raises(BenchError, match="prefill rank 1 answered without being asked"):
            teams.ask(teams.decode_ranks, commands.Check(), commands.Copied, 5)


def test_a_crash_of_a_rank_that_nobody_asked_ends_it_too():
    with scripted(done, lambda *_: None) as (prefill, _, teams):
        prefill.say(1, commands.Crashed("OSError: gone", ""))
        with pytest.raises(BenchError, match="prefill rank 1 failed: OSError: gone"):
            teams.ask(teams.decode_ranks, commands.Check(), commands.Copied, 30)


@pytest.mark.parametrize("data", [b"", b"\x93", b"\x81\xa4type\xa5Nobody"[:8], b"\xff" * 40])
def test_bytes_that_are_no_message_are_an_error_of_the_peer(data: bytes):
    with pytest.raises(MessageError):
        commands.decode_command(data)
    with pytest.raises(MessageError):
        commands.decode_answer(data)


class Ranks:
    """A side whose ranks do everything, but for what a variant is refused or fails."""

    def __init__(self, *, refused: dict[str, str] | None = None, failing: dict[str, int] | None = None) -> None:
        """Args:
        failing: from which of its turns on a variant fails.
        """
        self._refused = refused or {}
        self._failing = failing or {}
        self._turns: dict[str, int] = {}
        self._opened: commands.Open | None = None
        self._now = 0.0

    def prefill(self, rank: int, command: commands.Command) -> commands.Answer:
        return self._answer(command, is_prefill=True)

    def decode(self, rank: int, command: commands.Command) -> commands.Answer:
        return self._answer(command, is_prefill=False)

    def _answer(self, command: commands.Command, *, is_prefill: bool) -> commands.Answer:
        match command:
            case commands.Start(_, _, variants):
                refused = {name: why for name, why in self._refused.items() if name in variants}
                return commands.Started("http://registry", {} if is_prefill else refused)
            case commands.Open():
                if not is_prefill:
                    self._turns[command.variant] = self._turns.get(command.variant, 0) + 1
                self._opened = command
                return commands.Done()
            case commands.Transfer():
                assert self._opened is not None
                variant, count = self._opened.variant, 2 * self._opened.passes
                if self._turns[variant] > self._failing.get(variant, 1000):
                    return commands.Failed("TransferFailedError: a chunk can never fit")
                self._now += 1.0
                if not is_prefill:
                    return commands.Received("receiver", (self._now + 1,) * count, 0.5, 0.2)
                way = commands.Way("staged", "asked for", 10)
                bytes_sent = ({"receiver": 10},) * count
                times, ones = (self._now,) * count, (1,) * count
                return commands.Sent(times, times, (1e-6,) * count, 0.5, 0.2, bytes_sent, ones, ones, (way,))
            case commands.Check():
                return commands.Found(Checked(100))
            case commands.Listen():
                return commands.Listening(b"here")
            case commands.Bulk():
                return commands.BulkTimes(0.0, 1.0, 40)
            case commands.CopyMemory():
                return commands.Copied(1e-9)
        return commands.Done()


def measured(ranks: Ranks, shape: BenchOptions) -> tuple[Measured, list[commands.Command], list[commands.Command]]:
    with scripted(ranks.prefill, ranks.decode) as (prefill, decode, teams):
        place = Place("both", None, shares_clock=True)
        result = Measurement([shape], 0, teams, place, lambda _: None).measure()
        return result, [command for _, command in prefill.told], [command for _, command in decode.told]


def test_every_variant_has_its_turn_in_every_round_and_everybody_begins_once():
    shape = options(requests=2, repetitions=5)
    result, _, told = measured(Ranks(), shape)
    assert [tuple(each.runs) for each in result.rounds] != [shape.variants] * 5
    assert all(set(each.runs) == set(shape.variants) for each in result.rounds)
    turns = [command.variant for command in told if isinstance(command, commands.Open)]
    assert turns[:4] == list(shape.variants)  # the untimed round
    firsts = [next(iter(each.runs)) for each in result.rounds]
    assert set(firsts) == set(shape.variants)
    rooms = [range(each.first_room, each.first_room + 2) for each in told if isinstance(each, commands.Open)]
    assert len({room for each in rooms for room in each}) == 2 * len(rooms)


def test_only_timed_rounds_go_over_the_pages_more_than_once():
    shape = options(requests=2, in_flight=1, passes=3, variants="auto", repetitions=2)
    _, _, told = measured(Ranks(), shape)
    assert [command.passes for command in told if isinstance(command, commands.Open)] == [1, 3, 3]


def test_a_variant_that_is_refused_leaves_the_others_their_turns():
    shape = options(requests=2, variants="direct,staged,auto")
    result, prefill, decode = measured(Ranks(refused={"staged": "SettingsError: too small"}), shape)
    assert result.refused == {"staged": "SettingsError: too small"}
    assert set(result.rounds[0].runs) == {"direct", "auto"}
    assert not [each for each in prefill + decode if isinstance(each, commands.Open) and each.variant == "staged"]


def test_a_variant_whose_first_transfer_fails_is_refused_for_that_reason():
    shape = options(requests=2, variants="direct,staged")
    result, _, _ = measured(Ranks(failing={"staged": 0}), shape)
    assert result.refused == {"staged": "TransferFailedError: a chunk can never fit"}
    assert set(result.rounds[0].runs) == {"direct"}
    assert result.rounds[0].bulk_whole > 0


def test_a_variant_that_fails_later_ends_the_run():
    shape = options(requests=2, variants="direct,staged", repetitions=3)
    with pytest.raises(BenchError, match="staged, failed in round 2: TransferFailedError"):
        measured(Ranks(failing={"staged": 2}), shape)


def test_if_every_variant_is_refused_nothing_is_measured():
    shape = options(requests=2, variants="direct,staged")
    reasons = {"direct": "no", "staged": "no"}
    result, prefill, _ = measured(Ranks(refused=reasons), shape)
    assert result.refused == reasons
    assert result.rounds == ()
    assert not [command for command in prefill if isinstance(command, commands.Open | commands.Aim | commands.Bulk)]


def test_two_sides_that_were_told_the_same_agree(monkeypatch: pytest.MonkeyPatch):
    said = agreed(ARGUMENTS, prepare(ARGUMENTS))
    assert difference(said, dict(said)) is None
    own = dataclasses.replace(ARGUMENTS, plant_wrong_byte=True, seconds=5.0, repetitions=7)  # the leader's alone
    assert difference(said, agreed(own, prepare(own))) is None
    monkeypatch.setenv(
        "KVFERRY_NIXL_THREADS", "7"
    )  # a machine with other processors, or another operator's open request
    assert difference(said, agreed(ARGUMENTS, prepare(ARGUMENTS))) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"page_size": "1,16"}, "--page-size is 16 on the prefill side and 1,16 on the decode side"),
        ({"tokens": 65}, "--tokens is 64 on the prefill side and 65 on the decode side"),
        ({"variants": "direct"}, "--variants is synchronous,direct,staged,auto on the prefill side"),
        ({"preset": "qwen3-8b"}, "the model (--preset, --config) is small"),
        ({"transport": "kvferry.testing.transports:FaultyTransport"}, "on the prefill side and kvferry.testing.transp"),
        ({"nixl_threads": 77}, " on the prefill side and 77 on the decode side"),
    ],
)
def test_two_sides_that_were_told_different_things_learn_which(changes: dict[str, Any], said: str):
    other = dataclasses.replace(ARGUMENTS, **changes)
    reason = difference(agreed(ARGUMENTS, prepare(ARGUMENTS)), agreed(other, prepare(other)))
    assert reason is not None
    assert said in reason
    assert reason.count(" on the prefill side and ") == 1
