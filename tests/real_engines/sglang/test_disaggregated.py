"""One prefill and one decode engine of SGLang's over kvferry, token for token against the undivided engine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from examples.tiny_model import write
from tests.real_engines.prompts import prompts
from tests.real_engines.sglang.engine import EngineProcess, Output, Shape, disaggregated
from tests.real_engines.sglang.tampering import Tampering

from kvferry.applications.up.supervision import free_ports

pytestmark = pytest.mark.timeout(600)

TOKENS = 12
ENDS_S = 5.0
"""By when both sides have ended after one has refused a request."""

ROOMS = count(1000)


class Pair:
    """A prefill and a decode engine."""

    def __init__(self, model: Path, directory: Path, *, backend: str = "kvferry", **environment: str) -> None:
        """Begins to start both."""
        self.tampering = Tampering(directory)
        (self.port,) = free_ports(1)
        self._model, self._backend = model, backend
        self._environment = {**self.tampering.environment, **environment}
        self.prefill = self.begin("prefill", chunked_prefill_size=128)
        self.decode = self.begin("decode", disaggregation_decode_enable_radix_cache=True)

    def begin(self, mode: str, **options: Any) -> EngineProcess:
        """Begins to start an engine of either kind that meets the others."""
        given = disaggregated(mode, self.port, self._backend, **options)
        return EngineProcess(Shape(self._model, given, self._environment, (self.tampering.directory,)))

    def started(self) -> Pair:
        self.prefill.started()
        self.decode.started()
        return self

    def submit(self, given: Sequence[Sequence[int]], tokens: int = TOKENS) -> list[int]:
        """Hands requests to both, as gateways do; returns their rooms."""
        rooms = [next(ROOMS) for _ in given]
        for engine in (self.prefill, self.decode):
            engine.submit(given, tokens, rooms=rooms, port=self.port)
        return rooms

    def run(self, given: Sequence[Sequence[int]], tokens: int = TOKENS) -> list[Output]:
        """What the decode engine answers."""
        self.submit(given, tokens)
        self.prefill.outputs()
        return self.decode.outputs()

    def restart_prefill(self) -> None:
        """In the place of one that was killed."""
        self.prefill = self.begin("prefill", chunked_prefill_size=128).started()

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()


def assert_equal(found: Sequence[Output], expected: Sequence[tuple[int, ...]]) -> None:
    assert [each.error for each in found] == [None] * len(found)
    assert [each.tokens for each in found] == list(expected)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def undivided(model: Path) -> Iterator[EngineProcess]:
    engine = EngineProcess(Shape(model))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def pair(model: Path, undivided: EngineProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    both = Pair(model, tmp_path_factory.mktemp("tampering"))
    undivided.started()
    yield both.started()
    both.close()


@pytest.fixture(autouse=True)
def healed(pair: Pair) -> Iterator[None]:
    yield
    pair.tampering.heal()


def test_sixteen_prompts_at_once(pair: Pair, undivided: EngineProcess):
    given = prompts(1)
    assert_equal(pair.run(given), undivided.generate(given, TOKENS))


def test_pages_leave_as_chunks_finish(pair: Pair, undivided: EngineProcess):
    (prompt,) = prompts(2, 1, shortest=600)
    (room,) = pair.submit([prompt])
    pair.prefill.outputs()
    assert_equal(pair.decode.outputs(), undivided.generate([prompt], TOKENS))
    chunks = [each["pages"] for each in pair.tampering.said("submitted") if each["room"] == room]
    assert len(chunks) >= 4
    assert sum(chunks) == 38  # pages of 16 tokens


def test_what_the_decode_side_has_does_not_travel(pair: Pair, undivided: EngineProcess):
    (prompt,) = prompts(3, 1, shortest=320)
    longer = prompt + prompts(4, 1, shortest=90)[0]
    assert_equal(pair.run([prompt]), undivided.generate([prompt], TOKENS))
    (room,) = pair.submit([longer])
    pair.prefill.outputs()
    assert_equal(pair.decode.outputs(), undivided.generate([longer], TOKENS))
    (asked,) = [each for each in pair.tampering.said("asked") if each["room"] == room]
    assert asked == {"room": room, "pages": 6, "prefix_tokens": 320}


@pytest.mark.parametrize("fault", ["another page", "another first token"])
def test_a_fault_shows(pair: Pair, undivided: EngineProcess, fault: str):
    given = prompts(5 + len(fault), 4, shortest=100)
    pair.tampering.plant(fault)
    found = pair.run(given)
    pair.tampering.heal()
    assert [each.tokens for each in found] != undivided.generate(given, TOKENS)


def test_a_hundred_requests_leave_nothing(pair: Pair, undivided: EngineProcess):
    # Five times what a pool holds: what leaked would be missed. SGLang looks itself, too, when it is idle, and ends.
    for batch in range(5):
        given = prompts(100 + batch, 20, shortest=150, longest=250)
        assert_equal(pair.run(given, 2), undivided.generate(given, 2))
    time.sleep(2)
    (prompt,) = prompts(106, 1, shortest=900)
    assert_equal(pair.run([prompt], 2), undivided.generate([prompt], 2))


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_abort(pair: Pair, undivided: EngineProcess, side: str):
    (given,) = prompts(7 + len(side), 1, shortest=400)
    engine = pair.prefill if side == "prefill" else pair.decode
    engine.submit([given], TOKENS, rooms=[next(ROOMS)], port=pair.port)
    time.sleep(1)
    engine.abort()
    (answer,) = engine.outputs(30)
    assert answer.error
    assert_equal(pair.run([given]), undivided.generate([given], TOKENS))


def test_pages_of_different_size_are_refused_and_both_sides_end(pair: Pair, undivided: EngineProcess):
    """The decode server refuses before it opens a room; the prefill server has opened its own."""
    other = pair.begin("decode", page_size=32)
    try:
        other.started()
        given = prompts(11, 2, shortest=100)
        for number, prompt in enumerate(given):
            room = next(ROOMS)
            begun_at = time.monotonic()
            for engine in (pair.prefill, other):
                engine.submit([prompt], TOKENS, rooms=[room], port=pair.port)
            (refused,), (told,) = other.outputs(60), pair.prefill.outputs(60)
            took_s = time.monotonic() - begun_at
            assert refused.error is not None
            assert "--page-size is 16 there and 32 here" in refused.error
            assert told.error is not None
            assert "refused it: the prefill server at" in told.error
            assert took_s < ENDS_S, f"request {number}: {took_s:.1f} s"
    finally:
        other.close()
    assert_equal(pair.run(given), undivided.generate(given, TOKENS))


def test_a_prefill_engine_that_is_killed_fails_its_requests_soon_and_comes_back(pair: Pair, undivided: EngineProcess):
    given = prompts(9, 4, shortest=500)
    pair.decode.submit(given, TOKENS, rooms=[next(ROOMS) for _ in given], port=pair.port)
    time.sleep(1.5)
    killed_at = time.monotonic()
    pair.prefill.kill()
    answers = pair.decode.outputs(60)
    assert time.monotonic() - killed_at < 20
    assert all(each.error for each in answers)
    pair.restart_prefill()
    assert_equal(pair.run(given), undivided.generate(given, TOKENS))


def test_kvferry_in_the_place_of_nixl(model: Path, undivided: EngineProcess, tmp_path: Path):
    both = Pair(model, tmp_path / "tampering", backend="nixl", KVFERRY_SGLANG_REPLACES_NIXL="1", KVFERRY_PATH="staged")
    try:
        given = prompts(10)
        assert_equal(both.started().run(given), undivided.generate(given, TOKENS))
        assert len({each["room"] for each in both.tampering.said("submitted")}) == len(given)
    finally:
        both.close()
