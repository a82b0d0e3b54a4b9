"""Engines that draft with a model of its own, whose cache travels too, though its layers have the same numbers.

The draft is the model itself. Every token that it drafts is accepted as long as it has its cache, and few are without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from examples.tiny_model import write, write_eagle3
from tests.real_engines.prompts import prompts
from tests.real_engines.vllm.engine import EngineProcess
from tests.real_engines.vllm.pairs import COUNT, Engines, Pair

pytestmark = [pytest.mark.servers, pytest.mark.full, pytest.mark.timeout(600)]

DRAFTED = 3
"""Tokens that are drafted at a time."""


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    model = write("qwen3", tmp_path_factory.mktemp("qwen3"))
    begun = Engines(model)
    speculative = {"method": "draft_model", "model": str(model), "num_speculative_tokens": DRAFTED}
    begun.begin("alone", connector="", speculative=speculative)
    begun.prefill("prefill", step_tokens=128, speculative=speculative)
    begun.decode("decode", speculative=speculative)
    yield begun
    begun.close()


def accepted(engines: Engines, pair: Pair, seed: int) -> float:
    """Checks that the tokens are those of the undivided engine.

    Returns how many drafted tokens are accepted, as a part of those that the undivided engine accepts. Not of those
    that are drafted: the first step after a cache has come has placeholders of vLLM's, none of which is accepted.
    """
    each, alone = prompts(seed, 8, longest=300), engines.alone().started()

    def counted(engine: EngineProcess) -> float:
        count: float = engine.ask("metric", "vllm:spec_decode_num_accepted_tokens_total")
        return count

    here, there, received = counted(alone), counted(pair.decode), pair.received
    outputs = pair.run(each, f"drafts-{seed}")
    assert [output.tokens for output in outputs] == alone.generate(each, COUNT), pair.said
    assert pair.received - received == len(each), "prompts were computed on the decode side"
    return (counted(pair.decode) - there) / (counted(alone) - here)


def test_a_draft_model_finds_its_cache(engines: Engines):
    assert accepted(engines, Pair(engines.prefill("prefill"), engines.decode("decode")), 1) == 1


def test_without_its_cache_it_drafts_other_tokens(engines: Engines):
    """Else the test beside this one would prove nothing. The tokens are the same: the model verifies them."""
    pair = Pair(engines.prefill("prefill"), engines.decode("decode"))
    pair.prefill.ask("plant", "no draft")
    share = accepted(engines, pair, 2)
    pair.prefill.ask("heal")
    assert share < 0.5


def test_a_side_without_a_draft_model_still_works(engines: Engines):
    pair = Pair(engines.prefill("prefill-plain"), engines.decode("decode"))
    assert accepted(engines, pair, 3) < 0.5


@pytest.mark.long
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2)])
def test_ranks_of_another_number_get_their_heads_of_the_draft(engines: Engines, prefill_tp: int, decode_tp: int):
    speculative = engines.alone().shape.speculative
    prefill = engines.prefill(f"prefill-tp{prefill_tp}", tp=prefill_tp, speculative=speculative)
    decode = engines.decode(f"decode-tp{decode_tp}", tp=decode_tp, speculative=speculative)
    assert accepted(engines, Pair(prefill, decode), 10 + decode_tp) == 1


def eagle3(folder: Path) -> dict[str, Any]:
    draft = write_eagle3(folder / "eagle3")
    return {"method": "eagle3", "model": str(draft), "num_speculative_tokens": DRAFTED}


def hidden_states(_: Path) -> dict[str, Any]:
    kept = {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 3]}}
    return {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": kept}


@pytest.mark.long
@pytest.mark.parametrize("drafting", [eagle3, hidden_states])
def test_a_drafts_layer_arrives_with_the_others(tmp_path: Path, drafting: Callable[[Path], dict[str, Any]]):
    """With random weights nothing that is drafted is accepted: its cache is compared, block by block."""
    model = write("qwen3", tmp_path / "qwen3")
    engines = Engines(model)
    try:
        speculative = drafting(tmp_path)
        for begin in (engines.prefill, engines.decode):
            begin(begin.__name__, speculative=speculative)
        engines.alone()
        pair = Pair(engines.prefill("prefill"), engines.decode("decode"))
        before = [set(blocks) for blocks in pair.decode.ask("draft_blocks")]
        # Four whole blocks are sent, and the last token is computed on the decode side.
        each = prompts(60, 1, shortest=4 * pair.decode.shape.block_tokens + 1)
        (output,) = pair.run(each, "eagle")
        assert [output.tokens] == engines.alone().started().generate(each, COUNT)
        sent, came = pair.prefill.ask("draft_blocks"), pair.decode.ask("draft_blocks")
        shared = [len(set(mine) & set(theirs) - old) for mine, theirs, old in zip(sent, came, before, strict=True)]
        assert shared == [4], "its only layer"
    finally:
        engines.close()
