"""Caches of sparse and compressed attention, made, grouped and handed out by vLLM's own code, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.real_engines.vllm.kept_caches import MODELS, Engine, Model, Transfer, engines
from tests.support.vllm_ranks import Deployment

from kvferry import DecodeEndpoint, PrefillEndpoint
from kvferry.engines.vllm import worker as worker_module
from kvferry.layout import Entry
from kvferry.testing.network import LocalNetwork


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalNetwork]:
    with LocalNetwork() as found:
        for kind in (PrefillEndpoint, DecodeEndpoint):

            def begin(layout: Any, kind: Any = kind, **more: Any) -> Any:
                return kind(layout, transport=found.transport(), **more)

            monkeypatch.setattr(worker_module, kind.__name__, begin)
        yield found


def check(engine: Engine, transfer: Transfer) -> None:
    """Looks at every byte that the next token needs, on every rank."""
    request = transfer.received.request_id
    seen = set()
    for group, table in zip(engine.groups, engine.tables(request), strict=True):
        prefix = transfer.prefix if group.is_prefix_cached else 0
        first = 0 if group.has_state else max(prefix, group.first_attended(transfer.tokens))
        for layer in group.layer_names:
            for rank in engine.ranks:
                for position in range(first // group.block_tokens, -(-transfer.tokens // group.block_tokens)):
                    block = table[position]
                    assert not block.is_null
                    found = engine.page(rank, layer, block.block_id).numpy()
                    expected = engine.content(rank, layer, position)
                    start, stop = 0, found.shape[1]
                    if not group.has_state and stop == group.block_tokens and found.shape[2] not in (584, 528, 132):
                        start = max(0, first - position * group.block_tokens)
                        stop = min(stop, transfer.tokens - position * group.block_tokens)
                    assert (found[:, start:stop] == expected[:, start:stop]).all(), f"{layer}, block {position}"
                    seen.add(layer)
    assert seen == {layer for group in engine.groups for layer in group.layer_names}


@pytest.mark.shows(
    "vllm",
    "AttentionSpec with tokens_per_state",
    "MLAAttentionSpec with cache_role indexer",
    "SlidingWindowMLASpec",
    "CircularBufferSpec",
)
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (1, 2), (4, 2)])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_what_a_model_keeps_arrives(network: LocalNetwork, model: Model, prefill_tp: int, decode_tp: int):
    """Whatever the number of ranks, in prompts that end anywhere, of which the decode side has a part already."""
    with engines(network, model, Deployment(tp=prefill_tp), Deployment(tp=decode_tp)) as pair:
        packed = {each.name for each in pair.decode.described.layout.components if each.entry is Entry.PAGE}
        assert bool(packed) is (model.cache_dtype != "auto"), "quantised pages cannot be cut by token"
        # Of the last prompt but one, the decode side has what its window begins with.
        prefixes = []
        for tokens, seed in [(3, 10_000), (129, 20_000), (769, 0), (800, 0), (1301, 0)]:
            transfer = pair.transfer(tokens, seed)
            assert transfer.tokens == tokens - 1
            prefixes.append(transfer.prefix)
            check(pair.decode, transfer)
            pair.prefill.manager.free(transfer.received)
            pair.decode.manager.free(transfer.received)
        assert prefixes[:3] == [0, 0, 0]
        assert all(prefix >= 768 for prefix in prefixes[3:])
