"""Who waits for a registry is woken when it tells of a change, instead of waiting for the next try."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from tests.support.registries import rank
from tests.support.waiting import PATIENCE_S, eventually
from tests.unit.testing.models import pool

from kvferry import DecodeEndpoint, EngineView, InProcessNetwork, InProcessTransport, RegistryClient, Settings
from kvferry.control.registry import Grant, OnChange
from kvferry.control.renewals import LeaseKeeper, Renewals
from kvferry.errors import RegistryUnreachableError
from kvferry.protocol.wire.registrations import RankRegistration
from kvferry.testing.probe import probe

NEVER_S = 3600.0


class Telling(RegistryClient):
    """A registry that tells of changes when the test says so, and answers as the test says.

    Attributes:
        changed: what is called at a change; None if nobody has asked.
        asked: how often it was asked.
    """

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1")
        self.changed: OnChange | None = None
        self.asked = 0
        self.is_away = True
        self.retry_s = 0.0
        self.while_asked: Callable[[], None] = lambda: None

    def watch(self, changed: OnChange) -> None:
        assert self.changed is None, "watched once"
        self.changed = changed

    def tell(self, engine: str | None) -> None:
        assert self.changed is not None
        self.changed(engine)

    def grant(self, registration: RankRegistration) -> Grant:
        self.asked += 1
        if self.is_away:
            raise RegistryUnreachableError("it is away")
        return Grant(NEVER_S, renew_s=NEVER_S)

    def remove(self, engine: str, engine_rank: int, incarnation: str) -> bool:
        return True

    def engine(self, name: str) -> EngineView:
        self.asked += 1
        self.while_asked()
        return EngineView(engine=name, registrations=(), world_size=0, complete=False, retry_s=self.retry_s)

    def released(self) -> tuple[str, ...]:
        return ()


class TestKeeper:
    @pytest.mark.parametrize("engine", [None, "prefill"])
    def test_a_rank_that_is_not_registered_tries_again_at_once(self, engine: str | None):
        registry = Telling()
        keeper = LeaseKeeper(
            registry, rank(0), lambda _: None, renewals=Renewals(shortest_retry_s=NEVER_S, longest_retry_s=NEVER_S)
        )
        with keeper:
            eventually("it waits", lambda: registry.changed)
            registry.is_away = False
            registry.tell(engine)
            assert keeper.registered.wait(PATIENCE_S)
        assert registry.asked == 2

    def test_what_is_about_others_or_changes_nothing_wakes_nobody(self):
        registry = Telling()
        keeper = LeaseKeeper(
            registry, rank(0), lambda _: None, renewals=Renewals(shortest_retry_s=NEVER_S, longest_retry_s=NEVER_S)
        )
        with keeper:
            eventually("it waits", lambda: registry.changed)
            registry.tell("another")
            assert not keeper.woken.is_set()
            registry.is_away = False
            registry.tell(None)
            assert keeper.registered.wait(PATIENCE_S)
            registry.tell("prefill")
            assert not keeper.woken.is_set()
        assert registry.asked == 2


class TestDecodeRank:
    @pytest.fixture
    def registry(self) -> Telling:
        return Telling()

    @pytest.fixture
    def decode(self, registry: Telling, monkeypatch: pytest.MonkeyPatch) -> Iterator[DecodeEndpoint]:
        monkeypatch.setattr("kvferry.protocol.links.link._SHORTEST_PAUSE_S", NEVER_S)
        monkeypatch.setattr("kvferry.protocol.links.link._LONGEST_PAUSE_S", NEVER_S)
        memory = pool()
        settings = Settings(registry_url=registry.url, close_timeout_s=0.0)
        transport = InProcessTransport(InProcessNetwork())
        with DecodeEndpoint(memory.layout, settings=settings, transport=transport, registry=registry) as endpoint:
            endpoint.open(1, memory.pages_for(8), engine="prefill", tokens=8)
            yield endpoint

    @pytest.mark.parametrize("engine", [None, "prefill"])
    def test_an_engine_that_is_missed_is_looked_up_at_once(
        self, registry: Telling, decode: DecodeEndpoint, engine: str | None
    ):
        eventually("it waits", lambda: registry.changed)
        for asked in range(2, 5):
            registry.tell(engine)
            eventually("it was looked up again", lambda asked=asked: registry.asked >= asked)

    def test_what_is_about_others_has_nobody_looked_up(self, registry: Telling, decode: DecodeEndpoint):
        eventually("it waits", lambda: registry.changed)
        registry.tell("another")
        inbox = probe(decode).context.inbox
        eventually("the change was taken", lambda: not inbox)
        (link,) = probe(decode).links.current
        assert link.look_up_at is not None
        assert link.look_up_at > time.monotonic() + NEVER_S / 4
        assert registry.asked == 1

    def test_it_asks_again_no_sooner_than_the_registry_says(
        self, registry: Telling, decode: DecodeEndpoint, monkeypatch: pytest.MonkeyPatch
    ):
        eventually("it waits", lambda: registry.changed)
        (link,) = probe(decode).links.current
        registry.retry_s, before = 10 * NEVER_S, link.look_up_at
        registry.tell("prefill")
        eventually("it was looked up again", lambda: registry.asked == 2 and link.look_up_at not in (None, before))
        assert link.look_up_at is not None
        assert link.look_up_at > time.monotonic() + 9 * NEVER_S

    def test_a_change_during_a_look_up_is_not_lost(self, registry: Telling, decode: DecodeEndpoint):
        eventually("it waits", lambda: registry.changed)
        is_asked, may_answer = threading.Event(), threading.Event()

        def wait() -> None:
            is_asked.set()
            assert may_answer.wait(PATIENCE_S)

        registry.while_asked = wait
        registry.tell("prefill")
        assert is_asked.wait(PATIENCE_S)
        registry.tell("prefill")
        inbox = probe(decode).context.inbox
        eventually("the change was taken", lambda: not inbox)
        may_answer.set()
        eventually("it was looked up once more", lambda: registry.asked >= 3)
