"""Two real vLLM engines that would read each other's caches wrongly are told apart, and so are two requests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from examples.tiny_model import write
from tests.real_engines.prompts import prompts
from tests.real_engines.vllm.adapters import write_adapter
from tests.real_engines.vllm.engine import Output
from tests.real_engines.vllm.pairs import COUNT, Engines, Pair

from kvferry.engines.vllm.identity import Platform, content_order
from kvferry.engines.vllm.parameters import ROOM

pytestmark = [pytest.mark.servers, pytest.mark.full, pytest.mark.timeout(600)]

_rooms = itertools.count(1_000_000)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints of one shape."""
    directory = tmp_path_factory.mktemp("models")
    one, other = directory / "one", directory / "other"
    return write("qwen3", one), write("qwen3", other, seed=12)


@pytest.fixture(scope="module")
def engines(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    directory = tmp_path_factory.mktemp("adapters")
    adapters = {name: write_adapter(directory / name, models[0], seed=seed) for seed, name in enumerate("ab")}
    begun = Engines(models[0])
    begun.begin("alone", connector="", adapters=adapters)
    begun.prefill("prefill", adapters=adapters)
    begun.decode("decode", adapters=adapters, prefix_cache=True, is_asynchronous=True)
    yield begun
    begun.close()


def ask(
    pair: Pair, name: str, prompt: Sequence[int], *, adapters: tuple[str, str] = ("", ""), other: Sequence[int] = ()
) -> None:
    """Asks both engines at once, with the adapters named for the prefill and the decode engine.

    Args:
        other: what the prefill engine is asked instead, if anything.
    """
    room, there = next(_rooms), pair.prefill.shape.name
    wants = {"do_remote_prefill": True, "remote_engine_id": there, ROOM: room}
    pair.decode.submit(name, prompt, COUNT, wants, adapter=adapters[1])
    pair.prefill.submit(name, other or prompt, 1, {"do_remote_decode": True, ROOM: room}, adapter=adapters[0])


def ended(pair: Pair, name: str) -> Output:
    pair.prefill.output(name)
    return pair.decode.output(name)


def alone(engines: Engines, prompt: Sequence[int], adapter: str) -> tuple[int, ...]:
    """Tokens of the undivided engine."""
    engine = engines.alone().started()
    name = f"alone-{next(_rooms)}"
    engine.submit(name, prompt, COUNT, adapter=adapter)
    return engine.output(name).tokens


# ---- engines -------------------------------------------------------------------------------------------------------


def test_two_checkpoints_of_one_shape_are_refused_with_both_named(engines: Engines, models: tuple[Path, Path]):
    pair = Pair(engines.prefill("prefill"), engines.decode("decode-other", model=models[1]))
    ask(pair, "other", prompts(1, 1)[0])
    assert ended(pair, "other").reason == "error"
    said = next(line for line in pair.decode.ask("logged") if "do not mean the same" in line)
    assert "weights is " in said
    assert said.count("tensors or files") == 2
    assert said.endswith("KVFERRY_MAY_DIFFER=weights")
    pair.prefill.wait_idle()


@pytest.mark.skipif(
    not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()),
    reason="vLLM caches fp8 on CPUs with AVX-512 or AMX alone; test_vllm_identity.py has the names without an engine",
)
def test_two_types_of_fp8_are_refused_with_both_named(engines: Engines):
    pair = Pair(
        engines.prefill("prefill-e4m3", cache_dtype="fp8_e4m3"), engines.decode("decode-e5m2", cache_dtype="fp8_e5m2")
    )
    ask(pair, "fp8", prompts(2, 1)[0])
    assert ended(pair, "fp8").reason == "error"
    expected = "cache_dtype is 'float8_e4m3fn' on prefill engine 'prefill-e4m3', 'float8_e5m2' on this decode rank"
    assert expected in pair.said
    pair.prefill.wait_idle()


def test_backends_of_vllms_give_one_shape_to_two_orders_and_these_are_told_apart():
    """They need GPUs to run, and none to say what they make of a layer's cache."""
    from vllm.v1.attention.backends.b12x import B12xPagedAttentionBackend
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    plain = FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    backends = (FlashAttentionBackend, TritonAttentionBackend, B12xPagedAttentionBackend)
    kept = [(backend.customize_spec(plain), backend.get_name()) for backend in backends]
    assert len({(spec.num_heads, spec.num_states, spec.state_content_size_bytes) for spec, _ in kept}) == 1
    flash, triton, b12x = (content_order(spec, name, None, Platform("cuda", 9)) for spec, name in kept)
    assert (flash, triton) == ("a slot a head: K, V",) * 2
    assert b12x == "a slot for K of all heads, a slot for V: as B12X orders them on cuda"


# ---- requests ------------------------------------------------------------------------------------------------------


def test_requests_with_two_adapters_are_mixed_and_each_gets_its_own(engines: Engines):
    """Not with requests that have none: beside others vLLM's kernels for CPUs give those the last adapter."""
    pair = Pair(engines.prefill("prefill"), engines.decode("decode"))
    each = prompts(3, 4, shortest=40, longest=200)
    before = pair.received
    for number, prompt in enumerate(each):
        for adapter in "ab":
            ask(pair, f"mixed-{number}-{adapter}", prompt, adapters=(adapter, adapter))
    found = {}
    for number, adapter in itertools.product(range(len(each)), "ab"):
        found[number, adapter] = ended(pair, f"mixed-{number}-{adapter}").tokens
    assert found == {(number, adapter): alone(engines, each[number], adapter) for number, adapter in found}, pair.said
    assert found[0, "a"] != found[0, "b"], "adapters change nothing: this proves nothing"
    assert pair.received - before == len(found), "prompts were computed on the decode side"


@pytest.mark.parametrize(
    ("adapters", "said"),
    [
        (("a", "b"), "the decode side's request has another LoRA adapter than the prefill side's"),
        (("a", ""), "the prefill side's request names a LoRA adapter, the decode side's names none"),
    ],
    ids=["another", "none"],
)
def test_a_request_with_another_adapter_is_refused_on_both_sides_and_nothing_is_kept_of_it(
    engines: Engines, adapters: tuple[str, str], said: str
):
    pair = Pair(engines.prefill("prefill"), engines.decode("decode"))
    free = pair.free_blocks()
    (prompt,) = prompts(4 + len(adapters[1]), 1, shortest=200)
    ask(pair, "mismatched", prompt, adapters=adapters)
    assert ended(pair, "mismatched").reason == "error"
    pair.prefill.wait_idle()
    for engine in (pair.prefill, pair.decode):
        assert any(said in line for line in engine.ask("logged")), engine.ask("logged")
    assert pair.free_blocks() == free
    ask(pair, "matched", prompt, adapters=(adapters[1], adapters[1]))
    assert ended(pair, "matched").tokens == alone(engines, prompt, adapters[1]), "its prefix was taken for the other's"


def test_without_the_comparison_another_adapters_cache_is_taken_and_kept(engines: Engines):
    """What it keeps from happening: the prompt's next request is wrong too, from the decode side's prefix cache."""
    pair = Pair(engines.prefill("prefill"), engines.decode("decode"))
    (prompt,) = prompts(9, 1, shortest=200)
    expected = alone(engines, prompt, "b")
    pair.prefill.ask("plant", "requests are not compared")
    ask(pair, "taken", prompt, adapters=("a", "b"))
    assert ended(pair, "taken").tokens != expected
    pair.prefill.ask("heal")
    ask(pair, "poisoned", prompt, adapters=("b", "b"))
    assert ended(pair, "poisoned").tokens != expected


def test_a_request_with_another_prompt_of_as_many_tokens_is_refused(engines: Engines):
    pair = Pair(engines.prefill("prefill"), engines.decode("decode"))
    prompt, other = prompts(7, 1, shortest=100)[0], prompts(8, 1, shortest=100)[0]
    ask(pair, "mixed-up", prompt, other=other)
    assert ended(pair, "mixed-up").reason == "error"
    assert "the decode side's request has another prompt than the prefill side's" in pair.said
    pair.prefill.wait_idle()
    ask(pair, "right", prompt)
    assert ended(pair, "right").tokens == alone(engines, prompt, "")
