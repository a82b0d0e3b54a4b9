"""A model whose layers differ in their KV heads, between engines of one and of two tensor-parallel ranks.

Layers with windows have twice the heads of those with full attention. Where these have one, each of two ranks has one
head of either kind. On a CPU SGLang pads heads that ranks cannot divide, with zeros: such caches are those of engines
of as many ranks alone, so that models of two and four heads are between unequal ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from examples.tiny_model import MIMO_V2, MIMO_V2_EVEN, write
from tests.real_engines.prompts import prompts
from tests.real_engines.sglang.engine import EngineProcess, Shape, disaggregated
from tests.real_engines.sglang.pairs import refuse_another_prompt
from tests.real_engines.sglang.windows import install

from kvferry.applications.up.supervision import free_ports

pytestmark = [pytest.mark.servers, pytest.mark.full, pytest.mark.timeout(600)]

TOKENS = 12
ROOMS = count(5000)


@pytest.fixture(scope="module")
def repair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("windows"))


@pytest.fixture(scope="module")
def given() -> list[list[int]]:
    return prompts(21, 8, shortest=100, longest=200)


@dataclass(frozen=True)
class Undivided:
    """A model, and what the undivided engine generates."""

    model: Path
    tokens: Sequence[tuple[int, ...]]


@pytest.fixture(scope="module")
def undivided(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, repair: Path, given: list[list[int]]
) -> Undivided:
    model = write(request.param, tmp_path_factory.mktemp("model"))
    engine = EngineProcess(Shape(model, path=(repair,)))
    try:
        return Undivided(model, engine.started().generate(given, TOKENS))
    finally:
        engine.close()


def engine(mode: str, port: int, model: Path, repair: Path, tp: int) -> EngineProcess:
    options = disaggregated(mode, port, tp_size=tp, max_total_tokens=2048)
    environment = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(tp)))} if tp > 1 else {}
    return EngineProcess(Shape(model, options, environment, (repair,)))


@pytest.mark.shows("sglang", "SWAKVPool", "StateType.SWA")
@pytest.mark.parametrize(
    ("undivided", "prefill_tp", "decode_tp"),
    [
        pytest.param(MIMO_V2, 1, 1, marks=pytest.mark.long),
        (MIMO_V2, 2, 2),
        (MIMO_V2_EVEN, 2, 1),
        pytest.param(MIMO_V2_EVEN, 1, 2, marks=pytest.mark.long),
    ],
    indirect=["undivided"],
)
def test_tokens_are_those_of_the_undivided_engine(
    undivided: Undivided, repair: Path, given: list[list[int]], prefill_tp: int, decode_tp: int
):
    (port,) = free_ports(1)
    prefill = engine("prefill", port, undivided.model, repair, prefill_tp)
    decode = engine("decode", port, undivided.model, repair, decode_tp)
    try:
        refuse_another_prompt(prefill.started(), decode.started(), port)
        rooms = [next(ROOMS) for _ in given]
        for each in (prefill, decode):
            each.submit(given, TOKENS, rooms=rooms, port=port)
        prefill.outputs()
        found = decode.outputs()
        assert [each.error for each in found] == [None] * len(found)
        assert [each.tokens for each in found] == undivided.tokens
    finally:
        prefill.close()
        decode.close()
