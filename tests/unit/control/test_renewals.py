"""Many ranks at one registry: how often they ask, counted in a simulation of both sides' code, without a clock."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
from tests.support.registered_ranks import rank

from kvferry.control.leases import RENEWALS_PER_S, RETURNS_PER_S, Leases
from kvferry.control.pacing import Pacer
from kvferry.control.registry import Grant
from kvferry.control.registry_client import _LOOK_S
from kvferry.control.registry_messages import Lease
from kvferry.control.renewals import Renewals
from kvferry.errors import RegistrationRefusedError, SettingsError

LEASE_S = 10.0
ENGINE_RANKS = 64


class Fleet:
    """Ranks of engines of 64, which ask the registry when `Renewals` says.

    Attributes:
        asked: requests that the registry answered, by the second.
        at: the time until which the simulation has come.
    """

    def __init__(self, count: int, *, start_s: float = 0.0, heeds: Callable[[Grant], float] | None = None) -> None:
        """Ranks that start at the same moment, or over some time.

        Args:
            heeds: how ranks of an older release take a grant; None stands for this one.
        """
        self._chance = random.Random(1)
        self.ranks = [
            rank(number % ENGINE_RANKS, ENGINE_RANKS, engine=f"prefill-{number // ENGINE_RANKS}")
            for number in range(count)
        ]
        self._renewals = [Renewals(jitter=lambda: self._chance.uniform(0.5, 1.0)) for _ in self.ranks]
        self._heeds = heeds
        self._order = itertools.count()
        self._due = [(number * start_s / count, next(self._order), number) for number in range(count)]
        self.leases = Leases(LEASE_S)
        self.is_away = False
        self.at = 0.0
        self.asked: Counter[int] = Counter()
        self.failed: Counter[int] = Counter()
        self.registered: set[int] = set()

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
    assert fleet.most_in_a_second(60, 200) <= RENEWALS_PER_S + 1
    # For each lease of ten seconds that is thirteen requests an engine, of 64 ranks.
    assert sum(fleet.asked[second] for second in range(100, 110)) <= 13 * (10_000 / ENGINE_RANKS)


def test_ranks_that_start_at_one_moment_come_apart():
    fleet = Fleet(1_024)
    fleet.run(30.0)
    assert fleet.asked[0] == 1_024
    assert fleet.most_in_a_second(1, 30) <= RENEWALS_PER_S + 1
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
    assert fleet.most_in_a_second(back_at + 110, back_at + 200) <= RENEWALS_PER_S + 1
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


@pytest.mark.full
def test_how_long_a_dead_rank_is_listed_grows_with_the_number_of_ranks_and_is_said():
    fleet = Fleet(10_000, start_s=10.0)
    fleet.run(150.0)
    fleet._due = [entry for entry in fleet._due if entry[2] >= ENGINE_RANKS]  # the first engine dies
    restarted = rank(0, 2, incarnation="second", engine="prefill-0", layout_digest="other")
    with pytest.raises(RegistrationRefusedError, match=r"lease runs out within [1-9]\d s"):
        fleet.leases.register(restarted, fleet.at)
    fleet.run(150.0 + 100.0)
    fleet.leases.register(restarted, fleet.at)
    assert fleet.leases.engine("prefill-0", fleet.at).registrations == (restarted,)


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
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 16.0, 16.0])
    assert busy.failed() == 2.0, "it is gone now"
    busy.granted(Grant(10.0, renew_s=3.0))
    assert busy.failed(timed_out=True) == 0.1


def test_a_grant_is_read_by_older_ranks_and_older_registries_grants_by_us():
    new = msgspec.json.encode(Lease(lease_s=75.0, renew_s=50.0, return_s=10.0))
    assert msgspec.json.decode(new, type=OldLease).lease_s == 75.0
    assert msgspec.json.decode(b'{"lease_s":10.0}', type=Lease) == Lease(lease_s=10.0)
