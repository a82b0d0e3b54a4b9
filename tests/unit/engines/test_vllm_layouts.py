"""vLLM's caches as layouts: shapes and strides as its GPU and CPU backends have them, on CPU tensors."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from kvferry.engines.vllm.caches import CacheGroup, HeldPart, ModelShape
from kvferry.engines.vllm.layouts import DescribedCaches, layer_number
from kvferry.engines.vllm.layouts import describe as describe_with
from kvferry.errors import IncompatiblePeerError, LayoutError
from kvferry.layout import Entry, Interval, RankCoordinates, split
from kvferry.layout.shard import RankLayout, Shard
from kvferry.plan import check_exchangeable
from kvferry.plan.pair import PairPlan, Unit
from kvferry.plan.pieces import SourceGroup
from kvferry.plan.proof import prove

BLOCKS, BLOCK_TOKENS, LAYERS, HEADS, CONTENT = 6, 4, 3, 8, 10
"""Heads of the whole model; content is a key and a value."""

ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
"""Every physical order of (layer, block, head, token, content) that vLLM 0.32 knows."""


def names(numbers: list[int]) -> tuple[str, ...]:
    return tuple(f"model.layers.{number}.self_attn.attn" for number in numbers)


def views(order: str, heads: int, *, layers: int = LAYERS, pages: int = BLOCKS, page_tokens: int = BLOCK_TOKENS):
    """One allocation, and a view of (block, head, token, content) for every layer."""
    sizes = (layers, pages, heads, page_tokens, CONTENT)
    permutation = ORDERS[order]
    memory = torch.arange(layers * pages * heads * page_tokens * CONTENT, dtype=torch.float32)
    physical = memory.view([sizes[axis] for axis in permutation])
    logical = physical.permute([permutation.index(axis) for axis in range(5)])
    return memory, {name: logical[number] for number, name in enumerate(names(list(range(layers))))}


def value_at(memory, shard: Shard, layer: int, page: int, token: int, head: int, content: int) -> float:
    address = (
        shard.addresses[layer]
        + page * shard.paging.page_stride
        + token * shard.paging.token_stride
        + head * shard.strides[0]
        + content * shard.strides[1]
    )
    return float(memory[(address - memory.data_ptr()) // 4])


def describe(
    caches: dict[str, Any],
    groups: list[CacheGroup],
    model: ModelShape,
    coordinates: RankCoordinates,
    *,
    num_blocks: int,
    total: int | None = HEADS,
) -> DescribedCaches:
    """Describes caches whose layers all have as many heads, divided evenly; None where nobody knows."""
    held = None if total is None else HeldPart(total, split(total, coordinates.tp_size, coordinates.tp_rank))
    heads = {name: held for each in groups for name in each.layer_names}
    return describe_with(caches, groups, model, coordinates, heads=heads, num_blocks=num_blocks)


def group(numbers: list[int], name: str = "group 0", **more: Any) -> CacheGroup:
    return CacheGroup(name, names(numbers), BLOCK_TOKENS, **more)


@pytest.mark.parametrize("order", ORDERS)
def test_elements_are_where_the_layout_says_whatever_the_order(order: str):
    memory, caches = views(order, HEADS)
    described = describe(caches, [group([0, 1, 2])], ModelShape(LAYERS), RankCoordinates(), num_blocks=BLOCKS)
    (shard,) = described.layout.shards
    assert shard.component.entry is Entry.TOKEN
    for layer, page, token, head, content in itertools.product(
        range(LAYERS), (0, BLOCKS - 1), range(BLOCK_TOKENS), (0, 3, HEADS - 1), (0, CONTENT - 1)
    ):
        expected = caches[names([layer])[0]][page, head, token, content].item()
        assert value_at(memory, shard, layer, page, token, head, content) == expected


@pytest.mark.parametrize(
    ("tp_size", "tp_rank", "held"),
    [(1, 0, Interval(0, 8)), (2, 1, Interval(4, 8)), (4, 2, Interval(4, 6)), (16, 5, Interval(2, 3))],
)
def test_a_rank_holds_its_heads(tp_size: int, tp_rank: int, held: Interval):
    _memory, caches = views("LBHNC", len(held))
    described = describe(
        caches,
        [group([0, 1, 2])],
        ModelShape(LAYERS),
        RankCoordinates(tp_rank=tp_rank, tp_size=tp_size),
        num_blocks=BLOCKS,
    )
    assert described.layout.shards[0].box == (Interval(0, LAYERS), held, Interval(0, CONTENT))


def test_heads_that_do_not_fit_are_named():
    _memory, caches = views("LBHNC", 3)
    with pytest.raises(
        LayoutError, match=r"model.layers.0.self_attn.attn' has 3 heads where this rank holds \[4, 8\) of"
    ):
        describe(
            caches,
            [group([0, 1, 2])],
            ModelShape(LAYERS),
            RankCoordinates(tp_rank=1, tp_size=2),
            num_blocks=BLOCKS,
        )


@pytest.mark.shows("vllm", "MLAAttentionSpec")
def test_latents_are_the_same_on_every_rank():
    _memory, caches = views("LBNHC", 1)
    described = describe(
        caches,
        [group([0, 1, 2])],
        ModelShape(LAYERS),
        RankCoordinates(tp_rank=1, tp_size=2),
        num_blocks=BLOCKS,
        total=1,
    )
    (shard,) = described.layout.shards
    assert [axis.size for axis in shard.component.axes] == [LAYERS, 1, CONTENT]
    assert shard.box[1] == Interval(0, 1)


def test_layers_of_several_numbers_of_heads_are_components_of_their_own():
    """As MiMo-V2 has them: on eight ranks every layer has one head on each, and yet they are divided differently."""
    _memory, caches = views("LBHNC", 1)
    heads = {
        names([0])[0]: HeldPart(4, Interval(2, 3)),
        names([1])[0]: HeldPart(8, Interval(5, 6)),
        names([2])[0]: HeldPart(4, Interval(2, 3)),
    }
    coordinates = RankCoordinates(tp_rank=5, tp_size=8)
    layout = describe_with(
        caches, [group([0, 1, 2])], ModelShape(LAYERS), coordinates, heads=heads, num_blocks=BLOCKS
    ).layout
    held = sorted((shard.component.name, shard.component.axes[1].size, *shard.box[:2]) for shard in layout.shards)
    assert held == [
        ("kv, 4 heads", 4, Interval(0, 1), Interval(2, 3)),
        ("kv, 4 heads", 4, Interval(2, 3), Interval(2, 3)),
        ("kv, 8 heads", 8, Interval(1, 2), Interval(5, 6)),
    ]


def unknown(tp_size: int, packing: str | None = None) -> dict[int, RankLayout]:
    """Every rank of an engine of which nobody knows how it divides heads; with two of them on each."""
    return {
        rank: describe(
            views("LBHNC", 2)[1],
            [group([0, 1, 2])],
            ModelShape(LAYERS, packing),
            RankCoordinates(tp_rank=rank, tp_size=tp_size),
            num_blocks=BLOCKS,
            total=None,
        ).layout
        for rank in range(tp_size)
    }


@pytest.mark.shows("vllm", "AttentionSpec with num_head_slots")
@pytest.mark.parametrize("packing", [None, "a kernel's"])
def test_heads_that_nobody_knows_go_to_the_like_rank_alone(packing: str | None):
    ranks = unknown(4, packing)
    assert prove(ranks, ranks, room=3).receivers == 4
    group_of_sources = SourceGroup(ranks)
    for rank, layout in ranks.items():
        assert {piece.holders for piece in group_of_sources.pieces_for(layout)} == {(rank,)}


def test_heads_that_nobody_knows_are_refused_with_another_number_of_ranks():
    with pytest.raises(
        IncompatiblePeerError, match=r"share 4.*share 2.*layer \[0, 3\): .*the same tensor-parallel size"
    ):
        check_exchangeable(unknown(4)[0], unknown(2)[0], source_name="theirs", destination_name="ours")
    with pytest.raises(
        IncompatiblePeerError, match=r"share 4.*head 8.*layer \[0, 3\): .*the same tensor-parallel size"
    ):
        check_exchangeable(
            unknown(4)[0], engine("LBHNC", 1, BLOCK_TOKENS)[0], source_name="theirs", destination_name="ours"
        )


def test_a_pipeline_stage_holds_its_layers():
    _memory, caches = views("LBHNC", HEADS)
    stage = {f"model.layers.{number + 5}.attn": cache for number, cache in enumerate(caches.values())}
    described = describe(
        stage,
        [CacheGroup("group 0", tuple(stage), BLOCK_TOKENS)],
        ModelShape(8),
        RankCoordinates(pp_rank=1, pp_size=2),
        num_blocks=BLOCKS,
    )
    assert described.layout.shards[0].box[0] == Interval(5, 8)


def test_packed_pages_can_be_cut_by_head_alone():
    memory, caches = views("LBHNC", HEADS)
    described = describe(
        caches, [group([0, 1, 2])], ModelShape(LAYERS, "a kernel's"), RankCoordinates(), num_blocks=BLOCKS
    )
    (shard,) = described.layout.shards
    assert shard.component.entry is Entry.PAGE
    assert shard.component.packing == f"a kernel's, {BLOCK_TOKENS} tokens a page"
    assert [axis.size for axis in shard.component.axes] == [LAYERS, HEADS, BLOCK_TOKENS * CONTENT]
    assert shard.paging.page_tokens == BLOCK_TOKENS
    assert value_at(memory, shard, 2, 4, 0, 5, 7) == caches[names([2])[0]][4, 5, 0, 7].item()


def test_packed_pages_that_are_not_dense_are_refused():
    _memory, caches = views("LBNHC", HEADS)
    with pytest.raises(LayoutError, match="packed, so that tokens and content must lie behind each other"):
        describe(caches, [group([0, 1, 2])], ModelShape(LAYERS, "a kernel's"), RankCoordinates(), num_blocks=BLOCKS)


def hybrid(groups: list[CacheGroup]) -> RankLayout:
    _memory, caches = views("LBHNC", HEADS, layers=6)
    return describe(caches, groups, ModelShape(6), RankCoordinates(), num_blocks=BLOCKS).layout


def test_a_hybrid_has_a_component_for_every_kind_however_its_layers_are_grouped():
    """vLLM groups layers as their sizes and number allow: two engines of one model need not agree."""
    one = hybrid([group([2, 5], "full"), group([0, 3], "a", window_tokens=7), group([1, 4], "b", window_tokens=7)])
    two = hybrid([group([2, 5], "full"), group([0, 1, 3, 4], "a", window_tokens=7)])
    assert one.digest == two.digest
    assert {component.name: component.window_tokens for component in one.components} == {"kv": None, "kv, window 7": 7}
    full = [("kv", Interval(2, 3), "full"), ("kv", Interval(5, 6), "full")]
    assert held_by(one) == [
        *full,
        ("kv, window 7", Interval(0, 1), "a"),
        ("kv, window 7", Interval(1, 2), "b"),
        ("kv, window 7", Interval(3, 4), "a"),
        ("kv, window 7", Interval(4, 5), "b"),
    ]
    assert held_by(two) == [*full, ("kv, window 7", Interval(0, 2), "a"), ("kv, window 7", Interval(3, 5), "a")]


def test_chunks_are_told_from_windows_and_from_chunks_of_another_length():
    chunks = hybrid([group([2, 5], "full"), group([0, 1, 3, 4], "a", chunk_tokens=8)])
    assert {each.name: each.window_tokens for each in chunks.components} == {"kv": None, "kv, chunk 8": 7}
    for other in ({"window_tokens": 7}, {"chunk_tokens": 16}):
        theirs = hybrid([group([2, 5], "full"), group([0, 1, 3, 4], "a", **other)])
        with pytest.raises(IncompatiblePeerError, match=r"components: .*kv, chunk 8"):
            check_exchangeable(chunks, theirs, source_name="theirs", destination_name="ours")


def held_by(layout: RankLayout) -> list[tuple[str, Interval, str]]:
    """The layers of every shard, with its component and the group of its pages."""
    return sorted((shard.component.name, shard.box[0], shard.group) for shard in layout.shards)


def test_layers_of_several_groups_may_share_memory():
    """vLLM lets groups overlay each other; a block belongs to one of them at a time."""
    _memory, caches = views("LBHNC", HEADS, layers=2)
    first, second = caches.values()
    shared = dict(zip(names([0, 1, 2, 3]), (first, second, first, second), strict=True))
    groups = [group([0, 1], "full"), group([2, 3], "window", window_tokens=7)]
    layout = describe(shared, groups, ModelShape(4), RankCoordinates(), num_blocks=BLOCKS).layout
    assert len(layout.shards) == 2


@pytest.mark.shows("vllm", "UniformTypeKVCacheSpecs")
def test_layers_of_several_sizes_are_components_of_their_own():
    _memory, caches = views("LBHNC", HEADS)
    caches[names([1])[0]] = torch.zeros(BLOCKS, HEADS, BLOCK_TOKENS, 2 * CONTENT)
    layout = describe(caches, [group([0, 1, 2])], ModelShape(LAYERS), RankCoordinates(), num_blocks=BLOCKS).layout
    assert {component.name for component in layout.components} == {
        f"kv, {size} a head" for size in (CONTENT, 2 * CONTENT)
    }


# As vLLM names them: EAGLE's and DeepSeek's are numbered behind the model's, those of Qwen3-Next's MTP modules, of
# MiMo-V2's and of a draft model of its own from 0 again.
DRAFTS = {
    "eagle": ("model.layers.3.self_attn.attn", "model.layers.4.self_attn.attn"),
    "deepseek mtp": ("model.layers.3.mtp_block.self_attn.attn", "model.layers.4.mtp_block.self_attn.attn"),
    "qwen3-next mtp": ("mtp.layers.0.self_attn.attn", "mtp.layers.1.self_attn.attn"),
    "mimo-v2 mtp": ("model.mtp.layers.0.self_attn.attn", "model.mtp.layers.1.self_attn.attn"),
    "its own": ("draft_model.model.layers.0.self_attn.attn", "draft_model.model.layers.1.self_attn.attn"),
    "two numbers": ("mtp.layers.0.attn.0", "mtp.layers.0.attn.1"),
}


def drafting(drafts: tuple[str, ...], *, told: bool = True) -> RankLayout:
    """A model of three layers and its draft, in one block table, in the order in which vLLM has made them."""
    _memory, caches = views("LBHNC", HEADS, layers=LAYERS + len(drafts))
    every = (*names([0, 1, 2]), *drafts)
    tensors = dict(zip(every, caches.values(), strict=True))
    model = ModelShape(LAYERS, drafts=drafts if told else ())
    groups = [CacheGroup("group 0", every, BLOCK_TOKENS)]
    return describe(tensors, groups, model, RankCoordinates(), num_blocks=BLOCKS).layout


@pytest.mark.parametrize("drafts", DRAFTS.values(), ids=DRAFTS)
def test_a_draft_model_is_a_component_of_its_own_whatever_its_numbers(drafts: tuple[str, ...]):
    layout = drafting(drafts)
    found = {each.name: (each.axes[0].size, each.is_optional) for each in layout.components}
    assert found == {"kv": (LAYERS, False), "draft": (2, True)}
    assert held_by(layout) == [("draft", Interval(0, 2), "group 0"), ("kv", Interval(0, 3), "group 0")]
    assert layout.digest == drafting(DRAFTS["its own"]).digest
    first, second = (layout.shards_of("draft")[0].addresses[index] for index in (0, 1))
    last = layout.shards_of("kv")[0].addresses[2]
    assert second - first == first - last > 0, "each of them is where the tensor of its name is"


def test_a_draft_model_may_be_missing_on_the_other_side():
    ours, theirs = drafting(DRAFTS["its own"]), drafting(())
    for source, destination in ((ours, theirs), (theirs, ours)):
        check_exchangeable(source, destination, source_name="theirs", destination_name="ours")
        assert prove({0: source}, {0: destination}, room=3).receivers == 1


def test_draft_models_of_other_numbers_of_layers_are_refused():
    with pytest.raises(IncompatiblePeerError, match=r"axes of 'draft'.*layer 2.*layer 1"):
        check_exchangeable(
            drafting(DRAFTS["eagle"]), drafting(DRAFTS["eagle"][:1]), source_name="theirs", destination_name="ours"
        )


def test_a_layer_behind_the_models_that_is_no_draft_models_is_refused():
    with pytest.raises(LayoutError, match=r"'model.layers.3.self_attn.attn' has a number behind .* 3 layers"):
        drafting(DRAFTS["eagle"], told=False)


def test_a_block_may_be_several_pages_of_the_kernel():
    _memory, caches = views("LBHNC", HEADS, pages=4 * BLOCKS)
    groups = [CacheGroup("group 0", names([0, 1, 2]), 4 * BLOCK_TOKENS)]
    described = describe(caches, groups, ModelShape(LAYERS), RankCoordinates(), num_blocks=BLOCKS)
    assert described.pages_per_block == {"group 0": 4}
    assert described.layout.shards[0].paging.page_tokens == BLOCK_TOKENS


@pytest.mark.parametrize(
    ("cache", "problem"),
    [
        (None, "has no cache"),
        ((torch.zeros(2, 2), torch.zeros(2, 2)), "has 2 tensors, as of recurrent state"),
        (torch.zeros(BLOCKS, 2, HEADS, BLOCK_TOKENS, CONTENT), r"has shape \(6, 2, 8, 4, 10\)"),
        (torch.zeros(BLOCKS + 1, HEADS, BLOCK_TOKENS, CONTENT), "with a multiple of 6 blocks"),
        (
            torch.zeros(BLOCKS, HEADS, BLOCK_TOKENS // 2, CONTENT),
            "2 entries .* a block has 4 tokens, with an entry for",
        ),
    ],
)
def test_what_cannot_be_described_is_named(cache: object, problem: str):
    caches = {} if cache is None else {names([0])[0]: cache}
    with pytest.raises(LayoutError, match=problem) as raised:
        describe(caches, [group([0])], ModelShape(1), RankCoordinates(), num_blocks=BLOCKS)
    assert "model.layers.0.self_attn.attn" in str(raised.value)


def test_no_cache_at_all_is_refused():
    with pytest.raises(LayoutError, match="no KV cache"):
        describe({}, [], ModelShape(1), RankCoordinates(), num_blocks=BLOCKS)


@pytest.mark.parametrize("name", ["model.embed", "model.stages.0.layers.1.experts.2.attn"])
def test_a_name_without_a_number_or_with_many_is_refused(name: str):
    with pytest.raises(LayoutError, match="numbers in its name"):
        layer_number(name)


def test_numbers_in_names():
    assert layer_number("model.layers.12.self_attn.attn") == 12
    assert layer_number("transformer.h.3.attn2.kv") == 3
    assert layer_number("model.layers.3.self_attn.1.attn") == 3


def engine(order: str, tp_size: int, page_tokens: int, packing: str | None = None) -> dict[int, RankLayout]:
    """Every rank of an engine; its memory need not exist any more."""
    layouts = {}
    for rank in range(tp_size):
        held = len(split(HEADS, tp_size, rank))
        _memory, caches = views(order, held, page_tokens=page_tokens)
        groups = [CacheGroup("group 0", names([0, 1, 2]), page_tokens)]
        coordinates = RankCoordinates(tp_rank=rank, tp_size=tp_size)
        model = ModelShape(LAYERS, packing)
        layouts[rank] = describe(caches, groups, model, coordinates, num_blocks=BLOCKS).layout
    return layouts


@pytest.mark.parametrize(("here", "there"), [("LBHNC", "LBNHC"), ("BLNHC", "LHBNC"), ("BHLNC", "BLHNC")])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 2), (4, 2), (2, 16), (3, 2)])
@pytest.mark.parametrize("decode_tokens", [4, 8])
def test_any_order_tensor_parallel_size_and_block_size_can_be_exchanged(
    here: str, there: str, prefill_tp: int, decode_tp: int, decode_tokens: int
):
    """Every byte is written once, by the byte that belongs there."""
    found = prove(engine(here, prefill_tp, 4), engine(there, decode_tp, decode_tokens), room=3)
    assert found.receivers == decode_tp


def descriptors(order: str, prefill_tp: int, decode_tp: int) -> int:
    """How many a request in every block takes on the direct path, over all ranks."""
    sources = engine(order, prefill_tp, BLOCK_TOKENS)
    group_of_sources, count = SourceGroup(sources), 0
    for receiver in engine(order, decode_tp, BLOCK_TOKENS).values():
        pieces = group_of_sources.pieces_for(receiver)
        for rank, source in sources.items():
            if mine := [piece for piece in pieces if piece.holders == (rank,)]:
                count += int(PairPlan(source, receiver, mine).descriptor_rows(Unit.WHOLE).source[:, 4].sum())
    return count


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 2), (2, 4), (4, 2), (1, 8)])
def test_blocks_with_heads_outside_take_a_descriptor_a_block_whatever_the_number_of_ranks(
    prefill_tp: int, decode_tp: int
):
    """This is what the connector asks vLLM for. With tokens outside, every token of a part of the heads takes one."""
    blocks = LAYERS * BLOCKS * max(prefill_tp, decode_tp)
    assert descriptors("LBHNC", prefill_tp, decode_tp) == blocks
    assert descriptors("LBNHC", prefill_tp, decode_tp) == blocks * (1 if prefill_tp == decode_tp else BLOCK_TOKENS)


def test_packed_blocks_of_another_size_are_refused():
    sides = engine("LBHNC", 1, 4, "a kernel's"), engine("LBHNC", 1, 8, "a kernel's")
    with pytest.raises(IncompatiblePeerError, match=r"4 tokens a page.*8 tokens a page|8 tokens a page.*4 tokens"):
        check_exchangeable(sides[0][0], sides[1][0], source_name="theirs", destination_name="ours")
    assert prove(sides[0], engine("LBHNC", 2, 4, "a kernel's"), room=3).receivers == 2
