"""Many ranks at one registry: how often they ask, counted in a simulation of both sides' code, without a clock."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
from tests.support.registries import rank

from kvferry.control.leases import RENEWALS_PER_S, RETURNS_PER_S, Leases, Pacer
from kvferry.control.registry import Grant
from kvferry.control.registry_messages import Lease
from kvferry.control.renewals import _LOOK_S, Renewals
from kvferry.errors import RegistrationRefusedError, SettingsError

LEASE_S = 10.0
ENGINE_RANKS = 64


class Fleet:
    """Ranks of engines, of 64 each, which ask the registry when `Renewals` says.

    Attributes:
        asked: requests that the registry answered, by the second.
        silences: for each engine the longest time between two of them since `listen_anew`.
        at: the time until which the simulation has come.
    """

    def __init__(
        self,
        count: int,
        *,
        start_s: float = 0.0,
        engine_ranks: int = ENGINE_RANKS,
        heeds: Callable[[Grant], float] | None = None,
    ) -> None:
        """Ranks that start at the same moment, or over some time.

        Args:
            heeds: how ranks of an older release take a grant; None stands for this one.
        """
        self._chance = random.Random(1)
        self.ranks = [
            rank(number % engine_ranks, engine_ranks, engine=f"prefill-{number // engine_ranks}")
            for number in range(count)
        ]
        self._renewals = [Renewals(jitter=lambda: self._chance.uniform(0.5, 1.0)) for _ in self.ranks]
        self._heeds = heeds
        self._order = itertools.count()
        self._due: list[tuple[float, int, int]] = [
            (number * start_s / count, next(self._order), number) for number in range(count)
        ]
        self.leases = Leases(LEASE_S)
        self.is_away = False
        self.at = 0.0
        self.asked: Counter[int] = Counter()
        self.failed: Counter[int] = Counter()
        self.registered: set[int] = set()
        self.silences: dict[str, float] = {}
        self._heard_at: dict[str, float] = {}

    def run(self, until: float) -> None:
        heapq.heapify(self._due)
        while self._due[0][0] < until:
            self.at, _, number = heapq.heappop(self._due)
            heapq.heappush(self._due, (self.at + self._ask(number), next(self._order), number))
        self.at = until

    def _ask(self, number: int) -> float:
        renewals = self._renewals[number]
        if self.is_away:
            self.failed[int(self.at)] += 1
            return 1.5 if self._heeds else renewals.failed()
        grant = self.leases.register(self.ranks[number], self.at)
        self.asked[int(self.at)] += 1
        engine = self.ranks[number].engine
        self.silences[engine] = max(self.silences.get(engine, 0.0), self.at - self._heard_at.get(engine, self.at))
        self._heard_at[engine] = self.at
        self.registered.add(number)
        return self._heeds(grant) if self._heeds else renewals.granted(grant)

    def crash(self) -> None:
        """The registry is gone. Its ranks notice when they look next whether their connections are open."""
        self.is_away = True
        self.leases = Leases(LEASE_S)
        self.registered.clear()
        noticed = []
        for due_at, order, number in self._due:
            at = self.at + self._chance.uniform(0, _LOOK_S) + self._renewals[number].hung_up()
            noticed.append((min(due_at, at), order, number))
        self._due = noticed

    def listen_anew(self) -> None:
        self.silences.clear()

    def die(self, dead: Callable[[int], bool]) -> None:
        """Ranks die, those whose numbers are meant."""
        self._due = [entry for entry in self._due if not dead(entry[2])]

    def come_at_once(self, engine: str) -> None:
        """All ranks of an engine have something new to say, as where they drain."""
        self._due = [
            (self.at if self.ranks[number].engine == engine else at, order, number) for at, order, number in self._due
        ]

    def listed(self, engine: str = "prefill-0") -> int:
        return len(self.leases.engine(engine, self.at).registrations)

    def most_in_a_second(self, since: float, until: float) -> int:
        return max(self.asked[second] for second in range(int(since), int(until)))

    def are_all_listed(self) -> bool:
        views = self.leases.engines(self.at)
        return sum(len(view.registrations) for view in views) == len(self.ranks)


@pytest.mark.full
def test_ten_thousand_ranks_renew_so_often_and_no_more_and_none_is_ever_missing():
    fleet = Fleet(10_000, start_s=10.0)
    fleet.run(12.0)
    for until in range(20, 200, 10):
        fleet.run(float(until))
        assert fleet.are_all_listed()
    assert sum(fleet.asked[second] for second in range(100, 200)) <= 100 * RENEWALS_PER_S
    assert fleet.most_in_a_second(60, 200) <= 1.3 * RENEWALS_PER_S
    assert max(fleet.silences.values()) <= LEASE_S / 2, "an engine is forgotten after a lease"
    fleet.listen_anew()
    fleet.run(400.0)
    assert max(fleet.silences.values()) <= LEASE_S / 3


@pytest.mark.full
@pytest.mark.parametrize("engine_ranks", [1, 2, 7])
def test_each_of_a_thousand_engines_is_heard_three_times_a_lease(engine_ranks: int):
    fleet = Fleet(1_024 * engine_ranks, engine_ranks=engine_ranks)
    fleet.run(120.0)
    assert fleet.are_all_listed()
    assert max(fleet.silences.values()) <= LEASE_S / 3 + 1e-6
    most = RENEWALS_PER_S + 1_024 * 3 / LEASE_S
    assert sum(fleet.asked[second] for second in range(60, 120)) <= 60 * most
    assert fleet.most_in_a_second(20, 120) <= 1.3 * most


def test_ranks_that_start_at_one_moment_come_apart():
    fleet = Fleet(1_024)
    fleet.run(30.0)
    assert fleet.asked[0] <= 1_024 + RENEWALS_PER_S
    assert fleet.most_in_a_second(1, 30) <= 2 * RENEWALS_PER_S, "their first turns come while there seem to be few"
    assert fleet.are_all_listed()


def test_engines_of_one_rank_that_start_at_one_moment_come_apart():
    fleet = Fleet(256, engine_ranks=1)
    fleet.run(30.0)
    assert fleet.most_in_a_second(1, 30) <= 1.3 * 256 * 3 / LEASE_S


@pytest.mark.full
def test_an_engine_that_dies_is_forgotten_after_a_lease_however_many_ranks_there_are():
    fleet = Fleet(10_000, start_s=10.0)
    fleet.run(150.0)
    fleet.die(lambda number: number < ENGINE_RANKS)
    restarted = rank(0, 2, incarnation="second", engine="prefill-0", layout_digest="other")
    with pytest.raises(RegistrationRefusedError, match="lease runs out within 10 s"):
        fleet.leases.register(restarted, fleet.at)
    fleet.run(150.0 + LEASE_S)
    assert fleet.listed() == 0
    fleet.leases.register(restarted, fleet.at)
    assert fleet.leases.engine("prefill-0", fleet.at).registrations == (restarted,)
    assert fleet.listed("prefill-1") == ENGINE_RANKS


@pytest.mark.full
def test_a_rank_that_dies_among_living_ones_is_forgotten_after_its_turn_and_they_stay():
    fleet = Fleet(10_000, start_s=10.0)
    fleet.run(150.0)
    fleet.die(lambda number: number < ENGINE_RANKS and number % 2 == 0)
    for until in range(151, 270):
        fleet.run(float(until))
        assert fleet.listed() >= ENGINE_RANKS // 2
    assert fleet.listed() == ENGINE_RANKS // 2
    assert fleet.listed("prefill-1") == ENGINE_RANKS


@pytest.mark.full
def test_an_engine_that_lost_most_ranks_is_back_with_the_next_turn_of_one_that_lives():
    fleet = Fleet(10_000, start_s=10.0)
    fleet.run(150.0)
    fleet.die(lambda number: 1 < number < ENGINE_RANKS)
    fleet.run(150.0 + 70.0)
    assert fleet.listed() == 2
    for until in range(221, 300):
        fleet.run(float(until))
        assert fleet.listed() == 2


def test_no_rank_counts_as_ended_because_its_engine_was_silent_while_its_turn_was_to_come():
    fleet = Fleet(6_400, start_s=10.0, engine_ranks=16)
    fleet.ranks[:16] = [rank(number, 16, engine="prefill-0", incarnation=f"start-{number}") for number in range(16)]
    fleet.run(100.0)
    fleet.die(lambda number: number < 8)
    for until in range(101, 200):
        fleet.run(float(until))
        with pytest.raises(RegistrationRefusedError, match="'start-12' is registered"):
            fleet.leases.release("start-12", fleet.at)
    fleet.leases.release("start-3", fleet.at)
    assert fleet.leases.released() == ("start-3",)


@pytest.mark.full
def test_an_engine_whose_ranks_have_all_something_new_to_say_is_not_silent_then():
    fleet = Fleet(10_000, start_s=10.0)
    fleet.run(150.0)
    fleet.come_at_once("prefill-3")
    fleet.listen_anew()
    fleet.run(300.0)
    assert fleet.silences["prefill-3"] <= LEASE_S / 2
    assert fleet.are_all_listed()


def test_the_ranks_of_a_few_engines_renew_at_a_third_of_the_lease_as_ever():
    fleet = Fleet(2 * ENGINE_RANKS, start_s=1.0)
    fleet.run(60.0)
    assert sum(fleet.asked[second] for second in range(30, 60)) == pytest.approx(128 * 9, rel=0.02)
    assert fleet.leases.register(fleet.ranks[0], 60.0).lease_s == LEASE_S


@pytest.mark.full
@pytest.mark.parametrize("away_s", [0.5, 5.0, 60.0])
def test_a_registry_that_comes_back_is_not_run_down_and_soon_knows_everybody(away_s: float):
    fleet = Fleet(10_000, start_s=10.0)
    fleet.run(150.0)
    fleet.crash()
    fleet.run(150.0 + away_s)
    fleet.is_away = False
    back_at = fleet.at
    fleet.run(back_at + 15.5)
    assert len(fleet.registered) == 10_000
    assert fleet.are_all_listed()
    assert fleet.most_in_a_second(back_at, back_at + 16) <= 1.5 * RETURNS_PER_S
    fleet.run(back_at + 200)
    assert fleet.most_in_a_second(back_at + 110, back_at + 200) <= 1.3 * RENEWALS_PER_S
    assert fleet.are_all_listed()


@pytest.mark.full
def test_while_the_registry_is_away_no_more_knock_than_it_said():
    fleet = Fleet(10_000, start_s=10.0)
    fleet.run(150.0)
    fleet.crash()
    fleet.run(300.0)
    assert max(fleet.failed.values()) <= 1.5 * RETURNS_PER_S


def test_a_few_ranks_are_back_in_a_moment():
    fleet = Fleet(ENGINE_RANKS)
    fleet.run(20.0)
    fleet.crash()
    fleet.run(20.2)
    fleet.is_away = False
    fleet.run(20.2 + _LOOK_S + 0.5)
    assert fleet.are_all_listed()


def test_ranks_of_an_older_release_that_go_by_the_lease_alone_are_kept_too():
    fleet = Fleet(1_024, start_s=2.0, heeds=lambda grant: grant.lease_s / 3)
    for until in range(10, 60, 10):
        fleet.run(float(until))
        assert fleet.are_all_listed()
    assert fleet.leases.register(fleet.ranks[0], 60.0).lease_s < 2 * LEASE_S, "they push the others ever further away"


def test_a_pacer_gives_turns_one_after_the_other_and_none_too_late():
    pacer = Pacer(10)
    turns = [pacer.turn_in_s(5.0, soonest_s=1.0, longest_s=1.5) for _ in range(8)]
    assert turns == pytest.approx([1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.5, 1.5])
    assert pacer.turn_in_s(9.0, soonest_s=1.0, longest_s=1.5) == pytest.approx(1.0), "nobody has come for long"


@pytest.mark.parametrize("waits", [(0.0, 1.0), (2.0, 1.0), (1.0, float("inf"))])
def test_impossible_waits_are_refused(waits: tuple[float, float]):
    with pytest.raises(SettingsError, match=r"shortest_retry_s is .* longest_retry_s is"):
        Renewals(shortest_retry_s=waits[0], longest_retry_s=waits[1])


class OldLease(msgspec.Struct, frozen=True, kw_only=True):
    """As releases before know it."""

    lease_s: float


def test_a_registry_that_is_too_busy_to_answer_is_asked_ever_less_and_one_that_is_away_every_other_second():
    away, busy = Renewals(jitter=lambda: 1.0), Renewals(jitter=lambda: 1.0)
    assert [away.failed() for _ in range(8)] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0])
    waits = [busy.failed(timed_out=True) for _ in range(10)]
    assert waits == pytest.approx([2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0, 60.0, 60.0])
    assert busy.failed() == 2.0, "it is gone now"
    busy.granted(Grant(10.0, renew_s=3.0))
    assert busy.failed() == 0.1


def test_a_grant_is_read_by_older_ranks_and_older_registries_grants_by_us():
    new = msgspec.json.encode(Lease(lease_s=75.0, renew_s=50.0, return_s=10.0))
    assert msgspec.json.decode(new, type=OldLease).lease_s == 75.0
    assert msgspec.json.decode(b'{"lease_s":10.0}', type=Lease) == Lease(lease_s=10.0)
