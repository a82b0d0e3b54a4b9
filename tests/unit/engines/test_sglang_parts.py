"""The parts of SGLang's plug-in that need no SGLang: metadata rows, settings, and how the two sides find each other."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from tests.support.http import Served
from tests.support.registries import rank

from kvferry.control.construction import create_registry_client
from kvferry.control.credentials import Credentials
from kvferry.control.registry_client import RegistryClient
from kvferry.control.registry_server import RegistryServer
from kvferry.engines.sglang.directory import Announcement, Directory, ask, new_engine_name, registry_url
from kvferry.engines.sglang.metadata_rows import MetadataRows
from kvferry.engines.sglang.settings import PluginSettings, settings_beside
from kvferry.errors import (
    EngineEndedError,
    IncompatiblePeerError,
    KVFerryError,
    RegistryError,
    RegistryUnreachableError,
)
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
    check_engine_name(new_engine_name(8998))


def test_no_two_starts_have_one_name_whatever_their_machines_are_called():
    assert new_engine_name(8998) != new_engine_name(8998)


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
    with pytest.raises(EngineEndedError, match=f"{server.address} cannot be reached.*refused"):
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


class Announced:
    """A bootstrap server that announces an engine."""

    def __init__(self, engine: str, port: int) -> None:
        self.engine, self.port = engine, port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = msgspec.json.encode(Announcement(self.engine, self.port))
        await Response(body)(scope, receive, send)


def test_a_directory_asks_the_registry_of_the_engine():
    with (
        RegistryServer("127.0.0.1", 0) as one,
        RegistryServer("127.0.0.1", 0) as other,
        Served(Announced("a", 1)) as of_a,
        Served(Announced("b", 1)) as of_b,
    ):
        directory = Directory(Settings())
        with pytest.raises(EngineEndedError, match="no bootstrap server that requests have named announces engine 'a'"):
            directory.engine("a")
        directory.add("a", one.url, of_a.address)
        directory.add("b", other.url, of_b.address)
        assert [directory.url_for(name) for name in ("a", "b", "c")] == [one.url, other.url, directory.url]
        other.close()
        assert directory.engine("a").registrations == ()
        with pytest.raises(RegistryUnreachableError):
            directory.engine("b")
        directory.add("b", one.url, of_b.address)  # it has come back elsewhere
        assert directory.engine("b").registrations == ()
        directory.close()


@pytest.mark.parametrize("its_registry", ["is there", "is gone"])
def test_an_engine_whose_bootstrap_server_has_ended_is_not_waited_for(its_registry: str):
    lost: list[str] = []
    with RegistryServer("127.0.0.1", 0) as registry, Served(Announced("a", registry.address[1])) as bootstrap:
        directory = Directory(Settings(), lost=lost.append)
        directory.add("a", registry.url, bootstrap.address)
        assert directory.engine("a").registrations == ()  # its ranks may come yet
        if its_registry == "is gone":
            registry.close()
            with pytest.raises(RegistryUnreachableError, match=str(registry.address[1])):
                directory.engine("a")
        assert not lost
        bootstrap.close()
        with pytest.raises(EngineEndedError, match=f"{bootstrap.address} cannot be reached"):
            directory.engine("a")
        assert lost == [bootstrap.address]
        directory.close()


def test_another_start_behind_the_same_bootstrap_server_is_another_engine():
    lost: list[str] = []
    with RegistryServer("127.0.0.1", 0) as one, RegistryServer("127.0.0.1", 0) as other:
        RegistryClient(other.url).register(rank(engine="b"))
        with Served(Announced("b", other.address[1])) as bootstrap:
            directory = Directory(Settings(), lost=lost.append)
            directory.add("a", one.url, bootstrap.address)
            with pytest.raises(EngineEndedError, match=r"'a' has ended: .* announces 'b' now"):
                directory.engine("a")
            assert lost == [bootstrap.address]  # the next request looks the server up anew
            directory.add("b", other.url, bootstrap.address)
            assert [each.engine for each in directory.engine("b").registrations] == ["b"]
            with pytest.raises(EngineEndedError, match="announces engine 'a'"):
                directory.engine("a")
        directory.close()


def test_a_link_that_has_ended_has_its_server_looked_up_anew():
    lost: list[str] = []
    with Directory(Settings(), lost=lost.append) as directory:
        directory.add("a", "http://127.0.0.1:1", NOBODY)
        for engine in ("a", "b"):
            directory.lost(engine)
        assert lost == [NOBODY]


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
