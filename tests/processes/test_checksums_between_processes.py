"""Checksums between processes: right transfers succeed, and a wrong byte is named on both sides."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tests.support.caches import Model, Shape
from tests.support.processes import Rank, RankProcess, until
from tests.support.real_transport import skip_unless_installed

from kvferry.control.registry_server import RegistryServer

skip_unless_installed()

MODEL = Model(layers=4, heads=4, head_dim=16, page_tokens=8, dtype="float32")
PAGES = 12


@pytest.fixture(scope="module")
def registry_url() -> Iterator[str]:
    with RegistryServer(port=0, lease_s=2) as running:
        yield running.url


@pytest.fixture(scope="module")
def processes() -> Iterator[list[RankProcess]]:
    started = [RankProcess() for _ in range(3)]
    yield started
    for process in started:
        process.close()


@pytest.mark.parametrize("path", [pytest.param("direct", marks=pytest.mark.full), "staged"])
def test_right_bytes_are_verified_and_a_wrong_one_is_named(processes: list[RankProcess], registry_url: str, path: str):
    *prefills, decode = processes
    prefill_shape, decode_shape = Shape(tp=2, pages=64), Shape(pages=64, heads_first=True)
    name, settings = f"checked-{path}", {"registry_url": registry_url, "close_timeout_s": 1.0}
    for rank, place in zip(prefills, prefill_shape.coordinates(), strict=True):
        rank.do(Rank.start_prefill, MODEL, prefill_shape, place, name, settings)
    (place,) = decode_shape.coordinates()
    settings |= {"path": path, "checksums": True}
    decode.do(Rank.start_decode, MODEL, decode_shape, place, f"to-{name}", settings)
    pages = np.random.default_rng(7).permutation(64).tolist()
    for room in (1, 2, 3):
        mine, theirs = pages[:PAGES], pages[-PAGES:]
        decode.do(Rank.receive, room, mine, name)
        if room == 2:
            decode.do(Rank.spoil, mine[0])
        for rank in prefills:
            rank.do(Rank.send, room, theirs, [PAGES])
        for rank in processes:
            rank.ask(Rank.wait, room)
        answers = [rank.answer() for rank in processes]
        if room != 2:
            assert [(answer.error, answer.value) for answer in answers] == [(None, 0)] * 3
            continue
        assert answers[2].error_type == "ChecksumError"
        assert answers[0].error_type == "ChecksumError"
        for answer in (answers[0], answers[2]):
            assert "'k' layer [0, 4) head [0, 2) dim [0, 16) in page" in str(answer.error)
            assert f"in page {mine[0]} (page 0 of the request" in str(answer.error)
            assert "tokens 0 to 7, written by prefill rank 0" in str(answer.error)
        until(decode, room, lambda state: state[:2] == ("FAILED", True))
