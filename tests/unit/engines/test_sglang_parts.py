"""The parts of SGLang's plug-in that need no SGLang: metadata rows, settings, and how the two sides find each other."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from tests.support.http import Served
from tests.support.registered_ranks import rank

from kvferry.control.construction import create_registry_client
from kvferry.control.credentials import Credentials
from kvferry.control.registry_client import RegistryClient
from kvferry.control.registry_server import RegistryServer
from kvferry.engines.sglang.directory import Announcement, Directory, ask, engine_name, registry_url
from kvferry.engines.sglang.metadata_rows import MetadataRows
from kvferry.engines.sglang.settings import PluginSettings, settings_beside
from kvferry.errors import IncompatiblePeerError, KVFerryError, RegistryError, RegistryUnreachableError
from kvferry.protocol.wire.registrations import check_engine_name
from kvferry.settings import Settings

NOBODY = "127.0.0.1:1"
"""A bootstrap server that is not there."""


def rows_of(*tables: np.ndarray) -> MetadataRows:
    return MetadataRows(tuple(each.ctypes.data for each in tables), tuple(each[0].nbytes for each in tables))


def test_rows_cross_whatever_their_index():
    random = np.random.default_rng(1)
    sent = [random.integers(0, 99, (6, 16), np.int32), random.integers(0, 99, (6, 8), np.uint64)]
    received = [np.zeros_like(each) for each in sent]
    rows_of(*received).write(2, rows_of(*sent).read(5))
    for before, after in zip(sent, received, strict=True):
        np.testing.assert_array_equal(after[2], before[5])
        assert not np.delete(after, 2, axis=0).any()


def test_rows_of_other_sizes_change_nothing():
    table = np.zeros((4, 8), np.uint8)
    aux = rows_of(np.ones((4, 8), np.uint8), np.ones((4, 8), np.uint8)).read(0)
    with pytest.raises(IncompatiblePeerError, match=r"\[8, 8\] bytes, this side of \[8\]"):
        rows_of(table).write(0, aux)
    assert not table.any()


@pytest.mark.parametrize("aux", [b"", b"\xc1", msgspec.msgpack.encode({"a": 1})])
def test_what_are_no_rows_is_refused(aux: bytes):
    with pytest.raises(KVFerryError, match="sent no metadata rows"):
        rows_of(np.zeros((4, 8), np.uint8)).write(0, aux)


def test_limits_follow_sglangs_where_the_user_sets_none(monkeypatch: pytest.MonkeyPatch):
    assert settings_beside(11.0, 12.0).waiting_timeout_s == 12.0
    monkeypatch.setenv("KVFERRY_BOOTSTRAP_TIMEOUT_S", "77")
    monkeypatch.setenv("KVFERRY_SECRET", "a secret of some length")
    settings = settings_beside(11.0, 12.0)
    assert (settings.bootstrap_timeout_s, settings.waiting_timeout_s) == (77.0, 12.0)
    assert settings.shared_secret == "a secret of some length"


def test_nixl_is_replaced_only_if_asked_for(monkeypatch: pytest.MonkeyPatch):
    assert not PluginSettings().replaces_nixl
    monkeypatch.setenv("KVFERRY_SGLANG_REPLACES_NIXL", "1")
    assert PluginSettings().replaces_nixl


def test_every_machine_has_a_name_that_engines_can_have(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("platform.node", lambda: "a machine/of mine" * 20)
    check_engine_name(engine_name(8998))


def test_a_bootstrap_server_says_who_it_is():
    announcement = Announcement("sglang-a:8998", 4321)
    with Served(Response(msgspec.json.encode(announcement))) as server:
        assert ask(server.address) == announcement


@pytest.mark.parametrize(("status", "body"), [(404, b"not found"), (200, b"<html>"), (200, b'{"engine": 3}')])
def test_another_server_is_told_apart(status: int, body: bytes):
    with (
        Served(Response(body, status)) as server,
        pytest.raises(RegistryError, match=f"{server.address} knows nothing of kvferry"),
    ):
        ask(server.address)


def test_of_a_longer_answer_no_more_is_read_than_one_can_have():
    with (
        Served(Response(bytes(2**20 + 1))) as server,
        pytest.raises(RegistryUnreachableError, match="its answer does not end within 1048576 bytes"),
    ):
        ask(server.address)


def test_an_encoded_answer_is_not_decoded():
    response = Response(b"whatever it is", headers={"content-encoding": "gzip"})
    with Served(response) as server, pytest.raises(RegistryUnreachableError, match="it encodes its answers"):
        ask(server.address)


def test_a_server_that_is_gone_is_named():
    with Served(Response()) as server:
        pass
    with pytest.raises(RegistryUnreachableError, match=f"{server.address} cannot be reached"):
        ask(server.address)


@pytest.mark.parametrize(
    ("make", "port", "url"),
    [
        (Settings, 4321, "http://10.0.0.7:4321"),
        (lambda: Settings(registry_url="http://10.0.0.1:8998"), 4321, "http://10.0.0.1:8998"),
        (lambda: Settings(registry_url="http://10.0.0.1:8998"), None, "http://10.0.0.1:8998"),
    ],
)
def test_a_registry_is_beside_the_bootstrap_server_unless_all_share_one(
    make: Callable[[], Settings], port: int | None, url: str
):
    assert registry_url("10.0.0.7:8998", Announcement("sglang-a:8998", port), make()) == url


def test_addresses_of_version_six_keep_their_brackets():
    assert registry_url("[::1]:8998", Announcement("a", 4321), Settings()) == "http://[::1]:4321"


def test_a_directory_asks_the_registry_of_the_engine():
    with RegistryServer("127.0.0.1", 0) as one, RegistryServer("127.0.0.1", 0) as other:
        directory = Directory(Settings())
        with pytest.raises(RegistryUnreachableError, match="no request has named a bootstrap server of engine 'a'"):
            directory.engine("a")
        directory.add("a", one.url, NOBODY)
        directory.add("b", other.url, NOBODY)
        assert [directory.url_for(name) for name in ("a", "b", "c")] == [one.url, other.url, directory.url]
        other.close()
        assert directory.engine("a").registrations == ()
        with pytest.raises(RegistryUnreachableError):
            directory.engine("b")
        directory.add("b", one.url, NOBODY)  # it has come back elsewhere
        assert directory.engine("b").registrations == ()
        directory.close()


class Announced:
    """A bootstrap server that announces an engine, and counts how often it was asked."""

    def __init__(self, engine: str, port: int) -> None:
        self.engine, self.port, self.times_asked = engine, port, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.times_asked += scope["type"] == "http"
        body = msgspec.json.encode(Announcement(self.engine, self.port))
        await Response(body)(scope, receive, send)


@pytest.mark.parametrize("old", ["is gone", "belongs to others now"])
def test_a_restarted_server_is_found_where_its_registry_is_now(old: str):
    """A registry whose port nobody has set gets another one with every start."""
    moved: list[str] = []
    with RegistryServer("127.0.0.1", 0) as before, RegistryServer("127.0.0.1", 0) as now:
        RegistryClient(now.url).register(rank(engine="a"))
        announced = Announced("a", now.address[1])
        with Served(announced) as bootstrap:
            directory = Directory(Settings(), moved=moved.append)
            directory.add("a", before.url, bootstrap.address)
            if old == "is gone":
                before.close()
            assert [each.engine for each in directory.engine("a").registrations] == ["a"]
            assert directory.url_for("a") == now.url
            assert (moved, announced.times_asked) == ([bootstrap.address], 1)
            directory.engine("a")
            assert announced.times_asked == 1  # who is there is not looked for
        directory.close()


def test_a_server_that_has_not_moved_is_missed_where_it_is():
    with RegistryServer("127.0.0.1", 0) as registry, Served(Announced("a", registry.address[1])) as bootstrap:
        directory = Directory(Settings())
        directory.add("a", registry.url, bootstrap.address)
        assert directory.engine("a").registrations == ()
        bootstrap.close()
        assert directory.engine("a").registrations == ()
        registry.close()
        with pytest.raises(RegistryUnreachableError, match=str(registry.address[1])):
            directory.engine("a")
        directory.close()


def test_another_engine_behind_the_same_bootstrap_server_is_not_taken_for_the_one_that_was_there():
    moved: list[str] = []
    with RegistryServer("127.0.0.1", 0) as one, RegistryServer("127.0.0.1", 0) as other:
        RegistryClient(other.url).register(rank(engine="b"))
        with Served(Announced("b", other.address[1])) as bootstrap:
            directory = Directory(Settings(), moved=moved.append)
            directory.add("a", one.url, bootstrap.address)
            assert directory.engine("a").registrations == ()
            assert directory.url_for("a") == one.url
            assert moved == [bootstrap.address]  # the next request looks the server up anew
        directory.close()


def test_released_endpoints_are_asked_of_the_registry_that_all_share_with_its_secret():
    secret = "the secret of these tests"
    with RegistryServer("127.0.0.1", 0, token=Credentials.derived_from(secret).registry_token) as registry:
        settings = Settings(registry_url=registry.url, secret=secret)
        with create_registry_client(settings) as operator:
            operator.release("prefill-0-71-abc")
        with Directory(settings) as directory:
            assert directory.released() == ("prefill-0-71-abc",)
            assert directory.engines() == ()


def test_an_etcd_may_be_the_registry_that_all_share():
    settings = Settings(registry_url="etcd://127.0.0.1:9,127.0.0.1:10")
    announced = Announcement("a", None)
    with Directory(settings) as directory, Served(Announced("a", 1)) as bootstrap:
        directory.add("a", registry_url(bootstrap.address, announced, settings), bootstrap.address)
        assert directory.url_for("a") == directory.url == settings.registry_url
        with pytest.raises(RegistryUnreachableError, match=r"127\.0\.0\.1:10: Connection refused"):
            directory.engine("a")
