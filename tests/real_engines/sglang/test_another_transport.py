"""A prefill and a decode engine of SGLang's over Mooncake instead of NIXL, by kvferry's setting alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.tiny_model import write
from tests.real_engines.prompts import prompts
from tests.real_engines.sglang.engine import EngineProcess, Shape
from tests.real_engines.sglang.pairs import TOKENS, Pair, assert_equal
from tests.support.real_transport import skip_unless_installed

pytestmark = [pytest.mark.servers, pytest.mark.full, pytest.mark.timeout(600)]


def test_mooncake_carries_the_same_tokens(tmp_path: Path):
    skip_unless_installed("mooncake")
    model, given = write("llama", tmp_path / "model"), prompts(1)
    undivided = EngineProcess(Shape(model))
    pair = Pair(model, tmp_path, environment={"KVFERRY_TRANSPORT": "mooncake"})
    try:
        expected = undivided.started().generate(given, TOKENS)
        assert_equal(pair.started().run(given), expected)
        pair.tampering.plant("another page")  # what arrives is what is computed with
        assert [each.tokens for each in pair.run(prompts(2))] != undivided.generate(prompts(2), TOKENS)
    finally:
        pair.close()
        undivided.close()
