"""Control connections that are lost without a word: a NAT or load balancer forgot them, or drops one way.

Both processes live, and TCP reports no break. The decode rank misses the answers to its heartbeats, makes the
connection anew, and everything goes on: within twice `peer_timeout_s` in every case.
"""

from __future__ import annotations

import itertools
import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq
from tests.support.caches import Shape
from tests.support.processes import Rank, RankProcess
from tests.support.proxy import ControlProxy
from tests.support.real_transport import skip_unless_installed
from tests.support.registries import RegistryProcess
from tests.support.resources import Resources
from tests.support.victims import (
    END_S,
    LEASE_S,
    MEMORY_TOLERANCE_BYTES,
    MODEL,
    POOL_PAGES,
    RECONNECT_SOCKETS,
    SETTINGS,
    TIMES,
    Engine,
    Rooms,
)
from tests.support.waiting import eventually

from kvferry import RankCoordinates

skip_unless_installed()

log = logging.getLogger(__name__)

SECRETS = {"open": None, "secret": "a secret of this pair"}

LOSSES: dict[str, Callable[[ControlProxy], None]] = {
    "forgotten": ControlProxy.forget,
    "deaf-prefill": lambda proxy: proxy.forget(down=False),
    "deaf-decode": lambda proxy: proxy.forget(up=False),
}
EVERYWHERE = pytest.mark.parametrize(("path", "secret"), list(itertools.product(SETTINGS, SECRETS)))

PEER_TIMEOUT_S = 4.0
"""Longer than elsewhere: what is half-way must survive until a connection is made anew, on a busy machine too."""

LONG_S = 5 * PEER_TIMEOUT_S


class Pair(Rooms):
    """A prefill and a decode rank in processes of their own, and a proxy between them."""

    def __init__(self, path: str, secret: str) -> None:
        super().__init__(path)
        self.secret = secret
        self.registry = RegistryProcess(lease_s=LEASE_S, secret=SECRETS[secret])
        self.proxy = ControlProxy()
        self.struck_prefill = Engine("prefill", RankProcess(), is_prefill=True)
        self.struck_decode = Engine("decode", RankProcess(), is_prefill=False)
        settings: dict[str, Any] = SETTINGS[path] | TIMES | {"registry_url": self.registry.url}
        settings |= {"peer_timeout_s": PEER_TIMEOUT_S, "secret": SECRETS[secret]}
        shape = MODEL, Shape(pages=POOL_PAGES), RankCoordinates()
        prefills = settings | {"workers": 4, "queues": 1, "nixl_threads": 1, "advertise_port": self.proxy.port}
        self.struck_prefill.do(Rank.start_prefill, *shape, "prefill", prefills)
        self.proxy.target = self.struck_prefill.do(Rank.control_port)
        self.struck_decode.do(Rank.start_decode, *shape, "decode", settings)
        self.serve()

    def serve(self) -> None:
        """A whole room."""
        self.run(self.struck_prefill, self.struck_decode)

    def is_heard(self) -> bool:
        """Whether a room goes well, and the decode rank hears that another one failed: words both ways."""
        room, failed = (self.begin(self.struck_prefill, self.struck_decode) for _ in range(2))
        self.submit(room)
        failed.source.do(Rank.abort, failed.number)
        ends = [room.target.do(Rank.end, each.number, END_S) for each in (room, failed)]
        if ends[0].state == "SUCCESS":
            self.succeeds(room)
        return ends[0].state == "SUCCESS" and "the test wants it so" in ends[1].error

    def healed_after(self, since: float) -> float:
        """Begins rooms until all is well; how long after a moment that was."""
        while not self.is_heard():
            assert time.monotonic() < since + LONG_S, "rooms go on failing"
        took_s = time.monotonic() - since
        log.info("healed after %.2f s", took_s)
        return took_s

    def close(self) -> None:
        """Ends everything."""
        for engine in (self.struck_prefill, self.struck_decode):
            engine.process.close()
        self.proxy.close()
        self.registry.kill()


class Pairs:
    """The pairs that tests share: of the last path and secret that were asked for."""

    def __init__(self) -> None:
        self._begun: Pair | None = None

    @contextmanager
    def get(self, path: str, secret: str) -> Iterator[Pair]:
        """A pair that has exchanged rooms; one with which a test fails is ended."""
        if self._begun is None or (self._begun.path, self._begun.secret) != (path, secret):
            self.close()
            self._begun = Pair(path, secret)
        try:
            self._begun.serve()
            yield self._begun
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends what is left."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.close()


@pytest.fixture(scope="module")
def pairs() -> Iterator[Pairs]:
    begun = Pairs()
    yield begun
    begun.close()


@pytest.mark.sampled(one_in=12, full=2)
@pytest.mark.parametrize("loss", list(LOSSES))
@EVERYWHERE
def test_an_idle_connection_that_is_lost_is_made_anew(pairs: Pairs, path: str, secret: str, loss: str):
    with pairs.get(path, secret) as pair:
        LOSSES[loss](pair.proxy)
        assert pair.healed_after(time.monotonic()) < 2 * PEER_TIMEOUT_S


@pytest.mark.sampled(one_in=12, full=2)
@pytest.mark.parametrize("loss", list(LOSSES))
@EVERYWHERE
def test_rooms_that_are_half_way_when_a_connection_is_lost_end_well(pairs: Pairs, path: str, secret: str, loss: str):
    with pairs.get(path, secret) as pair:
        standing = [pair.begin(pair.struck_prefill, pair.struck_decode) for _ in range(8)]
        since = time.monotonic()
        LOSSES[loss](pair.proxy)
        for room in standing:
            pair.finish(room)
        assert pair.healed_after(since) < 2 * PEER_TIMEOUT_S


@pytest.mark.sampled(one_in=12, full=2)
@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
@EVERYWHERE
def test_after_a_black_hole_nothing_goes_through_what_was_lost_in_it(
    pairs: Pairs, path: str, secret: str, is_busy: bool
):
    """The rooms of that time fail, on both sides: everybody has given everybody up."""
    with pairs.get(path, secret) as pair:
        standing = [pair.begin(pair.struck_prefill, pair.struck_decode) for _ in range(8 * is_busy)]
        pair.proxy.forget(is_hole=True)
        lost = {"decode": pair.struck_prefill, "prefill": pair.struck_decode}
        for name, engine in lost.items():
            eventually(f"{engine.name} is alone", lambda name=name, engine=engine: not engine.do(Rank.peers, name))
        for room in standing:
            assert "silent for" in pair.fails(pair.struck_decode, room).error
            assert "silent for" in pair.fails(pair.struck_prefill, room).error
        pair.proxy.heal()
        assert pair.healed_after(time.monotonic()) < 2 * PEER_TIMEOUT_S
        for room in standing:
            assert room.target.do(Rank.wait_reusable, room.number, END_S)


@pytest.mark.sampled(one_in=6, full=2)
@pytest.mark.parametrize("path", list(SETTINGS))
@pytest.mark.parametrize("ahead", [0, 1, 1 << 40], ids=["same", "next", "far-ahead"])
def test_one_connection_of_a_stranger_under_a_decode_ranks_name_ends_nothing(pairs: Pairs, path: str, ahead: int):
    """Where there is no secret: under the identity that the decode rank's connection has, and under higher ones."""
    with pairs.get(path, "open") as pair, zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        standing = [pair.begin(pair.struck_prefill, pair.struck_decode) for _ in range(8)]
        name = pair.struck_decode.do(Rank.endpoint_name)
        (number,) = (int(each[1]) for head in pair.proxy.heads if (each := re.search(rb"~(\d+)", head)))
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.setsockopt(zmq.IDENTITY, f"{name}~{number + ahead}".encode())
        stranger.connect(f"tcp://127.0.0.1:{pair.proxy.target}")
        since = time.monotonic()
        stranger.send(b"a word")
        eventually("it is heard", lambda: "dropped a message" in str(pair.struck_prefill.do(Rank.logged)))
        for room in standing:
            pair.finish(room)
        assert pair.healed_after(since) < 2 * PEER_TIMEOUT_S


@pytest.mark.full
@pytest.mark.sampled(one_in=6, full=2)
@EVERYWHERE
def test_a_prefill_rank_that_is_frozen_for_long_has_one_connection_at_a_time(pairs: Pairs, path: str, secret: str):
    with pairs.get(path, secret) as pair:
        before = pair.struck_prefill.do(Rank.resources)
        pair.struck_prefill.process.freeze()
        made = pair.proxy.accepted
        eventually("another one is made", lambda: pair.proxy.accepted > made)
        eventually("all but the last, and one that is being closed, are", lambda: len(pair.proxy.heads) <= 2)
        pair.struck_prefill.process.thaw()
        pair.healed_after(time.monotonic())

        def left_over() -> str:
            now: Resources = pair.struck_prefill.do(Rank.resources)
            return now.beyond(before, resident_bytes=MEMORY_TOLERANCE_BYTES, sockets=2 * RECONNECT_SOCKETS, threads=0)

        eventually("nothing is left of the others", lambda: not left_over())
