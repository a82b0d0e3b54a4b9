"""What requests at a registry cost where there are many ranks, over real loopback connections: counted, not timed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from starlette.testclient import TestClient
from tests.support.http import answering, http_answer
from tests.support.ports import held_port
from tests.support.registries import rank
from tests.support.waiting import PATIENCE_S, eventually

from kvferry.answers import Answer
from kvferry.control import registry_app as routes
from kvferry.control import renewals
from kvferry.control.leases import Leases
from kvferry.control.registry_client import RegistryClient
from kvferry.control.registry_messages import LONGEST_RETRY_S
from kvferry.control.registry_server import RegistryServer
from kvferry.control.renewals import LeaseKeeper
from kvferry.protocol.wire.registrations import EngineView

RANKS = 64


class Watched(RegistryClient):
    """Keeps what it was answered."""

    def __init__(self, url: str) -> None:
        super().__init__(url, PATIENCE_S)
        self.answers: list[Answer] = []

    def exchange(self, method: str, path: str, **arguments: Any) -> Answer:
        self.answers.append(super().exchange(method, path, **arguments))
        return self.answers[-1]


@pytest.fixture
def server() -> Iterator[RegistryServer]:
    with RegistryServer(port=0, lease_s=60.0) as running:
        yield running


@pytest.fixture
def client(server: RegistryServer) -> Iterator[Watched]:
    with Watched(server.url) as connected:
        yield connected


def nobody(_: Exception) -> None:
    pass


class TestLookUps:
    def test_what_has_not_changed_is_sent_once(self, client: Watched):
        for number in range(RANKS):
            client.register(rank(number, RANKS))
        client.answers.clear()
        views = [client.engine("prefill") for _ in range(10)]
        assert views[0].complete
        assert all(view == views[0] for view in views)
        assert [answer.status for answer in client.answers] == [200] + 9 * [304]
        assert len(client.answers[0].body) > 10_000
        assert sum(len(answer.body) for answer in client.answers[1:]) == 0

    def test_every_change_is_seen_and_a_renewal_is_none(self, client: Watched):
        def looked_up() -> tuple[list[str], int]:
            ranks = [each.incarnation for each in client.engine("prefill").registrations]
            return ranks, client.answers[-1].status

        assert looked_up() == ([], 404)
        client.register(rank(0, incarnation="a"))
        assert looked_up() == (["a"], 200)
        client.register(rank(0, incarnation="a"))
        assert looked_up() == (["a"], 304)
        client.register(rank(1, incarnation="b"))
        assert looked_up() == (["a", "b"], 200)
        client.register(rank(1, incarnation="c"))
        assert looked_up() == (["a", "c"], 200)
        client.drain("prefill")
        assert looked_up() == (["a", "c"], 200), "an engine that drains counts as unchanged"
        assert client.engine("prefill").draining
        client.remove("prefill", 0, "a")
        assert looked_up() == (["c"], 200)
        client.remove("prefill", 1, "c")
        assert looked_up() == ([], 404)
        client.register(rank(0, incarnation="a"))
        assert looked_up() == (["a"], 200), "an engine that was gone counts as unchanged"

    def test_a_lease_that_runs_out_is_a_change(self):
        now = [0.0]
        web = TestClient(routes.registry_app(Leases(10.0), lambda: now[0]))
        for number, at in ((0, 0.0), (1, 5.0)):
            now[0] = at
            web.put(f"/v1/engines/prefill/ranks/{number}", content=msgspec.json.encode(rank(number)))
        tag = web.get("/v1/engines/prefill").headers["etag"]
        assert web.get("/v1/engines/prefill", headers={"if-none-match": tag}).status_code == 304
        now[0] = 10.0
        left = web.get("/v1/engines/prefill", headers={"if-none-match": tag})
        assert (left.status_code, len(left.json()["registrations"])) == (200, 1)

    def test_what_another_registry_said_does_not_count(self, server: RegistryServer):
        with Watched(server.url) as client:
            client.register(rank(0))
            client.engine("prefill")
            server.close()
            port = int(server.url.rpartition(":")[2])
            with RegistryServer(port=port, lease_s=60.0):
                client.register(rank(1))  # the same number of changes as before
                view = client.engine("prefill")
        assert [each.engine_rank for each in view.registrations] == [1]
        assert client.answers[-1].status == 200

    def test_an_older_registry_says_no_revision_and_is_asked_in_full(self):
        view = EngineView(engine="prefill", registrations=(rank(0),), world_size=2, complete=False)
        body = msgspec.json.encode(view)
        with answering(http_answer(body, "200 OK")) as url, Watched(url) as client:
            assert client.engine("prefill") == view
            assert client.engine("prefill") == view

    def test_many_that_wait_for_an_engine_take_turns_and_few_do_not(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(routes, "RENEWALS_PER_S", 2)
        now = [0.0]
        web = TestClient(routes.registry_app(Leases(10.0), lambda: now[0]))

        def told() -> int:
            return int(web.get("/v1/engines/prefill").headers.get("retry-after", 0))

        assert [told() for _ in range(6)] == [0, 0, 1, 1, 2, 2]
        web.put("/v1/engines/prefill/ranks/0", content=msgspec.json.encode(rank(0)))
        assert told() == 3, "a rank is still missing"
        web.put("/v1/engines/prefill/ranks/1", content=msgspec.json.encode(rank(1)))
        assert told() == 0, "nobody waits for what is there"
        web.delete("/v1/engines/prefill/ranks/1?incarnation=first")
        assert max(told() for _ in range(30)) == LONGEST_RETRY_S
        now[0] = 60.0
        assert told() == 0

    def test_when_to_ask_again_reaches_the_caller(self):
        problem = b'{"error":"UnknownEngine","message":"none"}'
        for said, expected in ((b"7", 7.0), (b"1000", LONGEST_RETRY_S), (b"Wed, 21 Oct 2015 07:28:00 GMT", 0.0)):
            head = b"HTTP/1.1 404 Not Found\r\nretry-after: " + said + b"\r\ncontent-length: %d\r\n\r\n" % len(problem)
            with answering(head + problem) as url, RegistryClient(url, PATIENCE_S) as client:
                assert client.engine("prefill").retry_s == expected


class TestReturning:
    def test_a_registry_that_restarts_is_noticed_long_before_the_next_renewal(
        self, server: RegistryServer, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(renewals, "_LOOK_S", 0.02)
        port = int(server.url.rpartition(":")[2])
        with RegistryClient(server.url) as client, LeaseKeeper(client, rank(0), nobody) as keeper:
            assert keeper.registered.wait(PATIENCE_S)
            begun_at = time.monotonic()
            server.close()
            with RegistryServer(port=port, lease_s=60.0) as restarted, RegistryClient(restarted.url) as other:
                eventually("the rank is registered again", lambda: bool(other.engine("prefill").registrations))
            assert time.monotonic() - begun_at < 60.0 / 3, "it waited until its renewal was due"

    def test_one_that_is_there_is_asked_no_sooner(self, server: RegistryServer, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(renewals, "_LOOK_S", 0.01)
        with Watched(server.url) as client, LeaseKeeper(client, rank(0), nobody) as keeper:
            assert keeper.registered.wait(PATIENCE_S)
            time.sleep(0.3)
            assert len(client.answers) == 1

    def test_a_connection_that_closes_with_every_answer_says_nothing(self):
        body = b'{"lease_s":60.0}'
        head = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        with answering(head + body) as url, RegistryClient(url, PATIENCE_S) as client:
            assert client.grant(rank(0)).renew_s == 20.0
            assert not client.has_hung_up

    def test_nobody_has_hung_up_who_was_never_asked(self):
        with held_port() as port, RegistryClient(f"http://127.0.0.1:{port}") as client:
            assert not client.has_hung_up


def test_an_older_client_is_served_as_ever(server: RegistryServer):
    """It knows of no field but the lease's length, and sends what it always sent."""
    with httpx.Client(base_url=server.url, trust_env=False) as older:
        put = older.put("/v1/engines/prefill/ranks/0", content=msgspec.json.encode(rank(0)))
        assert put.json()["lease_s"] == 60.0
        found = older.get("/v1/engines/prefill")
        assert (found.status_code, found.json()["world_size"]) == (200, 2)
        assert set(found.json()) == {"engine", "registrations", "world_size", "complete"}
