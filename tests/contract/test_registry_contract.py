"""What every registry promises, whoever keeps the registrations: kvferry's own server, and a real etcd."""

from __future__ import annotations

import itertools
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.support.etcd import EtcdCluster, require_passwords
from tests.support.ports import held_port
from tests.support.registries import rank
from tests.support.waiting import PATIENCE_S, eventually

from kvferry.control.construction import create_registry_client
from kvferry.control.credentials import Credentials
from kvferry.control.etcd import registry as etcd_registry
from kvferry.control.etcd.address import EtcdSettings
from kvferry.control.etcd.registry import EtcdRegistry
from kvferry.control.registry import OnChange, Registry
from kvferry.control.registry_client import RegistryClient
from kvferry.control.registry_server import RegistryServer
from kvferry.control.renewals import LeaseKeeper
from kvferry.errors import (
    RegistrationRefusedError,
    RegistryAccessError,
    RegistryUnreachableError,
    SettingsError,
    UsageError,
)
from kvferry.findings import Severity
from kvferry.protocol.wire.registrations import RankRegistration
from kvferry.settings import Settings

LEASE_S = 1.0
USER, PASSWORD = "kvferry", "the password of these tests"
SECRET = "the secret of these tests"


class Kind(ABC):
    """Registries of a kind."""

    @abstractmethod
    def client(self) -> Registry:
        """Makes a client of the registry."""

    @abstractmethod
    def guarded(self, *, knows: bool | None) -> Registry:
        """Makes a client of a registry that lets only some in; None has it say nothing of who it is."""

    @abstractmethod
    def absent(self, port: int) -> str:
        """Returns the address of a registry that is not there."""


class Http(Kind):
    def __init__(self, url: str, guarded_url: str) -> None:
        self._url, self._guarded_url = url, guarded_url

    def client(self) -> Registry:
        return RegistryClient(self._url, PATIENCE_S)

    def guarded(self, *, knows: bool | None) -> Registry:
        secret = {True: SECRET, False: "another secret than that", None: None}[knows]
        token = None if secret is None else Credentials.derived_from(secret).registry_token
        return RegistryClient(self._guarded_url, token=token)

    def absent(self, port: int) -> str:
        return f"http://127.0.0.1:{port}"


class Etcd(Kind):
    def __init__(self, url: str, guarded_url: str) -> None:
        self._url, self._guarded_url = url, guarded_url

    def client(self) -> Registry:
        return EtcdRegistry(self._url, LEASE_S)

    def guarded(self, *, knows: bool | None) -> Registry:
        password = PASSWORD if knows else "another password"
        given = {} if knows is None else {"etcd_user": USER, "etcd_password": password}
        own = EtcdSettings.model_validate(given)
        return EtcdRegistry(self._guarded_url, LEASE_S, own=own)

    def absent(self, port: int) -> str:
        return f"etcd://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], tuple[str, str]]]:
    """Starts one etcd, and another that asks for a password, when they are first needed."""
    running: list[EtcdCluster] = []

    def urls() -> tuple[str, str]:
        if not running:
            running.extend(EtcdCluster(tmp_path_factory.mktemp("etcd")) for _ in range(2))
            for cluster in running:
                cluster.start()
            require_passwords(running[1], user=USER, password=PASSWORD, prefix="/guarded")
        return running[0].url, running[1].url

    try:
        yield urls
    finally:
        for cluster in running:
            cluster.close()


_number = itertools.count()


@pytest.fixture(params=["http", "etcd"])
def kind(request: pytest.FixtureRequest, clusters: Callable[[], tuple[str, str]]) -> Iterator[Kind]:
    """A registry of each kind, where nothing is registered."""
    if request.param == "etcd":
        url, guarded_url = clusters()
        number = next(_number)
        yield Etcd(f"{url}/{number}", f"{guarded_url}/guarded/{number}")
        return
    token = Credentials.derived_from(SECRET).registry_token
    with RegistryServer(port=0, lease_s=LEASE_S) as open_, RegistryServer(port=0, token=token) as guarded:
        yield Http(open_.url, guarded.url)


@pytest.fixture
def client(kind: Kind) -> Iterator[Registry]:
    with kind.client() as connected:
        yield connected


@pytest.fixture
def quick_roll_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_registry, "ROLL_CALL_LEASES", 0.5)


def live_ranks(client: Registry, engine: str = "prefill") -> list[int]:
    return [registration.engine_rank for registration in client.engine(engine).registrations]


def nobody(_: Exception) -> None:
    pass


def test_ranks_are_registered_listed_and_removed(client: Registry):
    assert client.engine("prefill").registrations == ()
    assert client.engines() == ()
    assert 0 < client.register(rank(0)) <= LEASE_S
    assert not client.engine("prefill").complete
    client.register(rank(1))
    view = client.engine("prefill")
    assert view.registrations == (rank(0), rank(1))
    assert (view.world_size, view.complete) == (2, True)
    assert client.engines() == (view,)
    assert client.remove("prefill", 0, "first")
    assert not client.remove("prefill", 0, "first")
    assert live_ranks(client) == [1]
    assert client.remove("prefill", 1, "first")
    assert client.engines() == ()


def test_every_client_sees_what_another_has_registered(kind: Kind):
    with kind.client() as one, kind.client() as other:
        one.register(rank(0))
        assert other.engine("prefill").registrations == (rank(0),)
        assert other.remove("prefill", 0, "first")
        assert one.engine("prefill").registrations == ()
        one.register(rank(0))
        assert live_ranks(other) == [0], "what was removed is registered again, though nothing has changed here"


def test_a_registration_that_changes_replaces_the_one_before(client: Registry):
    client.register(rank(0))
    moved = rank(0, control_address="tcp://127.0.0.1:50000")
    client.register(moved)
    assert client.engine("prefill").registrations == (moved,)


def test_an_engine_without_living_ranks_is_forgotten(client: Registry):
    client.register(rank(0))
    client.register(rank(1))
    eventually("both leases ran out", lambda: client.engines() == () and client.engine("prefill").world_size == 0)


def test_a_rank_that_is_renewed_stays(client: Registry):
    until = time.monotonic() + 2 * LEASE_S
    client.register(rank(0))
    while time.monotonic() < until:
        time.sleep(client.register(rank(0)) / 3)
        assert live_ranks(client) == [0]


def test_a_rank_that_dies_among_living_ones_is_forgotten(kind: Kind, quick_roll_calls: None):
    with kind.client() as dies, kind.client() as lives:
        dies.register(rank(0))
        with LeaseKeeper(lives, rank(1), nobody) as keeper:
            assert keeper.registered.wait(PATIENCE_S)
            assert live_ranks(lives) == [0, 1]
            eventually("the lease of rank 0 ran out", lambda: live_ranks(lives) == [1])
            assert keeper.registered.is_set()


def test_a_rank_whose_lease_was_lost_registers_again(client: Registry):
    client.register(rank(0))
    eventually("its lease ran out", lambda: live_ranks(client) == [])
    client.register(rank(0))
    assert live_ranks(client) == [0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layout_digest": "other"}, "layout_digest is 'other' here and 'digest' there"),
        ({"protocol_version": 2}, "protocol version 2 here, protocol version 1 there, and none in common"),
        ({"tp_size": 4}, "world_size is 4 here and 2 there"),
    ],
)
def test_a_rank_that_differs_from_a_live_one_is_refused_and_nothing_changes(
    client: Registry, changes: dict[str, Any], words: str
):
    client.register(rank(0))
    with pytest.raises(RegistrationRefusedError, match=words) as refused:
        client.register(rank(1, **changes))
    assert client.url in str(refused.value) or "40000" in str(refused.value)
    assert client.engine("prefill").registrations == (rank(0),)


def test_a_rank_is_not_compared_with_its_own_earlier_start(client: Registry):
    client.register(rank(0))
    restarted = rank(0, incarnation="second", layout_digest="other")
    client.register(restarted)
    assert client.engine("prefill").registrations == (restarted,)
    client.register(rank(1, layout_digest="other"))


def test_a_name_that_another_start_has_taken_is_not_given_back(kind: Kind):
    with kind.client() as one, kind.client() as other:
        one.register(rank(0, incarnation="older"))
        other.register(rank(0, incarnation="newer"))
        with pytest.raises(RegistrationRefusedError, match=r"'older'.*replaced.*'newer'.*different names"):
            one.register(rank(0, incarnation="older"))
        assert not one.remove("prefill", 0, "older")
        assert other.engine("prefill").registrations == (rank(0, incarnation="newer"),)
        assert other.remove("prefill", 0, "newer")
        one.register(rank(0, incarnation="older"))


def test_ranks_that_register_at_the_same_time_are_all_there(kind: Kind):
    ranks = [rank(number, tp_size=32) for number in range(32)]
    with kind.client() as one, kind.client() as other, ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda each: (one, other)[each.engine_rank % 2].register(each), ranks))
        view = one.engine("prefill")
    assert view.registrations == tuple(ranks)
    assert view.complete


def test_of_two_layouts_that_race_for_a_name_exactly_one_wins(kind: Kind):
    """Ranks 0 and 1 have one digest, 2 and 3 the other: whichever comes first, nobody else's gets in."""

    def outcome(registration: RankRegistration) -> bool:
        with kind.client() as own:
            own.load()
            start.wait(PATIENCE_S)
            try:
                own.register(registration)
            except RegistrationRefusedError:
                return False
            return True

    for number in range(5):
        name, start = f"prefill-{number}", threading.Barrier(4)
        ranks = [rank(each, tp_size=4, layout_digest="ab"[each // 2], engine=name) for each in range(4)]
        with ThreadPoolExecutor(4) as threads:
            accepted = [one for one, fine in zip(ranks, threads.map(outcome, ranks), strict=True) if fine]
        assert len({one.layout_digest for one in accepted}) == 1
        with kind.client() as reader:
            assert reader.engine(name).registrations == tuple(accepted)


def test_an_unknown_engine_is_told_from_those_that_are_there(client: Registry):
    for name in ("prefill-a", "decode"):
        client.register(rank(engine=name))
    view = client.engine("prefill-b")
    assert (view.registrations, view.world_size, view.complete) == ((), 0, False)
    assert (view.others, view.num_others) == (("prefill-a", "decode"), 2)
    assert [each.engine for each in client.engines()] == ["decode", "prefill-a"]


def test_every_accepted_engine_name_is_one_engine(client: Registry):
    names = ("a", "a.b", "a..b", "10.0.0.1:30000", "a@b-c_d.e", "lease", "ranks", "x" * 128)
    for name in names:
        client.register(rank(engine=name))
    for name in names:
        assert live_ranks(client, name) == [0]
        assert client.remove(name, 0, "first")
    assert client.engines() == ()


def test_a_name_that_no_engine_can_have_is_refused(client: Registry):
    for ask in (lambda: client.engine("../health"), lambda: client.remove("", 0, "first")):
        with pytest.raises(SettingsError, match="cannot be an engine's name"):
            ask()


def test_an_operator_releases_what_is_not_registered(client: Registry):
    assert client.released() == ()
    client.release("prefill-0-71-abc")
    client.release("prefill-0-72-abc")
    client.release("prefill-0-71-abc")
    assert sorted(client.released()) == ["prefill-0-71-abc", "prefill-0-72-abc"]


def test_an_operator_drains_an_engine_and_its_ranks_hear_of_it_when_they_renew(kind: Kind):
    with kind.client() as ranks, kind.client() as operator, kind.client() as gateway:
        ranks.register(rank(0, incarnation="a"))
        ranks.register(rank(1, incarnation="b"))
        ranks.register(rank(0, 1, incarnation="c", engine="another"))
        assert not gateway.engine("prefill").draining
        assert sorted(operator.drain("prefill")) == ["a", "b"]
        view = gateway.engine("prefill")
        assert view.draining, "before the ranks have heard of it"
        assert [each.draining for each in view.registrations] == [True, True]
        assert [each.drained for each in view.registrations] == [False, False]
        assert [each.draining for each in gateway.engines()] == [False, True]
        assert not ranks.drains("a")
        ranks.register(rank(0, incarnation="a"))
        ranks.register(rank(0, 1, incarnation="c", engine="another"))
        assert [ranks.drains(each) for each in "abc"] == [True, False, False]
        ranks.register(rank(0, incarnation="a", draining=True, drained=True, open_rooms=0))
        ranks.register(rank(1, incarnation="b", draining=True, open_rooms=3))
        assert [(each.drained, each.open_rooms) for each in gateway.engine("prefill").registrations] == [
            (True, 0),
            (False, 3),
        ]


def test_a_drain_is_not_for_ranks_that_start_later(kind: Kind):
    with kind.client() as ranks, kind.client() as operator:
        ranks.register(rank(0, 1, incarnation="first"))
        operator.drain("prefill")
        ranks.register(rank(0, 1, incarnation="second"))
        assert not ranks.drains("second")
        assert not operator.engine("prefill").draining


def test_a_rank_that_registers_for_a_drain_replaces_what_it_had_registered_at_once(client: Registry):
    told: list[bool] = []
    with LeaseKeeper(client, rank(0, 1), nobody, on_drain=lambda: told.append(True)) as keeper:
        assert keeper.registered.wait(PATIENCE_S)
        client.drain("prefill")
        eventually("the keeper hears of it", lambda: told == [True])
        keeper.update(rank(0, 1, draining=True, open_rooms=2))
        eventually("others see it", lambda: client.engine("prefill").registrations[0].open_rooms == 2)
        time.sleep(LEASE_S)
        assert told == [True], "once"
        assert client.engine("prefill").draining


def test_an_engine_that_is_not_there_cannot_be_drained(client: Registry):
    client.register(rank(0))
    with pytest.raises(RegistrationRefusedError, match=r"no rank of an engine named 'prefil' is registered.*'prefill'"):
        client.drain("prefil")
    with pytest.raises(SettingsError, match="cannot be an engine's name"):
        client.drain("../health")


def test_a_dead_rank_among_living_ones_can_be_released_before_long(kind: Kind, monkeypatch: pytest.MonkeyPatch):
    """Without any other roll call than that of the release itself."""
    monkeypatch.setattr(etcd_registry, "ROLL_CALL_LEASES", 1e6)
    with kind.client() as dies, kind.client() as lives, LeaseKeeper(lives, rank(1), nobody) as keeper:
        assert keeper.registered.wait(PATIENCE_S)
        dies.register(rank(0, incarnation="dead"))
        with pytest.raises(RegistrationRefusedError, match="'dead' is registered, as rank 0 of engine 'prefill' at"):
            lives.release("dead")
        assert lives.released() == ()
        eventually("rank 0 is forgotten", lambda: live_ranks(lives) == [1])
        lives.release("dead")
        assert lives.released() == ("dead",)
        assert keeper.registered.is_set()


def test_a_keeper_keeps_and_removes_a_registration(client: Registry):
    problems: list[Exception] = []
    with LeaseKeeper(client, rank(0), problems.append) as keeper:
        assert keeper.registered.wait(PATIENCE_S)
        time.sleep(2 * LEASE_S)
        assert live_ranks(client) == [0]
        assert keeper.registered.is_set()
    assert live_ranks(client) == []
    assert problems == []


def test_a_keeper_waits_until_an_earlier_start_with_another_layout_is_forgotten(kind: Kind):
    problems: list[Exception] = []
    with kind.client() as old, kind.client() as new:
        old.register(rank(1))
        restarted = rank(0, incarnation="second", layout_digest="other")
        with LeaseKeeper(new, restarted, problems.append) as keeper:
            assert keeper.registered.wait(PATIENCE_S)
            assert new.engine("prefill").registrations == (restarted,)
    assert [type(each) for each in problems] == [RegistrationRefusedError]


def test_a_keeper_keeps_on_where_changes_cannot_be_watched(kind: Kind):
    problems: list[Exception] = []
    with kind.client() as old, kind.client() as new:
        old.register(rank(1))
        watch = new.watch

        def breaks_once(changed: OnChange) -> None:
            new.watch = watch  # type: ignore[method-assign]
            raise RuntimeError("no more threads")

        new.watch = breaks_once  # type: ignore[method-assign]
        with LeaseKeeper(new, rank(0, incarnation="second", layout_digest="other"), problems.append) as keeper:
            assert keeper.registered.wait(PATIENCE_S)
    assert {type(each) for each in problems} == {RegistrationRefusedError, RuntimeError}


def test_many_keepers_share_one_client(client: Registry):
    keepers = [LeaseKeeper(client, rank(number, 16), nobody) for number in range(16)]
    for keeper in keepers:
        keeper.start()
    assert all(keeper.registered.wait(PATIENCE_S) for keeper in keepers)
    assert client.engine("prefill").complete
    assert all(keeper.close(PATIENCE_S) for keeper in keepers)
    assert client.engines() == ()


CALLS: dict[str, Callable[[Registry], Any]] = {
    "register": lambda client: client.register(rank(0)),
    "remove": lambda client: client.remove("prefill", 0, "first"),
    "engine": lambda client: client.engine("prefill"),
    "engines": lambda client: client.engines(),
    "drain": lambda client: (client.register(rank(0)), client.drain("prefill")),
    "release": lambda client: client.release("lost"),
    "released": lambda client: client.released(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_stranger_is_refused_and_told_what_to_set(kind: Kind, call: Callable[[Registry], Any]):
    with kind.guarded(knows=True) as friend:
        call(friend)
        friend.remove("prefill", 0, "first")
    for knows in (False, None):
        with kind.guarded(knows=knows) as stranger, pytest.raises(RegistryAccessError) as refused:
            call(stranger)
        assert stranger.url in str(refused.value)
        assert "KVFERRY_" in str(refused.value)
        for secret in (PASSWORD, SECRET, "another password", "another secret"):
            assert secret not in str(refused.value)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_registry_that_is_not_there_is_named_with_cause_and_remedy(kind: Kind, call: Callable[[Registry], Any]):
    with held_port() as port:
        url = kind.absent(port)
        with (
            create_registry_client(Settings(registry_url=url)) as client,
            pytest.raises(RegistryUnreachableError, match=f"the registry at {url} cannot be reached.*refused.*check"),
        ):
            call(client)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_closed_client_says_so(client: Registry, call: Callable[[Registry], Any]):
    call(client)
    client.close()
    client.close()
    with pytest.raises(UsageError, match="closed"):
        call(client)


def test_a_forked_child_is_told_not_to_use_it(client: Registry):
    client.engines()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            client.engines()
        except UsageError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(write)
    with os.fdopen(read) as said:
        assert "forked" in said.read()


def test_a_registry_that_is_well_is_found_well(client: Registry):
    found = list(client.findings())
    assert found
    assert {each.severity for each in found} == {Severity.GOOD}
    assert {each.about for each in found} == {"registry"}


def test_what_changes_is_told_where_it_can_be(kind: Kind):
    told: list[str | None] = []
    with kind.client() as client:
        client.watch(told.append)
        if isinstance(kind, Http):  # look-ups are repeated anyway
            client.register(rank(engine="a"))
            assert told == []
            return
        eventually("the watch has begun", lambda: None in told)
        client.register(rank(engine="a"))
        eventually("a registration was told", lambda: "a" in told)
        client.register(rank(engine="b"))
        told.clear()
        client.remove("b", 0, "first")
        eventually("a removal was told", lambda: "b" in told)
        eventually("a lease that ran out was told", lambda: "a" in told)


def test_the_address_does_not_end_with_a_slash(kind: Kind, tmp_path: Path):
    with kind.client() as client, create_registry_client(Settings(registry_url=client.url + "/")) as same:
        assert same.url == client.url == client.url_for("any")
