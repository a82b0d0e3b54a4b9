"""Which KV heads a rank of vLLM's holds: by what projections, the modules around them and the caches say."""

from __future__ import annotations

from typing import Any

import pytest
from torch.nn import Module, ModuleList

from kvferry.engines.vllm.caches import HeldPart
from kvferry.engines.vllm.modules import CachedHeads, held_heads
from kvferry.errors import LayoutError
from kvferry.layout import Interval, RankCoordinates

NAME = "model.layers.0.self_attn.attn"


class Layer(Module):
    """An attention layer, as far as it matters here: it knows nothing."""


class Projection(Module):
    """What makes keys and values, as vLLM's QKVParallelLinear."""

    def __init__(self, total: int, rank: int, size: int, **changes: Any) -> None:
        super().__init__()
        self.total_num_kv_heads, self.tp_rank, self.tp_size = total, rank, size
        self.num_kv_heads, self.num_kv_head_replicas = max(1, total // size), max(1, size // total)
        vars(self).update(changes)


class SelfAttention(Module):
    """The module around an attention layer, with or without a projection."""

    def __init__(self, projection: Module | None = None, **attributes: Any) -> None:
        super().__init__()
        self.attn = Layer()
        if projection is not None:
            self.qkv_proj = projection
        vars(self).update(attributes)


def heads(around: SelfAttention, cached: CachedHeads, rank: int, size: int) -> HeldPart | None:
    place = RankCoordinates(tp_rank=rank, tp_size=size)
    return held_heads({NAME: cached}, {NAME: around.attn}, place, lambda: around.modules())[NAME]


@pytest.mark.parametrize(
    ("total", "rank", "size", "held"),
    [
        (8, 1, 4, Interval(2, 4)),
        (8, 5, 8, Interval(5, 6)),
        (4, 5, 8, Interval(2, 3)),
        (1, 5, 8, Interval(0, 1)),
    ],
)
def test_a_projection_knows(total: int, rank: int, size: int, held: Interval):
    around = SelfAttention(Projection(total, rank, size))
    assert heads(around, CachedHeads(len(held)), rank, size) == HeldPart(total, held)


def test_on_a_single_rank_all_heads_are_there():
    assert heads(SelfAttention(), CachedHeads(3), 0, 1) == HeldPart(3, Interval(0, 3))


def test_what_nobody_knows_is_not_guessed():
    assert heads(SelfAttention(), CachedHeads(1), 5, 8) is None


def test_a_cache_that_is_the_same_everywhere_says_so():
    assert heads(SelfAttention(), CachedHeads(1, most_shards=1), 5, 8) == HeldPart(1, Interval(0, 1))


def test_a_layer_that_is_not_divided_has_all_heads_on_every_rank():
    around = SelfAttention(Projection(8, 0, 1))
    assert heads(around, CachedHeads(8), 5, 8) == HeldPart(8, Interval(0, 8))


def test_what_is_no_head_is_not_divided_by_head():
    """A backend that keeps all keys and then all values: two slots, whatever the number of heads."""
    around = SelfAttention(Projection(8, 1, 4))
    assert heads(around, CachedHeads(2, are_slots=True), 1, 4) is None
    assert heads(SelfAttention(), CachedHeads(2, are_slots=True), 0, 1) is None


def test_the_module_around_knows_where_no_head_is_on_several_ranks():
    around = SelfAttention(total_num_kv_heads=8, num_kv_heads=2)
    assert heads(around, CachedHeads(2), 1, 4) == HeldPart(8, Interval(2, 4))
    assert heads(SelfAttention(total_num_kv_heads=4, num_kv_heads=1), CachedHeads(1), 5, 8) is None


def test_a_number_of_something_else_is_no_witness():
    around = SelfAttention(Projection(8, 5, 8), total_num_kv_heads=8, num_kv_heads=8)
    assert heads(around, CachedHeads(1), 5, 8) == HeldPart(8, Interval(5, 6))
    assert heads(SelfAttention(total_num_kv_heads=8, num_kv_heads=8), CachedHeads(1), 5, 8) is None


def test_a_projection_in_the_decoder_layer_is_found_and_that_of_another_layer_is_not():
    """Whoever asks is not given the modules: they are found among all that live in the process."""
    place = RankCoordinates(tp_rank=5, tp_size=8)
    first, second = Module(), Module()
    first.self_attn, first.qkv_proj = SelfAttention(), Projection(4, 5, 8)
    second.self_attn = SelfAttention()
    both = {NAME: first.self_attn.attn, "model.layers.1.self_attn.attn": second.self_attn.attn}
    model = ModuleList([first, second])
    found = held_heads(dict.fromkeys(both, CachedHeads(1)), both, place)
    assert list(found.values()) == [HeldPart(4, Interval(2, 3)), None]
    assert len(model) == 2


def test_layers_without_a_cache_do_not_count():
    """vLLM lists mixtures of experts beside attention layers."""
    layer, place = Module(), RankCoordinates(tp_rank=5, tp_size=8)
    layer.self_attn, layer.qkv_proj, layer.mlp = SelfAttention(), Projection(4, 5, 8), Module()
    listed = {NAME: layer.self_attn.attn, "model.layers.0.mlp.experts": layer.mlp}
    assert held_heads({NAME: CachedHeads(1)}, listed, place, lambda: layer.modules()) == {
        NAME: HeldPart(4, Interval(2, 3))
    }


def test_the_projection_of_another_attention_in_the_same_decoder_layer_is_not_asked():
    layer, place = Module(), RankCoordinates(tp_rank=5, tp_size=8)
    layer.self_attn, layer.cross_attn = SelfAttention(Projection(4, 5, 8)), SelfAttention()
    both = {NAME: layer.self_attn.attn, "model.layers.0.cross_attn.attn": layer.cross_attn.attn}
    found = held_heads(dict.fromkeys(both, CachedHeads(1)), both, place, lambda: layer.modules())
    assert list(found.values()) == [HeldPart(4, Interval(2, 3)), None]


def test_an_index_in_the_same_attention_does_not_hide_its_projection():
    """Every rank has the same of it, whatever makes the keys and values beside it."""
    place, around = RankCoordinates(tp_rank=5, tp_size=8), SelfAttention(Projection(4, 5, 8))
    around.index_cache = Layer()
    both = {NAME: around.attn, "model.layers.0.self_attn.index_cache": around.index_cache}
    cached = {NAME: CachedHeads(1), "model.layers.0.self_attn.index_cache": CachedHeads(1, most_shards=1)}
    found = held_heads(cached, both, place, lambda: around.modules())
    assert list(found.values()) == [HeldPart(4, Interval(2, 3)), HeldPart(1, Interval(0, 1))]


def test_a_wrapped_projection_is_found():
    """LoRA puts another module around it."""
    wrapper = Module()
    wrapper.base_layer = Projection(4, 5, 8)
    assert heads(SelfAttention(wrapper), CachedHeads(1), 5, 8) == HeldPart(4, Interval(2, 3))


@pytest.mark.parametrize(
    ("around", "cached", "problem"),
    [
        (
            SelfAttention(Projection(8, 5, 8), total_num_kv_heads=4, num_kv_heads=1),
            CachedHeads(1),
            r"SelfAttention says 4 over all ranks, its Projection says 8 over all ranks, of which .* has \[5, 6\)",
        ),
        (SelfAttention(Projection(8, 5, 8)), CachedHeads(2), "its cache has 2 on this rank, its Projection makes 1"),
        (
            SelfAttention(Projection(8, 5, 8)),
            CachedHeads(1, most_shards=1),
            r"its cache says 1 over all ranks, of which this rank has \[0, 1\), its Projection says 8",
        ),
        (SelfAttention(Projection(8, 4, 8)), CachedHeads(1), "as rank 4 of 8, and this is rank 5 of 8"),
        (
            SelfAttention(Projection(4, 5, 8, num_kv_head_replicas=1)),
            CachedHeads(1),
            "makes 1 of 4, each on 1 ranks, as rank 5 of 8",
        ),
    ],
)
def test_a_contradiction_is_refused_with_all_that_was_said(around: SelfAttention, cached: CachedHeads, problem: str):
    with pytest.raises(LayoutError, match=problem) as raised:
        heads(around, cached, 5, 8)
    assert NAME in str(raised.value)
