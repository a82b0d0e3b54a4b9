"""A registry in etcd: what is special to it, on one real member. What every registry promises is in tests/contract."""

from __future__ import annotations

import base64
import itertools
import json
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import trustme
from tests.support.etcd import EtcdCluster, fill, require_passwords
from tests.support.http import answering, http_answer
from tests.support.registries import rank
from tests.support.waiting import PATIENCE_S, eventually

from kvferry.applications.doctor import configuration, others
from kvferry.control.construction import create_registry_client
from kvferry.control.etcd import members as etcd_members
from kvferry.control.etcd import registry as etcd_registry
from kvferry.control.etcd.address import EtcdSettings, EtcdUrl
from kvferry.control.etcd.messages import Lease
from kvferry.control.etcd.registry import EtcdRegistry
from kvferry.control.registry_client import RegistryClient
from kvferry.control.renewals import LeaseKeeper
from kvferry.errors import (
    RegistrationRefusedError,
    RegistryAccessError,
    RegistryError,
    RegistryUnreachableError,
    SettingsError,
)
from kvferry.findings import Severity
from kvferry.settings import Settings
from kvferry.transport import Diagnosis

LEASE_S = 2.0
PASSWORD = "the password of these tests"


def with_password() -> EtcdSettings:
    return EtcdSettings.model_validate({"etcd_user": "kvferry", "etcd_password": PASSWORD})


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as running:
        yield running


_number = itertools.count()


@pytest.fixture
def url(etcd: EtcdCluster) -> str:
    """Where nothing is registered."""
    return f"{etcd.url}/{next(_number)}"


@pytest.fixture
def client(url: str) -> Iterator[EtcdRegistry]:
    with EtcdRegistry(url, LEASE_S) as connected:
        yield connected


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def keys_of(etcd: EtcdCluster, lease: int) -> set[str]:
    """What is attached to a lease of an engine's, without what all its keys begin with."""
    keys = etcd.ask("lease/timetolive", {"ID": lease, "keys": True}).get("keys", ())
    return {base64.b64decode(each).decode().partition("/prefill/")[2] for each in keys}


def interrupt(client: EtcdRegistry, wrap: Callable[[Callable[[], Any]], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a callable called with a registry's next write, which is done when it is called."""
    ask = client.members.ask

    def interrupted(path: str, body: dict[str, Any], kind: type[Any]) -> Any:
        if "request_put" not in json.dumps(body):
            return ask(path, body, kind)
        monkeypatch.setattr(client.members, "ask", ask)
        return wrap(lambda: ask(path, body, kind))

    monkeypatch.setattr(client.members, "ask", interrupted)


class Counted:
    """Counts what a registry asks of the cluster, by path."""

    def __init__(self, *clients: EtcdRegistry) -> None:
        self.asked: Counter[str] = Counter()
        for each in clients:
            self._count(each.members)

    def _count(self, members: etcd_members.EtcdMembers) -> None:
        ask = members.ask

        def counted(path: str, body: dict[str, Any], kind: type[Any]) -> Any:
            writes = "puts" if "request_put" in json.dumps(body) else path
            self.asked[writes] += 1
            return ask(path, body, kind)

        members.ask = counted  # type: ignore[method-assign]


class TestOneLease:
    def test_all_ranks_of_an_engine_have_one_lease(self, etcd: EtcdCluster, url: str):
        before = set(etcd.leases())
        ranks = [rank(number, tp_size=64) for number in range(64)]
        clients = [EtcdRegistry(url, 60.0) for _ in range(8)]  # as many processes
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda each: clients[each.engine_rank % 8].register(each), ranks))
        assert clients[0].engine("prefill").complete
        (lease,) = set(etcd.leases()) - before
        assert keys_of(etcd, lease) == {"lease", *(f"ranks/{number}" for number in range(64))}
        for each in clients:
            each.close()

    def test_whoever_comes_first_renews_it_for_all_and_nothing_is_written(self, url: str):
        clients = [EtcdRegistry(url, LEASE_S) for _ in range(8)]
        ranks = [rank(number, tp_size=8) for number in range(8)]
        for each, mine in zip(clients, ranks, strict=True):
            each.register(mine)
        counted, until = Counted(*clients), time.monotonic() + 2 * LEASE_S
        rounds = 0
        while time.monotonic() < until:
            rounds += 1
            for each, mine in zip(clients, ranks, strict=True):
                each.register(mine)
            time.sleep(LEASE_S / 3)
        assert clients[0].engine("prefill").complete
        assert rounds >= 4
        assert 1 <= counted.asked["lease/keepalive"] <= rounds + 1, "one rank renews it, not eight"
        assert counted.asked["kv/txn"] == 8 * rounds
        assert counted.asked["puts"] == counted.asked["lease/grant"] == 0
        for each in clients:
            each.close()

    @pytest.mark.full
    def test_any_rank_that_lives_keeps_it(self, url: str):
        """Also when the one that had it granted has died."""
        with EtcdRegistry(url, LEASE_S) as first, EtcdRegistry(url, LEASE_S) as second:
            first.register(rank(0))
            with LeaseKeeper(second, rank(1), lambda problem: None) as keeper:
                assert keeper.registered.wait(PATIENCE_S)
                until = time.monotonic() + 2 * LEASE_S
                while time.monotonic() < until:
                    assert rank(1) in second.engine("prefill").registrations
                    time.sleep(0.02)

    def test_a_release_that_is_refused_calls_the_roll(self, etcd: EtcdCluster, url: str):
        """Who lives follows to the new lease, and nobody renews the old one, to which the dead are attached."""
        before = set(etcd.leases())
        with EtcdRegistry(url, 60.0) as lives, EtcdRegistry(url, 60.0) as dies, EtcdRegistry(url, 60.0) as operator:
            lives.register(rank(0))
            dies.register(rank(1, incarnation="dead"))
            (old,) = set(etcd.leases()) - before
            with pytest.raises(RegistrationRefusedError, match="'dead' is registered"):
                operator.release("dead")
            lives.register(rank(0))
            (new,) = set(etcd.leases()) - before - {old}
            assert keys_of(etcd, old) == {"ranks/1"}
            assert keys_of(etcd, new) == {"lease", "ranks/0"}

    @pytest.mark.full
    def test_a_roll_call_leaves_no_moment_without_the_living(
        self, etcd: EtcdCluster, url: str, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(etcd_registry, "ROLL_CALL_LEASES", 0.5)
        before = set(etcd.leases())
        with EtcdRegistry(url, LEASE_S) as client:
            keepers = [LeaseKeeper(client, rank(number, 4), lambda problem: None) for number in range(4)]
            for each in keepers:
                each.start()
            assert all(each.registered.wait(PATIENCE_S) for each in keepers)
            seen: set[int] = set()
            until = time.monotonic() + 3 * LEASE_S
            while time.monotonic() < until:
                assert client.engine("prefill").complete
                seen |= set(etcd.leases()) - before
                time.sleep(0.02)
            assert len(seen) >= 3, "the roll was called"
            # At most every 0.75 s, and a lease lives on for as long as it lasts, and until etcd looks.
            assert len(set(etcd.leases()) - before) <= 5, "leases of roll calls that came too late are given back"
            assert all(each.registered.is_set() for each in keepers)
            for each in keepers:
                assert each.close(PATIENCE_S)

    def test_a_lease_that_is_revoked_is_replaced_at_the_next_renewal(self, etcd: EtcdCluster, client: EtcdRegistry):
        before = set(etcd.leases())
        client.register(rank(0))
        (lease,) = set(etcd.leases()) - before
        etcd.ask("lease/revoke", {"ID": lease})
        assert client.engine("prefill").registrations == ()
        client.register(rank(0))
        assert client.engine("prefill").registrations == (rank(0),)

    def test_a_lease_that_a_new_leader_does_not_count_yet_lasts_no_longer(
        self, client: EtcdRegistry, monkeypatch: pytest.MonkeyPatch
    ):
        """The keeper would come back after a third of what it hears."""
        ask, granted_s = client.members.ask, int(LEASE_S)

        def uncounted(path: str, body: dict[str, Any], kind: type[Any]) -> Any:
            if path == "lease/timetolive":
                return Lease(id=body["ID"], ttl=2**63 // 10**9, granted_ttl=granted_s)
            return ask(path, body, kind)

        monkeypatch.setattr(client.members, "ask", uncounted)
        for _ in range(2):
            assert client.register(rank(0)) == granted_s

    def test_a_rank_that_joins_an_engine_which_has_just_become_another_is_refused(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ):
        """It has read that rank 0 is there, with which it agrees; before it writes, rank 0 leaves and another comes."""
        with EtcdRegistry(url, 60.0) as first, EtcdRegistry(url, 60.0) as late, EtcdRegistry(url, 60.0) as other:
            first.register(rank(0))

            def becomes_another(commit: Callable[[], Any]) -> Any:
                first.remove("prefill", 0, "first")
                other.register(rank(0, layout_digest="other"))
                return commit()

            interrupt(late, becomes_another, monkeypatch)
            with pytest.raises(RegistrationRefusedError, match="'digest' here and 'other' there"):
                late.register(rank(1))
            assert late.engine("prefill").registrations == (rank(0, layout_digest="other"),)

    def test_a_rank_that_found_nobody_is_refused_if_somebody_joins_before_it_writes(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ):
        """Rank 1 joins rank 0, which leaves; in between, somebody else has read that nobody is there."""
        with EtcdRegistry(url, 60.0) as first, EtcdRegistry(url, 60.0) as joins, EtcdRegistry(url, 60.0) as other:
            first.register(rank(0))

            def is_overtaken(commit: Callable[[], Any]) -> Any:
                first.remove("prefill", 0, "first")
                joined: list[Any] = []

                def founds_too_late(commit_other: Callable[[], Any]) -> Any:
                    joined.append(commit())
                    return commit_other()

                interrupt(other, founds_too_late, monkeypatch)
                with pytest.raises(RegistrationRefusedError, match="'other' here and 'digest' there"):
                    other.register(rank(0, layout_digest="other"))
                return joined[0]

            interrupt(joins, is_overtaken, monkeypatch)
            joins.register(rank(1))
            assert joins.engine("prefill").registrations == (rank(1),)

    def test_a_write_whose_answer_was_lost_is_found_done(self, client: EtcdRegistry, monkeypatch: pytest.MonkeyPatch):
        ask = client.members.ask
        lost: list[object] = []

        def losing(path: str, body: dict[str, Any], kind: type[Any]) -> Any:
            answer = ask(path, body, kind)
            if path == "kv/txn" and not lost:
                lost.append(answer)
                return ask(path, body, kind)  # as the next member is asked the same
            return answer

        monkeypatch.setattr(client.members, "ask", losing)
        client.register(rank(0))
        assert client.engine("prefill").registrations == (rank(0),)
        assert client.register(rank(0)) > 0


class TestKeys:
    def test_what_is_no_registration_counts_as_none_and_is_said(
        self, etcd: EtcdCluster, client: EtcdRegistry, caplog: pytest.LogCaptureFixture
    ):
        client.register(rank(0))
        folder = client.engine_folder("prefill")
        genuine = etcd.ask("kv/range", {"key": encoded(folder + "ranks/0")})["kvs"][0]["value"]
        etcd.ask("kv/put", {"key": encoded(folder + "ranks/1"), "value": encoded("garbage")})
        etcd.ask("kv/put", {"key": encoded(folder + "ranks/2"), "value": genuine})  # of another rank
        etcd.ask("kv/put", {"key": base64.b64encode(folder.encode() + b"\xff").decode(), "value": ""})
        etcd.ask("kv/put", {"key": encoded(client.root + "engines/no slash"), "value": ""})
        assert client.engine("prefill").registrations == (rank(0),)
        assert [each.engine for each in client.engines()] == ["prefill"]
        assert client.engine("other").others == ("prefill",)
        assert "is no registration, and counts as none" in caplog.text
        client.register(rank(1))
        assert client.engine("prefill").complete

    def test_prefixes_are_apart(self, etcd: EtcdCluster, client: EtcdRegistry):
        client.register(rank(0))
        with EtcdRegistry(client.url + "/below") as below, EtcdRegistry(client.url[:-1] + "x") as beside:
            assert below.engines() == beside.engines() == ()

    def test_released_endpoints_are_bounded(self, client: EtcdRegistry, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(etcd_registry, "MOST_RELEASED", 3)
        for number in range(5):
            client.release(f"endpoint-{number}/{number}")
        assert sorted(client.released()) == [f"endpoint-{number}/{number}" for number in (2, 3, 4)]


class TestAddress:
    @pytest.mark.parametrize(
        ("url", "members", "prefix"),
        [
            ("etcd://a", ("a:2379",), "/kvferry"),
            ("etcd://a:1,b:2,c", ("a:1", "b:2", "c:2379"), "/kvferry"),
            ("etcds://a:1/", ("a:1",), "/kvferry"),
            ("etcd://a:1/team/x/", ("a:1",), "/team/x"),
            ("ETCD://[::1]:1,[fd00::2],10.0.0.1", ("[::1]:1", "[fd00::2]:2379", "10.0.0.1:2379"), "/kvferry"),
        ],
    )
    def test_it_names_members_and_a_prefix(self, url: str, members: tuple[str, ...], prefix: str):
        address = EtcdUrl.parsed(url)
        assert (address.members, address.prefix) == (members, prefix)
        assert address.has_tls == url.startswith("etcds")

    @pytest.mark.parametrize(
        "url",
        [
            "etcd://",
            "etcd://a,",
            "etcd://,a",
            "etcd://a:b",
            "etcd://a:0",
            "etcd://a:99999",
            "etcd://[::1",
            "etcd://a b",
            "etcd://a?b",
            "etcd://a#b",
            "etcd://é",
            "etcd://a/b\n",
            "etcdx://a",
            "etcd:/a",
        ],
    )
    def test_a_bad_one_is_refused(self, url: str):
        with pytest.raises(SettingsError, match="must read like etcd://a:2379,b:2379,c:2379"):
            EtcdUrl.parsed(url)

    def test_one_with_a_password_is_refused_without_repeating_it(self):
        with pytest.raises(SettingsError, match="KVFERRY_ETCD_PASSWORD_FILE") as refused:
            EtcdUrl.parsed("etcd://user:hunter2@a:1")
        assert "hunter2" not in str(refused.value)

    def test_the_scheme_chooses(self):
        for url in ("etcd://a:1,b:1", "etcds://a:1", "ETCD://a:1"):
            with create_registry_client(Settings(registry_url=url)) as client:
                assert isinstance(client, EtcdRegistry)
        with create_registry_client(Settings(), "http://127.0.0.1:1") as client:
            assert isinstance(client, RegistryClient)

    def test_nixl_stays_on_loopback_only_if_all_members_do(self):
        assert Settings(registry_url="etcd://127.0.0.1:1,[::1]:2").is_on_loopback
        assert not Settings(registry_url="etcd://127.0.0.1:1,node-7:2").is_on_loopback


class TestAccess:
    def test_a_password_comes_from_a_file_and_is_never_shown(self, tmp_path: Path):
        file = tmp_path / "password"
        file.write_text(PASSWORD + "\n")
        file.chmod(0o600)
        given = {"registry_url": "etcd://a:1", "etcd_user": "kvferry"}
        for settings in (Settings(**given, etcd_password_file=file), Settings(**given, etcd_password=PASSWORD)):
            assert settings.of(EtcdSettings).password == PASSWORD
            assert PASSWORD not in f"{settings!r} {settings.model_dump()} {settings.model_dump_json()}"
            with create_registry_client(settings) as client:
                assert PASSWORD not in repr(vars(client))
        assert PASSWORD not in repr(with_password())
        said = " ".join(each.what for each in configuration.variables({"KVFERRY_ETCD_PASSWORD": PASSWORD}, Diagnosis()))
        assert PASSWORD not in said
        file.chmod(0o644)
        with pytest.raises(SettingsError, match=r"etcd_password_file \(KVFERRY_ETCD_PASSWORD_FILE\).*chmod 600"):
            Settings(**given, etcd_password_file=file)

    @pytest.mark.parametrize(
        "given",
        [
            {"etcd_user": "kvferry"},
            {"etcd_password": "hunter2"},
            {"etcd_user": "kvferry", "etcd_password": ""},
            {"etcd_user": "kvferry", "etcd_password": "hunter2", "etcd_password_file": Path("/nowhere")},
            {"etcd_certificate": Path("c.pem")},
            {"etcd_key": Path("k.pem")},
        ],
    )
    def test_what_belongs_together_is_set_together(self, given: dict[str, Any]):
        with pytest.raises(SettingsError, match=r"belong together|leave one out") as refused:
            Settings(**given)
        assert "hunter2" not in str(refused.value)

    def test_a_password_in_the_clear_is_warned_of(self, caplog: pytest.LogCaptureFixture):
        own = with_password()
        EtcdRegistry("etcd://127.0.0.1:1,localhost:1", own=own).close()
        EtcdRegistry("etcds://node-7:1", own=own).close()
        EtcdRegistry("etcd://node-7:1").close()
        assert "without TLS" not in caplog.text
        EtcdRegistry("etcd://127.0.0.1:1,node-7:1", own=own).close()
        assert "without TLS" in caplog.text
        assert PASSWORD not in caplog.text

    def test_a_token_that_members_know_no_more_is_renewed(self, tmp_path: Path):
        with EtcdCluster(tmp_path) as etcd:
            require_passwords(etcd, user="kvferry", password=PASSWORD, prefix="/kvferry")
            own = with_password()
            with EtcdRegistry(etcd.url, 60.0, own=own) as client:
                client.register(rank(0))
                client.members.token = "forgotten.1"
                client.register(rank(0))
                assert client.engine("prefill").registrations == (rank(0),)
                client.members.token = "forgotten.1"
                told: list[str | None] = []
                client.watch(told.append)
                eventually("the watch has begun", lambda: None in told)
                with (
                    EtcdRegistry(f"{etcd.url}/elsewhere", own=own) as stranger,
                    pytest.raises(RegistryAccessError, match=r"permission denied.*'kvferry'.*/elsewhere/"),
                ):
                    stranger.engines()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, authority = tmp_path_factory.mktemp("certificates"), trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    trustme.CA().cert_pem.write_to_path(str(folder / "other.pem"))
    for name, issued in (("server", authority.issue_cert("127.0.0.1")), ("client", authority.issue_cert("rank"))):
        issued.cert_chain_pems[0].write_to_path(str(folder / f"{name}.pem"))
        issued.private_key_pem.write_to_path(str(folder / f"{name}.key.pem"))
    return {file.name.removesuffix(".pem"): file for file in folder.iterdir()}


@pytest.fixture(scope="module")
def secured(files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    import ssl

    verify = ssl.create_default_context(cafile=str(files["ca"]))
    verify.load_cert_chain(files["client"], files["client.key"])
    given = {"cert-file": "server", "key-file": "server.key", "trusted-ca-file": "ca"}
    arguments = [*(f"--{name}={files[file]}" for name, file in given.items()), "--client-cert-auth"]
    folder = tmp_path_factory.mktemp("etcd")
    with EtcdCluster(folder, 1, *arguments, scheme="https", verify=verify) as running:
        yield running


class TestTls:
    def test_settings_make_a_client_with_certificates_on_both_sides(self, secured: EtcdCluster, files: dict[str, Path]):
        settings = Settings(
            registry_url=secured.url,
            registry_tls_ca=files["ca"],
            etcd_certificate=files["client"],
            etcd_key=files["client.key"],
        )
        with create_registry_client(settings) as client:
            client.register(rank(0))
            assert client.engine("prefill").registrations == (rank(0),)

    @pytest.mark.parametrize(
        "access", [("other", True), ("ca", False)], ids=["another authority", "no certificate of our own"]
    )
    def test_who_is_not_trusted_is_told_what_to_look_at(
        self, secured: EtcdCluster, files: dict[str, Path], access: tuple[str, bool]
    ):
        authority, has_own = access
        given = {"etcd_certificate": files["client"], "etcd_key": files["client.key"]} if has_own else {}
        with (
            EtcdRegistry(secured.url, own=EtcdSettings.model_validate(given), trusted=files[authority]) as client,
            pytest.raises(RegistryUnreachableError, match=r"SSL.*KVFERRY_REGISTRY_TLS_CA.*KVFERRY_ETCD_CERT"),
        ):
            client.engines()

    def test_a_url_without_tls_is_hinted_at(self, secured: EtcdCluster):
        with EtcdRegistry(secured.url.replace("etcds", "etcd")) as client, pytest.raises(RegistryError):
            client.engines()

    def test_certificates_that_cannot_be_used_are_refused_at_once(self, files: dict[str, Path]):
        wrong = EtcdSettings.model_validate({"etcd_certificate": files["client"], "etcd_key": files["server.key"]})
        for own, trusted, words in (
            (None, Path("/nowhere"), "KVFERRY_REGISTRY_TLS_CA"),
            (wrong, None, "KVFERRY_ETCD_KEY"),
        ):
            with pytest.raises(SettingsError, match=words):
                EtcdRegistry("etcds://a:1", own=own, trusted=trusted)


class TestOthers:
    """Whoever else may answer at a member's address."""

    @pytest.mark.parametrize(
        "answer",
        [
            http_answer(b"<html>hello</html>"),
            http_answer(b"[]"),
            http_answer(b'{"kvs": 1}'),
            http_answer(b'{"kvs": [{"key": "no base64!"}]}'),
            http_answer(b"<html>gone</html>", "404 Not Found"),
            http_answer(b"{" * 20000),
        ],
        ids=["html", "list", "number", "no base64", "404", "deep"],
    )
    def test_what_is_no_etcd_is_said(self, answer: bytes):
        with answering(answer) as url, EtcdRegistry(url.replace("http", "etcd")) as client:
            with pytest.raises(RegistryError, match="is no etcd") as error:
                client.engines()
            assert type(error.value) is RegistryError
            assert client.url in str(error.value)

    @pytest.mark.parametrize("key", ["error", "message"])
    def test_refusals_of_either_gateway_are_understood(self, key: str):
        """The newer one, of etcd 3.6, gives the reason another name."""
        body = json.dumps({"code": 8, key: "etcdserver: mvcc: database space exceeded"}).encode()
        with (
            answering(http_answer(body, "429 Too Many Requests")) as url,
            EtcdRegistry(url.replace("http", "etcd")) as client,
            pytest.raises(RegistryError, match="has no space left"),
        ):
            client.engines()

    def test_an_answer_without_end_is_cut(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(etcd_members, "_LARGEST_ANSWER_BYTES", 1000)
        with (
            answering(http_answer(b" " * 5000)) as url,
            EtcdRegistry(url.replace("http", "etcd")) as client,
            pytest.raises(RegistryError, match="does not end"),
        ):
            client.engines()

    def test_an_encoded_answer_is_refused(self):
        answer = http_answer(b"no gzip", headers="Content-Encoding: gzip\r\n")
        with (
            answering(answer) as url,
            EtcdRegistry(url.replace("http", "etcd")) as client,
            pytest.raises(RegistryError, match="encodes its answers"),
        ):
            client.engines()

    def test_members_that_say_nothing_are_given_up_in_time(self):
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
            ports = [each.getsockname()[1] for each in (one, other)]
            with EtcdRegistry(f"etcd://127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}") as client:
                client.load()
                began = time.monotonic()
                with pytest.raises(RegistryUnreachableError) as error:
                    client.engines()
                assert time.monotonic() - began < 10.0
        for port in ports:
            assert f"127.0.0.1:{port}: it does not answer in time" in str(error.value)

    def test_closing_ends_a_watch_at_once(self, url: str):
        client = EtcdRegistry(url)
        told: list[str | None] = []
        client.watch(told.append)
        eventually("it has begun", lambda: None in told)
        client.close()
        assert not [each for each in threading.enumerate() if each.name == "kvferry-etcd-watch"]

    def test_a_watcher_that_raises_ends_no_watch(self, client: EtcdRegistry, caplog: pytest.LogCaptureFixture):
        told: list[str | None] = []

        def broken(engine: str | None) -> None:
            raise ValueError("the watcher is broken")

        client.watch(broken)
        client.watch(told.append)
        with caplog.at_level(logging.ERROR):
            client.register(rank(0))
            eventually("the other one was told", lambda: told)
        assert "the watcher is broken" in caplog.text

    def test_events_in_many_packets_are_told(self, client: EtcdRegistry):
        """As of 64 ranks at once, which etcd sends in one line, and HTTP in several pieces."""
        told: list[str | None] = []
        client.watch(told.append)
        eventually("it has begun", lambda: None in told)
        client.register(rank(0, engine="e0", control_address="tcp://" + "a" * 200))
        for number in range(1, 40):
            client.register(rank(0, engine=f"e{number}", control_address="tcp://" + "a" * 200))
        eventually("all were told", lambda: {f"e{number}" for number in range(40)} <= set(told))


class TestRefusals:
    def test_compaction_and_defragmentation_go_unnoticed(self, etcd: EtcdCluster, client: EtcdRegistry):
        told: list[str | None] = []
        client.watch(told.append)
        eventually("it has begun", lambda: None in told)
        with LeaseKeeper(client, rank(0), lambda problem: None) as keeper:
            assert keeper.registered.wait(PATIENCE_S)
            revision = int(etcd.ask("kv/range", {"key": "AA=="})["header"]["revision"])
            etcd.ask("kv/compaction", {"revision": revision, "physical": True})
            etcd.ask("maintenance/defragment", {})
            told.clear()
            client.register(rank(1))
            eventually("changes are told as before", lambda: "prefill" in told)
            time.sleep(LEASE_S)
            assert client.engine("prefill").registrations[0] == rank(0)
            assert keeper.last_error is None

    @pytest.mark.full
    def test_a_full_disk_refuses_what_is_new_and_keeps_what_is_there(self, tmp_path: Path):
        with (
            EtcdCluster(tmp_path, 1, f"--quota-backend-bytes={2**20}") as etcd,
            EtcdRegistry(etcd.url, 2.0) as client,
            LeaseKeeper(client, rank(0, tp_size=1), lambda problem: None) as keeper,
        ):
            assert keeper.registered.wait(PATIENCE_S)
            fill(etcd)
            with pytest.raises(RegistryError, match=r"no space left.*compact.*etcdctl alarm disarm"):
                client.register(rank(0, engine="another"))
            time.sleep(2 * 2.0)  # two leases
            assert client.engine("prefill").complete
            assert keeper.last_error is None
            (finding,) = [each for each in client.findings() if each.severity is Severity.ERROR]
            assert "has no space left" in finding.what
            etcd.make_room()
            client.register(rank(0, engine="another"))
            assert client.engine("another").registrations


class TestDoctor:
    def test_it_says_which_members_answer_and_who_is_there(self, client: EtcdRegistry):
        client.register(rank(0))
        found = list(others.registry(Settings(registry_url=client.url)))
        said = " ".join(each.what for each in found)
        assert "leads: etcd 3." in said
        assert "engine 'prefill': 1 of 2 ranks" in said
        assert {each.severity for each in found} == {Severity.GOOD, Severity.WARNING}

    def test_it_names_members_that_do_not_answer(self):
        found = list(others.registry(Settings(registry_url="etcd://127.0.0.1:9,127.0.0.1:10")))
        assert [each.severity for each in found] == [Severity.WARNING, Severity.WARNING, Severity.ERROR]
        assert "127.0.0.1:9 does not answer: Connection refused" in found[0].what
        assert "start its members" in found[-1].remedy


def test_a_watch_whose_thread_cannot_start_is_begun_anew_and_keeps_nobody_from_closing(
    monkeypatch: pytest.MonkeyPatch,
):
    start = threading.Thread.start

    def no_thread(thread: threading.Thread) -> None:
        if thread.name == "kvferry-etcd-watch":
            raise RuntimeError("can't start new thread")
        start(thread)

    client, told = EtcdRegistry("etcd://127.0.0.1:9"), list[str | None]()
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError):
            client.watch(told.append)
    client.watch(told.append)
    assert [each for each in threading.enumerate() if each.name == "kvferry-etcd-watch"]
    client.close()
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(threading.Thread, "start", no_thread)
        another = EtcdRegistry("etcd://127.0.0.1:9")
        with pytest.raises(RuntimeError):
            another.watch(told.append)
        another.close()
