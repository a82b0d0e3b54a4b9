"""The registry's rules, without a registry: time is a number, and nothing listens."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.support.registries import rank
from tests.support.tiers import examples

from kvferry.control.leases import Leases
from kvferry.errors import LayoutError, RankReplacedError, RegistrationRefusedError, SettingsError
from kvferry.layout.parallel import RankCoordinates
from kvferry.protocol.wire.registrations import EngineView, RankRegistration

LEASE_S = 10.0


def live_ranks(view: EngineView) -> list[int]:
    return [registration.engine_rank for registration in view.registrations]


def test_an_engine_is_complete_once_every_rank_has_registered():
    registrations = Leases(LEASE_S)
    assert registrations.register(rank(1), now=0.0).lease_s == LEASE_S
    partial = registrations.engine("prefill", now=0.0)
    assert (live_ranks(partial), partial.world_size, partial.complete) == ([1], 2, False)
    registrations.register(rank(0), now=1.0)
    whole = registrations.engine("prefill", now=1.0)
    assert whole.registrations == (rank(0), rank(1))
    assert whole.complete


def test_the_rank_follows_from_all_three_coordinates():
    registrations = Leases(LEASE_S)
    coordinates = RankCoordinates(tp_rank=1, tp_size=2, pp_rank=1, pp_size=2, dp_rank=1, dp_size=2)
    registrations.register(rank(coordinates=coordinates), now=0.0)
    view = registrations.engine("prefill", now=0.0)
    assert (live_ranks(view), view.world_size) == ([7], 8)


def test_a_lease_runs_out_at_its_end_and_not_before():
    registrations = Leases(LEASE_S)
    registrations.register(rank(0), now=100.0)
    assert live_ranks(registrations.engine("prefill", now=109.999)) == [0]
    assert registrations.engine("prefill", now=110.0) == EngineView(
        engine="prefill", registrations=(), world_size=0, complete=False
    )
    assert registrations.engines(now=110.0) == ()


def test_a_renewal_counts_from_when_it_came():
    registrations = Leases(LEASE_S)
    registrations.register(rank(0), now=0.0)
    registrations.register(rank(1), now=0.0)
    registrations.register(rank(0), now=6.0)
    assert live_ranks(registrations.engine("prefill", now=12.0)) == [0]


def test_engines_are_listed_by_name_and_apart():
    registrations = Leases(LEASE_S)
    registrations.register(rank(engine="b", layout_digest="one"), now=0.0)
    registrations.register(rank(engine="a", layout_digest="another"), now=5.0)
    assert [view.engine for view in registrations.engines(now=6.0)] == ["a", "b"]
    assert [view.engine for view in registrations.engines(now=11.0)] == ["a"]


def test_a_new_incarnation_replaces_the_old_one_at_once():
    registrations = Leases(LEASE_S)
    registrations.register(rank(0, incarnation="old"), now=0.0)
    restarted = rank(0, incarnation="new", control_address="tcp://127.0.0.1:50000")
    registrations.register(restarted, now=0.1)
    assert registrations.engine("prefill", now=0.1).registrations == (restarted,)


def test_a_late_removal_by_the_old_incarnation_leaves_the_new_one_alone():
    registrations = Leases(LEASE_S)
    registrations.register(rank(0, incarnation="old"), now=0.0)
    registrations.register(rank(0, incarnation="new"), now=0.1)
    assert not registrations.remove("prefill", 0, "old")
    assert live_ranks(registrations.engine("prefill", now=0.1)) == [0]
    assert registrations.remove("prefill", 0, "new")
    assert not registrations.remove("prefill", 0, "new")
    assert registrations.engines(now=0.1) == ()


@pytest.mark.parametrize("arguments", [("other", 0, "first"), ("prefill", 1, "first"), ("prefill", -1, "first")])
def test_removing_what_is_not_there_changes_nothing(arguments: tuple[str, int, str]):
    registrations = Leases(LEASE_S)
    registrations.register(rank(0), now=0.0)
    assert not registrations.remove(*arguments)
    assert live_ranks(registrations.engine("prefill", now=0.0)) == [0]


OLDER, NEWER = rank(0, incarnation="older"), rank(0, incarnation="newer")


def test_an_older_start_cannot_take_the_rank_back_while_a_newer_one_lives():
    registrations = Leases(LEASE_S)
    registrations.register(OLDER, now=0.0)
    registrations.register(NEWER, now=1.0)
    with pytest.raises(RankReplacedError, match=r"'older'.*replaced.*'newer'.*different names"):
        registrations.register(OLDER, now=2.0)
    registrations.register(NEWER, now=3.0)
    with pytest.raises(RankReplacedError):
        registrations.register(OLDER, now=12.9)
    registrations.register(OLDER, now=13.0)


def test_a_registry_without_memory_knows_which_start_is_newer_whichever_comes_first():
    forgetful = Leases(LEASE_S)
    forgetful.register(NEWER, now=0.0)
    with pytest.raises(RankReplacedError, match=r"'older'.*replaced.*'newer'.*different names"):
        forgetful.register(OLDER, now=1.0)
    assert not forgetful.remove("prefill", 0, "older")
    assert forgetful.engine("prefill", now=1.0).registrations == (NEWER,)
    came_first = Leases(LEASE_S)
    came_first.register(OLDER, now=0.0)
    came_first.register(OLDER, now=1.0)
    came_first.register(NEWER, now=2.0)
    with pytest.raises(RankReplacedError):
        came_first.register(OLDER, now=3.0)


def test_a_replaced_incarnation_may_return_once_its_successor_left():
    registrations = Leases(LEASE_S)
    registrations.register(OLDER, now=0.0)
    registrations.register(NEWER, now=1.0)
    assert registrations.remove("prefill", 0, "newer")
    registrations.register(OLDER, now=2.0)
    assert live_ranks(registrations.engine("prefill", now=2.0)) == [0]


@pytest.mark.parametrize(
    ("changes", "both_values"),
    [
        ({"tp_size": 4}, ["world_size is 4 here and 2 there", "tp_size is 4 here and 2 there"]),
        (
            {"coordinates": RankCoordinates(tp_rank=1, tp_size=2, pp_size=3)},
            ["world_size is 6 here and 2 there", "pp_size is 3 here and 1 there"],
        ),
        ({"coordinates": RankCoordinates(pp_rank=1, pp_size=2)}, ["tp_size is 1 here and 2 there"]),
        ({"coordinates": RankCoordinates(dp_rank=1, dp_size=2)}, ["dp_size is 2 here and 1 there"]),
        ({"layout_digest": "other"}, ["layout_digest is 'other' here and 'digest' there"]),
        ({"protocol_version": 2}, ["protocol version 2 here, protocol version 1 there, and none in common"]),
    ],
)
def test_a_rank_that_differs_from_a_live_rank_is_refused_with_both_values(
    changes: dict[str, Any], both_values: list[str]
):
    registrations = Leases(LEASE_S)
    registrations.register(rank(0), now=0.0)
    with pytest.raises(RegistrationRefusedError) as refusal:
        registrations.register(rank(1, **changes), now=1.0)
    for sentence in both_values:
        assert sentence in str(refusal.value)
    assert "tcp://127.0.0.1:40000" in str(refusal.value)
    assert live_ranks(registrations.engine("prefill", now=1.0)) == [0]


def test_a_refused_restart_neither_renews_nor_replaces_its_own_old_rank():
    registrations = Leases(LEASE_S)
    registrations.register(rank(0), now=0.0)
    registrations.register(rank(1), now=5.0)
    with pytest.raises(RegistrationRefusedError):
        registrations.register(rank(0, incarnation="second", layout_digest="other"), now=6.0)
    assert registrations.engine("prefill", now=6.0).registrations == (rank(0), rank(1))
    assert live_ranks(registrations.engine("prefill", now=10.0)) == [1]


def test_an_engine_that_died_restarts_with_another_layout_within_one_lease():
    registrations = Leases(LEASE_S)
    for number in range(4):
        registrations.register(rank(number, tp_size=4), now=float(number))
    second_start = [rank(number, tp_size=2, incarnation="second") for number in range(2)]
    for now in (4.0, 8.0, 12.9):
        for registration in second_start:
            with pytest.raises(RegistrationRefusedError, match="lease runs out within 10 s"):
                registrations.register(registration, now=now)
    for registration in second_start:
        registrations.register(registration, now=13.0)
    view = registrations.engine("prefill", now=13.0)
    assert view.registrations == tuple(second_start)
    assert view.complete


def test_an_engine_that_was_closed_restarts_with_another_layout_at_once():
    registrations = Leases(LEASE_S)
    for number in range(2):
        registrations.register(rank(number), now=0.0)
    for number in range(2):
        registrations.remove("prefill", number, "first")
    registrations.register(rank(0, tp_size=1, incarnation="second"), now=0.1)
    assert registrations.engine("prefill", now=0.1).complete


def test_a_lone_rank_restarts_with_another_layout_at_once():
    registrations = Leases(LEASE_S)
    registrations.register(rank(0, tp_size=1), now=0.0)
    registrations.register(rank(0, tp_size=2, incarnation="second"), now=0.1)
    registrations.register(rank(1, tp_size=2, incarnation="second"), now=0.1)
    assert registrations.engine("prefill", now=0.1).complete


def test_full_of_engines_refuses_a_new_one_but_not_a_renewal_and_makes_room_when_leases_end():
    registrations = Leases(LEASE_S, max_engines=2)
    registrations.register(rank(engine="a"), now=0.0)
    registrations.register(rank(engine="b"), now=5.0)
    with pytest.raises(RegistrationRefusedError, match=r"no room .* 2 engines of at most 2"):
        registrations.register(rank(engine="c"), now=6.0)
    registrations.register(rank(1, engine="b"), now=6.0)
    registrations.register(rank(engine="b"), now=6.0)
    registrations.register(rank(engine="c"), now=10.0)
    assert [view.engine for view in registrations.engines(now=10.0)] == ["b", "c"]


def test_full_of_ranks_refuses_a_new_one_but_not_a_renewal_or_a_restart():
    registrations = Leases(LEASE_S, max_ranks=2)
    registrations.register(rank(engine="a"), now=0.0)
    registrations.register(rank(engine="b"), now=0.0)
    with pytest.raises(RegistrationRefusedError, match="2 live ranks of at most 2"):
        registrations.register(rank(1, engine="b"), now=1.0)
    registrations.register(rank(engine="a"), now=1.0)
    registrations.register(rank(engine="b", incarnation="second"), now=1.0)
    registrations.register(rank(1, engine="b"), now=11.0)


def test_a_world_that_can_never_fit_is_refused_at_its_first_rank():
    with pytest.raises(RegistrationRefusedError, match=r"17 ranks.*16"):
        Leases(LEASE_S, max_ranks=16).register(rank(tp_size=17), now=0.0)


@pytest.mark.parametrize("lease_s", [0.0, -1.0, float("inf"), float("nan")])
def test_an_impossible_lease_is_refused(lease_s: float):
    with pytest.raises(SettingsError, match="lease_s"):
        Leases(lease_s)


@pytest.mark.parametrize("limit", ["max_engines", "max_ranks"])
def test_an_impossible_limit_is_refused(limit: str):
    with pytest.raises(SettingsError, match=limit):
        Leases(LEASE_S, **{limit: 0})


@pytest.mark.parametrize("name", ["", "a/b", "..", "-a", "a b", "a\n", "é", "x" * 129, "a?b"])
def test_a_name_that_cannot_stand_in_a_url_is_refused(name: str):
    with pytest.raises(SettingsError, match="engine's name"):
        rank(engine=name)


@pytest.mark.parametrize("name", ["a", "prefill-0", "10.0.0.1:30000", "3f2a_dp0", "x" * 128])
def test_usual_names_are_accepted(name: str):
    assert rank(engine=name).engine == name


@pytest.mark.parametrize(("field", "longest"), [("incarnation", 256), ("control_address", 256), ("layout_digest", 128)])
def test_texts_are_bounded_and_printable(field: str, longest: int):
    longest_text: dict[str, Any] = {field: "x" * longest}
    rank(**longest_text)
    for text in ("", "x" * (longest + 1), "a b", "a\x00", "é"):
        changes: dict[str, Any] = {field: text}
        with pytest.raises(SettingsError, match=field):
            rank(**changes)


@pytest.mark.parametrize("version", [-1, 2**31])
def test_a_protocol_version_is_bounded(version: int):
    with pytest.raises(SettingsError, match="protocol_version"):
        rank(protocol_version=version)


def test_a_rank_outside_the_world_cannot_even_be_decoded():
    body = msgspec.json.encode(rank(1)).replace(b'"tp_rank":1', b'"tp_rank":2')
    with pytest.raises(LayoutError, match="tp_rank is 2"):
        msgspec.json.decode(body, type=RankRegistration)


def test_registrations_and_views_survive_json():
    registrations = Leases(LEASE_S)
    registrations.register(rank(0), now=0.0)
    view = registrations.engine("prefill", now=0.0)
    assert msgspec.json.decode(msgspec.json.encode(view), type=EngineView) == view


def test_a_released_rank_that_lives_is_released_no_more(caplog: pytest.LogCaptureFixture):
    """As where a registry has restarted, and knows nobody yet."""
    registrations = Leases(LEASE_S)
    registrations.release("first", now=0.0)
    registrations.release("second", now=0.0)
    registrations.register(rank(0, incarnation="first"), now=0.5)
    assert registrations.released() == ("second",)
    assert "rank 0 of engine 'prefill' (first) was released, and lives" in caplog.text


class RegistryRules(RuleBasedStateMachine):
    """Random registrations, removals and waits, beside the rules written a second time as plain facts."""

    MAX_RANKS = 5

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.registrations = Leases(LEASE_S, max_engines=2, max_ranks=self.MAX_RANKS)
        # What was granted last, and until when; a lease in which nobody renews ends those of all its engine's ranks.
        self.granted: dict[tuple[str, int], tuple[RankRegistration, float]] = {}
        self.heard_at: dict[str, float] = {}

    def live(self) -> dict[tuple[str, int], RankRegistration]:
        return {key: registration for key, (registration, until) in self.granted.items() if self.now < until}

    def is_welcome(self, registration: RankRegistration) -> bool:
        key = (registration.engine, registration.engine_rank)
        live = self.live()
        for (engine, number), other in live.items():
            if engine != registration.engine or number == registration.engine_rank:
                continue
            if (other.coordinates.tp_size, other.layout_digest) != (
                registration.coordinates.tp_size,
                registration.layout_digest,
            ):
                return False
        if key in live and registration.started_at < live[key].started_at:
            return False
        if key not in live:
            engines = {engine for engine, _ in live}
            if len(live) >= self.MAX_RANKS or len(engines | {registration.engine}) > 2:
                return False
        return True

    @rule(
        engine=st.sampled_from("abc"),
        tp_size=st.sampled_from([1, 2, 3]),
        number=st.integers(0, 2),
        start=st.integers(0, 2),
        digest=st.sampled_from(["x", "x", "x", "y"]),
    )
    def register(self, engine: str, tp_size: int, number: int, start: int, digest: str) -> None:
        its: dict[str, Any] = {"incarnation": "ijk"[start], "started_at": 100.0 - start}
        registration = rank(number % tp_size, tp_size, engine=engine, layout_digest=digest, **its)
        welcome = self.is_welcome(registration)
        try:
            lease_s = self.registrations.register(registration, self.now).lease_s
        except RegistrationRefusedError:
            assert not welcome
        else:
            assert welcome
            assert LEASE_S <= lease_s < 1.2 * LEASE_S
            self.heard_at[engine] = self.now
            key = (engine, registration.engine_rank)
            self.granted[key] = registration, self.now + lease_s

    @rule(
        engine=st.sampled_from("abc"),
        number=st.integers(0, 2),
        incarnation=st.sampled_from(["i", "j", "k"]),
    )
    def remove(self, engine: str, number: int, incarnation: str) -> None:
        held = self.live().get((engine, number))
        removed = self.registrations.remove(engine, number, incarnation)
        if held is not None:
            assert removed == (held.incarnation == incarnation)
            if removed:
                del self.granted[engine, number]

    @rule(seconds=st.sampled_from([0.5, 3.0, 9.5, 10.0, 25.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        silent = {engine for engine, heard_at in self.heard_at.items() if heard_at + LEASE_S <= self.now}
        self.granted = {key: known for key, known in self.granted.items() if key[0] not in silent}

    @invariant()
    def lists_exactly_the_live_ranks_which_agree(self) -> None:
        live = self.live()
        views = self.registrations.engines(self.now)
        listed = {(view.engine, one.engine_rank): one for view in views for one in view.registrations}
        assert listed == live
        assert len(listed) <= self.MAX_RANKS
        assert len(views) <= 2
        for view in views:
            assert view == self.registrations.engine(view.engine, self.now)
            assert len({(one.world_size, one.layout_digest) for one in view.registrations}) == 1
            assert view.complete == (live_ranks(view) == list(range(view.world_size)))


RegistryRules.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
TestRegistryRules = RegistryRules.TestCase


def test_who_is_not_registered_hears_who_is_the_nearest_first():
    registrations = Leases(LEASE_S)
    for name in ("decode", *(f"other-{number:02}" for number in range(12)), "Prefill-1", "prefill-2"):
        registrations.register(rank(engine=name), now=100.0)
    view = registrations.engine("prefill-1", now=101.0)
    assert view.others[:2] == ("Prefill-1", "prefill-2")
    assert (len(view.others), view.num_others) == (8, 15)
    view = registrations.engine("prefill-1", now=100.0 + LEASE_S)
    assert (view.others, view.num_others) == ((), 0)
