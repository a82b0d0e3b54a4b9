"""Requests that wait on a decode engine for longer than the prefill engine would hold their caches."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from examples.tiny_model import write
from tests.real_engines.prompts import prompts
from tests.real_engines.vllm.engine import EngineProcess
from tests.real_engines.vllm.pairs import Engines, Pair
from tests.support.waiting import eventually

pytestmark = [pytest.mark.servers, pytest.mark.full, pytest.mark.timeout(600)]

HOLD_S = 3.0
SETTINGS = {"bootstrap_timeout_s": HOLD_S}

SMALL_MIB = 9
"""A pool of 36 blocks: of two requests of 600 tokens, which take 19 each, the second waits for the first."""

LONG = 400
"""Tokens that a request generates, for seconds."""


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    begun = Engines(write("qwen3", tmp_path_factory.mktemp("qwen3")))
    begun.alone()
    begun.prefill("prefill", settings=SETTINGS)
    begun.decode("decode", settings=SETTINGS, pool_mib=SMALL_MIB, is_asynchronous=True)
    yield begun
    begun.close()


def connected(pair: Pair) -> Pair:
    """Two servers that found each other, which takes as long as it takes."""
    (prompt,) = prompts(1, 1, shortest=100)
    assert pair.run_in_turn(prompt, f"first-{pair.decode.shape.name}").tokens
    return pair


def computed(prefill: EngineProcess, name: str, prompt: list[int]) -> dict[str, object]:
    """Has a prompt computed; returns what the decode engine is to be told."""
    prefill.submit(name, prompt, 1, {"do_remote_decode": True})
    parameters = prefill.output(name).parameters
    assert parameters is not None
    return parameters


def keep_busy(decode: EngineProcess, requests: int) -> list[str]:
    """Has a decode engine compute requests of its own, one after the other."""
    names = [f"own-{number}" for number in range(requests)]
    for name, prompt in zip(names, prompts(2, requests, shortest=600, longest=600), strict=True):
        decode.submit(name, prompt, LONG)
    return names


def test_a_queue_that_is_longer_than_the_hold_loses_nothing(engines: Engines):
    pair = connected(Pair(engines.prefill("prefill"), engines.decode("decode")))
    each, free, before = prompts(3, 6, shortest=600, longest=600), pair.free_blocks(), pair.received
    begun_at = time.monotonic()
    for number, prompt in enumerate(each):
        name = f"queued-{number}"
        pair.decode.submit(name, prompt, LONG, computed(pair.prefill, name, prompt))
    outputs = [pair.decode.output(f"queued-{number}") for number in range(len(each))]
    assert time.monotonic() - begun_at > 1.5 * HOLD_S, "the queue was short: the test shows nothing"
    assert [output.reason for output in outputs] == ["length"] * len(each), pair.said
    assert pair.received - before == len(each)
    assert [output.tokens for output in outputs] == engines.alone().started().generate(each, LONG)
    assert pair.free_blocks() == free
    assert "no decode rank has asked" not in pair.said


def test_what_a_queue_waits_for_is_given_up_when_vllm_needs_its_blocks(engines: Engines):
    prefill = engines.prefill("prefill-small", settings=SETTINGS, pool_mib=SMALL_MIB)
    pair = connected(Pair(prefill, engines.decode("decode")))
    free = pair.free_blocks()
    (first, second) = prompts(4, 2, shortest=600, longest=600)
    own = keep_busy(pair.decode, 5)
    begun_at = time.monotonic()
    pair.decode.submit("given-up", first, 8, computed(prefill, "given-up", first))
    eventually("it is held for longer", lambda: time.monotonic() - begun_at > 1.5 * HOLD_S)
    assert prefill.ask("free_blocks") == free[0] - 19
    told = computed(prefill, "instead", second)
    assert prefill.ask("failures", "vllm:kvferry_failed_sends")["memory"] == 1
    assert "vLLM needs its blocks for other requests" in pair.said
    pair.decode.submit("instead", second, 8, told)
    assert pair.decode.output("given-up").reason == "error"
    assert [pair.decode.output("instead").tokens] == engines.alone().started().generate([second], 8)
    assert all(len(pair.decode.output(name).tokens) == LONG for name in own)
    assert pair.free_blocks() == free
    assert pair.said.count("vLLM needs its blocks for other requests") >= 2, "the decode server does not say why"


def test_what_the_queue_of_a_dead_server_waited_for_is_given_back(engines: Engines):
    decode = engines.decode("decode-killed", settings=SETTINGS, pool_mib=SMALL_MIB)
    pair = connected(Pair(engines.prefill("prefill"), decode))
    free, (prompt,) = pair.free_blocks(), prompts(5, 1, shortest=600, longest=600)
    keep_busy(decode, 4)
    begun_at = time.monotonic()
    decode.submit("left", prompt, 8, computed(pair.prefill, "left", prompt))
    eventually("it is held for longer", lambda: time.monotonic() - begun_at > 1.5 * HOLD_S)
    assert pair.prefill.ask("free_blocks") == free[0] - 19
    decode.kill()
    pair.prefill.wait_idle()
    assert pair.prefill.ask("free_blocks") == free[0]
    assert pair.prefill.ask("failures", "vllm:kvferry_failed_sends")["expiry"] == 1


def test_a_prefill_server_that_is_paused_does_not_wait_for_the_queue_of_one_that_is_paused_too(engines: Engines):
    """A pause is over once vLLM keeps nothing, and whoever asks for it waits until then."""
    pair = connected(Pair(engines.prefill("prefill"), engines.decode("decode")))
    free, (prompt,) = pair.free_blocks(), prompts(6, 1, shortest=600, longest=600)
    own = keep_busy(pair.decode, 4)
    begun_at = time.monotonic()
    pair.decode.submit("queued", prompt, 8, computed(pair.prefill, "queued", prompt))
    eventually("it is held for longer", lambda: time.monotonic() - begun_at > 1.5 * HOLD_S)
    assert pair.prefill.ask("free_blocks") == free[0] - 19
    for engine in (pair.decode, pair.prefill):
        engine.ask("pause")
    pair.prefill.wait_idle()
    for engine in (pair.decode, pair.prefill):
        engine.ask("resume")
    assert pair.decode.output("queued").reason == "error"
    assert all(len(pair.decode.output(name).tokens) == LONG for name in own)
    assert pair.free_blocks() == free
