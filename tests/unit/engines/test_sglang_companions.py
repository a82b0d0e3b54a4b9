"""The index of sparse attention and scales of blocks: drafts, layers without, stages, and what SGLang does not list."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest
from tests.support.sglang_pools import Lists, heads_pool, model_config, named

from kvferry import Device, Entry, Interval, RankCoordinates, RankLayout
from kvferry.engines.sglang.layouts import describe
from kvferry.engines.sglang.pools import caches_of
from kvferry.errors import LayoutError

LAYERS, INDEX, TAIL = 3, 40, 12


class StateType(str, Enum):
    """As SGLang's."""

    DSA = "dsa"
    DSA_TAIL = "dsa_tail"
    BLOCK_SCALE = "block_scale"


def sparse_pool(layers: int = LAYERS, *, kpool: int = 1) -> Any:
    return named(
        "DSATokenToKVPool",
        layer_num=layers,
        start_layer=0,
        index_kpool=kpool,
        index_page_size=4,
        index_head_dim=128,
        kpool_use_compress=kpool > 1,
    )


def joined(*given: tuple[list[int], list[int], list[int]]) -> list[list[int]]:
    """Lists of buffers, one behind the other."""
    return [[number for each in given for number in each[kind]] for kind in range(3)]


NONE: tuple[list[int], list[int], list[int]] = ([1], [0], [0])


def described(args: Any, **place: int) -> RankLayout:
    where = RankCoordinates(**place)
    return describe(caches_of(args, model_config(1, layers=6), None, {}, place=where), where, Device())


def sparse(*, draft: bool = False, without: int | None = None, kpool: int = 1) -> Any:
    """The KVArgs of a rank with latents and their index."""
    lists = Lists()
    lists.latents(LAYERS + draft, 24)
    lists.args.num_draft_entries = int(draft)
    layers = [*range(LAYERS + draft)]
    lists.state(StateType.DSA, joined(*(NONE if each == without else lists.buffers(1, INDEX) for each in layers)))
    if kpool > 1:
        lists.state(StateType.DSA_TAIL, joined(*(lists.buffers(1, TAIL) for _ in (*layers, *layers))))
    return lists.in_pools(sparse_pool(kpool=kpool), sparse_pool(1, kpool=kpool) if draft else None)


def test_the_index_is_whole_on_every_rank_and_in_the_pages_of_the_latents():
    layout = described(sparse(kpool=2), tp_size=2, tp_rank=1)
    shards = {shard.component.name: shard for shard in layout.shards}
    index = shards["index"]
    assert index.component.entry is Entry.PAGE
    assert (index.box, index.group) == ((Interval(0, LAYERS), Interval(0, INDEX)), "kv")
    assert (index.paging.num_pages, index.paging.page_stride) == (10, INDEX)
    tail = shards["index tail scores"]
    assert (tail.component.entry, tail.group) == (Entry.REQUEST, "index tail")
    assert tail.addresses[0] == shards["index tail keys"].addresses[-1] + 10 * TAIL


def test_a_layer_that_takes_another_ones_choice_has_no_index():
    layout = described(sparse(without=1))
    assert [shard.box[0] for shard in layout.shards_of("index")] == [Interval(0, 1), Interval(2, 3)]


def test_a_stages_index_is_that_of_its_layers():
    args = sparse(without=1)
    args.kvferry_pools.target.start_layer = 3
    layout = described(args, pp_size=2, pp_rank=1)
    assert [shard.box[0] for shard in layout.shards_of("index")] == [Interval(3, 4), Interval(5, 6)]
    assert layout.shards_of("index")[0].component.axes[0].size == 6


def test_a_stage_without_an_index_is_refused():
    args = sparse()
    args.state_item_lens[0] = [0] * LAYERS
    with pytest.raises(LayoutError, match="no layer on this rank has an index of its own"):
        described(args, pp_size=2)


def test_a_draft_models_index_may_stay_behind():
    layout = described(sparse(draft=True, kpool=2))
    drafts = [shard.component for shard in layout.shards if shard.component.name.startswith("draft index")]
    assert [(each.name, each.is_optional) for each in drafts] == [
        ("draft index", True),
        ("draft index tail keys", True),
        ("draft index tail scores", True),
    ]
    (scores,) = layout.shards_of("index tail scores")
    (keys,) = layout.shards_of("draft index tail keys")
    assert keys.addresses[0] == scores.addresses[-1] + 10 * TAIL


def test_pools_that_share_page_numbers_have_the_pages_of_the_smallest():
    args = sparse()
    args.state_data_lens[0] = [length + INDEX for length in args.state_data_lens[0]]
    assert {group.num_pages for group in described(args).groups} == {10}


@pytest.mark.parametrize("kind", ["dsa", "dsa_tail"])
def test_an_index_that_sglang_does_not_list_is_refused(kind: str):
    args = sparse(kpool=2)
    number = [each.value for each in args.state_types].index(kind)
    del args.state_types[number]
    with pytest.raises(LayoutError, match=rf"DSATokenToKVPool .* does not list its \['{kind}'\]"):
        described(args)


def test_a_draft_models_index_that_sglang_does_not_list_is_refused():
    args = sparse()
    args.kvferry_pools = type(args.kvferry_pools)(sparse_pool(), sparse_pool(1), None, None)
    with pytest.raises(LayoutError, match="lists 3 buffers of the index of 3 layers and 1 of a draft model"):
        described(args)


def scaled_pool() -> Any:
    pool = heads_pool(2, 64, k_scale_buffer=[object()])
    return named("MHATokenToKVPoolMXFP8", **vars(pool), MXFP8_SCALE_BLOCK_SIZE=32, mxfp8_sf_interleaved=False)


def scaled(target: Any, draft: Any = None, *, listed: bool = True) -> Any:
    """The KVArgs of a rank with keys and values in blocks of 32 bytes, which have a scale each."""
    lists = Lists()
    lists.attention(LAYERS, 2 * 64)
    if listed:
        lists.state(StateType.BLOCK_SCALE, joined(*(lists.buffers(1, 4 * 2 * 2) for _ in range(2 * LAYERS))))
    return lists.in_pools(target, draft)


def test_scales_have_the_heads_of_their_blocks():
    caches = caches_of(scaled(scaled_pool()), model_config(4), None, {}, place=RankCoordinates(tp_rank=1, tp_size=2))
    layout = describe(caches, RankCoordinates(tp_rank=1, tp_size=2), Device())
    (scales,) = layout.shards_of("scale of v")
    assert scales.box == (Interval(0, LAYERS), Interval(2, 4), Interval(0, 2))
    assert (scales.group, scales.paging.token_stride) == ("kv", 4)


def test_scales_that_sglang_does_not_list_are_refused():
    with pytest.raises(LayoutError, match=r"MHATokenToKVPoolMXFP8 .* does not list its \['block_scale'\]"):
        described(scaled(scaled_pool(), listed=False))
    with pytest.raises(LayoutError, match="does not list the scales of a draft model's blocks"):
        described(scaled(scaled_pool(), scaled_pool()))
