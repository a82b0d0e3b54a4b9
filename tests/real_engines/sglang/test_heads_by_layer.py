"""A model whose layers differ in their KV heads, between engines of one and of two tensor-parallel ranks.

Its layers with full attention have one head, those with windows two. With two ranks each has one of either: the same,
or its own.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
from examples.tiny_model import MIMO_V2, write
from tests.real_engines.prompts import prompts
from tests.real_engines.sglang.engine import EngineProcess, Shape, disaggregated
from tests.real_engines.sglang.windows import install

from kvferry.applications.up.supervision import free_ports

pytestmark = pytest.mark.timeout(600)

TOKENS = 12
ROOMS = count(5000)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(MIMO_V2, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def repair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("windows"))


@pytest.fixture(scope="module")
def given() -> list[list[int]]:
    return prompts(21, 8, shortest=100, longest=200)


@pytest.fixture(scope="module")
def expected(model: Path, repair: Path, given: list[list[int]]) -> list[tuple[int, ...]]:
    """The tokens of the undivided engine."""
    engine = EngineProcess(Shape(model, path=(repair,)))
    try:
        return engine.started().generate(given, TOKENS)
    finally:
        engine.close()


def engine(mode: str, port: int, model: Path, repair: Path, tp: int) -> EngineProcess:
    options = disaggregated(mode, port, tp_size=tp, max_total_tokens=2048)
    environment = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(tp)))} if tp > 1 else {}
    return EngineProcess(Shape(model, options, environment, (repair,)))


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp"),
    [
        pytest.param(1, 1, marks=pytest.mark.long),
        (2, 2),
        pytest.param(2, 1, marks=pytest.mark.long),
        pytest.param(1, 2, marks=pytest.mark.long),
    ],
)
def test_tokens_are_those_of_the_undivided_engine(
    model: Path,
    repair: Path,
    given: list[list[int]],
    expected: list[tuple[int, ...]],
    prefill_tp: int,
    decode_tp: int,
):
    (port,) = free_ports(1)
    prefill = engine("prefill", port, model, repair, prefill_tp)
    decode = engine("decode", port, model, repair, decode_tp)
    try:
        prefill.started()
        decode.started()
        rooms = [next(ROOMS) for _ in given]
        for each in (prefill, decode):
            each.submit(given, TOKENS, rooms=rooms, port=port)
        prefill.outputs()
        found = decode.outputs()
        assert [each.error for each in found] == [None] * len(found)
        assert [each.tokens for each in found] == expected
    finally:
        prefill.close()
        decode.close()
