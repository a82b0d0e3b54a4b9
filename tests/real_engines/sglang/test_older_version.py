"""An SGLang before the newest: its contract, and tokens that are right. `python -m tests.runs older` runs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from examples.tiny_model import write
from sglang.srt.disaggregation.utils import DisaggregationMode
from tests.real_engines.prompts import prompts
from tests.real_engines.sglang.engine import EngineProcess, Shape
from tests.real_engines.sglang.pairs import ROOMS, TOKENS, Pair, assert_equal, check_stages
from tests.real_engines.sglang.ranks import Model, place

from kvferry.engines.contract import contract_for
from kvferry.engines.sglang.contract import SERVING, TRIED, engine_version
from kvferry.engines.sglang.options import check_options
from kvferry.errors import UsageError

pytestmark = [
    pytest.mark.servers,
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
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def pair(model: Path, undivided: EngineProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    both = Pair(model, tmp_path_factory.mktemp("tampering"))
    undivided.started()
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


def test_a_request_that_fails_says_why_on_both_sides_and_leaves_nothing(pair: Pair, undivided: EngineProcess):
    (given,) = prompts(30, 1, shortest=100)
    for salt in ("another tenant", "one tenant"):
        rooms = [next(ROOMS)]
        pair.prefill.submit([given], TOKENS, rooms=rooms, port=pair.port, cache_salt=["one tenant"])
        pair.decode.submit([given], TOKENS, rooms=rooms, port=pair.port, cache_salt=[salt])
        answers = [*pair.prefill.outputs(), *pair.decode.outputs()]
        if salt == "one tenant":
            assert_equal(answers[1:], undivided.generate([given], TOKENS))
        else:
            assert ["another cache salt" in (each.error or "") for each in answers] == [True, True], answers


@pytest.mark.usefixtures("pair")
def test_pipeline_stages_on_the_prefill_side(model: Path, undivided: EngineProcess):
    check_stages(model, undivided, "prefill")


def test_what_cannot_be_done_with_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    at = {"tp": 1, "tp_rank": 0, "pp": 1, "pp_rank": 0}
    with (
        place(monkeypatch, 1, Model(), **at, disaggregation_enable_kv_checksum=True),
        pytest.raises(UsageError) as refused,
    ):
        check_options(SimpleNamespace(ib_device=None), DisaggregationMode.PREFILL)
    for option in ("--disaggregation-enable-kv-checksum", "SGLANG_RUST_SERVER on the prefill side"):
        assert f"{option} with SGLang 0.5.22" in str(refused.value)
