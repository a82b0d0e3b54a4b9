"""One side with kvferry and the other with SGLang's own NIXL: no request is answered, and clients are told why."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from examples.tiny_model import write
from tests.real_engines.prompts import prompts
from tests.real_engines.sglang import main_memory
from tests.real_engines.sglang.engine import EngineProcess
from tests.real_engines.sglang.pairs import ROOMS, TOKENS, Pair

pytestmark = [pytest.mark.servers, pytest.mark.full, pytest.mark.timeout(600)]

STOCK_S = 60.0
"""SGLang's own limit on what its own backend waits for, which is 300 s by default."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    limits = ("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT")
    both = Pair(
        write("llama", tmp_path_factory.mktemp("model")),
        main_memory.install(tmp_path_factory.mktemp("tampering")),
        environment=dict.fromkeys(limits, f"{STOCK_S:g}"),
    )
    yield both.started()
    both.close()


def ended(pair: Pair, prefill: EngineProcess, decode: EngineProcess, seed: int) -> list[str]:
    """Why a request has failed on the decode side and on the prefill side, within a fraction of SGLang's limit."""
    rooms = [next(ROOMS)]
    begun_at = time.monotonic()
    for engine in (prefill, decode):
        engine.submit(prompts(seed, 1, shortest=100), TOKENS, rooms=rooms, port=pair.port)
    answers = [each for engine in (decode, prefill) for each in engine.outputs(STOCK_S / 2)]
    assert time.monotonic() - begun_at < STOCK_S / 2
    assert [each.tokens for each in answers] == [(), ()]
    return [each.error or "" for each in answers]


def test_both_sides_of_a_stock_decode_server_are_told(pair: Pair):
    stock = pair.begin_decode(disaggregation_transfer_backend="nixl").started()
    try:
        for seed in (1, 2):
            errors = ended(pair, pair.prefill, stock, seed)
            assert ["uses SGLang's own nixl, and the prefill server kvferry" in each for each in errors] == [
                True
            ] * 2, errors
    finally:
        stock.close()


def test_the_client_of_a_stock_prefill_server_is_told(pair: Pair):
    pair.prefill.kill()
    stock = pair.begin_prefill(disaggregation_transfer_backend="nixl").started()
    try:
        for seed in (3, 4):
            said, told = ended(pair, stock, pair.decode, seed)
            assert "knows nothing of kvferry (status 404): give both sides the same" in said
            assert "Aborted by decode-side abort notification" in told
    finally:
        stock.close()
        pair.restart_prefill()
