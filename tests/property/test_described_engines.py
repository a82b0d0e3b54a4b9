"""Over all that an engine may say of its caches: every rank gets its own rank's bytes, or bytes that are the same.

An engine is made up with what it truly keeps on every rank, and with what its objects say of it: everything, a part, or
nothing. From what they say alone the plug-in describes every rank; every byte that would then be written is compared
with what the receiving rank would have computed itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.support.described import DescribedRank, wrong_bytes
from torch.nn import Module

from kvferry.engines.vllm.caches import CacheGroup, HeldPart, ModelShape
from kvferry.engines.vllm.layouts import describe
from kvferry.engines.vllm.modules import CachedHeads, held_heads
from kvferry.errors import IncompatiblePeerError
from kvferry.layout import RankCoordinates, split

ROOMS = range(64)
PAGES, PAGE_TOKENS, CONTENT = 2, 2, 3
SIZES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class TrueLayer:
    """A layer of a made-up model.

    Attributes:
        total: how many KV heads it truly has.
        told_by: which objects say how they are divided.
        places: where a head lies that several ranks have: "near" on neighbouring ranks, "far" on every total-th.
    """

    total: int
    window: int | None = None
    told_by: frozenset[str] = frozenset({"projection"})
    places: str = "near"

    def heads(self, rank: int, size: int) -> list[int]:
        """The heads that a rank truly has."""
        if self.total >= size:
            each = self.total // size
            return list(range(rank * each, (rank + 1) * each))
        return [rank // (size // self.total) if self.places == "near" else rank % self.total]


@st.composite
def layers(draw: st.DrawFn) -> TrueLayer:
    told_by = draw(st.frozensets(st.sampled_from(["projection", "module", "cache"]), max_size=2))
    total = 1 if "cache" in told_by else draw(st.sampled_from(SIZES))
    # A projection loads neighbouring ranks with the same head; where there is none, anything may be.
    places = "near" if "projection" in told_by else draw(st.sampled_from(["near", "far"]))
    return TrueLayer(total, draw(st.sampled_from([None, None, 3, 5])), told_by, places)


MODELS = st.lists(layers(), min_size=1, max_size=4)


def module_around(layer: TrueLayer, rank: int, size: int) -> tuple[Module, Module]:
    """The module around an attention layer, and the layer: all that an engine shows."""
    around, attention = Module(), Module()
    around.attn = attention
    own: dict[str, Any] = {"total_num_kv_heads": layer.total, "num_kv_heads": len(layer.heads(rank, size))}
    if "module" in layer.told_by:
        vars(around).update(own)
    if "projection" in layer.told_by:
        around.qkv_proj = Module()
        replicas = max(1, size // layer.total)
        vars(around.qkv_proj).update(own, num_kv_head_replicas=replicas, tp_rank=rank, tp_size=size)
    return around, attention


def described_rank(model: list[TrueLayer], rank: int, size: int) -> DescribedRank:
    """Describes one rank as the plug-in does, over memory in which every element says what it is."""
    views, cached, attention, blocks = {}, {}, {}, []
    modules: list[Module] = []
    for number, layer in enumerate(model):
        held = layer.heads(rank, size)
        labels = [
            label(number, head, page, token, element)
            for page in range(PAGES)
            for head in held
            for token in range(PAGE_TOKENS)
            for element in range(CONTENT)
        ]
        blocks.append(np.array(labels, dtype=np.int32))
    memory = np.concatenate(blocks)
    start = 0
    coordinates = RankCoordinates(tp_rank=rank, tp_size=size)
    for number, (layer, block) in enumerate(zip(model, blocks, strict=True)):
        name = f"model.layers.{number}.self_attn.attn"
        heads = layer.heads(rank, size)
        part = torch.from_numpy(memory)[start : start + len(block)]
        views[name] = part.view(PAGES, len(heads), PAGE_TOKENS, CONTENT)
        start += len(block)
        around, attention[name] = module_around(layer, rank, size)
        modules += around.modules()
        cached[name] = CachedHeads(len(heads), most_shards=1 if "cache" in layer.told_by else None)
    windows = sorted({layer.window for layer in model}, key=str)
    groups = [
        CacheGroup(
            f"group {number}",
            tuple(name for name, layer in zip(views, model, strict=True) if layer.window == window),
            PAGE_TOKENS,
            window,
        )
        for number, window in enumerate(windows)
    ]
    described = describe(
        views,
        groups,
        ModelShape(len(model)),
        coordinates,
        heads=held_heads(cached, attention, coordinates, lambda: modules),
        num_blocks=PAGES,
    )
    return DescribedRank(described.layout, memory.view(np.uint8))


def label(number: int, head: int, page: int, token: int, element: int) -> int:
    """What an element of a layer says that it is: a number that no other has."""
    return (((number * 64 + head) * 16 + page) * 16 + token) * 16 + element


def engine(model: list[TrueLayer], size: int) -> dict[int, DescribedRank]:
    return {rank: described_rank(model, rank, size) for rank in range(size)}


MIMO = [TrueLayer(4), TrueLayer(8, window=3)]
"""Full layers of 4 KV heads and window layers of 8, as MiMo-V2 has them."""


@given(MODELS, st.sampled_from(SIZES))
@example(MIMO, 8)
@example([TrueLayer(4, told_by=frozenset(), places="far"), TrueLayer(8, told_by=frozenset())], 8)
def test_between_equal_sizes_every_rank_gets_its_own_ranks_bytes(model: list[TrueLayer], size: int):
    ranks = engine(model, size)
    assert list(wrong_bytes(ranks, ranks, ROOMS, range(PAGES))) == []


@given(MODELS, st.sampled_from(SIZES), st.sampled_from(SIZES))
@example(MIMO, 2, 8)
@example(MIMO, 8, 1)
def test_whatever_is_not_refused_is_right(model: list[TrueLayer], prefill: int, decode: int):
    try:
        wrong = list(wrong_bytes(engine(model, prefill), engine(model, decode), ROOMS, range(PAGES)))
    except IncompatiblePeerError:
        is_known = all({"projection", "cache"} & layer.told_by for layer in model)
        assert not is_known, "every layer's heads were known"
        assert prefill != decode
    else:
        assert wrong == []


@pytest.mark.parametrize("fault", ["the model's number", "as many as it looks like"])
def test_heads_that_are_guessed_are_found_out(fault: str, monkeypatch: pytest.MonkeyPatch):
    """What the plug-in used to do: one number for all layers, or a rank's number and that of the ranks."""

    def guessed(cached: Any, attention: Any, place: RankCoordinates, modules: Any) -> dict[str, HeldPart]:
        total = 4 if fault == "the model's number" else place.tp_size // 2
        return {name: HeldPart(total, split(total, place.tp_size, place.tp_rank)) for name in cached}

    monkeypatch.setitem(globals(), "held_heads", guessed)
    ranks = engine(MIMO, 8)
    wrong = list(wrong_bytes(ranks, ranks, ROOMS))
    assert "gets 'kv, window 3' layer [1, 2) head [0, 1) content [0, 3) from rank 1" in wrong[0]
