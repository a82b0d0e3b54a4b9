"""Models whose layers differ in their KV heads.

MiMo-V2 has two in the layers that attend to a window and one in the others: on two ranks every layer has one head on
each, one of two or the only one. Gemma 4 has four, and two of twice the size.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from examples.tiny_model import MIMO_V2, write
from tests.real_engines.prompts import prompts
from tests.real_engines.vllm.pairs import COUNT, Engines, Pair

pytestmark = [pytest.mark.servers, pytest.mark.full, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", params=[MIMO_V2, pytest.param("gemma4", marks=pytest.mark.long)])
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    begun = Engines(write(request.param, tmp_path_factory.mktemp(request.param)))
    begun.alone()
    yield begun
    begun.close()


def check(engines: Engines, pair: Pair, tag: str) -> None:
    """The tokens are those of the undivided engine, and no prompt was computed on the decode side."""
    each = prompts(20 + 2 * pair.prefill.shape.tp + pair.decode.shape.tp, 8, longest=300)
    before = pair.received
    outputs = pair.run(each, tag)
    expected = engines.alone().started().generate(each, COUNT)
    wrong = [number for number, output in enumerate(outputs) if output.tokens != expected[number]]
    assert not wrong, f"{len(wrong)} of {len(each)} prompts: {pair.said}"
    assert pair.received - before == len(each), "prompts were computed on the decode side"


@pytest.mark.parametrize("tp", [2, pytest.param(1, marks=pytest.mark.long)])
def test_every_rank_gets_the_heads_of_its_layers(engines: Engines, tp: int):
    pair = Pair(engines.prefill(f"prefill-tp{tp}", tp=tp), engines.decode(f"decode-tp{tp}", tp=tp))
    check(engines, pair, f"equal-{tp}")


@pytest.mark.long
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2)])
def test_ranks_of_another_number_get_theirs(engines: Engines, prefill_tp: int, decode_tp: int):
    """Where every layer has blocks of the same size: those of several sizes follow from the heads on a rank, and on CPU
    a block's inner order depends on its size."""
    prefill = engines.prefill(f"prefill-even-tp{prefill_tp}", tp=prefill_tp, has_hybrid_blocks=False)
    decode = engines.decode(f"decode-even-tp{decode_tp}", tp=decode_tp, has_hybrid_blocks=False)
    check(engines, Pair(prefill, decode), f"unequal-{prefill_tp}-{decode_tp}")
