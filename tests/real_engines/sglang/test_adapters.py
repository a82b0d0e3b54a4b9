"""Requests with LoRA adapters between two real engines: each gets its own, and no cache of another one's.

SGLang asks for pinned memory where adapters are, which a CPU has not: a plug-in of ours for tests lets it go on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from examples.tiny_model import write
from tests.real_engines.prompts import prompts
from tests.real_engines.sglang.engine import EngineProcess, Output, Shape
from tests.real_engines.sglang.pairs import ROOMS, TOKENS, Pair, assert_equal
from tests.real_engines.sglang.unpinned import install
from tests.real_engines.vllm.adapters import write_adapter

pytestmark = [pytest.mark.servers, pytest.mark.full, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def model(directory: Path) -> Path:
    return write("llama", directory / "model")


@pytest.fixture(scope="module")
def options(directory: Path, model: Path) -> dict[str, Any]:
    """Of engines with two adapters."""
    adapters = [f"{name}={write_adapter(directory / name, model, seed=seed)}" for seed, name in enumerate("ab")]
    return {"enable_lora": True, "lora_paths": adapters, "max_loras_per_batch": 3, "lora_backend": "torch_native"}


@pytest.fixture(scope="module")
def undivided(directory: Path, model: Path, options: dict[str, Any]) -> Iterator[EngineProcess]:
    engine = EngineProcess(Shape(model, options, path=(install(directory / "unpinned"),)))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def pair(directory: Path, model: Path, options: dict[str, Any], undivided: EngineProcess) -> Iterator[Pair]:
    both = Pair(model, install(directory / "tampering"), **options)
    undivided.started()
    yield both.started()
    both.close()


def run(
    pair: Pair, given: Sequence[Sequence[int]], prefill: Sequence[str], decode: Sequence[str]
) -> tuple[list[Output], list[Output]]:
    """What both engines answer, asked with these adapters."""
    rooms = [next(ROOMS) for _ in given]
    for engine, adapters in ((pair.prefill, prefill), (pair.decode, decode)):
        engine.submit(given, TOKENS, rooms=rooms, port=pair.port, lora_path=list(adapters))
    return pair.prefill.outputs(), pair.decode.outputs()


def alone(undivided: EngineProcess, given: Sequence[Sequence[int]], adapters: Sequence[str]) -> list[tuple[int, ...]]:
    undivided.submit(given, TOKENS, lora_path=list(adapters))
    return [each.tokens for each in undivided.outputs()]


def test_requests_with_two_adapters_are_mixed_and_each_gets_its_own(pair: Pair, undivided: EngineProcess):
    each = prompts(3, 4, shortest=40, longest=200)
    given, adapters = [*each, *each], ["a", "b"] * 2 + ["b", "a"] * 2
    expected = alone(undivided, given, adapters)
    assert all(one != other for one, other in zip(expected[:4], expected[4:], strict=True)), "adapters change nothing"
    assert_equal(run(pair, given, adapters, adapters)[1], expected)
    asked = {each["room"] for each in pair.tampering.said("submitted")}
    assert len(asked) == len(given), "prompts were computed on the decode side"


def test_a_request_with_another_adapter_is_refused_by_name_and_nothing_is_kept_of_it(
    pair: Pair, undivided: EngineProcess
):
    given = prompts(4, 1, shortest=200)
    for answers in run(pair, given, ["a"], ["b"]):
        assert "another LoRA adapter" in (answers[0].error or ""), answers
    assert_equal(run(pair, given, ["b"], ["b"])[1], alone(undivided, given, ["b"]))
