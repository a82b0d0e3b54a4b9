"""Engines whose pages differ in size, token for token against the undivided engine: behind prefixes, and in chunks."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.tiny_model import write
from tests.real_engines.prompts import prompts
from tests.real_engines.sglang.engine import EngineProcess, Shape
from tests.real_engines.sglang.pairs import TOKENS, Pair, assert_equal

pytestmark = [pytest.mark.servers, pytest.mark.full, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    "page_sizes", [(1, 16), *(pytest.param(sizes, marks=pytest.mark.long) for sizes in [(16, 1), (32, 16)])]
)
def test_tokens_are_those_of_the_undivided_engine(tmp_path: Path, page_sizes: tuple[int, int]):
    model = write("llama", tmp_path / "model")
    undivided = EngineProcess(Shape(model))
    pair = Pair(model, tmp_path / "tampering", page_sizes=page_sizes)
    try:
        given = prompts(1, 8)
        pair.started()
        assert_equal(pair.run(given), undivided.started().generate(given, TOKENS))
        (prompt,) = prompts(3, 1, shortest=310)
        longer = prompt + prompts(4, 1, shortest=90)[0]
        assert_equal(pair.run([prompt]), undivided.generate([prompt], TOKENS))
        assert_equal(pair.run([longer]), undivided.generate([longer], TOKENS))
        asked = pair.tampering.said("asked")[-1]
        held = asked["prefix_tokens"]
        here, there = page_sizes
        assert held == (len(prompt) // there) * there
        handed_in = [each["pages"] for each in pair.tampering.said("submitted") if each["room"] == asked["room"]]
        assert sum(handed_in) == -(-len(longer) // here) - held // here
        pair.tampering.plant("another page")
        others = prompts(5, 4, shortest=100)
        assert [each.tokens for each in pair.run(others)] != undivided.generate(others, TOKENS)
    finally:
        undivided.close()
        pair.close()
