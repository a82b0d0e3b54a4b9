"""Real engines whose weights are replaced while they run, whose peers die while idle, and whose gateways err."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from examples.tiny_model import write
from safetensors.torch import load_file, save_file
from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput, UpdateWeightVersionReqInput
from tests.real_engines.prompts import prompts
from tests.real_engines.sglang.engine import EngineProcess, Shape, disaggregated
from tests.real_engines.sglang.pairs import ROOMS, TOKENS, Pair, assert_equal, refuse_another_prompt
from tests.real_engines.sglang.test_lives import IDLE_S
from tests.support.waiting import eventually

from kvferry.applications.up.supervision import free_ports

pytestmark = [pytest.mark.servers, pytest.mark.timeout(900)]

POOL = 4096
"""Tokens in an engine's pool."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def newer(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model after some training."""
    directory = write("llama", tmp_path_factory.mktemp("newer"))
    torch.manual_seed(7)
    tensors = load_file(model / "model.safetensors")
    trained = {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in tensors.items()}
    save_file(trained, directory / "model.safetensors", {"format": "pt"})
    return directory


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


def update(engine: EngineProcess, path: Path, version: str | None = None, *, flushes: bool = True) -> None:
    time.sleep(IDLE_S)  # else SGLang does not flush its cache, and says that the update has failed
    request = UpdateWeightFromDiskReqInput(model_path=str(path), weight_version=version, flush_cache=flushes)
    success, message, _ = engine.ask("update_weights_from_disk", request)
    assert success, message


def assert_refused(pair: Pair, given: Sequence[Sequence[int]]) -> None:
    """Both sides refuse all of them, since their weights differ."""
    rooms = [next(ROOMS) for _ in given]
    for engine in (pair.prefill, pair.decode):
        engine.submit(given, TOKENS, rooms=rooms, port=pair.port, apart=True)
    for answer in [*pair.prefill.outputs(), *pair.decode.outputs()]:
        assert "weights is " in (answer.error or ""), f"{answer} is of the one side's weights, or of the other's"


def test_a_second_request_of_a_number_fails_alone(pair: Pair, undivided: EngineProcess):
    """Both died before, and so did the number's next."""
    first, second, third = prompts(1, 3, shortest=100, longest=300)
    for twice, once in ((pair.prefill, pair.decode), (pair.decode, pair.prefill)):
        room = next(ROOMS)
        twice.submit([first, second], TOKENS, rooms=[room, room], port=pair.port, apart=True)
        # Else the first may have ended before the second comes, whose number is free then.
        eventually("the second is refused", lambda room: {"room": room} in pair.tampering.said("in use"), room)
        once.submit([first], TOKENS, rooms=[room], port=pair.port)
        (served,), answers = once.outputs(), twice.outputs()
        assert (served.error, answers[0].error) == (None, None)
        assert f"room {room} is in use here by another request" in (answers[1].error or "")
    assert_equal(answers[:1], undivided.generate([first], TOKENS))
    for engine in (pair.prefill, pair.decode):
        engine.submit([third], TOKENS, rooms=[room], port=pair.port)
    pair.prefill.outputs()
    assert_equal(pair.decode.outputs(), undivided.generate([third], TOKENS))


def test_weights_that_are_replaced_in_place_never_meet_others(
    pair: Pair, undivided: EngineProcess, model: Path, newer: Path
):
    """4 of 4 answers were wrong, without a word; a server that started with the new weights was refused."""
    given = prompts(2, 4, shortest=100, longest=300)
    old = undivided.generate(given, TOKENS)
    assert_equal(pair.run(given), old)
    update(pair.prefill, newer)
    for answer in pair.run(given):
        assert "weights is " in (answer.error or ""), (
            f"{answer} is of the prefill server's new weights, or its old ones"
        )
    update(undivided, newer)
    new = undivided.generate(given, TOKENS)
    assert all(one != other for one, other in zip(old, new, strict=True)), "the weights change nothing"
    started = pair.begin_decode(model=newer).started()
    try:
        refuse_another_prompt(pair.prefill, started, pair.port)
        rooms = [next(ROOMS) for _ in given]
        for engine in (pair.prefill, started):
            engine.submit(given, TOKENS, rooms=rooms, port=pair.port)
        pair.prefill.outputs()
        assert_equal(started.outputs(), new)
    finally:
        started.close()
    update(pair.decode, newer)
    assert_equal(pair.run(given), new)  # of which the decode side had cached the first with its old weights
    # A name is nothing beside files; and decode may be the first to go back.
    pair.decode.ask("update_weight_version", UpdateWeightVersionReqInput(new_version="7"))
    assert_equal(pair.run(given), new)
    update(pair.decode, model, "8")
    assert_refused(pair, given)
    update(pair.prefill, model)
    assert_equal(pair.run(given), old)
    update(undivided, model)


def test_what_an_update_leaves_cached_becomes_nobodys_answer(
    pair: Pair, undivided: EngineProcess, model: Path, newer: Path
):
    """Both sides have the new weights and answered from what the old ones had computed, here or there."""
    given = prompts(6, 4, shortest=100, longest=300)
    assert_equal(pair.run(given), undivided.generate(given, TOKENS))
    for side in (pair.prefill, pair.decode):
        update(side, newer, flushes=False)
        assert_refused(pair, given)
    update(undivided, newer)
    for side in (pair.prefill, pair.decode):
        assert_refused(pair, given)
        time.sleep(IDLE_S)
        assert side.ask("flush_cache").success
    assert_equal(pair.run(given), undivided.generate(given, TOKENS))
    for engine in (pair.prefill, pair.decode, undivided):
        update(engine, model)


def test_a_server_that_died_while_idle_holds_nobody_up(pair: Pair, undivided: EngineProcess, model: Path):
    """Its requests held all pages for 300 s, and those of another server failed behind them. Last: it is killed."""
    (port,) = free_ports(1)
    other = EngineProcess(Shape(model, disaggregated("prefill", port, chunked_prefill_size=128)))
    try:
        refuse_another_prompt(other.started(), pair.decode, port)
        assert_equal(pair.run(prompts(3, 2)), undivided.generate(prompts(3, 2), TOKENS))
        pair.prefill.kill()
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen(16)
            dead, good = prompts(4, 6, shortest=900, longest=1000), prompts(5, 8, shortest=100, longest=300)
            assert sum(map(len, dead)) > POOL
            rooms = [next(ROOMS) for _ in (*dead, *dead[:2], *good)]
            ports = [pair.port] * len(dead) + [silent.getsockname()[1]] * 2 + [port] * len(good)
            other.submit(good, TOKENS, rooms=rooms[-len(good) :], port=port)
            pair.decode.submit([*dead, *dead[:2], *good], TOKENS, rooms=rooms, bootstrap_port=ports, apart=True)
            other.outputs()
            answers = pair.decode.outputs()
    finally:
        other.close()
    assert_equal(answers[-len(good) :], undivided.generate(good, TOKENS))
    assert all("cannot be reached" in (each.error or "") for each in answers[: len(dead) + 2]), answers
