"""An SGLang before the newest: the contract that it has, and tokens that are right. `make test-sglang-older` runs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from examples.tiny_model import write
from tests.real_engines.prompts import prompts
from tests.real_engines.sglang.engine import EngineProcess, Shape
from tests.real_engines.sglang.pairs import TOKENS, Pair, assert_equal

from kvferry.engines.contract import contract_for
from kvferry.engines.sglang.contract import SERVING, TRIED
from kvferry.engines.sglang.plugin import engine_version

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        engine_version() not in TRIED[:-1], reason="the newest SGLang that was tried: the other files show more of it"
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def undivided(model: Path) -> Iterator[EngineProcess]:
    engine = EngineProcess(Shape(model))
    yield engine.started()
    engine.close()


@pytest.fixture(scope="module")
def pair(model: Path, undivided: EngineProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    both = Pair(model, tmp_path_factory.mktemp("tampering"))
    yield both.started()
    both.close()


def test_it_has_every_line_of_its_contract():
    contract = contract_for(SERVING, engine_version())
    assert contract.tried == (engine_version(),)
    assert contract.broken() == ()
    assert len(contract.lines) > 60


def test_tokens_are_right_with_and_without_a_prefix_on_the_decode_side(pair: Pair, undivided: EngineProcess):
    given = prompts(1, 6)
    assert_equal(pair.run(given), undivided.generate(given, TOKENS))
    longer = [prompt + prompts(2, 1)[0] for prompt in given]
    assert_equal(pair.run(longer), undivided.generate(longer, TOKENS))
    asked = [each["prefix_tokens"] for each in pair.tampering.said("asked")]
    assert any(asked[len(given) :])
