"""Connections for bytes that are lost without a word, between two hosts: a NAT forgot them, or drops one way.

Both processes live and hear each other, and a new connection would pass. The system ends one on which nothing is
acknowledged for `peer_timeout_s`; what was on its way has failed then, the two connect anew, and everything goes on:
within twice `peer_timeout_s`, and no byte of what was lost arrives in pages that were given back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from tests.support.caches import Shape
from tests.support.hosts import Host, Link, skip_without_hosts
from tests.support.processes import Rank
from tests.support.real_transport import REAL, skip_unless_installed
from tests.support.sites import CONTROL_PORT, Place, place, v4
from tests.support.victims import (
    END_S,
    LARGE_ROOM_PAGES,
    LATE_WRITE_S,
    MODEL,
    POOL_PAGES,
    SETTINGS,
    TIMES,
    Engine,
    Room,
    Rooms,
)
from tests.support.waiting import eventually

from kvferry import RankCoordinates

skip_unless_installed()
skip_without_hosts()
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(REAL.name != "nixl", reason="it is NIXL over TCP that is tried"),
]

log = logging.getLogger(__name__)

PEER_TIMEOUT_S = 4.0
"""As in `test_lost_connections`."""

LONG_S = 5 * PEER_TIMEOUT_S
LOSSES = ("forgotten", "deaf-prefill", "deaf-decode", "black-hole")
IDLE, BUSY = (
    [
        pytest.param(path, loss, marks=() if (at + LOSSES.index(loss)) % 2 == turn else pytest.mark.long)
        for at, path in enumerate(SETTINGS)
        for loss in LOSSES
    ]
    for turn in (0, 1)
)
"""Of paths and losses. In the whole proof the two tests take turns, so that together they have each of them once."""

SLOW = Link(bytes_per_s=4e6)
"""So that a large room is on its way when the connection is lost."""


class Pair(Rooms):
    """A prefill and a decode rank, each on a host."""

    def __init__(self, at: Place, path: str) -> None:
        super().__init__(path)
        self._network, self._at = at.network, at
        self._hosts = [at.host(f"{name}-{path}", number) for number, name in enumerate(("prefill", "decode"), start=2)]
        self.struck_prefill, self.struck_decode = (self._start(each) for each in self._hosts)
        self.run(self.struck_prefill, self.struck_decode)

    def _start(self, host: Host) -> Engine:
        engine = Engine(host.name, self._at.process(host), is_prefill=host.name.startswith("prefill"))
        settings: dict[str, Any] = SETTINGS[self.path] | TIMES | {"peer_timeout_s": PEER_TIMEOUT_S}
        settings |= {"write_timeout_s": LONG_S, "waiting_timeout_s": LONG_S}  # by which nothing ends here
        if engine.is_prefill:
            settings |= {"control_port": CONTROL_PORT, "workers": 4, "queues": 1, "nixl_threads": 2}
        begin = Rank.start_prefill if engine.is_prefill else Rank.start_decode
        engine.do(begin, MODEL, Shape(pages=POOL_PAGES), RankCoordinates(), engine.name, settings)
        return engine

    def writing(self) -> Room:
        """A large room that is on its way."""
        room = self.new_room(self.struck_prefill, self.struck_decode, pages=LARGE_ROOM_PAGES[self.path])
        self._reach_both_open(room)
        before = self._network.carried[self._hosts[0], self._hosts[1]]
        self._network.links[self._hosts[0], self._hosts[1]] = SLOW
        self.submit(room)
        eventually("it is on its way", lambda: self._network.carried[self._hosts[0], self._hosts[1]] > before + 500_000)
        return room

    def lose(self, loss: str) -> None:
        """Loses the connections for bytes; in a black hole all of them, until nobody knows the other any more."""
        here, there = self._hosts
        if loss != "black-hole":
            way = (there, here) if loss == "deaf-prefill" else (here, there)
            self._network.forget(*way, but=CONTROL_PORT, comes_back=loss != "forgotten")
            self._network.heal()
            return
        self._network.forget(here, there)
        self._network.between(here, there, Link(is_cut=True))
        for engine, other in ((self.struck_prefill, there), (self.struck_decode, here)):
            eventually("it is alone", lambda engine=engine, name=other.name: not engine.do(Rank.peers, name))
        self._network.heal()

    def healed_after(self, since: float) -> float:
        """Runs rooms until one goes well; how long after a moment that was."""
        while True:
            room = self.begin(self.struck_prefill, self.struck_decode)
            self.submit(room)
            end = room.target.do(Rank.end, room.number, END_S)
            log.info("room %s: %s", room.number, end)
            if end.state == "SUCCESS":
                self.succeeds(room)
                return time.monotonic() - since
            assert time.monotonic() < since + LONG_S, f"rooms go on failing: {end}"

    def comes_back(self, room: Room) -> None:
        """A room that has failed gives its pages back, on both sides, and nothing is written to them afterwards."""
        for engine in (room.source, room.target):
            assert "is gone" in (end := self.fails(engine, room)).error or "silent for" in end.error, end
        assert room.source.do(Rank.wait_reusable, room.number, END_S)
        assert room.target.do(Rank.reuse, room.number, END_S)
        time.sleep(LATE_WRITE_S)
        assert room.target.do(Rank.changed, room.number) == 0, "a late write changed pages that were given back"


class Pairs:
    """The pair that tests share, of the path that was last asked for."""

    def __init__(self) -> None:
        self._begun: Pair | None = None
        self._place = ExitStack()

    @contextmanager
    def get(self, path: str) -> Iterator[Pair]:
        """A pair that has exchanged rooms; one with which a test fails is ended."""
        if self._begun is None or self._begun.path != path:
            self.close()
            self._begun = Pair(self._place.enter_context(place(v4)), path)
        try:
            yield self._begun
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends what is left."""
        self._begun = None
        self._place.close()


@pytest.fixture(scope="module")
def pairs() -> Iterator[Pairs]:
    begun = Pairs()
    yield begun
    begun.close()


@pytest.mark.parametrize(("path", "loss"), IDLE)
def test_an_idle_connection_that_is_lost_is_made_anew(pairs: Pairs, path: str, loss: str):
    with pairs.get(path) as pair:
        pair.lose(loss)
        took_s = pair.healed_after(time.monotonic())
        log.info("%s, %s, idle: healed after %.2f s", loss, path, took_s)
        assert took_s < 2 * PEER_TIMEOUT_S


@pytest.mark.parametrize(("path", "loss"), BUSY)
def test_a_room_on_its_way_fails_and_the_next_goes_well(pairs: Pairs, path: str, loss: str):
    with pairs.get(path) as pair:
        room = pair.writing()
        since = time.monotonic()
        pair.lose(loss)
        took_s = pair.healed_after(time.monotonic() if loss == "black-hole" else since)
        log.info("%s, %s, busy: healed after %.2f s", loss, path, took_s)
        assert took_s < 2 * PEER_TIMEOUT_S
        pair.comes_back(room)
