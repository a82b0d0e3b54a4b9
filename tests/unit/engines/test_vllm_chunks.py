"""Chunked local attention through the whole plug-in, from one scheduler's block tables to another's, without vLLM."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.vllm_ranks import UNTOUCHED, Deployment, Engine, Kind, plugged_in, transfer

from kvferry.testing.network import LocalNetwork

KINDS = (Kind((3,)), Kind((0, 1, 2), chunk=16))
"""Layer 3 attends to every token, the others within chunks."""


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalNetwork]:
    with plugged_in(monkeypatch) as found:
        yield found


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (1, 2), (4, 2)])
@pytest.mark.parametrize(("here", "there"), [(4, 4), (4, 8), (8, 4)])
def test_the_next_token_finds_its_chunk_whatever_prefix_is_here(
    network: LocalNetwork, prefill_tp: int, decode_tp: int, here: int, there: int
):
    """Every token that the next one attends to is there, byte by byte, and none of the prefix has been touched."""
    prefill = Engine(network, "prefill", KINDS, Deployment(tp=prefill_tp, block_tokens=here), sends=True)
    decode = Engine(network, "decode", KINDS, Deployment(tp=decode_tp, block_tokens=there), sends=False)
    try:
        for tokens, prefix in [(5, 0), (17, 0), (18, 0), (30, 8), (33, 8), (34, 16), (47, 40), (48, 24), (49, 48)]:
            decode.wipe()
            decode.check(transfer(prefill, decode, tokens, prefix), tokens - 1, prefix)
    finally:
        decode.close()
        prefill.close()


def test_another_number_of_tokens_is_refused_by_what_they_depend_on(
    network: LocalNetwork, caplog: pytest.LogCaptureFixture
):
    """Nothing else would tell: where there are chunks, the decode side asks for pages and says no number of tokens."""
    prefill = Engine(network, "prefill", KINDS, Deployment(), sends=True)
    decode = Engine(network, "decode", KINDS, Deployment(), sends=False, held_back_tokens=2)
    try:
        transfer(prefill, decode, 30, 0)
    finally:
        decode.close()
        prefill.close()
    assert "another prompt than the prefill side's" in caplog.text
    assert max(float(cache.max()) for cache in decode.ranks[0].caches.values()) == UNTOUCHED, "nothing was written"
