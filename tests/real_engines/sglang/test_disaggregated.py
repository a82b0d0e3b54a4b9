"""One prefill and one decode engine of SGLang's over kvferry, token for token against the undivided engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from examples.tiny_model import write
from tests.real_engines.prompts import prompts
from tests.real_engines.sglang.engine import EngineProcess, Shape
from tests.real_engines.sglang.pairs import ROOMS, TOKENS, Pair, assert_equal

pytestmark = pytest.mark.timeout(600)


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
    # With SGLang's own checksums of what has moved, which an engine on a CPU computes by a plug-in of ours.
    both = Pair(model, tmp_path_factory.mktemp("tampering"), disaggregation_enable_kv_checksum=True)
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
    # Nor does the prefill engine hand it in, or digest it: else its checksum would not be the decode side's.
    handed_in = [each["pages"] for each in pair.tampering.said("submitted") if each["room"] == room]
    assert sum(handed_in) == 6
    compared = [each for each in pair.tampering.said("compared") if each["room"] == room]
    assert compared == [{"room": room, "pages": 6, "mismatch": False}]


def test_sglangs_checksum_finds_another_page_behind_a_prefix(pair: Pair, undivided: EngineProcess):
    (prompt,) = prompts(11, 1, shortest=320)
    assert_equal(pair.run([prompt]), undivided.generate([prompt], TOKENS))
    given = [prompt + prompts(12, 1, shortest=90)[0], prompts(13, 1, shortest=200)[0]]
    pair.tampering.plant("another page")
    found = pair.run(given)
    pair.tampering.heal()
    assert [each.error for each in found] == ["KV checksum mismatch"] * 2
    assert_equal(pair.run(given), undivided.generate(given, TOKENS))


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
    environment = {"KVFERRY_SGLANG_REPLACES_NIXL": "1", "KVFERRY_PATH": "staged"}
    both = Pair(model, tmp_path / "tampering", backend="nixl", environment=environment)
    try:
        given = prompts(10)
        assert_equal(both.started().run(given), undivided.generate(given, TOKENS))
        assert len({each["room"] for each in both.tampering.said("submitted")}) == len(given)
    finally:
        both.close()
