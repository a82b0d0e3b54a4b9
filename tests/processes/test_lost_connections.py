"""Control connections that are lost without a word: a NAT or load balancer forgot them, or drops one way.

Both processes live, and TCP reports no break. The decode rank misses the answers to its heartbeats, makes the
connection anew, and everything goes on: within twice `peer_timeout_s` in every case.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.support.caches import Shape
from tests.support.processes import Rank, RankProcess
from tests.support.proxy import ControlProxy
from tests.support.real_transport import skip_unless_installed
from tests.support.registries import RegistryProcess
from tests.support.victims import (
    END_S,
    LEASE_S,
    MODEL,
    PEER_TIMEOUT_S,
    POOL_PAGES,
    SETTINGS,
    TIMES,
    Engine,
    Room,
    Rooms,
)

from kvferry import RankCoordinates

skip_unless_installed()

SECRETS = {"open": None, "secret": "a secret of this pair"}

LOSSES: dict[str, Callable[[ControlProxy], None]] = {
    "forgotten": ControlProxy.forget,
    "deaf-prefill": lambda proxy: proxy.forget(down=False),
    "deaf-decode": lambda proxy: proxy.forget(up=False),
}


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
        settings |= {"secret": SECRETS[secret]}
        shape = MODEL, Shape(pages=POOL_PAGES), RankCoordinates()
        prefills = settings | {"workers": 4, "queues": 1, "nixl_threads": 1, "advertise_port": self.proxy.port}
        self.struck_prefill.do(Rank.start_prefill, *shape, "prefill", prefills)
        self.proxy.target = self.struck_prefill.do(Rank.control_port)
        self.struck_decode.do(Rank.start_decode, *shape, "decode", settings)
        self.serve()

    def serve(self) -> None:
        """A whole room."""
        self.run(self.struck_prefill, self.struck_decode)

    def healed_after(self, since: float) -> float:
        """Begins rooms until one ends well; how long after a moment that was."""
        while True:
            room = self.begin(self.struck_prefill, self.struck_decode)
            self.submit(room)
            if room.target.do(Rank.end, room.number, END_S).state == "SUCCESS":
                took_s = time.monotonic() - since
                self.succeeds(room)
                return took_s
            assert time.monotonic() < since + 5 * PEER_TIMEOUT_S, "rooms go on failing"

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


EVERYWHERE = pytest.mark.parametrize(("path", "secret"), list(itertools.product(SETTINGS, SECRETS)))


@pytest.mark.parametrize("loss", list(LOSSES))
@EVERYWHERE
def test_an_idle_connection_that_is_lost_is_made_anew(pairs: Pairs, path: str, secret: str, loss: str, record_property):
    with pairs.get(path, secret) as pair:
        LOSSES[loss](pair.proxy)
        took_s = pair.healed_after(time.monotonic())
        record_property("healed_s", took_s)
        assert took_s < 2 * PEER_TIMEOUT_S
        pair.serve()


@pytest.mark.parametrize("loss", list(LOSSES))
@EVERYWHERE
def test_rooms_that_are_half_way_when_a_connection_is_lost_end_well(
    pairs: Pairs, path: str, secret: str, loss: str, record_property
):
    with pairs.get(path, secret) as pair:
        standing: list[Room] = [pair.begin(pair.struck_prefill, pair.struck_decode) for _ in range(8)]
        since = time.monotonic()
        LOSSES[loss](pair.proxy)
        for room in standing:
            pair.finish(room)
        took_s = time.monotonic() - since
        record_property("healed_s", took_s)
        assert took_s < 2 * PEER_TIMEOUT_S
