"""One prefill and one decode engine of SGLang's over kvferry, token for token against the undivided engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from examples.tiny_model import write
from tests.real_engines.prompts import prompts
from tests.real_engines.sglang.engine import EngineProcess, Shape
from tests.real_engines.sglang.pairs import ROOMS, TOKENS, Pair, assert_equal, check_stages
from tests.support.waiting import eventually

pytestmark = [pytest.mark.servers, pytest.mark.timeout(600)]

ENDS_S = 5.0
RANGES = 3
"""Of layers, each of which leaves by itself."""
"""By when both sides have ended after one has refused a request."""


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
    # With SGLang's own checksums of what has moved, which an engine on a CPU computes by a plug-in of ours; and layer
    # by layer, since all other pairs of engines send the layers of a step at once.
    both = Pair(
        model,
        tmp_path_factory.mktemp("tampering"),
        environment={"KVFERRY_LAYER_RANGES": str(RANGES)},
        disaggregation_enable_kv_checksum=True,
    )
    undivided.started()
    yield both.started()
    both.close()


@pytest.fixture(autouse=True)
def healed(pair: Pair) -> Iterator[None]:
    yield
    pair.tampering.heal()


@pytest.mark.shows("sglang", "MHATokenToKVPool")
def test_sixteen_prompts_at_once(pair: Pair, undivided: EngineProcess):
    given = prompts(1)
    assert_equal(pair.run(given), undivided.generate(given, TOKENS))


def test_layers_leave_as_they_are_computed_until_steps_overlap(pair: Pair, undivided: EngineProcess):
    (prompt,) = prompts(2, 1, shortest=600)
    (room,) = pair.submit([prompt])
    pair.prefill.outputs()
    assert_equal(pair.decode.outputs(), undivided.generate([prompt], TOKENS))
    chunks = [each["pages"] for each in pair.tampering.said("submitted") if each["room"] == room]
    # Of 16 tokens a page, in their order. A step that begins before the one before it was handed in leaves at its end:
    # whether a later one does depends on how fast the engine is.
    assert chunks[:RANGES] == [8] * RANGES
    assert chunks.count(8) - RANGES in range(3, 3 * RANGES + 1, RANGES - 1)
    assert chunks.count(6) in (1, RANGES)
    assert chunks == sorted(chunks, reverse=True)


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
    assert handed_in == [6] * RANGES
    compared = [each for each in pair.tampering.said("compared") if each["room"] == room]
    assert compared == [{"room": room, "pages": 6, "mismatch": False}]


def test_sglangs_checksum_would_differ_if_the_prefill_side_did_not_know_the_prefix(pair: Pair):
    """As it was: every request of which the decode side had the first pages failed."""
    (prompt,) = prompts(14, 1, shortest=320)
    assert [each.error for each in pair.run([prompt])] == [None]
    pair.tampering.plant("no prefix")
    (found,) = pair.run([prompt + prompts(15, 1, shortest=90)[0]])
    assert "KV checksum mismatch" in (found.error or "")


def test_sglangs_checksum_finds_another_page_behind_a_prefix(pair: Pair, undivided: EngineProcess):
    (prompt,) = prompts(11, 1, shortest=320)
    assert_equal(pair.run([prompt]), undivided.generate([prompt], TOKENS))
    given = [prompt + prompts(12, 1, shortest=90)[0], prompts(13, 1, shortest=200)[0]]
    pair.tampering.plant("another page")
    found = pair.run(given)
    pair.tampering.heal()
    assert ["KV checksum mismatch" in (each.error or "") for each in found] == [True, True]
    assert_equal(pair.run(given), undivided.generate(given, TOKENS))


@pytest.mark.parametrize("fault", ["another page", "another first token", "layers too early"])
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


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_abort_in_the_middle_gives_everything_back_on_both_sides(pair: Pair, undivided: EngineProcess, side: str):
    idle = {each: pair.all_tokens(each) for each in ("prefill", "decode")}
    (given,) = prompts(20 + len(side), 1, shortest=900)
    pair.tampering.plant("no end")
    (room,) = pair.submit([given])
    eventually("all but the last chunk is sent", lambda: [{"room": room}] == pair.tampering.said("withheld")[-1:])
    assert all(pair.free_tokens(each)["tokens"] < idle[each] for each in idle)
    aborted_at = time.time()
    (pair.prefill if side == "prefill" else pair.decode).abort()
    for engine in (pair.prefill, pair.decode):
        (answer,) = engine.outputs(30)
        assert answer.error
    for each in idle:
        # On a machine with too much to do a side may be given up: docs/reliability.md says for how long pages are held
        # then, and what kvferry has logged, which pytest shows, who it was.
        eventually(f"{each} has all back", lambda each: pair.free_tokens(each)["tokens"] == idle[each], each)
        assert pair.free_tokens(each)["at"] - aborted_at < 2, pair.free_tokens(each)
    pair.tampering.heal()
    assert_equal(pair.run([given]), undivided.generate([given], TOKENS))


def test_another_salt_on_one_side_is_refused_by_name(pair: Pair, undivided: EngineProcess):
    (given,) = prompts(30, 1, shortest=100)
    for salt in ("another tenant", "one tenant"):
        rooms = [next(ROOMS)]
        pair.prefill.submit([given], TOKENS, rooms=rooms, port=pair.port, cache_salt=["one tenant"])
        pair.decode.submit([given], TOKENS, rooms=rooms, port=pair.port, cache_salt=[salt])
        answers = [*pair.prefill.outputs(), *pair.decode.outputs()]
        if salt == "one tenant":
            assert_equal(answers[1:], undivided.generate([given], TOKENS))
        else:
            assert ["another cache salt" in (each.error or "") for each in answers] == [True, True], answers


@pytest.mark.full
def test_another_checkpoint_of_the_same_shape_is_refused(pair: Pair, tmp_path: Path):
    other = pair.begin_decode(write("llama", tmp_path / "model", seed=12)).started()
    try:
        (given,) = prompts(40, 1, shortest=100)
        rooms = [next(ROOMS)]
        pair.prefill.submit([given], TOKENS, rooms=rooms, port=pair.port)
        other.submit([given], TOKENS, rooms=rooms, port=pair.port)
        for engine in (other, pair.prefill):
            (answer,) = engine.outputs()
            assert "the two sides' caches do not mean the same: weights is" in (answer.error or ""), answer
    finally:
        other.close()


@pytest.mark.full
def test_another_type_of_cache_is_refused_and_both_sides_end(pair: Pair, undivided: EngineProcess):
    """The decode server refuses before it opens a room; the prefill server has opened its own."""
    other = pair.begin_decode(kv_cache_dtype="bfloat16")
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
            assert "--kv-cache-dtype is auto there and bfloat16 here" in refused.error
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


@pytest.mark.full
def test_kvferry_in_the_place_of_nixl(model: Path, undivided: EngineProcess, tmp_path: Path):
    # With what may be set for SGLang's own backends, and would have its scheduler do what is of no use here.
    of_others = {"SGLANG_DISAGG_STAGING_BUFFER": "1", "SGLANG_MOONCAKE_CUSTOM_MEM_POOL": "INTRA_NODE_NVLINK"}
    environment = {"KVFERRY_SGLANG_REPLACES_NIXL": "1", "KVFERRY_PATH": "staged", **of_others}
    both = Pair(
        model,
        tmp_path / "tampering",
        backend="nixl",
        environment=environment,
        spawns=True,
        disaggregation_ib_device="mlx5_0",
    )
    try:
        given = prompts(10)
        assert_equal(both.started().run(given), undivided.generate(given, TOKENS))
        assert len({each["room"] for each in both.tampering.said("submitted")}) == len(given)
    finally:
        both.close()


@pytest.mark.full
def test_pipeline_stages_on_the_prefill_side(undivided: EngineProcess, model: Path):
    """Without SGLang's own checksums, which are of one stage's bytes."""
    check_stages(model, undivided, "prefill")


@pytest.mark.full
def test_pipeline_stages_on_the_decode_side(undivided: EngineProcess, model: Path):
    check_stages(model, undivided, "decode")


@pytest.mark.full
def test_replicas_on_both_sides(model: Path, undivided: EngineProcess, tmp_path: Path):
    """Plain --dp-size: rooms choose among them."""
    bound = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    both = Pair(model, tmp_path / "tampering", environment=bound, dp_size=2)
    try:
        given = prompts(16, 6, shortest=20, longest=200)
        assert_equal(both.started().run(given), undivided.generate(given, TOKENS))
    finally:
        both.close()
