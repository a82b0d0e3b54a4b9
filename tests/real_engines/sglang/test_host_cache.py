"""SGLang's cache in host memory (HiCache) beside kvferry: what comes back layer by layer leaves layer by layer, too."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.tiny_model import write
from tests.real_engines.prompts import prompts
from tests.real_engines.sglang import host_cache
from tests.real_engines.sglang.engine import EngineProcess, Shape
from tests.real_engines.sglang.pairs import TOKENS, Pair, assert_equal

pytestmark = [pytest.mark.servers, pytest.mark.full, pytest.mark.timeout(600)]

POOL_TOKENS = 1024
"""Of the prefill engine's device: one long prompt drives the one before into host memory."""


@pytest.mark.parametrize(("ranges", "overlaps"), [(1, True), (3, False)])
def test_a_prefix_that_comes_back_from_host_memory_is_sent(tmp_path: Path, ranges: int, overlaps: bool):
    model, copies = write("llama", tmp_path / "model"), tmp_path / "copies"
    copies.touch()
    environment = {"KVFERRY_LAYER_RANGES": str(ranges), host_cache.COPIES: str(copies)}
    pair = Pair(
        model,
        host_cache.install(tmp_path / "plugins"),
        environment=environment,
        of_prefill={**host_cache.OPTIONS, "max_total_tokens": POOL_TOKENS},
        disable_overlap_schedule=not overlaps,
    )
    undivided = EngineProcess(Shape(model))
    try:
        undivided.started()
        pair.started()
        first, *others = prompts(1, 3, shortest=600)
        tail = prompts(2, 1, shortest=70)[0]
        for prompt in (first, *others):
            assert_equal(pair.run([prompt]), undivided.generate([prompt], TOKENS))
        of_first = [each["pages"] for each in pair.tampering.said("submitted")][: 5 * ranges]
        assert of_first == [pages for pages in (8, 8, 8, 8, 6) for _ in range(ranges)], (
            "all layers did not leave in turn"
        )
        copies.write_text("")
        assert_equal(pair.run([first + tail]), undivided.generate([first + tail], TOKENS))
        assert copies.read_text(), "nothing came back from host memory"
    finally:
        pair.close()
        undivided.close()
