"""A connection for bytes breaks in the middle of rooms, between real processes over TCP.

Of two connections that UCX has, one breaks after some bytes, and the decode rank receives 200 Mbit/s: what was sent
before lands late. However NIXL notices it, in a post or in a poll, nothing of it lands in pages that were given back,
and every room says why it failed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from tests.support.broken_wire import built, two_interfaces
from tests.support.caches import Model, Shape
from tests.support.processes import Rank, RankProcess
from tests.support.real_transport import REAL, skip_unless_installed
from tests.support.victims import END_S

from kvferry.control.registry_server import RegistryServer

skip_unless_installed()
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(REAL.name != "nixl", reason="it is NIXL over TCP that is tried"),
]

WIRE_BYTES_PER_S = 25e6
BREAKS_AFTER_BYTES = 1_000_000
QUARANTINE_S = 0.5
LATE_WRITE_S = 1.5
ROOMS, PAGES = 6, 24
# 32 KiB a block: UCX 1.23 crashes where one of two connections breaks that share a block, whoever uses it.
MODEL = Model(layers=4, heads=8, head_dim=64, page_tokens=16, dtype="float32")
SHAPE = Shape(pages=ROOMS * PAGES)


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RankProcess, RankProcess]]:
    """A prefill and a decode rank in programs of their own, between which UCX has two connections."""
    monkeypatch.setenv("LD_PRELOAD", str(built(tmp_path)))
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", two_interfaces())
    with closing(RankProcess(is_fresh=True)) as prefill, closing(RankProcess(is_fresh=True)) as decode:
        monkeypatch.delenv("LD_PRELOAD")
        yield prefill, decode


@pytest.mark.parametrize("path", ["direct", "staged"])
def test_what_was_sent_before_a_connection_broke_lands_in_no_page_that_was_given_back(
    ranks: tuple[RankProcess, RankProcess], path: str
):
    prefill, decode = ranks
    with RegistryServer(port=0, lease_s=2) as registry:
        settings = {
            "registry_url": registry.url,
            "heartbeat_interval_s": 0.3,
            "quarantine_s": QUARANTINE_S,
            "path": path,
            "staging_chunk_mib": 0.0625,
        }
        (coordinates,) = SHAPE.coordinates()
        prefill.do(Rank.start_prefill, MODEL, SHAPE, coordinates, "prefill", settings)
        decode.do(Rank.start_decode, MODEL, SHAPE, coordinates, "decode", settings)
        pages = np.random.default_rng(0).permutation(ROOMS * PAGES).reshape(ROOMS, PAGES).tolist()
        begin_and_end(prefill, decode, {1: pages[0]})
        assert decode.do(Rank.wait, 1) == 0
        decode.do(Rank.wire_is_slow, WIRE_BYTES_PER_S)
        prefill.do(Rank.wire_breaks, BREAKS_AFTER_BYTES)
        rooms = dict(enumerate(pages, start=2))
        ends = begin_and_end(prefill, decode, rooms)
        assert prefill.do(Rank.is_wire_broken)
        assert "FAILED" in {state for state, _ in ends.values()}
        assert {room: error for room, (_, error) in ends.items() if "without saying why" in error} == {}
        time.sleep(LATE_WRITE_S)
        assert {room: changed for room in rooms if (changed := decode.do(Rank.changed, room))} == {}
        decode.do(Rank.wire_is_slow, 0.0)
        begin_and_end(prefill, decode, {100: pages[0]})  # over a connection that was made anew
        assert decode.do(Rank.wait, 100) == 0
        prefill.do(Rank.stop)
        decode.do(Rank.stop)


def begin_and_end(prefill: RankProcess, decode: RankProcess, rooms: dict[int, list[int]]) -> dict[int, tuple[str, str]]:
    """Runs rooms side by side. A failed one's pages are reused as soon as they may be; returns how each has ended."""
    for room, pages in rooms.items():
        decode.do(Rank.receive, room, pages, "prefill")
    for room, pages in rooms.items():
        prefill.ask(Rank.send, room, pages, [PAGES])
    for _ in rooms:
        assert prefill.answer().error is None
    ends = {}
    for room in rooms:
        end = decode.do(Rank.end, room, END_S)
        ends[room] = end.state, end.error
        if end.state == "FAILED":
            assert decode.do(Rank.reuse, room, END_S)
    return ends
