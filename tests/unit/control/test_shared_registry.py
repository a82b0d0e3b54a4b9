"""Endpoints of a process share a client of the registry: counted, without a registry."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.support.registries import rank
from tests.support.waiting import PATIENCE_S, eventually

from kvferry.control.registry import OnChange, Registry
from kvferry.control.shared_registry import SharedRegistries, SharedRegistry
from kvferry.endpoint.runtime.platform import SystemPlatform
from kvferry.errors import RegistryUnreachableError, UsageError
from kvferry.findings import Finding
from kvferry.protocol.wire.registrations import EngineView, RankRegistration
from kvferry.settings import Settings

USERS = 64


class Counted(Registry):
    """A registry that answers when it is let, and counts what it is asked."""

    url = "http://registry:1"

    def __init__(self) -> None:
        self.looked_up = self.watches = self.closed = self.revision = 0
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.asked = threading.Event()
        self.fails = False
        self.changed: OnChange = lambda _: None

    def engine(self, name: str) -> EngineView:
        self.looked_up += 1
        seen = self.revision
        self.asked.set()
        assert self.may_answer.wait(PATIENCE_S)
        if self.fails:
            raise RegistryUnreachableError("it does not answer")
        return EngineView(engine=name, registrations=(), world_size=seen, complete=False)

    def watch(self, changed: OnChange) -> None:
        self.watches += 1
        self.changed = changed

    def register(self, registration: RankRegistration) -> float:
        return 10.0

    def remove(self, engine: str, engine_rank: int, incarnation: str) -> bool:
        return True

    def engines(self) -> tuple[EngineView, ...]:
        return ()

    def drain(self, engine: str) -> tuple[str, ...]:
        return ()

    def drains(self, endpoint: str) -> bool:
        return False

    def release(self, endpoint: str) -> None:
        pass

    def released(self) -> tuple[str, ...]:
        return ()

    def findings(self) -> Iterator[Finding]:
        yield from ()

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def client() -> Counted:
    return Counted()


@pytest.fixture
def shared(client: Counted) -> Callable[[], Registry]:
    registries = SharedRegistries()
    return lambda: registries.registry("key", lambda: client)


def test_those_that_ask_at_once_ask_the_registry_twice_at_most(client: Counted, shared: Callable[[], Registry]):
    users = [shared() for _ in range(USERS)]
    client.may_answer.clear()
    with ThreadPoolExecutor(USERS) as threads:
        first = threads.submit(users[0].engine, "prefill")
        assert client.asked.wait(PATIENCE_S)
        client.revision = 7  # after the first question was asked
        others = [threads.submit(user.engine, "prefill") for user in users[1:]]
        (look_ups,) = users[0].shared.look_ups.values()  # type: ignore[attr-defined]
        eventually("all have asked", lambda: look_ups.users == USERS)
        client.may_answer.set()
        assert first.result(PATIENCE_S).world_size == 0
        assert {each.result(PATIENCE_S).world_size for each in others} == {7}, "an answer older than the question"
    assert client.looked_up == 2
    assert not users[0].shared.look_ups  # type: ignore[attr-defined]


def test_engines_are_looked_up_beside_each_other(client: Counted, shared: Callable[[], Registry]):
    one, other = shared(), shared()
    client.may_answer.clear()
    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(one.engine, "a"), threads.submit(other.engine, "b")]
        eventually("both are asked for", lambda: client.looked_up == 2)
        client.may_answer.set()
        assert [each.result(PATIENCE_S).engine for each in found] == ["a", "b"]


def test_a_failure_is_everybodys_and_nobody_waits_for_ever(client: Counted, shared: Callable[[], Registry]):
    users = [shared() for _ in range(8)]
    client.fails = True
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(user.engine, "prefill") for user in users]
        assert {type(each.exception(PATIENCE_S)) for each in asked} == {RegistryUnreachableError}
    client.fails = False
    assert users[0].engine("prefill").engine == "prefill"


def test_a_watch_that_fails_is_begun_by_the_next_try(
    client: Counted, shared: Callable[[], Registry], monkeypatch: pytest.MonkeyPatch
):
    told: list[str | None] = []
    user = shared()

    def failing(_: OnChange) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(client, "watch", failing)
        with pytest.raises(RuntimeError):
            user.watch(told.append)
    user.watch(told.append)
    assert client.watches == 1
    client.changed("prefill")
    assert told == ["prefill"]


def test_there_is_one_watch_and_everybody_hears_of_changes(client: Counted, shared: Callable[[], Registry]):
    told: list[tuple[int, str | None]] = []
    users = [shared() for _ in range(3)]
    for number, user in enumerate(users):
        user.watch(lambda engine, number=number: told.append((number, engine)))  # type: ignore[misc]
    assert client.watches == 1
    assert told == [(1, None), (2, None)], "who comes later must look: what was told before is past"
    told.clear()
    client.changed("prefill")
    assert told == [(0, "prefill"), (1, "prefill"), (2, "prefill")]
    users[1].close()
    told.clear()
    client.changed(None)
    assert told == [(0, None), (2, None)]


def test_the_client_is_closed_with_the_last_of_its_users(client: Counted, shared: Callable[[], Registry]):
    one, other = shared(), shared()
    one.close()
    one.close()
    assert client.closed == 0
    with pytest.raises(UsageError, match="closed"):
        one.engine("prefill")
    assert other.grant(rank()).lease_s == 10.0
    other.close()
    assert client.closed == 1
    shared().close()
    assert client.closed == 2, "another is made where the last was closed"


def test_endpoints_with_one_platform_share_a_client_of_each_registry():
    platform = SystemPlatform()

    def client(url: str, **settings: object) -> Registry:
        made = platform.registry(Settings(**settings), url)
        assert isinstance(made, SharedRegistry)
        return made.client

    first = client("http://127.0.0.1:1")
    assert client("http://127.0.0.1:1") is first
    assert client("http://127.0.0.1:2") is not first
    assert client("http://127.0.0.1:1", secret="a secret of other ranks") is not first
    assert SystemPlatform().registry(Settings(), "http://127.0.0.1:1") is not first
