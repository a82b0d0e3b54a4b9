"""Whole requests between engines that plug-ins have described, over endpoints of this process and memory of ours."""

from __future__ import annotations

from collections.abc import Iterable

from tests.support.engines import DecodeEngine, PrefillEngine, Requests, new_engine_name

from kvferry import RankCoordinates, RankLayout
from kvferry.testing import LocalNetwork, Pool


def cross(
    prefill: Iterable[tuple[RankCoordinates, RankLayout]], decode: Iterable[tuple[RankCoordinates, RankLayout]]
) -> None:
    """Sends requests in chunks, one of them behind a prefix that ends inside of a page, into pages elsewhere.

    Every byte of the decode ranks is looked at: what was to arrive is there, and nothing else was written.
    """
    with LocalNetwork() as network:
        here = PrefillEngine(new_engine_name("prefill"), model=None)  # type: ignore[arg-type]
        there = DecodeEngine(new_engine_name("decode"))
        for engine, ranks in ((here, list(prefill)), (there, list(decode))):
            assert len({layout.digest for _, layout in ranks}) == 1, "a registry would refuse one of these ranks"
            for coordinates, layout in ranks:
                engine.pools.append(Pool.backed(layout, coordinates, seed=f"{engine.name} {coordinates.engine_rank}"))
        here.endpoints += [network.prefill(pool, engine=here.name) for pool in here.pools]
        there.endpoints += [network.decode(pool, engine=there.name) for pool in there.pools]
        requests = Requests(here, there)
        requests.run_tokens(1, 150, cuts=(64, 128))
        requests.run_tokens(2, 131, prefix_tokens=40, cuts=(64,))
