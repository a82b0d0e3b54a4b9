"""A model whose layers attend to a window in five of six: two kinds of layers, several block tables."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from examples.tiny_model import write
from tests.real_engines.prompts import prompts
from tests.real_engines.vllm.pairs import COUNT, Engines, Pair

pytestmark = [pytest.mark.servers, pytest.mark.full, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    begun = Engines(write("hybrid", tmp_path_factory.mktemp("hybrid")))
    for begin in (begun.alone, lambda: begun.prefill("prefill", step_tokens=128), lambda: begun.decode("decode")):
        begin()
    yield begun
    begun.close()


@pytest.mark.shows("vllm", "SlidingWindowSpec")
def test_only_the_window_travels_and_tokens_are_the_same(engines: Engines):
    pair = Pair(engines.prefill("prefill"), engines.decode("decode"))
    each = prompts(1)
    # Lengths around the edges of blocks, where vLLM drops the first one of a window.
    each += prompts(2, 12, shortest=157, longest=168)
    before, outputs = pair.received, pair.run(each, "hybrid")
    assert [output.tokens for output in outputs] == engines.alone().started().generate(each, COUNT)
    assert pair.received - before == len(each), "prompts were computed on the decode side"
    assert len(set(pair.free_blocks())) == 1
