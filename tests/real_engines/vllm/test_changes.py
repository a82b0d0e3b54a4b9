"""Weights and adapters that change in two real vLLM engines that run: what was computed before is not taken after."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from examples.tiny_model import write
from tests.real_engines.prompts import prompts
from tests.real_engines.vllm.adapters import write_adapter
from tests.real_engines.vllm.engine import EngineError, EngineProcess, Output
from tests.real_engines.vllm.pairs import COUNT, Engines, Pair

from kvferry.engines.vllm.parameters import ROOM

pytestmark = [pytest.mark.servers, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two of one shape; engines start with the first one."""
    directory = tmp_path_factory.mktemp("checkpoints")
    return str(write("qwen3", directory / "first")), str(write("qwen3", directory / "second", seed=12))


@pytest.fixture(scope="module")
def adapter(checkpoints: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the adapter lies that all engines have."""
    return write_adapter(tmp_path_factory.mktemp("adapters") / "a", Path(checkpoints[0]), seed=0)


@pytest.fixture(scope="module")
def engines(checkpoints: tuple[str, str], adapter: Path) -> Iterator[Engines]:
    begun = Engines(Path(checkpoints[0]))
    begun.begin("alone", connector="", adapters={"a": adapter})
    from_home = Path("~", os.path.relpath(adapter, Path.home()))  # which vLLM resolves
    for begin in (begun.prefill, begun.decode):
        begin(begin.__name__, prefix_cache=True, adapters={"a": from_home}, is_asynchronous=True)
    yield begun
    begun.close()


@pytest.fixture
def pair(engines: Engines, checkpoints: tuple[str, str], adapter: Path) -> Pair:
    """Both with the first checkpoint, whatever a test before has left."""
    found = Pair(engines.prefill("prefill"), engines.decode("decode"))
    for each in (found.prefill, found.decode, engines.alone().started()):
        load(each, checkpoints[0])
    return found


def load(engine: EngineProcess, checkpoint: str) -> None:
    """Replaces the weights of an engine in place."""
    engine.ask("rpc", "reload_weights", {"weights_path": checkpoint})


def alone(engines: Engines, prompt: Sequence[int], adapter: str = "") -> tuple[int, ...]:
    engine = engines.alone().started()
    engine.submit("alone", prompt, COUNT, adapter=adapter)
    return engine.output("alone").tokens


def offered(pair: Pair, prompt: Sequence[int], name: str, adapter: str = "") -> dict[str, object]:
    """What the prefill engine answers, once it has computed a prompt."""
    pair.prefill.submit(name, prompt, 1, {"do_remote_decode": True}, adapter=adapter)
    parameters = pair.prefill.output(name).parameters
    assert parameters is not None
    return parameters


def fetched(pair: Pair, prompt: Sequence[int], name: str, parameters: dict[str, object], adapter: str = "") -> Output:
    pair.decode.submit(name, prompt, COUNT, parameters, adapter=adapter)
    return pair.decode.output(name)


# ---- weights -------------------------------------------------------------------------------------------------------


def test_what_was_computed_before_both_changed_is_not_taken_after(
    engines: Engines, pair: Pair, checkpoints: tuple[str, str]
):
    each = prompts(1, 3, shortest=100)
    offers = [offered(pair, prompt, f"before-{number}") for number, prompt in enumerate(each)]
    for engine in (pair.prefill, pair.decode, engines.alone().started()):
        load(engine, checkpoints[1])
    after = [fetched(pair, prompt, f"before-{number}", offers[number]) for number, prompt in enumerate(each)]
    right = [alone(engines, prompt) for prompt in each]
    kept = [pair.decode.generate([prompt], COUNT)[0] for prompt in each]
    assert kept == right, "what came is in the decode engine's own prefix cache"
    assert [(output.reason, output.tokens) for output in after] == [("error", ())] * 3
    assert "weights" in pair.said


def test_equal_changes_agree_and_what_the_prefill_engine_has_from_before_does_not_leave(
    engines: Engines, pair: Pair, checkpoints: tuple[str, str]
):
    """The second time, it would have the prompt's blocks in its own prefix cache."""
    (prompt,) = prompts(2, 1, shortest=200)
    before = pair.run_in_turn(prompt, "first")
    assert before.tokens == alone(engines, prompt)
    for engine in (pair.prefill, pair.decode, engines.alone().started()):
        load(engine, checkpoints[1])
    received = pair.received
    assert pair.run_in_turn(prompt, "second").tokens == alone(engines, prompt) != before.tokens
    assert pair.received == received + 1


@pytest.mark.parametrize("changed", ["prefill", "decode"])
def test_one_side_that_changed_alone_is_refused_until_the_other_has_too(
    engines: Engines, pair: Pair, checkpoints: tuple[str, str], changed: str
):
    one, other = (pair.prefill, pair.decode) if changed == "prefill" else (pair.decode, pair.prefill)
    (prompt,) = prompts(3 + len(changed), 1, shortest=100)
    load(one, checkpoints[1])
    assert pair.run_in_turn(prompt, f"alone-{changed}").reason == "error"
    pair.prefill.wait_idle()
    assert "weights version" in pair.said
    for engine in (other, engines.alone().started()):
        load(engine, checkpoints[1])
    assert pair.run_in_turn(prompt, f"both-{changed}").tokens == alone(engines, prompt)


def test_what_had_come_when_the_weights_changed_is_not_gone_on_with(
    engines: Engines, pair: Pair, checkpoints: tuple[str, str]
):
    (prompt,) = prompts(8, 1, shortest=100)
    offer = offered(pair, prompt, "come")
    free = pair.decode.ask("free_blocks")
    pair.decode.submit("come", prompt, COUNT, offer)
    pair.decode.ask("rpc_when_one_has_arrived", "reload_weights", {"weights_path": checkpoints[1]})
    assert pair.decode.output("come").reason == "error"
    pair.decode.wait_idle()
    assert pair.decode.ask("free_blocks") == free
    load(engines.alone().started(), checkpoints[1])
    assert pair.decode.generate([prompt], COUNT) == [alone(engines, prompt)]


def test_what_a_queued_step_computes_while_the_weights_are_replaced_is_not_taken(
    engines: Engines, pair: Pair, checkpoints: tuple[str, str]
):
    """Asynchronous scheduling: the prefill engine answers with an offer after the change."""
    free, (prompt,) = pair.free_blocks(), prompts(14, 1, shortest=100)
    pair.prefill.ask("submit_and_load", "queued", prompt, {"do_remote_decode": True}, checkpoints[1])
    offer = pair.prefill.output("queued").parameters
    for engine in (pair.decode, engines.alone().started()):
        load(engine, checkpoints[1])
    if offer is not None:
        assert fetched(pair, prompt, "queued", offer).reason == "error"
    assert pair.free_blocks() == free
    assert pair.run_in_turn(prompt, "queued-after").tokens == alone(engines, prompt), pair.said


def test_equal_weights_agree_on_different_numbers_of_ranks(
    engines: Engines, checkpoints: tuple[str, str], adapter: Path
):
    two = engines.prefill("prefill-tp2", tp=2, prefix_cache=True)
    pair = Pair(two, engines.decode("decode"))
    (prompt,) = prompts(9, 1, shortest=100)
    for engine in (pair.prefill, pair.decode, engines.alone().started()):
        load(engine, checkpoints[1])
    received = pair.received
    assert pair.run_in_turn(prompt, "tp2").tokens == alone(engines, prompt), pair.said
    assert pair.received == received + 1


def test_weights_are_the_same_where_they_are_called_so(engines: Engines, pair: Pair):
    (prompt,) = prompts(10, 1, shortest=100)
    pair.prefill.ask("name_weights", "step-7")
    assert pair.run_in_turn(prompt, "unnamed").reason == "error"
    pair.decode.ask("name_weights", "step-7")
    assert pair.run_in_turn(prompt, "named").tokens == alone(engines, prompt)


def test_weights_that_a_trainer_loaded_unasked_are_others_once_they_are_named(
    engines: Engines, pair: Pair, checkpoints: tuple[str, str]
):
    (prompt,) = prompts(11, 1, shortest=200)
    before = pair.run_in_turn(prompt, "untrained")
    for engine in (pair.prefill, pair.decode):
        engine.ask("load_unasked", checkpoints[1])
        engine.ask("name_weights", "step-8")
    load(engines.alone().started(), checkpoints[1])
    received = pair.received
    assert pair.run_in_turn(prompt, "trained").tokens == alone(engines, prompt) != before.tokens
    assert pair.received == received + 1


# ---- caches --------------------------------------------------------------------------------------------------------


def test_what_was_offered_before_the_caches_were_reset_is_not_sent(engines: Engines, pair: Pair):
    free, (prompt,) = pair.free_blocks(), prompts(12, 1, shortest=100)
    offer = offered(pair, prompt, "reset")
    pair.prefill.ask("reset")
    pair.prefill.wait_idle()
    assert fetched(pair, prompt, "reset", offer).reason == "error"
    assert "the engine's caches were reset" in pair.said
    assert pair.free_blocks() == free
    assert pair.run_in_turn(prompt, "reset-after").tokens == alone(engines, prompt), pair.said


def test_what_was_asked_for_before_the_caches_were_reset_is_not_taken(engines: Engines, pair: Pair):
    free, (prompt,) = pair.free_blocks(), prompts(13, 1, shortest=100)
    room = {ROOM: 3_000_000}
    wants = {"do_remote_prefill": True, "remote_engine_id": pair.prefill.shape.name, **room}
    pair.decode.submit("asked", prompt, COUNT, wants)
    pair.decode.ask("reset")
    assert pair.decode.output("asked").reason == "error"
    pair.prefill.submit("asked", prompt, 1, {"do_remote_decode": True, **room})
    pair.prefill.output("asked")
    assert pair.free_blocks() == free
    assert pair.run_in_turn(prompt, "asked-after").tokens == alone(engines, prompt), pair.said


# ---- adapters ------------------------------------------------------------------------------------------------------


def replace(adapter: Path, checkpoint: str, seed: int) -> None:
    """Puts another adapter where one lies; a server that starts meanwhile reads no half of a file."""
    with tempfile.TemporaryDirectory(dir=adapter.parent) as empty:
        for file in write_adapter(Path(empty) / "other", Path(checkpoint), seed=seed).iterdir():
            file.replace(adapter / file.name)


def test_an_adapter_that_was_replaced_on_both_sides_is_another(
    engines: Engines, pair: Pair, checkpoints: tuple[str, str], adapter: Path
):
    prompt, other = prompts(21, 2, shortest=200)
    warm = fetched(pair, other, "warm", offered(pair, other, "warm", "a"), "a")
    assert warm.tokens == alone(engines, other, "a"), "both have it"
    offer = offered(pair, prompt, "old", "a")
    replace(adapter, checkpoints[0], 7)
    for engine in (pair.prefill, pair.decode, engines.alone().started()):
        engine.ask("load_adapter", "a")
    after = fetched(pair, prompt, "old", offer, "a")
    right = alone(engines, prompt, "a")
    assert after.tokens in ((), right), "what the old adapter computed was taken"
    new = fetched(pair, prompt, "new", offered(pair, prompt, "new", "a"), "a")
    assert new.tokens == right, "what the old adapter computed is still there"


def test_an_adapter_whose_files_alone_were_replaced_is_refused_until_it_is_loaded(
    engines: Engines, pair: Pair, checkpoints: tuple[str, str], adapter: Path
):
    (prompt,) = prompts(22, 1, shortest=200)
    assert fetched(pair, prompt, "loaded", offered(pair, prompt, "loaded", "a"), "a").tokens == alone(
        engines, prompt, "a"
    )
    replace(adapter, checkpoints[0], 8)
    refused = fetched(pair, prompt[1:], "replaced", offered(pair, prompt[1:], "replaced", "a"), "a")
    assert refused.reason == "error"
    assert "have changed since vLLM loaded them" in pair.said
    for engine in (pair.prefill, pair.decode, engines.alone().started()):
        engine.ask("load_adapter", "a")
    anew = fetched(pair, prompt, "anew", offered(pair, prompt, "anew", "a"), "a")
    assert anew.tokens == alone(engines, prompt, "a"), pair.said


def test_a_decode_engine_that_starts_after_an_adapter_was_replaced_agrees(
    engines: Engines, pair: Pair, checkpoints: tuple[str, str], adapter: Path
):
    replace(adapter, checkpoints[0], 9)
    for engine in (pair.prefill, engines.alone().started()):
        engine.ask("load_adapter", "a")
    for checkpoint in reversed(checkpoints):  # they lose the name that a test before has given them
        load(pair.prefill, checkpoint)
    late = Pair(pair.prefill, engines.decode("decode-late", adapters={"a": adapter}, is_asynchronous=True))
    (prompt,) = prompts(23, 1, shortest=200)
    found = fetched(late, prompt, "late", offered(late, prompt, "late", "a"), "a")
    assert found.tokens == alone(engines, prompt, "a"), late.said
    assert late.received == 1


# ---- memory --------------------------------------------------------------------------------------------------------


def test_an_engine_that_would_give_its_memory_back_unnoticed_is_kept_from_it(pair: Pair):
    with pytest.raises(EngineError, match="does not say when sleep and waking replace it"):
        pair.prefill.ask("sleep")


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_caches_whose_memory_was_replaced_are_registered_anew(engines: Engines, pair: Pair, side: str):
    (prompt,) = prompts(31 + len(side), 1, shortest=100)
    pair.prefill.wait_idle()
    (pair.prefill if side == "prefill" else pair.decode).ask("restore_caches")
    received = pair.received
    assert pair.run_in_turn(prompt, f"woken-{side}").tokens == alone(engines, prompt), pair.said
    assert pair.received == received + 1
